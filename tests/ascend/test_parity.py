"""A tape recorded on the CPU, replayed on the emulated NPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.parity.replay.loop import Replay
from lockstep.parity.replay.replay import Replayed, replay
from lockstep.parity.replay.show import first_divergence
from lockstep.run.progress import Console
from lockstep.train.training import Training
from taped_runs import record, write_lively

pytestmark = pytest.mark.ascend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively(tmp_path_factory.mktemp("model") / "model")


def on_device(run: Path, *words: str) -> Replayed:
    found = replay(run, "forced", ["device=npu", *words], Console.silent())
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_the_device_is_in_step_with_the_cpu(tmp_path: Path, model: Path, name: str) -> None:
    found = on_device(record(tmp_path, model, name, steps=1))
    assert found.in_step, first_divergence(found)


def test_half_precision_is_in_step_too(tmp_path: Path, model: Path) -> None:
    found = on_device(record(tmp_path, model, "sft", steps=1), "model.dtype=bf16")
    assert found.in_step, first_divergence(found)


def test_a_fault_on_the_device_is_named(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(tmp_path, model, "sft", steps=1)
    restore = Replay.restore

    def broken(self: Replay, training: Training, step: int) -> None:
        restore(self, training, step)
        proj = training.models.module.causal_lm.model.layers[1].mlp.down_proj  # type: ignore[union-attr]
        proj.forward = lambda x: torch.nn.functional.linear(x.half(), proj.weight.half()).float()

    monkeypatch.setattr(Replay, "restore", broken)
    found = on_device(run)
    assert found.stage == "log-probs"
    assert found.module is not None
    assert found.module.module == "model.layers.1.mlp.down_proj"
    assert found.operator is not None
    assert (found.operator.side, found.operator.operator) == ("replay", "aten._to_copy")
