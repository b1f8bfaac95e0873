"""`lockstep migrate`: whole scripts, with every construct that real ones use, become recipes that load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.compat.migrate import migrate, migrated
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe

VERL = r"""#!/usr/bin/env bash
# GRPO on one node
set -xeuo pipefail
export VLLM_ATTENTION_BACKEND=XFORMERS   # of the engine
MODEL=${MODEL:-"Qwen/Qwen2.5-0.5B-Instruct"}
max_prompt_length=$((1024 / 2))
max_response_length=$((1024 * 1))
tokens=$(((max_prompt_length + max_response_length) * 2))
gsm8k=$HOME/data/gsm8k/train.parquet
train_files="['$gsm8k', '$HOME/data/math/train.parquet']"
NOW=$(date +%Y%m%d)
engine=${1:-vllm}
PLACES=(
    trainer.nnodes=1          # one node
    trainer.n_gpus_per_node=8
)
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files=$HOME/data/gsm8k/test.parquet \
    data.train_batch_size=256 data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=128\
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens \
    actor_rollout_ref.rollout.name=$engine \
    actor_rollout_ref.rollout.n=5 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='gsm8k' trainer.experiment_name="qwen-${NOW}" \
    "${PLACES[@]}" \
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 "${@:2}" 2>&1 | tee log.txt
"""
HEREDOC = r"""set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --save_path ./checkpoint/llama3-8b-dpo \
   --train_batch_size 256 --micro_train_batch_size 1 \
   --pretrain $MODEL --bf16 --max_len 1024 --beta 0.1 \
   --dataset a.jsonl,b.jsonl --dataset_probs 0.4,0.6 \
   --apply_chat_template --packing_samples
EOF
    # --use_wandb [WANDB_TOKENS] or True (use wandb login command)
    # --ipo [for IPO]

