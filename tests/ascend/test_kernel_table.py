"""The table of fused operators fails on a wrong operator: the sweep of keys on the emulated NPU, right and broken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import ascend_kernels

pytestmark = pytest.mark.ascend


def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["ascend_kernels.py", "--repeat", "1", *words])
    status: object = 0
    try:
        ascend_kernels.main()
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr().out


def broken_beyond(keys: int, damage: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    whole = torch_npu.npu_fused_infer_attention_score

    def run(*tensors: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, sums = whole(*tensors, **more)
        return (damage(out) if max(more["actual_seq_lengths_kv"]) > keys else out), sums

    return run


def test_every_operator_is_right_with_and_without_a_mask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = table(monkeypatch, capsys, "--keys", "1024")
    assert status == 0, out
    assert [f"{keys} keys" in out for keys in (128, 129, 512, 513, 1024)] == [True] * 5
    assert "513 keys, mask" in out
    assert out.splitlines()[0].split()[3:5] == ["mean", "%"]


@pytest.mark.daily("scaled")
@pytest.mark.parametrize(
    "damage",
    [lambda out: out * 1.1, lambda out: out.flip(0), lambda out: out * float("nan")],
    ids=["scaled", "flipped", "nan"],
)
def test_an_operator_that_is_wrong_beyond_512_keys_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", broken_beyond(512, damage))
    status, out = table(monkeypatch, capsys, "--keys", "1024")
    assert "rows are wrong" in str(status)
    wrong = [line for line in out.splitlines() if line.endswith("WRONG")]
    assert wrong
    assert all("513 keys" in line or "1024 keys" in line for line in wrong)


def test_the_errors_by_hand() -> None:
    errors = ascend_kernels.Errors.of(torch.tensor([1.0, -2.5]), torch.tensor([1.5, -2.0]))
    assert errors.absolute == pytest.approx(50.0)
    assert errors.relative == pytest.approx(1.0 / 3.5)
    assert errors.worst == pytest.approx(0.25)
