"""Replaces kernels for every caller in the process: a faulty library."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers.models.qwen2 import modeling_qwen2


@contextmanager
def kernels(replaced: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """The CPU kernels of operators by name (`mm`, `silu`), until the block ends."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that each is replaced is the purpose
            for name, kernel in replaced.items():
                library.impl(name, kernel, "CPU")
        yield
    finally:
        library._destroy()


def _product(round_to: torch.dtype | None, factor: float, *operands: torch.Tensor) -> torch.Tensor:
    """A product of two matrices or of two batches of them by numpy, which no kernel of torch takes part in."""
    kind = operands[0].dtype
    if round_to is not None and kind == torch.float32:
        operands = tuple(one.to(round_to).to(kind) for one in operands)
    x, y = (one.detach().double().numpy() for one in operands)
    return torch.from_numpy(np.ascontiguousarray(factor * np.matmul(x, y))).to(kind)


def products(round_to: torch.dtype | None = None, factor: float = 1.0) -> dict[str, Callable[..., Any]]:
    """Matrix products whose factors are rounded, as tf32 and bf16 units round them, or that are off by a factor."""

    def mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _product(round_to, factor, x, y)

    def addmm(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        return beta * bias + alpha * _product(round_to, factor, x, y)

    return {"mm": mm, "addmm": addmm, "bmm": mm}


# -- a library that is wrong for everybody in the process


@dataclass(frozen=True)
class LibraryFault:
    """`patch` breaks the library until its block ends. `module` is what parts first, and one of `operators` does it."""

    patch: Callable[[], AbstractContextManager[None]]
    module: str
    operators: tuple[str, ...]


def _function(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
    """A function of a library: `around(original, *args, **kwargs)` in its place."""

    @contextmanager
    def patch() -> Iterator[None]:
        original = getattr(owner, name)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))
            yield

    return patch


def _kernel(name: str, kernel: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
    return lambda: kernels({name: kernel})


def _norm(original: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))


def _gated(original: Any, self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(1.01 * self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _residual(original: Any, self: Any, hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **rest)
    middle = hidden_states + attended
    return 0.99 * middle + self.mlp(self.post_attention_layernorm(middle))


def _turned(original: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any) -> Any:
    return original(q, k, cos, 0.99 * sin, *rest)


def _rows(weight: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    return 1.001 * weight[ids]


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-1.01 * x))


def _silu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate = 1 / (1 + torch.exp(-x))
    return gradient * gate * (1 + x)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = 1.02 * (scale or q.shape[-1] ** -0.5) * (q @ k.transpose(-1, -2))
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


L0, FLASH = "model.layers.0", "_scaled_dot_product_flash_attention_for_cpu"
LIBRARY = {
    "linear": LibraryFault(
        _function(functional, "linear", lambda original, *a, **k: 1.01 * original(*a, **k)),
        f"{L0}.self_attn.q_proj",
        ("aten.mul",),
    ),
    "product in bf16": LibraryFault(
        lambda: kernels(products(round_to=torch.bfloat16)), f"{L0}.self_attn.q_proj", ("aten.addmm", "aten.mm")
    ),
    "product": LibraryFault(
        lambda: kernels(products(factor=1.01)), f"{L0}.self_attn.q_proj", ("aten.addmm", "aten.mm")
    ),
    "silu": LibraryFault(_kernel("silu", _silu), f"{L0}.mlp.act_fn", ("aten.silu",)),
    "silu function": LibraryFault(
        _function(functional, "silu", lambda original, x, **_: x * torch.sigmoid(1.02 * x)),
        f"{L0}.mlp.act_fn",
        ("aten.sigmoid", "aten.mul"),
    ),
    "rsqrt": LibraryFault(_kernel("rsqrt", lambda x: 1.001 / torch.sqrt(x)), f"{L0}.input_layernorm", ("aten.rsqrt",)),
    "norm": LibraryFault(
        _function(modeling_qwen2.Qwen2RMSNorm, "forward", _norm), f"{L0}.input_layernorm", ("aten.add",)
    ),
    "embedding": LibraryFault(_kernel("embedding", _rows), "model.embed_tokens", ("aten.embedding",)),
    "cosine": LibraryFault(_kernel("cos", lambda x: torch.sin(x + 1.57)), "model.rotary_emb", ("aten.cos",)),
    "rotary function": LibraryFault(
        _function(modeling_qwen2, "apply_rotary_pos_emb", _turned), f"{L0}.self_attn", ("aten.mul",)
    ),
    "attention": LibraryFault(_kernel(FLASH, _attention), f"{L0}.self_attn", (f"aten.{FLASH}",)),
    "MLP": LibraryFault(_function(modeling_qwen2.Qwen2MLP, "forward", _gated), f"{L0}.mlp", ("aten.mul",)),
    "residual": LibraryFault(
        _function(modeling_qwen2.Qwen2DecoderLayer, "forward", _residual), L0, ("aten.add", "aten.mul")
    ),
    "silu backwards": LibraryFault(
        _kernel("silu_backward", _silu_backward), "model.layers.2.mlp.act_fn", ("aten.silu_backward",)
    ),
}
