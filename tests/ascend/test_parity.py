"""A tape recorded on the CPU, replayed on the emulated NPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.model import trials
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_loop import Replay
from lockstep.parity.replay.replay_result import Replayed, first_divergence
from lockstep.run.console import Console
from lockstep.train.training import Training
from taped_runs import record, write_lively

pytestmark = pytest.mark.ascend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A run on the CPU, which replays only read."""
    return record(tmp_path_factory.mktemp("sft"), model, "sft", steps=1)


def on_device(run: Path, *words: str) -> Replayed:
    found = replay(run, "forced", ["device=npu", *words], Console.silent())
    assert found is not None
    return found


# test_recipes.py compares the curves of five methods daily.
@pytest.mark.daily("sft")
@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_the_device_is_in_step_with_the_cpu(tmp_path: Path, model: Path, name: str) -> None:
    found = on_device(record(tmp_path, model, name, steps=1))
    assert found.in_step, first_divergence(found)


@pytest.mark.slow
def test_half_precision_is_in_step_too(sft: Path) -> None:
    found = on_device(sft, "model.dtype=bf16")
    assert found.in_step, first_divergence(found)


@pytest.mark.slow
def test_a_fault_on_the_device_is_named(sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every day the wrong kernels below are named."""
    restore = Replay.restore

    def broken(self: Replay, training: Training, step: int) -> None:
        restore(self, training, step)
        proj = training.models.module.causal_lm.model.layers[1].mlp.down_proj  # type: ignore[union-attr]
        proj.forward = lambda x: torch.nn.functional.linear(x.half(), proj.weight.half()).float()

    monkeypatch.setattr(Replay, "restore", broken)
    found = on_device(sft)
    assert found.stage == "log-probs"
    assert found.module is not None
    assert found.module.module == "model.layers.1.mlp.down_proj"
    assert found.operator is not None
    assert (found.operator.side, found.operator.operator) == ("replay", "aten._to_copy")


@pytest.mark.slow
def test_a_wrong_fused_norm_is_held_against_the_whole_norm(sft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right when it is tried at load, wrong afterwards; the operator is named, not the first part of a plain norm."""
    import torch_npu

    restore, right = Replay.restore, torch_npu.npu_rms_norm

    def broken(self: Replay, training: Training, step: int) -> None:
        restore(self, training, step)
        # Every norm: the first one in the order of execution is named.
        monkeypatch.setattr(torch_npu, "npu_rms_norm", lambda x, w, epsilon: right(x, w, epsilon=1e4 * epsilon))

    monkeypatch.setattr(Replay, "restore", broken)
    found = on_device(sft)
    assert found.module is not None
    assert found.module.module == "model.layers.0.input_layernorm"
    where = found.operator
    assert where is not None
    assert (where.side, where.operator) == ("replay", "npu.npu_rms_norm")
    assert "the clean CPU copy of the module runs aten.pow.Tensor_Scalar, ... and aten.mul.Tensor" in where.why
    assert where.script is not None
    assert "torch.ops.npu.npu_rms_norm.default(given[0], given[1], 0.01" in Path(where.script).read_text()


def test_a_wrong_attention_kernel_is_named_by_the_replay(
    sft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong from the start, so that the check at load sees it."""
    import torch_npu

    right = torch_npu.npu_fusion_attention

    def strong(*args: Any, scale: float, **more: Any) -> Any:
        return right(*args, scale=1.1 * scale, **more)

    monkeypatch.setattr(torch_npu, "npu_fusion_attention", strong)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    trials._verified_here.cache_clear()
    found = on_device(sft)
    trials._verified_here.cache_clear()
    assert "its attention kernel npu_fusion is wrong" in found.remarks[0]
    assert found.module is not None
    assert found.module.module == "model.layers.0.self_attn"
    assert found.operator is not None
    assert found.operator.operator == "npu.npu_fusion_attention"
    assert on_device(sft, "model.attention=sdpa").in_step
