"""Fused decoder layers of Llama-like models for generation on NVIDIA devices.

The layers of Gemma (norms also after attention and MLP, norms of 1 + weight, GELU, windows), of mixtures of experts and
of latent attention (MLA) are Llama-like too. The reference is the model's forward. Before use, every fused layer is
compared with the model's layer on random input. The inputs of the layers, their position embeddings and the final norm
are compared too. If anything differs, the model's modules are used instead.
"""

from __future__ import annotations

import inspect
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from triton.errors import TritonError

from lockstep.device.base import first_sentence
from lockstep.kernels.attention.kv_cache import CacheLayout, KVCache
from lockstep.kernels.attention.latent import latents_kept
from lockstep.kernels.attention.layout import DecodePass
from lockstep.kernels.attention.masks import CALLS, SHAPE
from lockstep.kernels.attention.paged import PrefillPass
from lockstep.kernels.decode.layer_parts_triton import (
    Angles,
    Attention,
    Experts,
    FeedForward,
    HeadAttention,
    Input,
    LatentAttention,
    Norm,
    Pass,
    joined,
    lay_side_by_side,
    parameters_of,
    product,
)
from lockstep.kernels.fused_modules import KernelForward, drawn, is_gelu_gated, is_rms_norm, is_silu_gated
from lockstep.kernels.norm_triton import WIDEST
from lockstep.kernels.triton_math import runs_on

# Names of submodules by which a Llama-like decoder is recognised.
DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
# Norms of layers that also normalise the outputs of attention and MLP, before they are added.
SANDWICH = LAYER | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
HEADS, HEAD_NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
LATENTS = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
QUERIES, LOW_RANK_QUERIES = {"q_proj"}, {"q_a_proj", "q_a_layernorm", "q_b_proj"}
EXPERTS = {"experts", "gate"}
# Tolerances for the norm of a layer's error: relative to what the layer adds to the residual stream, and relative to
# its output.
TOLERANCE = {torch.float32: (1e-4, 1e-6), torch.bfloat16: (5e-2, 4e-3), torch.float16: (1e-2, 5e-4)}


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its module and its fused parts."""

    module: Any
    attention: Attention
    feed: FeedForward | Experts
    kind: str | None
    """The layer type, if the position embeddings depend on it."""
    middle: Norm
    """The norm before the MLP."""
    after_attention: Norm | None
    after_feed: Norm | None

    @classmethod
    def of(cls, module: Any, kind: str | None) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        sandwich = _names(module) == SANDWICH
        feed = Experts(mlp) if hasattr(mlp, "experts") else FeedForward.of(mlp)
        middle = module.pre_feedforward_layernorm if sandwich else module.post_attention_layernorm
        return cls(
            module,
            LatentAttention.of(attention) if hasattr(attention, "kv_b_proj") else HeadAttention.of(attention),
            feed,
            kind,
            Norm.of(middle, feed.projections[0] if feed.projections else ()),
            Norm.of(module.post_attention_layernorm) if sandwich else None,
            Norm.of(module.post_feedforward_layernorm) if sandwich else None,
        )

    @property
    def index(self) -> int:
        return int(getattr(self.module.self_attn, CALLS)[0])

    def run(
        self,
        stream_TW: torch.Tensor,
        normed_TW: Input,
        angles: dict[str | None, Angles],
        step: Pass,
        after: Norm,
    ) -> Input:
        """Adds the layer's output to the residual stream in place. Returns the sum, normalised by `after`."""
        out: Any = self.module.self_attn.o_proj
        attended = product(self.attention.attend(normed_TW, angles[self.kind], step), (out,))
        normed = self.middle.of_sum(stream_TW, attended, self.after_attention)
        return after.of_sum(stream_TW, self.feed(normed), self.after_feed)


