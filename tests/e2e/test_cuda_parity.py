"""A tape recorded on the CPU, replayed on an NVIDIA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_loop import Replay
from lockstep.parity.replay.replay_result import Replayed, first_divergence
from lockstep.run.console import Console
from lockstep.train.training import Training
from taped_runs import record, write_lively

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively(tmp_path_factory.mktemp("model") / "model")


def on_device(run: Path, *words: str, mode: str = "forced") -> Replayed:
    found = replay(run, mode, ["device=cuda", *words], Console.silent())  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "rm", "grpo", "ppo"])
def test_the_device_is_in_step_with_the_cpu(tmp_path: Path, model: Path, name: str) -> None:
    run = record(tmp_path, model, name)
    for mode in ("forced", "chained", "free"):
        found = on_device(run, mode=mode)
        assert found.in_step, (mode, first_divergence(found))


@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_half_precision_is_in_step_too(tmp_path: Path, model: Path, name: str) -> None:
    found = on_device(record(tmp_path, model, name), "model.dtype=bf16")
    assert found.in_step, first_divergence(found)


def test_a_wrong_kernel_on_the_device_is_named(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(tmp_path, model, "sft")
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
    assert found.operator.side == "replay"
    assert found.operator.operator == "aten._to_copy"
    assert "torch.float16" in found.operator.why


def test_the_operator_of_a_wrong_way_back_is_named(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = record(tmp_path, model, "sft")
    restore = Replay.restore

    def broken(self: Replay, training: Training, step: int) -> None:
        restore(self, training, step)
        proj = training.models.module.causal_lm.model.layers[1].mlp.up_proj  # type: ignore[union-attr]
        proj.weight.register_hook(lambda gradient: 1.05 * gradient)

    monkeypatch.setattr(Replay, "restore", broken)
    found = on_device(run)
    assert found.module is not None
    assert (found.stage, found.module.module, found.module.phase) == (
        "gradient",
        "model.layers.1.mlp.up_proj",
        "backward",
    )
    assert found.operator is not None
    assert (found.operator.side, found.operator.operator) == ("replay", "aten.mul.Tensor")
