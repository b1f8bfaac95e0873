"""Attention in parts through the NPU's fused operator, modelled after its documents: whole attention comes out.

The real torch_npu is called by tests/ascend/test_parts.py. A device has not been asked.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from context_ranks import Case, check_attention
from draws import draws
from fusion_model import FusionModel
from lockstep.kernels.attention import partial
from lockstep.kernels.attention.npu_attention import FUSION_PARTS
from lockstep.kernels.attention.partial import PLAIN, partial_kernel
from lockstep.kernels.attention.partial_attention import sections
from thread_group import on_every_rank

HOST = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6).map(tuple)
SHAPES = st.sampled_from([(4, 4, 8, 8), (4, 2, 8, 8), (12, 3, 4, 4)])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FusionModel]:
    model = FusionModel()
    monkeypatch.setitem(sys.modules, "torch_npu", model)  # type: ignore[arg-type]
    partial._fusion_passes.cache_clear()
    partial._warn_once.cache_clear()
    yield model
    partial._fusion_passes.cache_clear()
    partial._warn_once.cache_clear()


@settings(max_examples=draws(5, 10))
@given(
    LENGTHS, st.sampled_from([2, 3, 4]), st.sampled_from(["zigzag", "gather"]), SHAPES, st.integers(0, 99), st.data()
)
def test_divided_attention_is_whole_attention(
    model: FusionModel,
    lengths: tuple[int, ...],
    ranks: int,
    layout: str,
    shape: tuple[int, int, int, int],
    seed: int,
    data: Any,
) -> None:
    """Outputs and gradients in fp32, to 1e-5 of the largest number."""
    case = Case(lengths, *shape, sinks=data.draw(st.booleans()))
    if layout == "gather":
        case = replace(case, window=data.draw(st.sampled_from([None, 1, 4])))
    model.calls.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_every_rank(ranks, layout, lambda one: check_attention(case, one, torch.float32, seed, "npu_fusion"))
    assert model.calls["forward"] >= ranks
    assert model.calls["gradient"] >= ranks


def chosen(dtype: torch.dtype = torch.float32, window: int | None = None, **change: Any) -> Any:
    sizes = {"heads": 4, "groups": 2, "size": 8, "value": 8, "queries": (3, 2), "keys": (3, 5), **change}
    query = torch.zeros(sum(sizes["queries"]), sizes["heads"], sizes["size"], dtype=dtype)
    value = torch.zeros(sum(sizes["keys"]), sizes["groups"], sizes["value"], dtype=dtype)
    where = sections(sizes["queries"], sizes["keys"], True, HOST)
    return partial_kernel("npu_fusion", query, value, where, window)


@pytest.mark.daily
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_right_operator_passes_its_trial_once(model: FusionModel, dtype: torch.dtype, window: int | None) -> None:
    assert chosen(dtype, window) is FUSION_PARTS
    tried = dict(model.calls)
    assert tried == {"forward": 2, "gradient": 2}
    assert chosen(dtype, window) is FUSION_PARTS
    assert dict(model.calls) == tried


@pytest.mark.daily
@pytest.mark.parametrize("fault", ["own_part", "own_sums", "from_the_start", "by_head", "broken"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrong_operator_is_not_used(model: FusionModel, fault: str, dtype: torch.dtype) -> None:
    setattr(model, fault, True)
    why = "failed on a trial: EZ9999" if fault == "broken" else "gives different results"
    with pytest.warns(UserWarning, match=f"parallel.context_parallel stays plain torch: npu_fusion_attention {why}"):
        assert chosen(dtype) is PLAIN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(dtype) is PLAIN


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float64}, "type torch.float64"),
        ({"value": 6}, "value head size 6 differs from key head size 8"),
        ({"heads": 257, "groups": 1}, "257 heads, at most 256"),
        ({"heads": 3}, "3 query heads are no multiple of 2 key heads"),
        ({"size": 769, "value": 769}, "head size 769, at most 768"),
        ({"queries": (1,) * 1025, "keys": (1,) * 1025}, "more than 1024 sequences"),
        ({"queries": (1,), "keys": (2**20 + 1,), "heads": 1, "groups": 1, "size": 1, "value": 1}, "1048576 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_operator_does_not_take_is_told_once(model: FusionModel, change: dict[str, Any], why: str) -> None:
    with pytest.warns(
        UserWarning, match=f"parallel.context_parallel uses plain torch: npu_fusion_attention has no .*{why}"
    ):
        assert chosen(**change) is PLAIN
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(**change) is PLAIN
    assert not model.calls


def test_logs_and_gradients_by_hand(model: FusionModel) -> None:
    """Two sequences of one query each, two heads. Scores are 0 and log 3, and 0: sums of 4 and of 1, by head alike."""
    query = torch.tensor([[[1.0], [2.0]], [[1.0], [1.0]]])
    key, value = torch.zeros(3, 2, 1), torch.tensor([[[8.0], [8.0]], [[4.0], [4.0]], [[5.0], [7.0]]])
    key[1, 0], key[1, 1] = torch.tensor(3.0).log(), torch.tensor(3.0).log() / 2
    where = sections([1, 1], [2, 1], False, HOST)
    out, lse_HT = FUSION_PARTS.forward(query, key, value, where, 1.0)
    assert out.flatten().tolist() == pytest.approx([5, 5, 5, 7])
    assert lse_HT.exp().tolist() == [pytest.approx([4, 1]), pytest.approx([4, 1])]
    # As a part of a whole whose sums are twice as large and whose outputs are 0: every share is half of what it was.
    _, _, dv = FUSION_PARTS.backward(
        torch.ones(2, 2, 1), query, key, value, torch.zeros(2, 2, 1), lse_HT + torch.tensor(2.0).log(), where, 1.0
    )
    assert dv.flatten().tolist() == pytest.approx([1 / 8, 1 / 8, 3 / 8, 3 / 8, 1 / 2, 1 / 2])