class FusedLayers:
    """Runs the decoder's fused forward over the packed tokens of an engine's forward pass."""

    def __init__(self, decoder: Any):
        self.decoder = decoder
        self.layers = [Layer.of(module, kind) for module, kind in zip(decoder.layers, _kinds(decoder), strict=True)]
        first = [Norm.of(layer.module.input_layernorm, layer.attention.projections[0]) for layer in self.layers]
        self.norms = [*first, Norm.of(decoder.norm)]
        """The norms before each layer, and the norm after the last layer."""
        self.prefills = all(isinstance(layer.attention, HeadAttention) for layer in self.layers)

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

    @property
    def latent_modules(self) -> list[nn.Module]:
        return [layer.attention.module for layer in self.layers if isinstance(layer.attention, LatentAttention)]

    def _fused_parameters(self) -> Iterator[list[nn.Parameter]]:
        for layer in self.layers:
            for projections in chain(layer.attention.projections, layer.feed.projections):
                yield from parameters_of(projections)

    def decode(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: DecodePass) -> torch.Tensor:
        """Returns the decoder's output for every token."""
        stream, normed, angles = self._begin(ids_T, positions_T)
        for layer, after in zip(self.layers, self.norms[1:], strict=True):
            normed = layer.run(stream, normed, angles, step, after)
        assert isinstance(normed, torch.Tensor)
        return normed

    def prefill(self, ids_T: torch.Tensor, positions_T: torch.Tensor, step: PrefillPass) -> None:
        """Writes keys and values to the KV cache. The last layer computes only its keys and values, because its output
        is not used."""
        stream, normed, angles = self._begin(ids_T, positions_T)
        *layers, last = self.layers
        for layer, after in zip(layers, self.norms[1:-1], strict=True):
            normed = layer.run(stream, normed, angles, step, after)
        assert isinstance(last.attention, HeadAttention)
        last.attention.place(normed, angles[last.kind], step)

    def _begin(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, Input, dict[str | None, Angles]]:
        """Returns the residual stream, the stream normalised for the first layer, and the rotary angles. The stream is
        in new memory, because the layers overwrite it."""
        stream = self.decoder.embed_tokens(ids_T)
        return stream, self.norms[0](stream), self.angles(stream, positions_T)

    def angles(self, stream_TW: torch.Tensor, positions_T: torch.Tensor) -> dict[str | None, Angles]:
        """Returns cos and sin of the rotary embedding, by layer type."""
        found: dict[str | None, Angles] = {}
        for kind in dict.fromkeys(layer.kind for layer in self.layers):
            which = () if kind is None else (kind,)
            cos, sin = self.decoder.rotary_emb(stream_TW[None], positions_T[None], *which)
            found[kind] = cos[0], sin[0]
        return found


# Errors of a trial, after which the model's modules are used. An assertion fails if only a part of a head is rotated.
TRIAL_ERRORS = (
    *(AssertionError, AttributeError, TypeError, KeyError, RuntimeError, ValueError, OSError),
    *(subprocess.SubprocessError, TritonError),
)


