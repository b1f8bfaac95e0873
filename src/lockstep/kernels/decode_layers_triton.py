"""Fused decoder layers of Llama-like models for generation on NVIDIA devices.

Projections of the same input run as one matmul (fused QKV, fused gate/up), so their weights are placed one after
another in memory. When a weight is moved, its `nn.Parameter` stays the same object. `joined` checks the memory
addresses, so that a moved parameter is detected (see `FusedLayers.ready`).
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from triton.errors import TritonError

from lockstep.device.base import first_sentence
from lockstep.kernels.attention.kv_cache import KVCache, uniform_layout
from lockstep.kernels.attention.layout import DecodePass
from lockstep.kernels.attention.masks import CALLS, SHAPE, WINDOW
from lockstep.kernels.attention.paged import PrefillPass, paged_attention
from lockstep.kernels.decode_triton import Norms, add_norm_, heads_of_line, place_heads_, swiglu_
from lockstep.kernels.fused_modules import KernelForward, drawn, epsilon_of, is_rms_norm, is_silu_gated
from lockstep.kernels.norm_triton import WIDEST, rms_norm
from lockstep.kernels.triton_math import runs_on


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


# The reference is the model's forward. Before use, every fused layer is compared with the model's layer on random
# input. The inputs of the layers, their position embeddings and the final norm are compared too. If anything differs,
# the model's modules are used instead.

Pass = PrefillPass | DecodePass
Angles = tuple[torch.Tensor, torch.Tensor]
"""Rotary embedding: cos and sin of the tokens' positions, each (T, D)."""
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
# Tolerances for the norm of a layer's error: relative to what the layer adds to the residual stream, and relative to
# its output.
TOLERANCE = {torch.float32: (1e-4, 1e-6), torch.bfloat16: (5e-2, 4e-3), torch.float16: (1e-2, 5e-4)}


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its module and the arguments of its attention."""

    module: Any
    heads: int
    groups: int
    index: int
    scale: float
    window: int | None

    @classmethod
    def of(cls, module: Any) -> Layer:
        attention = module.self_attn
        groups, size, _ = getattr(attention, SHAPE)
        scale = getattr(attention, "scaling", None)
        return cls(
            module,
            heads=attention.q_proj.out_features // size,
            groups=groups,
            index=getattr(attention, CALLS)[0],
            scale=size**-0.5 if scale is None else scale,
            window=getattr(attention, WINDOW),
        )

    @property
    def fused_projections(self) -> list[Sequence[nn.Linear]]:
        """Groups of projections that have the same input."""
        attention, mlp = self.module.self_attn, self.module.mlp
        return [(attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)]

    @property
    def head_norms(self) -> Norms | None:
        query, key = (getattr(self.module.self_attn, name, None) for name in ("q_norm", "k_norm"))
        if query is None or key is None:
            return None
        return query.weight, _epsilon(query), key.weight, _epsilon(key)

    def run(
        self,
        stream_TW: torch.Tensor,
        normed_TW: torch.Tensor,
        angles: Angles,
        step: Pass,
        after: nn.Module,
    ) -> torch.Tensor:
        """Adds the layer's output to the residual stream in place. Returns the sum, normalised by the norm module
        `after`."""
        module: Any = self.module
        heads = heads_of_line(self.place(normed_TW, angles, step), self.heads, self.groups)
        attn_out = paged_attention(*heads, step, self.index, scale=self.scale, window=self.window, stored=True)
        out: Any = module.self_attn.o_proj
        normed = _add_norm(
            stream_TW, linear(attn_out.flatten(1), out.weight, out.bias), module.post_attention_layernorm
        )
        _, feeds = self.fused_projections
        return _add_norm(stream_TW, linear(swiglu_(_product(normed, feeds)), module.mlp.down_proj.weight), after)

    def place(self, normed_TW: torch.Tensor, angles: Angles, step: Pass) -> torch.Tensor:
        """Computes the fused QKV projection of the tokens and writes keys and values to the KV cache."""
        projections, _ = self.fused_projections
        qkv = _product(normed_TW, projections)
        place_heads_(qkv, *angles, step.slots_T, *step.cache.layer(self.index), self.heads, self.head_norms)
        return qkv


class FusedLayers:
    """Runs the decoder's fused forward over the packed tokens of an engine's forward pass."""

    def __init__(self, decoder: Any):
        self.decoder = decoder
        self.layers = [Layer.of(module) for module in self.decoder.layers]
        first = [module.input_layernorm for module in self.decoder.layers]
        self.norms = [*first, self.decoder.norm]
        """The norms before each layer, and the norm after the last layer."""

    def lay(self) -> None:
        """Places the weights of each fused projection in one buffer, also if the weights were moved since the last
        call."""
        if _looks_alike(self.decoder):
            for parts in self._fused_parameters():
                lay_side_by_side(parts)

    @property
    def ready(self) -> bool:
        """Whether the modules still look like Llama layers without hooks, and the weights of fused projections are
        adjacent."""
        return _looks_alike(self.decoder) and all(joined(parts) is not None for parts in self._fused_parameters())

    def _fused_parameters(self) -> Iterator[list[nn.Parameter]]:
        for layer in self.layers:
            for projections in layer.fused_projections:
                yield from _parameters(projections)

    def decode(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: DecodePass) -> torch.Tensor:
        """Returns the decoder's output for every token."""
        stream, normed, angles = self._begin(ids_T, positions_T)
        for layer, after in zip(self.layers, self.norms[1:], strict=True):
            normed = layer.run(stream, normed, angles, step, after)
        return normed

    def prefill(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: PrefillPass) -> None:
        """Writes keys and values to the KV cache. The last layer computes only its keys and values, because its output
        is not used."""
        stream, normed, angles = self._begin(ids_T, positions_T)
        *layers, last = self.layers
        for layer, after in zip(layers, self.norms[1:-1], strict=True):
            normed = layer.run(stream, normed, angles, step, after)
        last.place(normed, angles, step)

    def _begin(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Angles]:
        """Returns the residual stream, the stream normalised for the first layer, and the rotary angles. The stream is
        in new memory, because the layers overwrite it."""
        stream = self.decoder.embed_tokens(ids_T)
        return stream, _norm(stream, self.norms[0]), self.angles(stream, positions_T)

    def angles(self, stream_TW: torch.Tensor, positions_T: torch.Tensor) -> Angles:
        cos, sin = self.decoder.rotary_emb(stream_TW[None], positions_T[None])
        return cos[0], sin[0]


