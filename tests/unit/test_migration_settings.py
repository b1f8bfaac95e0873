"""The settings of the example scripts of verl and OpenRLHF: each converts to a recipe, or is refused for a reason that
its table gives. Where a script takes a value from its caller, the tables in data/migration hold a stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.compat.conversion_output import checked, recipe_yaml, report
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.data.dataset import steps_and_rows
from lockstep.errors import Refusal
from lockstep.recipe import Recipe, load_recipe

FOLDER = Path(__file__).parents[1] / "data" / "migration"
# What cannot be converted, with the settings that are in the way.
REFUSED: dict[str, list[str]] = json.loads((FOLDER / "refused.json").read_text())


def commands() -> Iterator[tuple[str, str, str, list[str]]]:
    """Name of the script, whose it is, program, words."""
    for case in json.loads((FOLDER / "verl.json").read_text()):
        yield case["name"], "verl", case["program"], [f"{key}={value}" for key, value in case["settings"].items()]
    for dialect in ("flat", "dotted"):
        for number, case in enumerate(json.loads((FOLDER / f"openrlhf_{dialect}.json").read_text())):
            words = [word for flag in case["flags"] for word in flag]
            yield f"{dialect} {number} {case['name']}", "openrlhf", case["program"], words


COMMANDS = {name: (peer, program, words) for name, peer, program, words in commands()}


def convert(name: str, *more: str) -> Conversion:
    peer, program, words = COMMANDS[name]
    return (convert_verl if peer == "verl" else convert_openrlhf)(program, [*words, *more])


def test_every_script_is_here() -> None:
    assert len(COMMANDS) == 139 + 3 + 30 + 11


# Every day a fifth of them, and those that are refused.
SOME = {*REFUSED, *list(COMMANDS)[::5]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in COMMANDS]
)
def test_it_converts_or_is_refused_for_a_reason(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        with pytest.raises(Refusal) as refused:
            checked(convert(name))
        where = [problem.where for problem in refused.value.problems]
        assert where == REFUSED[name]
        assert all(problem.why for problem in refused.value.problems)
        return
    done = convert(name)
    recipe = checked(done)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_yaml(done, name), encoding="utf-8")
    assert load_recipe(str(file)) == recipe
    assert len(done.outcomes) == len(done.settings.given)
    lines = report(done).splitlines()
    assert len(lines) > len(done.outcomes)
    # The report fits a terminal of 80 columns, apart from its command and from words that cannot be folded.
    assert [line for line in lines if len(line) > 80 and " " in line.strip() and " -m lockstep " not in line] == []


@pytest.mark.parametrize("names", [SOME, pytest.param(set(COMMANDS), marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_setting_is_left_out_of_the_report(names: set[str]) -> None:
    """A mapped setting is in the recipe; an ignored one has a reason."""
    for name in sorted(names - REFUSED.keys()):
        for found in convert(name).outcomes:
            assert found.to if found.outcome in ("mapped", "changed") else found.note, (name, found.key)


def sizes(recipe: Recipe, rows: int) -> tuple[Any, ...]:
    """Rows or prompts of a step, responses of a step, updates of a step, tokens or rows of a micro-batch, steps."""
    batch, limit = recipe.batch, recipe.data.train[0].rows
    if recipe.method in ("sft", "dpo", "kto", "rm", "distill", "prm"):
        each, responses, updates = batch.rows_per_update, None, 1
    else:
        each, responses = batch.prompts, batch.prompts * recipe.rollout.n
        updates = batch.prompts // (batch.prompts_per_update or batch.prompts) * recipe.algorithm.epochs
    run, drop_last = recipe.run, recipe.data.drop_last
    steps, _ = steps_and_rows(min(rows, limit or rows), each, epochs=run.epochs, steps=run.steps, drop_last=drop_last)
    return each, responses, updates, batch.tokens or f"{batch.micro_batch_size} rows", steps


GSM8K = 7473
# By hand, from the commands: steps = epochs x floor(rows / rows of a step).
BY_HAND: dict[str, tuple[int, tuple[Any, ...]]] = {
    # 128 prompts x 5; 128 / 64 = 2 updates; padded micro-batches of 20; floor(7473 / 128) = 58
    "quickstart, GRPO on 8 NPUs": (GSM8K, (128, 640, 2, "20 rows", 58)),
    # 16 prompts, of which a mini-batch of 64 is all; floor(7473 / 16) = 467, 15 times
    "guide, GRPO on 2 nodes": (GSM8K, (16, 80, 1, "8 rows", 7005)),
    # floor(7473 / 512) = 14
    "guide, LoRA SFT": (GSM8K, (512, None, 1, "4 rows", 14)),
    # 256 x 5; 256 / 128; 16 sequences of 1024 + 1024 tokens packed; floor(7473 / 256) = 29, 3 times
    "cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k": (GSM8K, (256, 1280, 2, 32768, 87)),
    # 1024 x 5; 1024 / 256 = 4; dynamic batches of 24000 tokens; 7 steps an epoch, 15 epochs
    "grpo_trainer/run_qwen2-7b_seq_balance": (GSM8K, (1024, 5120, 4, 24000, 105)),
    # PPO: 1024 x 1; 4 updates; 16 sequences of 512 + 512 tokens packed; 7 steps an epoch, 15 epochs
    "ppo_trainer/run_deepseek7b_llm": (GSM8K, (1024, 1024, 4, 16384, 105)),
    # 1024 prompts x 8 = 8192 responses, 128 of them an update: 64; 16 sequences of 1024 + 1024; 100000 rows: 97
    "flat 5 scripts/train_grpo_llama_ray": (179465, (1024, 8192, 64, 32768, 97)),
    # 128 x 8 = 1024 responses, 128 an update: 8; 4 sequences of 2048; floor(100000 / 128) = 781
    "flat 6 scripts/train_grpo_ray_hybrid_engine": (179465, (128, 1024, 8, 8192, 781)),
    # 256 pairs an update; one pair of twice 8192 tokens in a micro-batch; floor(100000 / 256) = 390
    "flat 3 scripts/train_dpo_llama": (100000, (256, None, 1, 16384, 390)),
    # the first 1024 rows, 64 an update: 16
    "flat 11 scripts/train_kto_llama": (60000, (64, None, 1, "1 rows", 16)),
    # the first 500000 rows, 256 an update: 1953; 2 rows of 2048 tokens packed
    "dotted 6 scripts/train_sft": (2914896, (256, None, 1, 4096, 1953)),
    # 512 prompts x 16 = 8192 responses, 1024 an update: 8; 32768 tokens; floor(17917 / 512) = 34, 100 times
    "dotted 4 scripts/train_prorlv2_math_hybrid_engine": (17917, (512, 8192, 8, 32768, 3400)),
    # 256 pairs an update; one pair of twice 8192 tokens; floor(100000 / 256) = 390
    "flat 26 scripts/train_rm_llama": (100000, (256, None, 1, 16384, 390)),
    # 256 rows an update, 8 of 8192 tokens packed; floor(444655 / 256) = 1736
    "flat 19 scripts/train_prm_mistral": (444655, (256, None, 1, 65536, 1736)),
    # 1024 prompts, one response each, 128 an update: 8; 16 sequences of 1024 + 1024; 97 steps of 100000 rows
    "flat 21 scripts/train_reinforce_llama_ray": (179465, (1024, 1024, 8, 32768, 97)),
    # 1024 prompts, one response each, 128 an update: 8; dynamic batches of 16384 tokens; 97 steps of 100000 rows
    "dotted 2 scripts/train_ppo_ray_hybrid_engine": (179465, (1024, 1024, 8, 16384, 97)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_sizes_by_hand(name: str) -> None:
    more = ["actor_rollout_ref.model.path=m"] if name.startswith("quickstart") else []
    rows, expected = BY_HAND[name]
    assert sizes(checked(convert(name, *more)), rows) == expected


def test_the_recipes_of_a_grpo_and_a_ppo_command_key_by_key() -> None:
    """The guide's GRPO command, and OpenRLHF's PPO: every key that its settings and defaults decide."""
    grpo = checked(convert("guide, GRPO on 2 nodes"))
    assert (grpo.method, grpo.algorithm.advantage, grpo.algorithm.loss) == ("grpo", "grpo", "clip")
    assert (grpo.algorithm.kl.where, grpo.algorithm.kl.coefficient, grpo.algorithm.kl.estimator) == (
        "loss",
        0.001,
        "k3",
    )
    assert (grpo.algorithm.clip_low, grpo.algorithm.clip_high, grpo.algorithm.dual_clip) == (0.2, 0.2, 3.0)
    assert (grpo.optim.lr, grpo.optim.betas, grpo.optim.decay_all) == (5e-7, [0.9, 0.999], True)
    assert (grpo.optim.schedule, grpo.optim.warmup, grpo.optim.weight_decay) == ("constant", 0.0, 0.01)
    assert (grpo.model.dtype, grpo.model.master_weights, grpo.model.gradient_checkpointing) == ("bf16", True, True)
    assert (grpo.data.overlong, grpo.data.drop_last, grpo.data.max_prompt_tokens) == ("drop", True, 512)
    assert (grpo.val.every, grpo.val.at_start, grpo.val.max_new_tokens) == (5, True, 1024)
    assert (grpo.log.project, grpo.run.name, grpo.log.track) == (
        "verl_grpo_example_gsm8k",
        "qwen2_7b_function_rm",
        ["wandb"],
    )
    ppo = checked(convert("flat 12 scripts/train_ppo_llama_ray"))
    assert (ppo.method, ppo.algorithm.advantage, ppo.algorithm.dual_clip) == ("ppo", "gae", None)
    assert (ppo.algorithm.kl.where, ppo.algorithm.kl.coefficient, ppo.algorithm.kl.estimator) == ("reward", 0.01, "k1")
    assert (ppo.algorithm.whiten.over, ppo.algorithm.whiten.biased) == ("step", True)
    assert (ppo.reward.model, ppo.reward.clip) == ("OpenRLHF/Llama-3-8b-rm-mixture", [-10.0, 10.0])
    assert (ppo.critic.path, ppo.critic.lr, ppo.critic.clip) == ("OpenRLHF/Llama-3-8b-rm-mixture", 9e-6, 0.2)
    assert (ppo.optim.schedule, ppo.optim.warmup, ppo.optim.min_lr_ratio) == ("cosine", 0.03, 0.1)
    assert (ppo.data.prompt_key, ppo.data.template) == ("context_messages", "auto")
    assert "TOKEN" not in json.dumps(ppo.model_dump(mode="json"))  # a key to a tracker is never stored
