"""Runs with each optimizer: they learn, a killed run resumes bit for bit, and one process goes on as two."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from commands import lockstep, torchrun
from conftest import write_sft_recipe
from lockstep.optimizers.rule_table import RULES
from lockstep.recipe import load_recipe
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.train.offline import train_offline
from runs import facts, stored

pytestmark = pytest.mark.xdist_group("optimizers")
BF16 = ["model.dtype=bf16", "model.master_weights=false", "optim.stochastic_rounding=true"]
RATES = {"adamw": 2e-3, "adamw8bit": 2e-3, "adafactor": 3e-2, "muon": 5e-3, "lion": 5e-4}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RULES))
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, tiny_folder: Path, name: str) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    words = [f"optim.name={name}", *BF16, "checkpoint.every=2", "checkpoint.keep_last=9", "run.steps=4"]
    train_offline(load_recipe(str(recipe), [*words, "run.name=once"]), Console.silent())
    shutil.copytree(tmp_path / "runs" / "once", tmp_path / "runs" / "killed")
    shutil.rmtree(checkpoints.folder_of(RunFolder(tmp_path / "runs" / "killed").checkpoints, 4))
    train_offline(load_recipe(str(recipe), [*words, "run.name=killed"]), Console.silent())
    for part in ("weights", "optimizer"):
        mine, theirs = (stored(tmp_path / "runs" / run, 4, part) for run in ("killed", "once"))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert facts(tmp_path / "runs" / "killed") == facts(tmp_path / "runs" / "once")


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("name", list(RULES))
def test_each_optimizer_learns(tmp_path: Path, tiny_folder: Path, name: str, rounding: bool) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    words = [f"optim.name={name}", f"optim.lr={RATES[name]}", "run.steps=30", "run.name=learns", "run.epochs=null"]
    train_offline(load_recipe(str(recipe), [*words, *(BF16 if rounding else [])]), Console.silent())
    losses = [told["train/loss"] for _, told in facts(tmp_path / "runs" / "learns")]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("name", list(RULES))
def test_a_run_of_one_process_goes_on_as_two(tmp_path: Path, tiny_folder: Path, name: str) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    words = [recipe, f"optim.name={name}", "checkpoint.every=2", "checkpoint.keep_last=9", "run.steps=4"]
    done = lockstep("train", *words, "run.name=one")
    assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "two")
    shutil.rmtree(checkpoints.folder_of(RunFolder(tmp_path / "runs" / "two").checkpoints, 4))
    done = torchrun("train", *words, "run.name=two")
    assert done.returncode == 0, done.stderr
    assert "after step 2" in " ".join(done.stdout.split())
    mine, theirs = (stored(tmp_path / "runs" / run, 4) for run in ("two", "one"))
    for key, value in theirs.items():
        # Gradients of two ranks are summed in another order. Where a gradient is near 0, the sign of Lion's and the
        # size of AdamW's first updates are rounding.
        assert float((mine[key] - value).abs().mean()) < 2e-5, key
