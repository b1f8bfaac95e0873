"""Before the first update policy and reference agree, or the run refuses and says which row and why."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.device.select import explain
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train import offline
from lockstep.train.models import Models
from lockstep.train.offline import train_offline
from lockstep.train.reference_logprobs import add_cache
from preference_rows import write_recipe

QUICK = ["run.steps=2", "run.export=false", "data.val=[]"]
AGREE = "before the first step policy and reference agree: loss"


@pytest.fixture
def recipe_of(tiny_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    def make(method: str, *overrides: str) -> Any:
        return load_recipe(str(write_recipe(tmp_path, tiny_folder, method)), [*QUICK, *overrides])

    return make


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """Something goes wrong between loading the models and the first update."""

    def spoiled(models: Models, *rest: Any) -> None:
        add_cache(models, *rest)
        with torch.no_grad():
            change(models)

    monkeypatch.setattr(offline, "add_cache", spoiled)


LORA = "model.lora.rank=4"
STARTS = {
    "dpo": math.log(2),
    f"dpo {LORA}": math.log(2),
    f"dpo {LORA} model.lora.dropout=0.3": math.log(2),
    "dpo preference.precompute=true": math.log(2),
    f"dpo preference.precompute=true {LORA}": math.log(2),
    "dpo preference.nll=0.5": math.log(2),
    "dpo preference.label_smoothing=0.2": math.log(2),
    "dpo preference.loss=hinge": 1.0,
    "dpo model.dtype=bf16": math.log(2),
    "dpo batch.tokens=null batch.micro_batch_size=2": math.log(2),
    "ipo": 25.0,
    "kto": 0.5,
    f"kto {LORA}": 0.5,
}


@pytest.mark.daily("dpo", "dpo preference.loss=hinge", "kto model.lora.rank=4", "ipo", "dpo preference.precompute=true")
@pytest.mark.parametrize("words", STARTS)
def test_the_first_loss_is_the_number_of_equal_models(recipe_of, tmp_path: Path, capsys, words: str) -> None:
    method, *overrides = words.split()
    train_offline(recipe_of(method, *overrides), Console.open())
    said = capsys.readouterr().out
    assert AGREE in said
    told = float(said.split(AGREE)[1].split()[0])
    assert told == pytest.approx(STARTS[words], abs=1e-2 if "bf16" in words else 1e-4)
    if not {"model.lora.dropout=0.3", "preference.nll=0.5"} & set(overrides):
        first = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")[0][1]["train/loss"]
        assert first == pytest.approx(told, abs=1e-5)


@pytest.mark.daily("simpo", "rm")
@pytest.mark.parametrize("method", ["simpo", "orpo", "cpo", "rm", "prm"])
def test_a_method_without_a_reference_has_nothing_to_agree(recipe_of, capsys, method: str) -> None:
    train_offline(recipe_of(method), Console.open())
    assert "policy and reference" not in capsys.readouterr().out


def problem_of(recipe: Any) -> Any:
    with pytest.raises(Refusal) as caught:
        train_offline(recipe, Console.silent())
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_policy_that_moved_is_refused(recipe_of, tmp_path: Path, monkeypatch, method: str) -> None:
    def change(models: Any) -> None:
        models.module.get_parameter("model.model.norm.weight")[3] += 0.01

    spoil(monkeypatch, change)
    problem = problem_of(recipe_of(method))
    assert problem.where.startswith(f"step 0, {tmp_path / 'train.jsonl'} line ")
    assert problem.code == "wrong-initial-loss"
    assert "log-probabilities differ" in problem.why
    assert "loaded differently" in problem.remedy
    assert not list((tmp_path / "runs" / "run" / "checkpoints").glob("step_*"))


def test_a_reference_that_moved_is_refused(recipe_of, monkeypatch) -> None:
    def change(models: Any) -> None:
        assert models.reference is not None
        models.reference.get_parameter("model.model.norm.weight")[3] += 0.01

    spoil(monkeypatch, change)
    assert "loaded differently" in problem_of(recipe_of("dpo")).remedy


def test_an_adapter_that_does_not_start_at_zero_is_refused(recipe_of, monkeypatch) -> None:
    def change(models: Any) -> None:
        name = next(name for name, _ in models.module.trainable() if "lora_B" in name)
        models.module.stored.get_parameter(name).fill_(0.02)

    spoil(monkeypatch, change)
    assert "adapter does not start at zero" in problem_of(recipe_of("dpo", LORA)).remedy


def test_a_model_that_gives_no_numbers_is_refused(recipe_of, monkeypatch) -> None:
    def change(models: Any) -> None:
        models.module.get_parameter("model.model.norm.weight").fill_(float("nan"))

    spoil(monkeypatch, change)
    assert problem_of(recipe_of("dpo")).where.startswith("step 0")


def table_of(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs" / "tables").iterdir()
    return folder


def test_a_table_edited_by_hand_is_refused_with_its_row(recipe_of, tmp_path: Path) -> None:
    """One number of the third row's rejected response; all rows are in the first update."""
    words = ["preference.precompute=true", "batch.rows_per_update=24", "batch.tokens=4096"]
    recipe = recipe_of("dpo", *words)
    train_offline(recipe, Console.silent())
    file = table_of(tmp_path) / "logprobs.npy"
    rows = offline.prepare_offline(recipe, explain("cpu")[0], 1, Console.silent()).train.items
    before = sum(e.targets for row in rows[:2] for e in row.examples) + rows[2].examples[0].targets
    stored = np.load(file)
    assert stored.shape == (sum(e.targets for row in rows for e in row.examples),)
    stored[before + 1] -= 0.5
    np.save(file, stored)
    problem = problem_of(recipe_of("dpo", *words, "run.name=second"))
    assert problem.where == f"step 0, {rows[2].origin}"
    assert f"1 of {len(stored):,} log-probabilities differ" in problem.why
    assert f"{stored[before + 1]:.6f}" in problem.why
    assert "`tables`" in problem.remedy
    assert "remove it" in problem.remedy


def test_another_reference_is_said_and_allowed(recipe_of, tiny_folder: Path, tmp_path: Path, capsys) -> None:
    from lockstep.model.tiny import write_tiny

    other = tmp_path / "other"
    write_tiny(other, seed=9, hidden=64, layers=1)
    train_offline(recipe_of("dpo", f"preference.reference={other}"), Console.open())
    said = " ".join(capsys.readouterr().out.split())
    assert f"the reference is another model ({other})" in said
    assert AGREE not in said
    first = read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")[0][1]
    assert abs(first["train/loss"] - math.log(2)) > 1e-4


def test_the_same_folder_named_as_the_reference_is_no_other_model(recipe_of, tiny_folder: Path, capsys) -> None:
    train_offline(recipe_of("dpo", f"preference.reference={tiny_folder}"), Console.open())
    assert AGREE in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_does_not_ask_again(recipe_of, tmp_path: Path, capsys) -> None:
    """After some steps the two are no longer the same."""
    words = ["run.steps=4", "checkpoint.every=2", "checkpoint.keep_last=9"]
    train_offline(recipe_of("dpo", *words), Console.silent())
    shutil.rmtree(tmp_path / "runs" / "run" / "checkpoints" / "step_4")
    train_offline(recipe_of("dpo", *words), Console.open())
    said = capsys.readouterr().out
    assert "after step 2" in said
    assert AGREE not in said
