"""A device with a wrong attention kernel: training is refused with a diagnosis, a replay continues and names it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.device.cpu import Cpu
from lockstep.kernels.attention import varlen
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.varlen import Fused
from lockstep.model import trials
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_result import first_divergence
from lockstep.run.console import Console
from refusals import refuses
from taped_runs import record, write_lively


@pytest.fixture
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    trials._verified_here.cache_clear()
    yield
    trials._verified_here.cache_clear()


def broken(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Any, scale: float, window: Any) -> torch.Tensor:
    """The kernel receives complete sequences, also if packed rows share prefixes."""
    ends = [0, *layout.ends]
    full = make_layout([end - start for start, end in pairwise(ends)], q.device, "sdpa")
    return varlen._buckets(q, k, v, full, 1.1 * scale, window, 0.0, None, None)


@pytest.mark.usefixtures("nothing_remembered")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_a_wrong_kernel_is_refused_in_training_and_named_in_a_replay(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_lively(tmp_path / "model")
    run = record(tmp_path, model, name, steps=1)
    monkeypatch.setitem(varlen.KERNELS, "broken", Fused(broken, lambda *_: True))
    monkeypatch.setattr(Cpu, "attention", "broken")
    with refuses("device cpu", "wrong-kernel", "kernel broken") as refusal:
        record(tmp_path / "again", model, name, steps=1)
    assert refusal.value.problems[0].remedy.startswith("set model.attention=sdpa")
    found = replay(run, "forced", [], Console.silent())
    assert found is not None
    assert found.stage == "log-probs"
    assert found.remarks[0].startswith("The check at load: device cpu")
    assert "kernel broken" in found.remarks[0]
    assert found.module is not None
    assert found.module.module == "model.layers.0.self_attn"
    assert found.operator is not None
    assert found.operator.side == "replay"
    assert "attention" in str(found.operator.operator), first_divergence(found)
    # The remedy that the refusal names.
    mended = replay(run, "forced", ["model.attention=sdpa"], Console.silent())
    assert mended is not None
    assert mended.in_step, first_divergence(mended)
    assert not mended.remarks
