"""The parts of fused decoder layers: attention with heads or with latents (MLA), feed-forward, and norms.

Projections of the same input run as one matmul (fused QKV, fused gate/up), so their weights are placed one after
another in memory. When a weight is moved, its `nn.Parameter` stays the same object. `joined` checks the memory
addresses, so that a moved parameter is detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from lockstep.kernels.attention.layout import DecodePass
from lockstep.kernels.attention.masks import CALLS, CHUNK, HEADS, SHAPE, SOFTCAP, WINDOW
from lockstep.kernels.attention.paged import PrefillPass, decode_attention, paged_attention
from lockstep.kernels.decode.decode_triton import (
    WIDEST_CODED,
    HeadNorms,
    add_norm_,
    add_norm_codes_,
    heads_of_line,
    place_heads_,
    swiglu_,
    swiglu_codes,
)
from lockstep.kernels.decode.latent_triton import place_latents
from lockstep.kernels.fused_modules import adds_one, epsilon_of, is_gelu_gated
from lockstep.kernels.norm_triton import RmsNorm, rms_norm
from lockstep.kernels.quantized.formats import Quantized
from lockstep.kernels.quantized.quantized_view import QuantizedForward
from lockstep.kernels.quantized.token_products import TokenCodes, quantized_product

Input = torch.Tensor | TokenCodes
"""The input of projections. If they all use quantised weights, a kernel may have quantised it already."""
Angles = tuple[torch.Tensor, torch.Tensor]
Pass = PrefillPass | DecodePass


def lay_side_by_side(parts: Sequence[nn.Parameter]) -> None:
    """Moves parameters that differ only in the first dimension into one buffer, unless they are already adjacent in one
    buffer."""
    if joined(parts) is not None:
        return
    # The buffer is created outside of inference mode, because training uses the weights in it too.
    with torch.inference_mode(False), torch.no_grad():
        for part, place in zip(parts, torch.cat(list(parts)).split([len(part) for part in parts]), strict=True):
            part.data = place


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns adjacent tensors as one tensor on the same memory. Returns None if the tensors are not adjacent."""
    first = parts[0]
    storage, place = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        alike = part.shape[1:] == first.shape[1:] and part.dtype == first.dtype and part.is_contiguous()
        if not alike or part.untyped_storage().data_ptr() != storage or part.storage_offset() != place:
            return None
        place += part.numel()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def parameters_of(projections: Sequence[Any]) -> list[list[nn.Parameter]]:
    """Returns the list of weights of several projections, and the list of their biases if they have biases."""
    biases = [each.bias for each in projections if each.bias is not None]
    return [[each.weight for each in projections], *([biases] if biases else [])]


def format_of(projections: Sequence[nn.Linear]) -> str | None:
    """Returns the format of the weights of the projections if a view (`quantized_view.py`) is in use."""
    low = vars(projections[0]).get("forward")
    return low.weight.format if isinstance(low, QuantizedForward) else None


def product(x: Input, projections: Sequence[nn.Linear]) -> torch.Tensor:
    """Returns the concatenated outputs of several projections, computed as one matmul. Uses the quantised weights if a
    view (`quantized_view.py`) is in use."""
    if format_of(projections) is not None:
        return _quantized(x, [vars(each).get("forward") for each in projections])
    assert isinstance(x, torch.Tensor)
    weight, *bias = (joined(parts) for parts in parameters_of(projections))
    assert weight is not None
    return linear(x, weight, *bias)


def _quantized(x: Input, low: Sequence[Any]) -> torch.Tensor:
    assert all(isinstance(each, QuantizedForward) for each in low)
    codes, scales = joined([each.weight.codes for each in low]), joined([each.weight.scales for each in low])
    biases = [each.bias for each in low if each.bias is not None]
    bias = joined(biases) if biases else None
    if codes is None or scales is None or (biases and bias is None):
        return torch.cat([each(x) for each in low], -1)
    return quantized_product(x, Quantized(low[0].weight.format, codes, scales, tuple(codes.shape)), bias)


@dataclass(frozen=True)
class Norm:
    """An RMSNorm module."""

    module: Any
    unit_offset: bool
    readers: Sequence[nn.Linear]
    """The projections that read the result, if nothing else reads it."""

    @classmethod
    def of(cls, module: nn.Module, readers: Sequence[nn.Linear] = ()) -> Norm:
        return cls(module, adds_one(module), readers)

    @property
    def numbers(self) -> RmsNorm:
        epsilon = epsilon_of(self.module)
        assert epsilon is not None
        return RmsNorm(self.module.weight, epsilon, self.unit_offset)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, *self.numbers)

    def of_sum(self, stream_TW: torch.Tensor, more_TW: torch.Tensor, post: Norm | None) -> Input:
        """Adds `more_TW`, normalised by `post` if it is not None, to the residual stream in place. Returns the norm of
        the sum, quantised if its readers have quantised weights."""
        inner = None if post is None else post.numbers
        format = format_of(self.readers) if self.readers else None
        if format is None:
            return add_norm_(stream_TW, more_TW, self.numbers, inner)
        return add_norm_codes_(stream_TW, more_TW, self.numbers, inner, format)


class Attention(Protocol):
    """The attention of a layer, without its output projection."""

    @property
    def projections(self) -> list[Sequence[nn.Linear]]:
        """Groups of projections that have the same input. Only the first group reads the input of the attention."""

    def attend(self, normed_TW: Input, angles: Angles, step: Pass) -> torch.Tensor:
        """Writes the tokens to the KV cache. Returns the concatenated outputs of all heads."""


