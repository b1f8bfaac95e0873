"""What the device's operators replaced in a model is told: on the console once, and in the run's env.json."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import run
from lockstep.kernels import fused
from lockstep.kernels.fused_modules import Gather
from lockstep.model.load import load_policy
from lockstep.recipe.schema import Lora, Model


def plug_norms(model: nn.Module, _: Gather) -> list[str]:
    """Torch's own fused norm, where a device's plug-in would put the device's."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.forward = partial(
            nn.functional.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=norm.variance_epsilon
        )
    return [f"{len(norms)} x RMSNorm by rms_norm"]


@pytest.fixture
def fused_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused.FUSED, "sdpa", plug_norms)


@pytest.mark.usefixtures("fused_norms")
def test_a_run_says_once_what_was_replaced(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", recipe_file, "run.steps=2", "optim.warmup=0") == 0
    printed = capsys.readouterr().out
    # Two layers with two norms each, and the last.
    assert printed.count("in the model: 5 x RMSNorm by rms_norm") == 1
    evidence = json.loads((tmp_path / "runs" / "run" / "env.json").read_text(encoding="utf-8"))
    assert evidence["fused"] == {"model": ["5 x RMSNorm by rms_norm"]}


@pytest.mark.slow
@pytest.mark.usefixtures("fused_norms")
def test_a_critic_says_it_too(online_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", online_file, "method=ppo", "run.steps=1") == 0
    printed = capsys.readouterr().out
    assert printed.count("in the model: 5 x RMSNorm by rms_norm") == 1
    assert printed.count("in the critic: 5 x RMSNorm by rms_norm") == 1


def test_a_run_without_such_operators_says_nothing(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", recipe_file, "run.steps=1", "optim.warmup=0") == 0
    assert "fused" not in capsys.readouterr().out
    evidence = json.loads((tmp_path / "runs" / "run" / "env.json").read_text(encoding="utf-8"))
    assert evidence["fused"] == {"model": []}


@pytest.mark.usefixtures("fused_norms")
def test_adapters_around_a_model_do_not_hide_it(tiny_folder: Path) -> None:
    settings = Model(path=str(tiny_folder), lora=Lora(rank=2, alpha=4))
    policy = load_policy(settings, torch.device("cpu"), "sdpa", seed=0)
    assert fused.replaced(policy) == ["5 x RMSNorm by rms_norm"]