def fused_layers(decoder: nn.Module, layout: CacheLayout) -> FusedLayers | None:
    """Returns the fused layers of a decoder whose attention windows are set, with the weights placed in shared buffers.
    Returns None if the decoder is not Llama-like or the trial finds a difference. `layout` is that of the KV cache."""
    if not _looks_alike(decoder):
        return None
    fused = FusedLayers(decoder)
    if any(layout.calls[layer.index].latent is None for layer in fused.layers if _is_latent(layer.module.self_attn)):
        return None
    if len({norm.unit_offset for norm in fused.norms}) > 1:
        return None
    fused.lay()
    training = decoder.training
    decoder.eval()
    try:
        with torch.inference_mode(), latents_kept(fused.latent_modules):
            wrong = _trial(fused, layout)
    except TRIAL_ERRORS as error:
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
    embedding = getattr(decoder, "embed_tokens", None)
    if _names(decoder) != DECODER or not isinstance(embedding, nn.Embedding) or not runs_on(embedding.weight):
        return False
    like = _like(decoder)
    norms = [decoder.norm]
    plain: list[nn.Module] = [decoder, embedding]
    for layer in decoder.layers:
        if _names(layer) not in (LAYER, SANDWICH) or not (_is_headed(layer.self_attn) or _is_latent(layer.self_attn)):
            return False
        products = [module for module in layer.self_attn.children() if not is_rms_norm(module)]
        if hasattr(layer.mlp, "experts"):
            if not _names(layer.mlp) >= EXPERTS:
                return False
            # A mixture of experts runs as it is, with its hooks.
        elif _is_dense(layer.mlp):
            products += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
            plain.append(layer.mlp)
        else:
            return False
        if not all(_is_product(each, like) for each in products):
            return False
        plain += [layer, layer.self_attn, *products]
        norms += [module for module in (*layer.children(), *layer.self_attn.children()) if is_rms_norm(module)]
        if not all(is_rms_norm(getattr(layer, name)) for name in _names(layer) - {"self_attn", "mlp"}):
            return False
    alike = all(is_rms_norm(norm) and norm.weight.dtype == like.dtype for norm in norms)
    has_global_hooks = nn.modules.module._has_any_global_hook()
    return alike and not has_global_hooks and all(_silent(module) for module in (*plain, *norms))


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _like(decoder: Any) -> torch.Tensor:
    weight: torch.Tensor = decoder.embed_tokens.weight
    return weight


def _kinds(decoder: Any) -> Sequence[str | None]:
    """Returns the type of each layer, if the position embeddings depend on it."""
    if "layer_type" not in inspect.signature(type(decoder.rotary_emb).forward).parameters:
        return [None] * len(decoder.layers)
    return list(decoder.config.layer_types)