@dataclass(frozen=True)
class HeadAttention:
    """Attention with keys and values per head."""

    module: Any
    heads: int
    groups: int
    index: int
    scale: float
    query_norm: Norm | None
    key_norm: Norm | None

    @classmethod
    def of(cls, module: Any) -> HeadAttention:
        groups, size, _ = getattr(module, SHAPE)
        scale = getattr(module, "scaling", None)
        query, key = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
        return cls(
            module,
            heads=module.q_proj.out_features // size,
            groups=groups,
            index=getattr(module, CALLS)[0],
            scale=size**-0.5 if scale is None else scale,
            query_norm=None if query is None else Norm.of(query),
            key_norm=None if key is None else Norm.of(key),
        )

    @property
    def projections(self) -> list[Sequence[nn.Linear]]:
        return [(self.module.q_proj, self.module.k_proj, self.module.v_proj)]

    @property
    def head_norms(self) -> HeadNorms | None:
        if self.query_norm is None or self.key_norm is None:
            return None
        return self.query_norm.numbers, self.key_norm.numbers

    def attend(self, normed_TW: Input, angles: Angles, step: Pass) -> torch.Tensor:
        heads = heads_of_line(self.place(normed_TW, angles, step), self.heads, self.groups)
        limits = {
            "scale": self.scale,
            "window": getattr(self.module, WINDOW),
            "softcap": getattr(self.module, SOFTCAP),
            "chunk": getattr(self.module, CHUNK),
        }
        return paged_attention(*heads, step, self.index, **limits, stored=True).flatten(1)

    def place(self, normed_TW: Input, angles: Angles, step: Pass) -> torch.Tensor:
        """Computes the fused QKV projection of the tokens and writes keys and values to the KV cache."""
        qkv = product(normed_TW, self.projections[0])
        place_heads_(qkv, *angles, step.slots_T, *step.cache.layer(self.index), self.heads, self.head_norms)
        return qkv


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA) in decoding, with absorbed products (see `attention/latent.py`)."""

    module: Any
    index: int
    norm: Norm
    query_norm: Norm | None

    @classmethod
    def of(cls, module: Any) -> LatentAttention:
        query = getattr(module, "q_a_layernorm", None)
        return cls(
            module,
            index=getattr(module, CALLS)[0],
            norm=Norm.of(module.kv_a_layernorm),
            query_norm=None if query is None else Norm.of(query),
        )

    @property
    def projections(self) -> list[Sequence[nn.Linear]]:
        query = self.module.q_proj if self.query_norm is None else self.module.q_a_proj
        return [(query, self.module.kv_a_proj_with_mqa)]

    def attend(self, normed_TW: Input, angles: Angles, step: Pass) -> torch.Tensor:
        assert isinstance(step, DecodePass)
        module, heads = self.module, getattr(self.module, HEADS)
        rank, nope, value = module.kv_lora_rank, module.qk_nope_head_dim, module.v_head_dim
        size = rank + module.qk_rope_head_dim
        line = product(normed_TW, self.projections[0])
        query_TL, latent_TL = line.split([line.shape[1] - size, size], 1)
        if self.query_norm is not None:
            query_TL = product(self.query_norm(query_TL), (module.q_b_proj,))
        keys, values = step.cache.layer(self.index)
        query_THQ = line.new_empty(len(line), heads, size)
        paired = bool(getattr(module.config, "rope_interleave", False))
        place_latents(query_TL, latent_TL, *angles, step.slots_T, keys, self.norm.numbers, query_THQ, paired)
        weights = module.kv_b_proj.weight.view(heads, nope + value, rank)
        nope_HTN = query_TL.unflatten(1, (heads, -1))[..., :nope].transpose(0, 1)
        torch.bmm(nope_HTN, weights[:, :nope], out=query_THQ[..., :rank].transpose(0, 1))
        limits = module.scaling, getattr(module, WINDOW), getattr(module, SOFTCAP)
        latent_THR = decode_attention(query_THQ, keys, values, step, *limits, chunk=getattr(module, CHUNK))
        out_THV = line.new_empty(len(line), heads, value)
        values_HRV = weights[:, nope:].transpose(1, 2)
        torch.bmm(latent_THR.transpose(0, 1), values_HRV, out=out_THV.transpose(0, 1))
        return out_THV.flatten(1)


@dataclass(frozen=True)
class FeedForward:
    """A gated MLP whose projections have no biases."""

    module: Any
    gelu: bool

    @classmethod
    def of(cls, module: nn.Module) -> FeedForward:
        return cls(module, is_gelu_gated(module))

    @property
    def projections(self) -> list[Sequence[nn.Linear]]:
        return [(self.module.gate_proj, self.module.up_proj)]

    def __call__(self, normed_TW: Input) -> torch.Tensor:
        gate_up, down = product(normed_TW, self.projections[0]), (self.module.down_proj,)
        format = format_of(down)
        if format is None or down[0].in_features > WIDEST_CODED:
            return product(swiglu_(gate_up, self.gelu), down)
        return product(swiglu_codes(gate_up, self.gelu, format), down)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, which runs as a module. Its experts may be a fused kernel (`experts_triton.py`)."""

    module: Any
    projections: Sequence[Sequence[nn.Linear]] = ()

    def __call__(self, normed_TW: Input) -> torch.Tensor:
        assert isinstance(normed_TW, torch.Tensor)
        out: torch.Tensor = self.module(normed_TW[None])
        return out[0].contiguous()
