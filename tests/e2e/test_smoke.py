"""`lockstep train RECIPE --smoke`: what stays of a recipe, what becomes small, and what is looked at."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from conftest import write_jsonl
from lockstep.commands import smoke
from lockstep.commands.smoke import Smoke, small_config, small_model, smoke_test
from lockstep.compat.conversion_output import checked
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny
from lockstep.recipe.loader import builtin_names, checked_recipe, load_recipe
from lockstep.run.folder import RunFolder

WITHOUT_TAPE = "2 steps, validation, checkpoint, export (loaded with transformers)"
PASSED = f"{WITHOUT_TAPE}, tape"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another family with a larger vocabulary, and rows of the user's own."""
    folder = tmp_path_factory.mktemp("smoke")
    write_tiny(folder / "tiny", hidden=64, layers=2)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=192,
        intermediate_size=400,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id, 7]).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    write_jsonl(folder / "pairs.jsonl", [{"prompt": f"q {i}", "chosen": f"a {i}", "rejected": "no"} for i in range(70)])
    write_jsonl(
        folder / "questions.jsonl",
        [
            {
                "data_source": "mine",
                "prompt": [{"role": "user", "content": f"q {i}"}],
                "reward_model": {"style": "rule", "ground_truth": str(i)},
            }
            for i in range(12)
        ],
    )
    (folder / "reward.py").write_text("def score(solution_str, **more):\n    return float(len(solution_str) % 7)\n")
    return folder