def _is_dense(mlp: Any) -> bool:
    """Returns whether the module is a gated MLP without biases."""
    if not (is_silu_gated(mlp) or is_gelu_gated(mlp)):
        return False
    return all(getattr(each, "bias", None) is None for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def _is_headed(attention: Any) -> bool:
    """Returns whether all heads have the same size, divisible by two, and the module has no parameters other than its
    projections and optional per-head norms."""
    if _names(attention) not in (HEADS, HEADS | HEAD_NORMS) or not hasattr(attention, SHAPE):
        return False
    heads, size, value_size = getattr(attention, SHAPE)
    normed = [getattr(attention, name) for name in HEAD_NORMS if hasattr(attention, name)]
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    if not all(map(is_rms_norm, normed)) or not all(type(each) is nn.Linear for each in projections):
        return False
    widths = attention.q_proj.out_features % size, attention.k_proj.out_features, attention.v_proj.out_features
    same = size == value_size and size % 2 == 0 and all(each.weight.shape[0] == size for each in normed)
    biased = len({each.bias is None for each in projections}) > 1
    return same and widths == (0, heads * size, heads * size) and not biased and _is_narrow(attention, projections[0])


def _is_latent(attention: Any) -> bool:
    """Returns whether the module is latent attention (MLA) with the projections of DeepSeek."""
    names = _names(attention)
    if names not in (LATENTS | QUERIES, LATENTS | LOW_RANK_QUERIES) or not hasattr(attention, SHAPE):
        return False
    query = attention.q_proj if names >= QUERIES else attention.q_a_proj
    first = query, attention.kv_a_proj_with_mqa
    last = (attention.kv_b_proj, *((attention.q_b_proj,) if names >= LOW_RANK_QUERIES else ()))
    if not all(type(each) is nn.Linear for each in (*first, *last)) or any(each.bias is not None for each in last):
        return False
    return len({each.bias is None for each in first}) == 1 and _is_narrow(attention, query)


def _is_narrow(attention: nn.Module, projection: nn.Linear) -> bool:
    """Returns whether a row fits in one Triton program, and the module has no parameters of its own."""
    return projection.in_features <= WIDEST and not list(attention.parameters(recurse=False))


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


def _trial(fused: FusedLayers, layout: CacheLayout) -> str | None:
    """Compares the fused layers with the model's modules. Returns a description of the first difference, or None."""
    decoder, like = fused.decoder, _like(fused.decoder)
    positions = torch.tensor([0, 5, 17, 30], device=like.device)
    ids = torch.arange(1, 5, device=like.device) % len(like)
    step = _trial_pass(layout, positions, like)
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
    for (args, kwargs, output), layer in zip(calls, fused.layers, strict=True):
        module = layer.module
        if len(args) != 1 or not torch.equal(args[0][0], stream):
            return f"the decoder changes the input of {type(module).__name__} {module.self_attn.layer_idx}"
        if not all(
            torch.equal(a[0], b) for a, b in zip(kwargs["position_embeddings"], angles[layer.kind], strict=True)
        ):
            return "its layers get position embeddings that differ from those of its rotary_emb"
        stream = output[0]
    if not _close(fused.norms[-1](stream), out[0], torch.zeros_like(stream)):
        return "the decoder changes the output of the last layer"
    every = zip(fused.layers, calls, fused.norms, fused.norms[1:], strict=False)
    return next((wrong for wrong in (_compared(*each, angles, step) for each in every) if wrong), None)


def _trial_pass(layout: CacheLayout, positions: torch.Tensor, like: torch.Tensor) -> DecodePass:
    """Returns a decode pass of four sequences over a cache of random numbers."""
    cache = KVCache(layout, 8, 16, like)
    for number, tensor in enumerate(cache.tensors):
        tensor.copy_(drawn(*tensor.shape, like=like, seed=number))
    table = torch.arange(8, device=like.device).view(4, 2)
    slots = table.gather(1, (positions // 16)[:, None])[:, 0] * 16 + positions % 16
    return DecodePass(cache, "triton", slots, table, positions + 1)


def _compared(
    layer: Layer, call: Any, before: Norm, after: Norm, angles: dict[str | None, Angles], step: DecodePass
) -> str | None:
    """Compares a fused layer with its module on random input."""
    _, kwargs, output = call
    given = drawn(*output[0].shape, like=output, seed=layer.index)
    fed: list[tuple[Any, Any]] = []
    hook = layer.module.mlp.register_forward_hook(
        lambda _, args, named, out: fed.append(((*args, *named.values())[0], out)), with_kwargs=True
    )
    try:
        expected = layer.module(given[None], **kwargs)
    finally:
        hook.remove()
    if len(fed) != 1:
        return f"{type(layer.module).__name__} {layer.index} does not call its MLP exactly once"
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    planes = step.cache.layer(layer.index)
    stored = [part[step.slots_T].clone() for part in planes]
    stream = given.clone()
    received: list[torch.Tensor] = []
    if isinstance(layer.feed, Experts):
        # Rounding may choose other experts, which are the module's own. So only their input is compared.
        def experts(normed_1TW: torch.Tensor) -> torch.Tensor:
            received.append(normed_1TW)
            return fed[0][1]

        layer = replace(layer, feed=Experts(experts))
    normed = layer.run(stream, before(stream), angles, step, after)
    assert isinstance(normed, torch.Tensor)
    written = [part[step.slots_T] for part in planes]
    zeros = [torch.zeros_like(part) for part in stored]
    same = _close(stream, expected, given) and all(map(_close, written, stored, zeros))
    same = same and all(_close(each, fed[0][0], torch.zeros_like(each)) for each in received)
    if not same or not _close(normed, after(expected), torch.zeros_like(expected)):
        return f"the fused layer differs from {type(layer.module).__name__} {layer.index}"
    return None


def _close(actual: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> bool:
    of_change, of_all = TOLERANCE[expected.dtype]
    actual, expected, before = actual.float(), expected.float(), before.float()
    allowed = of_change * (expected - before).norm() + of_all * expected.norm()
    return bool((actual - expected).norm() <= allowed)