if [[ ${1:-} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""


def one(script: str, *words: str):  # type: ignore[no-untyped-def]
    found, problems, _ = migrated(script, words)
    assert not problems
    (only,) = found
    return only.done


def test_a_verl_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    script, out = tmp_path / "run.sh", tmp_path / "recipe.yaml"
    script.write_text(VERL)
    migrate(script, [], out)
    recipe, text = load_recipe(str(out)), out.read_text()
    assert [source.path for source in recipe.data.train] == [
        "/home/me/data/gsm8k/train.parquet",
        "/home/me/data/math/train.parquet",
    ]
    assert (recipe.batch.prompts, recipe.batch.prompts_per_update, recipe.batch.tokens) == (256, 128, 3072)
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_tokens, recipe.rollout.n) == (512, 1024, 5)
    assert (recipe.run.name, recipe.log.project, recipe.log.track) == ("qwen-now", "gsm8k", ["wandb"])
    assert (recipe.checkpoint.every, recipe.val.every, recipe.run.epochs) == (20, 5, 15)
    assert "n: 5  # actor_rollout_ref.rollout.n (line 28)" in text
    assert "betas: [0.9, 0.999]  # default of verl" in text


def test_what_a_run_would_know_is_asked_for() -> None:
    _, problems, _ = migrated(VERL.replace('"${@:2}"', '"${NOBODY:1}"'))
    (problem,) = problems
    assert (problem.where.split(":")[0], problem.code) == ("line 33", "unresolved-reference")
    assert "variable NOBODY" in problem.why


def test_a_here_document_with_comments_behind_it() -> None:
    done = one(HEREDOC, "MODEL=m")
    assert done.recipe["model.path"].value == "m"
    assert done.recipe["data.train"].value == [
        {"path": "a.jsonl", "weight": 0.4},
        {"path": "b.jsonl", "weight": 0.6},
    ]
    assert done.recipe["batch.tokens"].value == 2048  # a pair of 1024 tokens each
    assert "log.track" not in done.recipe


@pytest.mark.parametrize(
    ("broken", "line", "word"),
    [
        ("python -m verl.trainer.main_ppo a.b=1 \\\n  c.d=2\n  trainer.nnodes=1 \\\n  e.f=3", 3, "trainer.nnodes=1"),
        ("deepspeed --module openrlhf.cli.train_sft \\\n  --bf16\n  --max_len 5", 3, "--max_len"),
    ],
)
def test_a_missing_backslash_is_told(broken: str, line: int, word: str) -> None:
    _, problems, _ = migrated(broken)
    told = [problem for problem in problems if "backslash" in problem.why]
    assert [(problem.where, problem.remedy) for problem in told] == [
        (f"line {line}: {word}", f"end line {line - 1} with a backslash")
    ]


def test_several_commands_of_a_script_and_one_that_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "loop.sh", tmp_path / "r.yaml"
    script.write_text(
        "python -m openrlhf.cli.batch_inference --eval_task rm\n"
        "for beta in 0.1 0.2; do\n"
        "  deepspeed --module openrlhf.cli.train_dpo --pretrain m --dataset a.jsonl --beta $beta\n"
        "done\n"
        "deepspeed --module openrlhf.cli.train_rm --pretrain m --dataset a.jsonl\n"
    )
    with pytest.raises(Refusal, match=r"line 1: openrlhf batch_inference \[not-training\]"):
        migrate(script, [], out)
    assert load_recipe(str(out)).preference.beta == 0.1
    assert load_recipe(str(tmp_path / "r-2.yaml")).method == "rm"
    said = capsys.readouterr().err
    assert f"lockstep train {out}\n" in said
    assert f"lockstep train {tmp_path / 'r-2.yaml'}\n" in said


def test_an_unknown_key_names_the_nearest() -> None:
    done = migrated("python -m verl.trainer.main_ppo data.train_batchsize=3")[0][0].done
    (problem,) = [p for p in done.problems if p.code == "unknown-key"]
    assert (problem.where, problem.remedy) == ("line 1: data.train_batchsize", "did you mean data.train_batch_size?")


def test_the_verb(tmp_path: Path) -> None:
    script = tmp_path / "s.sh"
    script.write_text("python -m openrlhf.cli.train_rm --pretrain m --dataset a.jsonl --max_norm 2")
    done = CliRunner().invoke(app, ["migrate", str(script), "-o", str(tmp_path / "r.yaml")])
    assert done.exit_code == 0, done.output
    assert load_recipe(str(tmp_path / "r.yaml")).optim.clip == 2.0
    assert "--max_norm = 2.0 -> optim.clip: 2.0" in done.output


def test_torch_is_not_imported_before_training_starts() -> None:
    code = (
        "import sys\n"
        "from lockstep.compat.migrate import migrated\n"
        "from lockstep.compat.conversion_output import checked\n"
        "found, _, _ = migrated('deepspeed --module openrlhf.cli.train_rm --pretrain m --dataset a.jsonl')\n"
        "checked(found[0].done)\n"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_script_without_training_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "s.sh"
    script.write_text("ls\n")
    with pytest.raises(Refusal, match="has no training command"):
        migrate(script, [], None)


VERL_WORDS = (
    "algorithm.adv_estimator=grpo data.train_files=t.parquet data.train_batch_size=8 actor_rollout_ref.model.path=m "
    "actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.total_training_steps=2 "
)


def refused(words: str, path: Path) -> list[tuple[str, str]]:
    """The places and remedies of the problems of a command."""
    script = path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {words}\n", encoding="utf-8")
    with pytest.raises(Refusal) as caught:
        migrate(script, [], None)
    return [(problem.where, problem.remedy) for problem in caught.value.problems]


def test_a_comment_between_the_lines_of_a_command_is_told_alone(tmp_path: Path) -> None:
    """The keys after the comment are not reported as missing, too."""
    problems = refused(f"\\\n  # the batch\n  {VERL_WORDS}", tmp_path)
    assert problems == [
        ("line 3: algorithm.adv_estimator=grpo", "remove line 2, which is a comment, or move it above the command")
    ]


@pytest.mark.parametrize(
    ("words", "where", "remedy"),
    [
        ("model_engine=none", "line 1: model_engine", "correct the name, or convert where all files are"),
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
            "optim.warmup (from line 1: actor_rollout_ref.actor.optim.lr_warmup_steps)",
            "change actor_rollout_ref.actor.optim.lr_warmup_steps",
        ),
        (
            "trainer.resume_mode=resume_path trainer.resume_from_path=c",
            "line 1: trainer.resume_mode",
            "`lockstep migrate CHECKPOINT -o FOLDER` converts its weights: name FOLDER as the model; set disable",
        ),
    ],
)
def test_a_refusal_names_its_place_once_and_a_remedy(words: str, where: str, remedy: str, tmp_path: Path) -> None:
    assert refused(VERL_WORDS + words, tmp_path) == [(where, remedy)]


def test_a_flat_flag_among_dotted_ones_has_the_dotted_spelling_as_remedy() -> None:
    words = "--model.model_name_or_path m --dataset rows --data.max_len 128"
    commands, _, _ = migrated(f"deepspeed --module openrlhf.cli.train_sft {words}")
    remedies = [problem.remedy for problem in commands[0].done.problems]
    assert "did you mean --data.dataset?" in remedies
    assert "set the answer's column: --data.output_key output" in remedies
