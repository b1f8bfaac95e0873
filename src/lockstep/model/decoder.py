"""Runs the decoder of a transformers model on micro-batches, with lockstep's attention kernels."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.attention.interface import DividedLayout
from lockstep.kernels.attention.layout import Layout, make_layout, padded_layout
from lockstep.kernels.attention.masks import SHAPE, BeyondCausal, read_windows
from lockstep.kernels.mixer_states import ModuleShapes, measured_shapes
from lockstep.kernels.mixers import (
    TOKENWISE_KINDS,
    CallTrace,
    PackedMixer,
    install_mixers,
    layer_kinds,
    noting_calls,
    recurrent_modules,
)
from lockstep.kernels.rotary import own_positions, sequences
from lockstep.parallel.offload import ActivationOffload
from lockstep.types import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTSIDE = "its layers do not use transformers' attention interface"


class Decoder:
    """Runs the layers of a transformers model with lockstep's attention. Window sizes and rotary types are read from
    the model once."""

    def __init__(self, model: PreTrainedModel, kernel: str):
        self.model, self.kernel = model, kernel
        # The layers are found before sharding, because sharding renames the class of a layer.
        self._layers = decoder_layers(model)
        self.records_router_logits = False
        """Whether a forward pass of a mixture-of-experts model stores the router logits in `router_logits`."""
        self.router_logits: tuple[torch.Tensor, ...] = ()
        self._activations: ActivationOffload | None = None
        self.mixers: list[PackedMixer] = []
        """The recurrent modules of the model."""
        if not next(model.parameters()).is_meta:
            self.attentions  # noqa: B018  # a model on the meta device is inspected at its first run
        self.moving = own_positions(model)

    @property
    def alike_up_to(self) -> int | None:
        """Sequence length up to which position embeddings do not depend on the sequence length. The value is None if
        position embeddings never depend on the sequence length."""
        return min((rope.fixed for rope in self.moving if rope.fixed is not None), default=None)

    @cached_property
    def attentions(self) -> list[nn.Module]:
        """The attention modules of the model. Accessing this property also reads the sliding windows of the modules,
        and prepares the recurrent modules for packed rows."""
        decoder = inner_decoder(self.model)
        stateful = recurrent_modules(decoder)
        with noting_calls(decoder, "probe") if stateful else nullcontext(CallTrace()) as trace:
            found = read_windows(self.model, decoder)
        recurrent = [one for one in stateful if not any(part in found for part in one.modules())]
        self.mixers = install_mixers(decoder, recurrent, trace)
        _refuse_other_layers(self.model, found, recurrent)
        return found

    def cached_shape(self) -> tuple[int, int, int]:
        """Returns the number of layers, the number of heads and the head size of a KV cache. Raises NotImplementedError
        if the layers need KV caches of different shapes."""
        if not self.attentions:
            # A model without attention caches no keys, but its sequences still own blocks of the smallest size.
            return 1, 1, 1
        layers: list[Any] = [module.layer_idx for module in self.attentions]
        if min(layers) < 0:
            raise NotImplementedError("several of its layers share an attention module, which has no layer index")
        if len(set(layers)) < len(layers):
            raise NotImplementedError("it attends more than once in a layer, and the KV cache holds one set of keys")
        shapes = {getattr(module, SHAPE) for module in self.attentions}
        if len(shapes) > 1 or any(key != value for _, key, value in shapes):
            sizes = " and ".join(f"{heads} heads of {key} and {value}" for heads, key, value in sorted(shapes))
            raise NotImplementedError(f"its keys and values have several sizes ({sizes}), and the KV cache holds one")
        heads, size, _ = shapes.pop()
        return max(layers) + 1, heads, size

    @torch.inference_mode()
    def state_shapes(self) -> list[ModuleShapes]:
        """Returns the states of each recurrent module for one sequence. Raises NotImplementedError if a module keeps
        its state in another way than in a cache."""
        assert self.attentions or self.mixers
        if not self.mixers:
            return []
        device = self.model.get_input_embeddings().weight.device
        numbers = torch.arange(2, device=device)[None]
        layout, decoder = make_layout([2], device, self.kernel), inner_decoder(self.model)
        return measured_shapes(
            self.mixers, lambda: decoder(input_ids=numbers, position_ids=numbers, use_cache=False, layout=layout)
        )

    def keep_activations_on_host(self, device: torch.device) -> None:
        """Makes forward passes offload the activations of the layers to host memory until the backward pass."""
        if not self._layers:
            raise Refusal.at(
                "model.activation_offload",
                f"transformers does not list the layers of {type(self.model).__name__}",
                "set it to false, or use model.gradient_checkpointing instead",
                code="unsupported-model",
            )
        self._activations = ActivationOffload(self._layers, device)

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        """Computes the hidden states of the last layer."""
        decoder: Any = inner_decoder(self.model)
        own_T = None if batch.context is None else batch.context.local_T
        assert self.attentions or self.mixers
        lines = sequences(
            self.moving, batch.lengths, batch.input_ids_NT.shape, batch.packed_index_E, batch.packed, own_T
        )
        with lines, self._activations.waiting_on_host() if self._activations else nullcontext():
            output = decoder(
                input_ids=batch.input_ids_NT,
                position_ids=batch.position_ids_NT,
                use_cache=False,
                layout=layout_of(batch, self.kernel),
                **({"output_router_logits": True} if self.records_router_logits else {}),
            )
        if self.records_router_logits:
            self.router_logits = tuple(output.router_logits)
        return output.last_hidden_state


def inner_decoder(model: Any) -> nn.Module:
    """Returns the decoder of a causal language model. If `model` is a decoder, returns it unchanged."""
    from transformers import PreTrainedModel

    if model.get_output_embeddings() is None:
        return model
    decoder = model.get_decoder()
    # In some models `get_decoder` returns the output head.
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the decoder layers (`_no_split_modules` of transformers), which are sharded one by one."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def layout_of(batch: MicroBatch, kernel: str) -> Layout | DividedLayout:
    """Returns the attention layout (sequence bounds) of a micro-batch in the form that the kernel needs."""
    rows, width = batch.input_ids_NT.shape
    device = batch.input_ids_NT.device
    if batch.context is not None:
        return batch.context.layout(device, kernel)
    if batch.packed:
        return make_layout(batch.lengths, device, kernel, batch.packed_index_E)
    return padded_layout(rows, width, device, kernel)


def own_attention(model: PreTrainedModel) -> str:
    """Returns which attention implementation of transformers is correct for the model. sdpa ignores soft caps and
    sinks."""
    config = model.config.get_text_config()
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if model._supports_sdpa and not capped else "eager"


def _refuse_other_layers(model: PreTrainedModel, called: list[nn.Module], recurrent: list[nn.Module]) -> None:
    """Raises `BeyondCausal` for layers that mix tokens without lockstep's attention, because they would mix packed
    sequences."""
    if not called and not recurrent:
        raise BeyondCausal(OUTSIDE)
    if called and "position_ids" not in inspect.signature(inner_decoder(model).forward).parameters:
        raise BeyondCausal("it takes no position_ids, so a packed sequence would not begin at position 0")
    if layer_kinds(inner_decoder(model).config) & TOKENWISE_KINDS:
        # Some layers mix no tokens. The comparison with transformers notices layers that do.
        return
    names = set(model._no_split_modules or ())
    layers = [module for module in inner_decoder(model).modules() if type(module).__name__ in names]
    mixing = {*called, *recurrent}
    others = [layer for layer in layers if mixing.isdisjoint(layer.modules())]
    if others:
        inside = sorted({type(part).__name__ for layer in others for part in layer.children()})
        raise BeyondCausal(
            f"{len(others)} of its layers call no attention; they mix tokens by other means ({', '.join(inside[:4])})"
        )
