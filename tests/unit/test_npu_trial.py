"""How far a fused operator may lie from a module before it is another function, dtype by dtype."""

from __future__ import annotations

import pytest
import torch

from lockstep.kernels.fused_modules_npu import KERNELS

close = KERNELS.trial.close


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [(torch.float32, 1e-5, 4e-5), (torch.float16, 2**-8, 2**-6), (torch.bfloat16, 2**-5, 2**-3)],
    ids=["fp32", "fp16", "bf16"],
)
def test_a_little_more_than_rounding_is_another_function(dtype: torch.dtype, near: float, far: float) -> None:
    """The largest value is 2: near and far are one to four and ten to sixty roundings of it."""
    own = torch.tensor([0.5, -2.0, 1.0], dtype=dtype)
    for off, same in ((0.0, True), (near, True), (far, False)):
        assert close(own, own + torch.tensor([0.0, off, 0.0], dtype=dtype)) is same
    assert not close(own, own.flip(0))


def test_small_values_are_held_to_those_of_size_one() -> None:
    """Numbers far below 1 are not held to their own rounding: 2e-6 off is 1 % of them and passes, 2e-5 does not."""
    own = torch.full((4,), 2e-4)
    assert close(own, own + 2e-6)
    assert not close(own, own + 2e-5)


def test_other_shapes_types_and_what_is_no_number_are_not_alike() -> None:
    own = torch.ones(2, 3)
    assert not close(own, own.half())
    assert not close(own, own[:1])
    assert not close(own, own * float("nan"))