def said_by(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_built_in_recipe_needs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    smoke_test(load_recipe("ppo-brevity"))
    said = said_by(capsys)
    assert f": {PASSED}" in said
    assert "runs/warmup-brevity/export does not exist" in said
    assert "reward.model a small model with random weights" in said
    assert "data generated rows, because quickstart/preferences/prompts_train.parquet does not exist" in said
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"], "nothing is left"


@pytest.mark.slow
def test_own_rows_and_a_model_of_another_family(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "method": "dpo",
        "device": "cpu",
        "model": {"path": str(place / "llama"), "lora": {"rank": 4}},
        "data": {"train": str(place / "pairs.jsonl")},
        "parallel": {"devices": 8, "offload": "optimizer"},
        "optim": {"warmup": 10},
    }
    smoke_test(checked_recipe(values))
    said = said_by(capsys)
    assert f": {PASSED}" in said
    assert "model a llama with" in said
    assert f"data the first 64 rows of {place / 'pairs.jsonl'}" in said
    assert "parallel one process, without devices, offload" in said


def test_own_prompts_and_an_own_reward(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "method": "grpo",
        "device": "cpu",
        "run": {"steps": 100},
        "model": {"path": str(place / "tiny")},
        "data": {"train": str(place / "questions.jsonl")},
        "reward": {"function": f"{place / 'reward.py'}:score"},
        "rollout": {"engine": "vllm", "url": "http://127.0.0.1:1"},
        "batch": {"prompts": 64, "prompts_per_update": 16},
    }
    smoke_test(checked_recipe(values))
    said = said_by(capsys)
    assert f": {PASSED}" in said
    assert "rollout.engine native instead of vllm" in said


def test_what_shapes_the_updates_stays(place: Path, tmp_path: Path) -> None:
    values = {
        "method": "grpo",
        "model": {"path": str(place / "tiny"), "dtype": "bf16"},
        "data": {"train": str(place / "questions.jsonl"), "overlong": "drop"},
        "batch": {"prompts": 64, "prompts_per_update": 16, "tokens": 900},
        "rollout": {"n": 16, "max_tokens": 8, "temperature": 0.7},
        "algorithm": {"epochs": 2, "overlong": {"buffer": 8}},
        "optim": {"warmup": 0.5, "lr": 3e-4},
        "reward": {"function": f"{place / 'reward.py'}:score"},
    }
    small = Smoke(checked_recipe(values), tmp_path).recipe()
    assert (small.batch.prompts, small.batch.prompts_per_update, small.batch.tokens) == (4, 2, 900)
    assert (small.rollout.n, small.rollout.max_tokens, small.rollout.temperature) == (2, 8, 0.7)
    assert (small.algorithm.epochs, small.optim.warmup, small.optim.lr) == (2, 0.5, 3e-4)
    assert (small.model.dtype, small.data.overlong, small.run.steps) == ("bf16", "drop", 2)
    assert small.val.questions == str(place / "questions.jsonl")
    assert Path(small.run.folder).is_relative_to(tmp_path)


def test_lengths_fit_the_context_of_the_small_model(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "method": "grpo",
        "device": "cpu",
        "model": {"path": "nobody/long-context"},
        "data": {"train": "none.parquet", "max_prompt_tokens": 20480, "template_arguments": {"enable_thinking": False}},
        "reward": {"rules": {"openai/gsm8k": "gsm8k"}},
    }
    small = Smoke(checked_recipe(values), tmp_path).recipe()
    assert (small.data.max_prompt_tokens, small.data.template_arguments) == (2048 - 16, {})


def test_generated_rows_have_a_prompt_column_for_a_prompt_format(tmp_path: Path) -> None:
    data = {"train": "none.jsonl", "shape": "prompt_response", "prompt_key": "problem", "response_key": "solution"}
    values: dict[str, Any] = {
        "method": "sft",
        "device": "cpu",
        "model": {"path": "nobody/here"},
        "data": {**data, "template": "none", "prompt_format": "User: {}\nAssistant: "},
    }
    small = Smoke(checked_recipe(values), tmp_path).recipe().data
    assert (small.shape, small.prompt_key) == ("prompt_response", "extra_info.question")
    row = pq.read_table(small.train[0].path).to_pylist()[0]  # type: ignore[union-attr]
    assert row["extra_info"].keys() >= {"question", "answer"}


def test_generated_pairs_are_plain_text_without_a_template(tmp_path: Path) -> None:
    """OpenRLHF's programs without --apply_chat_template read plain text."""
    values = {"method": "dpo", "model": {"path": "none"}, "data": {"train": "none.jsonl", "template": "none"}}
    Smoke(checked_recipe(values), tmp_path).recipe()
    for split in ("train", "val"):
        (row, *_) = pq.read_table(tmp_path / "data" / f"pairs_{split}.parquet").to_pylist()
        assert all(isinstance(row[name], str) for name in ("prompt", "chosen", "rejected"))


def test_bad_input_is_refused_as_in_training(place: Path) -> None:
    values = {"device": "cpu", "model": {"path": str(place / "tiny")}, "data": {"train": str(place / "pairs.jsonl")}}
    with pytest.raises(Refusal, match=r"pairs\.jsonl"):
        smoke_test(checked_recipe(values))


def test_the_small_model_reads_the_same_tokens(place: Path, tmp_path: Path) -> None:
    small_model(str(place / "llama"), tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    known = json.loads((place / "llama" / "config.json").read_text())
    same = ("model_type", "architectures", "vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    assert {key: config[key] for key in same} == {key: known[key] for key in same}
    assert config["hidden_size"] < known["hidden_size"]
    end = GenerationConfig.from_pretrained(tmp_path / "small").eos_token_id
    assert end == GenerationConfig.from_pretrained(place / "llama").eos_token_id
    assert small_config(LlamaConfig(eos_token_id=31_000)).eos_token_id == 31_000


def test_a_part_that_is_missing_is_an_error(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the looks are worth: each part taken away from a whole run."""
    values: dict[str, Any] = {
        "device": "cpu",
        "model": {"path": str(place / "tiny")},
        "data": {"train": "none.jsonl"},
    }
    small = Smoke(checked_recipe(values), tmp_path).recipe()
    run = RunFolder(smoke.run_recipe(small))
    assert smoke._check_run(run, small) == PASSED.split(", ")
    for path, why in ((run.tape, "tape"), (run.checkpoints / "step_2", "checkpoints")):
        path.rename(tmp_path / "aside")
        path.mkdir(exist_ok=True) if path == run.tape else None
        with pytest.raises(AssertionError, match=why):
            smoke._check_run(run, small)
        if path == run.tape:
            path.rmdir()
        (tmp_path / "aside").rename(path)
    (run.export / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(Refusal):
        smoke._check_run(run, small)


@pytest.mark.slow
def test_a_migrated_command_with_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl's example of geometry3k, whose rows and model do not exist: drawn squares and the tiny model train it."""
    words = ["algorithm.adv_estimator=grpo", "data.train_files=geo3k/train.parquet", "data.image_key=images"]
    words += ["actor_rollout_ref.model.path=vl", "data.max_prompt_length=1024", "actor_rollout_ref.rollout.n=2"]
    recipe = checked(convert_verl("main_ppo", [*words, "actor_rollout_ref.rollout.name=vllm"]))
    smoke_test(recipe.model_copy(update={"device": "cpu"}))
    said = said_by(capsys)
    assert f": {WITHOUT_TAPE}" in said
    assert "the tiny vision-language model" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", builtin_names())
def test_every_built_in_recipe_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(name, ["device=cpu"])
    smoke_test(recipe)
    assert f": {PASSED if recipe.model.vision is None else WITHOUT_TAPE}" in said_by(capsys)


@pytest.mark.parametrize(
    ("name", "template", "why"),
    [
        ("agent-calculator", "template.jinja", "for the tiny model"),
        ("warmup-calculator", "template.jinja", "because quickstart/calculator/template.jinja does not exist"),
        ("grpo-arithmetic", "auto", ""),
    ],
)
def test_the_tiny_model_gets_a_template_with_tools(
    name: str, template: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = Smoke(load_recipe(name, ["device=cpu"]), tmp_path / "smoke")
    assert Path(made.recipe().data.template).name == template
    changed = dict(made.changes).get("data.template", "")
    assert why in changed
    assert bool(changed) == bool(why)
