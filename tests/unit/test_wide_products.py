"""bf16 products of a host without bf16 units: fp32 products, rounded once, in every form that models use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from lockstep.kernels import bf16_matmul as wide_products
from lockstep.kernels.bf16_matmul import prepare_products

# In a process of its own: operators that are replaced stay so, and the other tests should see the host as it is.
CHILD = """
import sys, torch
sys.path.insert(0, {tests!r})
from lockstep.kernels import bf16_matmul as wide_products
wide_products._has_bf16 = lambda: False
wide_products.prepare_products(torch.bfloat16)
import test_wide_products
test_wide_products.check_all()
print("all", torch.backends.mkldnn.enabled)
"""


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def _product_into(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out=torch.empty(a.shape[0], b.shape[1], dtype=a.dtype))


PRODUCTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "mm": (torch.mm, (_draw(5, 7), _draw(7, 3))),
    "mm, out": (_product_into, (_draw(5, 7), _draw(7, 3))),
    "transposed": (lambda a, b: a.t() @ b.t(), (_draw(7, 5), _draw(3, 7))),
    "bmm": (torch.bmm, (_draw(2, 5, 7), _draw(2, 7, 3))),
    "linear with bias": (linear, (_draw(5, 7), _draw(3, 7), _draw(3))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=0.5), (_draw(2, 5, 3), _draw(2, 5, 7), _draw(2, 7, 3))),
    "addmm_": (lambda c, a, b: c.clone().addmm_(a, b), (_draw(5, 3), _draw(5, 7), _draw(7, 3))),
}


def check_all() -> None:
    for name, (run, operands) in PRODUCTS.items():
        exact = run(*(operand.double() for operand in operands))
        ours = run(*operands)
        assert ours.dtype is torch.bfloat16, name
        # fp32 sums of seven products err by far less than half a bf16 step, so at most one rounding is left.
        assert torch.allclose(ours.double(), exact, rtol=2**-8, atol=2**-20), name
        again = run(*(operand.float() for operand in operands))
        assert again.dtype is torch.float32, name
    _check_attention()


def _check_attention() -> None:
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": torch.where(mask, 0.0, -1e9).bfloat16()}):
        leaves = [_draw(1 + index, 2, 6, 4)[:1].requires_grad_() for index in range(3)]
        out = scaled_dot_product_attention(*leaves, **options)
        upstream = _draw(*out.shape)
        ours = torch.autograd.grad(out, leaves, upstream)
        wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
        masks = {name: value.double() if getattr(value, "dtype", None) is torch.bfloat16 else value
                 for name, value in options.items()}  # fmt: skip
        exact = scaled_dot_product_attention(*wide, **masks)
        theirs = torch.autograd.grad(exact, wide, upstream.double())
        assert out.dtype is torch.bfloat16
        assert torch.allclose(out.double(), exact, rtol=2**-7, atol=2**-8)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype is torch.bfloat16
            assert torch.allclose(mine.double(), other, rtol=2**-6, atol=2**-6)


@pytest.mark.slow
def test_products_are_rounded_once_and_fp32_is_left_alone() -> None:
    code = CHILD.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["all", "True"], done.stderr


def test_a_host_with_bf16_units_and_other_dtypes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[None] = []
    monkeypatch.setattr(wide_products, "_install", lambda: installed.append(None))
    monkeypatch.setattr(wide_products, "_has_bf16", lambda: True)
    prepare_products(torch.bfloat16)
    assert not installed
    monkeypatch.setattr(wide_products, "_has_bf16", lambda: False)
    prepare_products(torch.float32)
    prepare_products(torch.float16)
    assert not installed
    prepare_products(torch.bfloat16)
    assert len(installed) == 1
