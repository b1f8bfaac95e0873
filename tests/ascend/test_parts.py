"""Attention in parts through the real torch_npu: forward and gradient against the twin, and what it asks for.

The emulated operator's gradient takes the statistics and the output that it is given, as the documents have it. That a
device's does too is what the trial asks before the operator is used (tests/unit/test_npu_parts.py).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch_npu

from ascend_emulator import report
from lockstep.kernels.attention import partial
from lockstep.kernels.attention.npu_attention import FUSION_PARTS, corner
from lockstep.kernels.attention.partial import PLAIN, partial_kernel
from lockstep.kernels.attention.partial_attention import Sections, merge, sections

pytestmark = pytest.mark.ascend
NPU = torch.device("npu", 0)
QUERIES, CAUSAL, OTHERS = (7, 1, 12, 5), (9, 1, 12, 8), (3, 6, 1, 4)
SIZE, SCALE = 16, 0.25
OPERATORS = {"npu::npu_fusion_attention", "npu::npu_fusion_attention_grad"}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(NPU, dtype)


@pytest.fixture(autouse=True)
def untried() -> None:
    partial._fusion_passes.cache_clear()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
def test_two_parts_are_the_whole(heads: int, groups: int, window: int | None) -> None:
    """Queries that see some keys causally and others all, in one: outputs, logs and gradients of both parts."""
    query, upstream = random(sum(QUERIES), heads, SIZE), random(sum(QUERIES), heads, SIZE, seed=9)
    parts: list[tuple[list[torch.Tensor], Sections, int | None]] = [
        ([random(sum(keys), groups, SIZE, seed=seed) for seed in seeds], sections(QUERIES, keys, causal, NPU), limit)
        for keys, seeds, causal, limit in ((CAUSAL, (1, 2), True, window), (OTHERS, (3, 4), False, None))
    ]

    def answers(kernel: Any) -> list[torch.Tensor]:
        (out, lse), (more, more_lse) = (
            kernel.forward(query, *tensors, where, SCALE, limit) for tensors, where, limit in parts
        )
        out, lse = merge(out, lse, more, more_lse)
        gradients = [
            kernel.backward(upstream, query, *tensors, out, lse, where, SCALE, limit) for tensors, where, limit in parts
        ]
        return [out, lse, *(gradient for three in gradients for gradient in three)]

    report.clear()
    found = answers(FUSION_PARTS)
    assert {operator.name for operator in report.operators()} >= OPERATORS
    for one, other in zip(found, answers(PLAIN), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_device_kernel_is_chosen_after_a_trial(dtype: torch.dtype) -> None:
    query, value = random(5, 4, SIZE, dtype=dtype), random(8, 2, SIZE, dtype=dtype)
    where = sections((3, 2), (3, 5), True, NPU)
    report.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert partial_kernel("npu_fusion", query, value, where) is FUSION_PARTS
        assert partial_kernel("npu_fusion", query, value, where, 4) is FUSION_PARTS
    assert {operator.name for operator in report.operators()} >= OPERATORS
    assert partial_kernel("sdpa", query, value, where) is PLAIN


@pytest.mark.parametrize("given", [{"softmax_layout": ""}, {"sparse_mode": 2}, {}], ids=str)
def test_an_operator_that_takes_an_argument_otherwise_is_not_used(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics head by head, causal sequences from their start, and a gradient from the part's own output."""

    def replaced(name: str, real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if not given and name.endswith("grad"):
                more["attention_in"] = PLAIN.forward(*args[:3], where_of(more), more["scale_value"])[0]
            # Another alignment of causal sequences alone.
            known = {key: value for key, value in given.items() if key == "softmax_layout" or more["sparse_mode"]}
            return real(*args, **{**more, **known})

        return call

    for name in ("npu_fusion_attention", "npu_fusion_attention_grad"):
        monkeypatch.setattr(torch_npu, name, replaced(name, getattr(torch_npu, name)))
    query, value = random(5, 4, SIZE), random(8, 2, SIZE)
    with pytest.warns(UserWarning, match="stays plain torch: npu_fusion_attention gives different results"):
        assert partial_kernel("npu_fusion", query, value, sections((3, 2), (3, 5), True, NPU)) is PLAIN


def where_of(more: dict[str, Any]) -> Sections:
    lengths = [
        [end - start for start, end in zip([0, *ends], ends, strict=False)]
        for ends in (more["actual_seq_qlen"], more["actual_seq_kvlen"])
    ]
    return sections(*lengths, more["atten_mask"] is not None, NPU)


def test_statistics_stand_head_by_head_within_each_sequence_by_default() -> None:
    """By hand: largest scores of 2 heads and of sequences of 2 and 1 queries, whose keys are 1."""
    query = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])[..., None].to(NPU)
    key = torch.ones(3, 2, 1, device=NPU)
    more = {"atten_mask": corner(NPU), "sparse_mode": 3, "actual_seq_qlen": [2, 3], "actual_seq_kvlen": [2, 3]}
    plain = torch_npu.npu_fusion_attention(query, key, key, 2, "TND", **more)[1]
    assert plain[..., 0].flatten().tolist() == [1, 3, 2, 4, 5, 6]
    asked = torch_npu.npu_fusion_attention(query, key, key, 2, "TND", softmax_layout="TND", **more)[1]
    assert asked[..., 0].flatten().tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(RuntimeError, match="softmax_layout"):
        torch_npu.npu_fusion_attention(query, key, key, 2, "TND", softmax_layout="NTD", **more)