def fused_layers(decoder: nn.Module) -> FusedLayers | None:
    """Returns the fused layers of a decoder whose attention windows are set, with the weights placed in shared buffers.
    Returns None if the decoder is not Llama-like or the trial finds a difference."""
    if not _looks_alike(decoder):
        return None
    fused = FusedLayers(decoder)
    fused.lay()
    training = decoder.training
    decoder.eval()
    try:
        with torch.inference_mode():
            wrong = _trial(fused)
    except (TypeError, KeyError, RuntimeError, ValueError, OSError, subprocess.SubprocessError, TritonError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        wrong = f"the fused layers failed on a trial: {first_sentence(error)}"
    finally:
        decoder.train(training)
    if wrong:
        warnings.warn(f"{type(decoder).__name__} generates without fused layers: {wrong}", stacklevel=2)
        return None
    return fused


# -- structure check


def _looks_alike(decoder: Any) -> bool:
    """Returns whether the decoder has the module structure of Llama and no module has an overridden forward."""
    if _names(decoder) != DECODER or type(decoder.embed_tokens) is not nn.Embedding or not runs_on(_like(decoder)):
        return False
    norms = [decoder.norm]
    plain: list[nn.Module] = [decoder, decoder.embed_tokens, *decoder.layers]
    for layer in decoder.layers:
        if _names(layer) != LAYER or not is_silu_gated(layer.mlp):
            return False
        attention, mlp = layer.self_attn, layer.mlp
        if _names(attention) not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS) or not _sized(attention):
            return False
        feeds = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, *feeds]
        if not all(_is_product(each, _like(decoder)) for each in products) or any(f.bias is not None for f in feeds):
            return False
        if len({each.bias is None for each in products[:3]}) > 1:
            return False
        plain += [attention, mlp, *products]
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, name) for name in HEAD_NORMS if hasattr(attention, name)]
    alike = all(is_rms_norm(norm) and norm.weight.dtype == _like(decoder).dtype for norm in norms)
    has_global_hooks = nn.modules.module._has_any_global_hook()
    return alike and not has_global_hooks and all(_silent(module) for module in (*plain, *norms))


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _like(decoder: Any) -> torch.Tensor:
    weight: torch.Tensor = decoder.embed_tokens.weight
    return weight


def _sized(attention: Any) -> bool:
    """Returns whether all heads have the same size, divisible by two, and the module has no parameters other than its
    projections and optional per-head norms."""
    if not hasattr(attention, SHAPE):
        return False
    heads, size, value_size = getattr(attention, SHAPE)
    normed = [getattr(attention, name).weight.shape[0] for name in HEAD_NORMS if hasattr(attention, name)]
    widths = attention.q_proj.out_features % size, attention.k_proj.out_features, attention.v_proj.out_features
    extra = list(attention.parameters(recurse=False))
    wide = attention.q_proj.in_features <= WIDEST
    same = size == value_size and size % 2 == 0 and all(each == size for each in normed)
    return same and widths == (0, heads * size, heads * size) and not extra and wide


