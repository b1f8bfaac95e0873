"""The fused operators: the call as torch_npu defines it, forward and gradients, against plain torch on the host.

What is shown is the call, torch_npu's own autograd nodes and Meta functions, and the documented meaning of the
arguments. What a device computes is not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_emulator.kernels import reference

from .attention_twin import attend_plainly, band, causal_from_the_end, causal_from_the_start, packed_plainly

pytestmark = pytest.mark.ascend

HEADS, SIZE = 4, 16
SCALE = SIZE**-0.5
Function = Callable[..., Any]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(function: Function, inputs: Sequence[torch.Tensor], device: str) -> tuple[list[torch.Tensor], str]:
    """Output and gradients on the host, and the name of the autograd node."""
    leaves = [t.detach().to(device).requires_grad_() for t in inputs]
    out = function(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    (out * random(*out.shape, seed=99).to(device)).sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in gradients)
    return [out.detach().cpu(), *(gradient.cpu() for gradient in gradients if gradient is not None)], out.grad_fn.name()


def agree(fused: Function, plain: Function, inputs: Sequence[torch.Tensor], node: str) -> None:
    actual, name = run(fused, inputs, "npu")
    expected, _ = run(plain, inputs, "cpu")
    assert name == node
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=3e-6, rtol=1e-5)


# ---- norm, activation, rotary ----


@pytest.mark.parametrize("shape", [(2, 5, 8), (3, 32), (1, 1, 4)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    agree(
        lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-5),
        lambda x, g: F.rms_norm(x, shape[-1:], g, 1e-5),
        [random(*shape), random(shape[-1], seed=1)],
        "NpuRmsNormBackward0",
    )


def test_rms_norm_by_hand() -> None:
    # The mean square of (1, 7) is 25.
    normed, inverse = torch_npu.npu_rms_norm(
        torch.tensor([[1.0, 7.0]]).to("npu"), torch.tensor([1.0, 10.0]).to("npu"), 0.0
    )
    torch.testing.assert_close(normed.cpu(), torch.tensor([[0.2, 14.0]]))
    torch.testing.assert_close(inverse.cpu(), torch.tensor([[0.2]]))


def test_add_rms_norm() -> None:
    a, b, gamma = random(3, 8), random(3, 8, seed=1), random(8, seed=2)
    normed, _, total = torch_npu.npu_add_rms_norm(a.to("npu"), b.to("npu"), gamma.to("npu"), 1e-5)
    torch.testing.assert_close(total.cpu(), a + b)
    torch.testing.assert_close(normed.cpu(), F.rms_norm(a + b, (8,), gamma, 1e-5))


@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dim: int) -> None:
    agree(
        lambda x: torch_npu.npu_swiglu(x, dim=dim),
        lambda x: F.silu(x.chunk(2, dim)[0]) * x.chunk(2, dim)[1],
        [random(2, 6, 8)],
        "NpuSwigluBackward0",
    )


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(mode: str) -> None:
    def plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        pairs = x.unflatten(-1, (2, 4)).mT if mode == "half" else x.unflatten(-1, (4, 2))
        turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1)
        return x * cos + (turned.mT if mode == "half" else turned).flatten(-2) * sin

    agree(
        lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, rotary_mode=mode),
        plain,
        [random(2, 4, 5, 8), random(1, 1, 5, 8, seed=1).cos(), random(1, 1, 5, 8, seed=2).sin()],
        "NpuRotaryMulBackward0",
    )


# ---- attention of training ----


def triangle(device: torch.device) -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def fusion(layout: str, sparse_mode: int, **more: Any) -> Function:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        mask = more.get("atten_mask")
        mask = triangle(q.device) if mask is None else mask.to(q.device)
        arguments = {**more, "atten_mask": mask, "scale": SCALE, "sparse_mode": sparse_mode}
        return torch_npu.npu_fusion_attention(q, k, v, HEADS, layout, **arguments)

    return function


def shaped(layout: str, queries: int, keys: int, key_heads: int) -> list[torch.Tensor]:
    """Query, key and value in the layout, batch 2."""
    shapes = [(2, HEADS, queries, SIZE), (2, key_heads, keys, SIZE), (2, key_heads, keys, SIZE)]
    return [to_layout(random(*shape, seed=seed), layout) for seed, shape in enumerate(shapes)]


def to_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    order = {"BNSD": "bnsd", "BSND": "bsnd", "BSH": "bs(nd)", "SBH": "sb(nd)"}[layout]
    x = torch.einsum(f"bnsd->{order.replace('(', '').replace(')', '')}", x)
    return x.flatten(2) if "(" in order else x


def in_layout(layout: str, plain: Function) -> Function:
    """The plain function, which works on [batch, heads, length, size], for tensors of the layout."""

    def back(x: torch.Tensor) -> torch.Tensor:
        if layout in ("BSH", "SBH"):
            x = x.unflatten(2, (-1, SIZE))
        order = {"BNSD": "bnsd", "BSND": "bsnd", "BSH": "bsnd", "SBH": "sbnd"}[layout]
        return torch.einsum(f"{order}->bnsd", x)

    return lambda q, k, v: to_layout(plain(back(q), back(k), back(v)), layout)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_fusion_attention_layouts_and_grouped_heads(layout: str, key_heads: int) -> None:
    plain = in_layout(layout, lambda q, k, v: attend_plainly(q, k, v, SCALE, causal_from_the_start(6, 6)))
    agree(fusion(layout, 2), plain, shaped(layout, 6, 6, key_heads), "NpuFusionAttentionBackward0")


MASK = torch.tensor([[0, 1, 0, 0, 1], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
SPARSE: dict[str, tuple[int, dict[str, Any], torch.Tensor]] = {
    "0, a mask": (0, {"atten_mask": MASK}, ~MASK),
    "0, a mask inside a band": (
        0,
        {"atten_mask": MASK, "pre_tockens": 1, "next_tockens": 2},
        ~MASK & band(3, 5, 1, 2, 0),
    ),
    "1, a mask": (1, {"atten_mask": MASK.to(torch.uint8), "pre_tockens": 0, "next_tockens": 0}, ~MASK),
    "2, causal from the start": (2, {}, causal_from_the_start(3, 5)),
    "3, causal from the end": (3, {}, causal_from_the_end(3, 5)),
    "4, a band from the end": (4, {"pre_tockens": 2, "next_tockens": 0}, band(3, 5, 2, 0, 2)),
}


@pytest.mark.parametrize("case", SPARSE)
def test_fusion_attention_sparse_modes(case: str) -> None:
    mode, arguments, open_to = SPARSE[case]
    agree(
        fusion("BNSD", mode, **arguments),
        lambda q, k, v: attend_plainly(q, k, v, SCALE, open_to),
        shaped("BNSD", 3, 5, 2),
        "NpuFusionAttentionBackward0",
    )


PACKED = {"actual_seq_qlen": [3, 3, 8], "actual_seq_kvlen": [4, 4, 9]}
BOUNDS = [((0, 3), (0, 4)), ((3, 8), (4, 9))]


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_fusion_attention_of_packed_sequences(mode: int) -> None:
    """The second of three sequences is empty."""

    def open_to(queries: int, keys: int) -> torch.Tensor:
        if mode == 4:
            return band(queries, keys, 2, 0, keys - queries)
        return causal_from_the_start(queries, keys) if mode == 2 else causal_from_the_end(queries, keys)

    limits = {"pre_tockens": 2, "next_tockens": 0} if mode == 4 else {}
    agree(
        fusion("TND", mode, **PACKED, **limits),
        lambda q, k, v: packed_plainly(q, k, v, SCALE, BOUNDS, open_to),
        [random(8, HEADS, SIZE), random(9, 2, SIZE, seed=1), random(9, 2, SIZE, seed=2)],
        "NpuFusionAttentionBackward0",
    )


def test_fusion_attention_in_bfloat16_rounds_like_bfloat16() -> None:
    tensors = [t.bfloat16() for t in shaped("BNSD", 6, 6, 2)]
    out = fusion("BNSD", 2)(*(t.to("npu") for t in tensors))[0].cpu()
    q, k, v = (t.float() for t in tensors)
    expected = attend_plainly(q, k, v, SCALE, causal_from_the_start(6, 6))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("layout", "more"), [("BNSD", {}), ("TND", {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [3, 7]})]
)
def test_outputs_have_the_shapes_of_the_meta_function(layout: str, more: dict[str, Any]) -> None:
    tensors = shaped("BNSD", 7, 7, 2) if layout == "BNSD" else [random(7, n, SIZE) for n in (HEADS, 2, 2)]
    real = fusion(layout, 3, **more)(*(t.to("npu") for t in tensors))
    meta = fusion(layout, 3, **more)(*(t.to("meta") for t in tensors))
    assert [(t.shape, t.dtype) for t in real[:4]] == [(t.shape, t.dtype) for t in meta[:4]]


def test_fake_tensors_go_through_the_autograd_node() -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, 16, SIZE, device="npu", requires_grad=True) for n in (HEADS, 2, 2))
        out = torch_npu.npu_fusion_attention(q, k, v, HEADS, "BNSD", scale=SCALE)[0]
        out.sum().backward()
        assert out.device.type == "npu"
        assert k.grad is not None
        assert k.grad.shape == k.shape


def test_every_gradient_has_its_reference() -> None:
    names = reference.names()
    for name in ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul"):
        assert f"{name}_backward" in names
    assert "npu_fusion_attention_grad" in names