def _is_product(module: nn.Module, like: torch.Tensor) -> bool:
    """Returns whether the module is a plain linear layer whose weight is an ordinary tensor (no adapter, no shard)."""
    if type(module) is not nn.Linear:
        return False
    parts = [module.weight] if module.bias is None else [module.weight, module.bias]
    return all(type(p.data) is torch.Tensor and p.dtype == like.dtype and p.device == like.device for p in parts)


def _silent(module: nn.Module) -> bool:
    """Returns whether the module has no hooks, and its forward is the method of its class or one of lockstep's
    kernels."""
    forward = vars(module).get("forward")
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return (forward is None or isinstance(forward, KernelForward)) and not any(hooks)


# -- the trial


def _trial(fused: FusedLayers) -> str | None:
    """Compares the fused layers with the model's modules. Returns a description of the first difference, or None."""
    decoder, like = fused.decoder, _like(fused.decoder)
    groups, size, _ = getattr(decoder.layers[0].self_attn, SHAPE)
    positions = torch.tensor([0, 5, 17, 30], device=like.device)
    ids = torch.arange(1, 5, device=like.device) % len(like)
    cache = KVCache(uniform_layout(max(layer.index for layer in fused.layers) + 1, groups, size), 8, 16, like)
    (planes,) = (tensor.unflatten(0, (-1, 2)) for tensor in cache.tensors)
    planes.copy_(drawn(1, *planes.shape[1:], like=like))
    table = torch.arange(8, device=like.device).view(4, 2)
    slots = table.gather(1, (positions // 16)[:, None])[:, 0] * 16 + positions % 16
    step = DecodePass(cache, "triton", slots, table, positions + 1)

    calls: list[tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append((args, kwargs, output[0] if isinstance(output, tuple) else output))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in decoder.layers]
    try:
        out = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=step).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    stream = decoder.embed_tokens(ids)
    angles = fused.angles(stream, positions)
    if len(calls) != len(fused.layers):
        return "the decoder does not call every layer exactly once"
    for (args, kwargs, output), module in zip(calls, decoder.layers, strict=True):
        if len(args) != 1 or not torch.equal(args[0][0], stream):
            return f"the decoder changes the input of {type(module).__name__} {module.self_attn.layer_idx}"
        if not all(torch.equal(a[0], b) for a, b in zip(kwargs["position_embeddings"], angles, strict=True)):
            return "its layers get position embeddings that differ from those of its rotary_emb"
        stream = output[0]
    if not _close(_norm(stream, decoder.norm), out[0], torch.zeros_like(stream)):
        return "the decoder changes the output of the last layer"
    for layer, (_, kwargs, _), after in zip(fused.layers, calls, fused.norms[1:], strict=True):
        before = drawn(len(ids), like.shape[1], like=like, seed=layer.index)
        expected = layer.module(before[None], **kwargs)
        expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
        stored = [part[slots].clone() for part in cache.layer(layer.index)]
        stream = before.clone()
        normed = layer.run(stream, _norm(stream, layer.module.input_layernorm), angles, step, after)
        written = [part[slots] for part in cache.layer(layer.index)]
        zeros = [torch.zeros_like(part) for part in stored]
        same = _close(stream, expected, before) and all(map(_close, written, stored, zeros))
        if not same or not _close(normed, _norm(expected, after), torch.zeros_like(expected)):
            return f"the fused layer differs from {type(layer.module).__name__} {layer.index}"
    return None


def _close(actual: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> bool:
    of_change, of_all = TOLERANCE[expected.dtype]
    actual, expected, before = actual.float(), expected.float(), before.float()
    allowed = of_change * (expected - before).norm() + of_all * expected.norm()
    return bool((actual - expected).norm() <= allowed)


# -- helpers


def _parameters(projections: Sequence[Any]) -> list[list[nn.Parameter]]:
    """Returns the list of weights of several projections, and the list of their biases if they have biases."""
    biases = [each.bias for each in projections if each.bias is not None]
    return [[each.weight for each in projections], *([biases] if biases else [])]


def _product(x: torch.Tensor, projections: Sequence[nn.Linear]) -> torch.Tensor:
    """Returns the concatenated outputs of several projections, computed as one matmul."""
    weight, *bias = (joined(parts) for parts in _parameters(projections))
    assert weight is not None
    return linear(x, weight, *bias)


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return rms_norm(x, norm.weight, _epsilon(norm))


def _add_norm(stream_TW: torch.Tensor, more_TW: torch.Tensor, norm: Any) -> torch.Tensor:
    return add_norm_(stream_TW, more_TW, norm.weight, _epsilon(norm))


def _epsilon(norm: nn.Module) -> float:
    epsilon = epsilon_of(norm)
    assert epsilon is not None
    return epsilon
