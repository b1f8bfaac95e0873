"""Runs the decoder of a transformers model on micro-batches, with lockstep's attention kernels."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.attention.interface import DividedLayout
from lockstep.kernels.attention.keywords import CallTrace, carry_layout, inside, noting_calls
from lockstep.kernels.attention.kv_cache import CacheLayout, uniform_layout
from lockstep.kernels.attention.latent import latent_layout, latent_modules, latents_kept
from lockstep.kernels.attention.layout import DecodePass, Layout, make_layout, padded_layout
from lockstep.kernels.attention.masks import BeyondCausal, MaskProbe, OwnMask, read_windows
from lockstep.kernels.attention.paged import PrefillPass
from lockstep.kernels.attention.rows import RowPass, RowProbe, engine_rows, padded_rows, read_rows, row_mask
from lockstep.kernels.invariant import variant_attention
from lockstep.kernels.mixer_states import ModuleShapes, measured_shapes
from lockstep.kernels.mixers import (
    TOKENWISE_KINDS,
    PackedMixer,
    install_mixers,
    layer_kinds,
    recurrent_modules,
)
from lockstep.kernels.rotary import own_positions, sequences
from lockstep.kernels.tiled_mlp import tile_mlps, untiled
from lockstep.model.routing import KEY, Routing
from lockstep.model.temperature import POSITIONS, give_positions
from lockstep.model.text_model import text_config
from lockstep.model.towers.vision_model import ImageEmbeddings, tower_parts, towers_of
from lockstep.parallel.offload import ActivationOffload
from lockstep.types import MicroBatch
from lockstep.vision.spans import ImageInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTSIDE = "its layers do not use transformers' attention interface"


class Decoder:
    """Runs the layers of a transformers model with lockstep's attention. Window sizes and rotary types are read from
    the model once."""

    def __init__(self, model: PreTrainedModel, kernel: str):
        self.model, self.kernel = model, kernel
        # The layers are found before sharding, because sharding renames the class of a layer.
        self.layers = decoder_layers(model)
        self.records_router_logits = False
        """Whether a forward pass of a mixture-of-experts model stores the router logits in `router_logits`."""
        self.router_logits: tuple[torch.Tensor, ...] = ()
        self.routing: Routing | None = None
        """The routers, if the run replays or records their choices (`model/routing.py`)."""
        self._activations: ActivationOffload | None = None
        self._positions_needed = False
        self.mixers: list[PackedMixer] = []
        """The recurrent modules of the model."""
        if not next(model.parameters()).is_meta:
            self.attentions  # noqa: B018  # a model on the meta device is inspected at its first run
        self.moving = own_positions(model)
        self.images = ImageEmbeddings(model) if towers_of(model) else None
        """Puts image features into embeddings, if the model was loaded with its towers."""

    def install_routing(self, where: str) -> Routing:
        """Makes forward passes record or replay the choices of the routers. `where` names the model in an error."""
        if self.routing is None:
            name = type(self.model).__name__
            if self.selects_rows:
                why = f"{where}: {name} selects tokens with an indexer, and runs sequences as padded rows"
                raise Refusal.at(KEY, why, "set it to off", code="unsupported-model")
            self.routing = Routing(self.layers, name, where)
        return self.routing

    @property
    def alike_up_to(self) -> int | None:
        """Sequence length up to which position embeddings do not depend on the sequence length. The value is None if
        position embeddings never depend on the sequence length."""
        return min((rope.fixed for rope in self.moving if rope.fixed is not None), default=None)

    @cached_property
    def attentions(self) -> list[nn.Module]:
        """The attention modules of the model. The first access reads their sliding windows, and prepares packing in the
        recurrent modules."""
        return self._probe.called

    @cached_property
    def _probe(self) -> MaskProbe:
        decoder = inner_decoder(self.model)
        stateful = recurrent_modules(decoder)
        with noting_calls(decoder, "probe") as trace:
            try:
                found = read_windows(self.model, decoder)
            except OwnMask as own:
                found = read_rows(self.model, decoder, own.seen)
        recurrent = [one for one in stateful if not any(part in found.called for part in one.modules())]
        self.mixers = install_mixers(decoder, recurrent, trace)
        for name, module in inside(decoder):
            if module in found.unreached:
                carry_layout(decoder, name, trace)
        _refuse_other_layers(self.model, found.called, recurrent, trace)
        self._positions_needed = give_positions(found.called)
        return found

    def cache_layout(self) -> CacheLayout:
        """Returns the KV cache layout: which key and value tensors each attention call of a forward pass caches."""
        if not self.attentions:
            # A model without attention caches no keys, but its sequences still own blocks of the smallest size.
            return uniform_layout(1, 1, 1)
        self._refuse_states_of_rows()
        return latent_layout(self._probe.layout, self._latent_modules)

    @property
    def selects_rows(self) -> bool:
        """Whether attention selects tokens by an indexer, so that it reads its cache in rows."""
        return bool(self.attentions) and isinstance(self._probe, RowProbe)

    def _refuse_states_of_rows(self) -> None:
        if self.mixers and isinstance(self._probe, RowProbe):
            kind = type(self.mixers[0].module).__name__
            raise NotImplementedError(f"it selects tokens with an indexer, and {kind} has a recurrent state")

    def batch_variant(self) -> str | None:
        """Returns why log-probs depend on the batch even with batch-invariant kernels, or None if they do not."""
        if self.attentions and (why := variant_attention(self.attentions)):
            return why
        return f"{type(self.mixers[0].module).__name__} has a recurrent state" if self.mixers else None

    @cached_property
    def _latent_modules(self) -> list[nn.Module]:
        return [] if isinstance(self._probe, RowProbe) else latent_modules(self.attentions)

    def keywords(self, position_ids_NT: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the additional keyword arguments of a forward pass over tokens with the given positions."""
        return {POSITIONS: position_ids_NT} if self._positions_needed else {}

    @torch.inference_mode()
    def state_shapes(self) -> list[ModuleShapes]:
        """Returns the states of each recurrent module for one sequence. Raises NotImplementedError if a module keeps
        its state in another way than in a cache."""
        assert self.attentions or self.mixers
        if not self.mixers:
            return []
        self._refuse_states_of_rows()
        device = self.model.get_input_embeddings().weight.device
        numbers = torch.arange(2, device=device)[None]
        layout, decoder = make_layout([2], device, self.kernel), inner_decoder(self.model)
        return measured_shapes(
            self.mixers, lambda: decoder(input_ids=numbers, position_ids=numbers, use_cache=False, layout=layout)
        )

    def keep_activations_on_host(self, device: torch.device) -> None:
        """Makes forward passes offload the activations of the layers to host memory until the backward pass."""
        if not self.layers:
            raise Refusal.at(
                "model.activation_offload",
                f"transformers does not list the layers of {type(self.model).__name__}",
                "set it to false, or use model.gradient_checkpointing instead",
                code="unsupported-model",
            )
        self._activations = ActivationOffload(self.layers, device)

    def untiled(self) -> str | None:
        """Returns why the MLPs cannot be tiled, or None if they can."""
        return untiled(self.layers)

    def tile_mlps(self, tokens: int) -> None:
        """Makes the MLPs of the layers compute `tokens` tokens at a time."""
        refuse_untiled(self.layers, type(self.model).__name__)
        tile_mlps(self.layers, tokens)

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        """Computes the hidden states of the last layer."""
        assert self.attentions or self.mixers
        assert batch.images is None or self.images is not None, "the model was loaded without its towers"
        if isinstance(self._probe, RowProbe):
            return self._in_rows(batch, self._probe)
        if self.routing is not None:
            self.routing.begin(batch.routes_TLK)
        own_T = None if batch.context is None else batch.context.local_T
        lines = sequences(
            self.moving, batch.lengths, batch.input_ids_NT.shape, batch.packed_index_E, batch.packed, own_T
        )
        positions, more = batch.position_ids_NT, dict[str, Any]()
        if self.images is not None and (batch.images is not None or self.images.on_every_rank):
            more = self.images.inputs(batch.input_ids_NT, batch.images)
            if batch.images is not None and self.images.family.three_axes:
                positions = batch.images.axes_3NT
        with lines:
            output = self._run(
                None if more else batch.input_ids_NT,
                positions,
                layout=layout_of(batch, self.kernel),
                **more,
                **self.keywords(batch.position_ids_NT),
            )
        if self.records_router_logits:
            self.router_logits = tuple(output.router_logits)
        if self.routing is not None:
            self.routing.end()
        return self._before_head(output.last_hidden_state)

    def _in_rows(self, batch: MicroBatch, probe: RowProbe) -> torch.Tensor:
        """Runs the sequences as right-padded rows, for models that derive their own masks."""
        rows = padded_rows(batch.input_ids_NT, batch.position_ids_NT, batch.lengths, batch.packed_index_E, batch.packed)
        width = rows.input_ids_NL.shape[1]
        mask = row_mask(probe.seen, rows.position_ids_NL, width, self.model.get_input_embeddings().weight.dtype)
        with sequences(self.moving, batch.lengths, rows.input_ids_NL.shape, None, False, None):
            output = self._run(rows.input_ids_NL, rows.position_ids_NL, layout=RowPass(), attention_mask=mask)
        if self.records_router_logits:
            shape = rows.input_ids_NL.shape
            self.router_logits = tuple(rows.back(logits.view(*shape, -1))[0] for logits in output.router_logits)
        return rows.back(self._before_head(output.last_hidden_state))

    def _run(self, input_ids: torch.Tensor | None, position_ids: torch.Tensor, **more: Any) -> Any:
        if self.records_router_logits:
            more["output_router_logits"] = True
        with self._activations.waiting_on_host() if self._activations else nullcontext():
            decoder = inner_decoder(self.model)
            return decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **more)

    def engine_states(
        self,
        ids_T: torch.Tensor,
        at_T: torch.Tensor,
        step: PrefillPass | DecodePass,
        images: ImageInputs | None = None,
    ) -> torch.Tensor:
        """Runs a forward pass of the native rollout engine over tokens at the given positions. Returns their hidden
        states. If there are `images`, their positions on three axes are used."""
        decoder: Any = inner_decoder(self.model)
        if isinstance(self._probe, RowProbe):
            return self._before_head(engine_rows(decoder, ids_T, at_T, step, self._probe))
        inputs = {"input_ids": ids_T[None], "position_ids": at_T[None], **self.keywords(at_T[None])}
        if images is not None:
            assert self.images is not None
            inputs |= self.images.inputs(inputs.pop("input_ids"), images, alone=True)
            inputs |= {"position_ids": images.axes_3NT} if self.images.family.three_axes else {}
        with latents_kept(self._latent_modules):
            return self._before_head(decoder(**inputs, use_cache=False, layout=step).last_hidden_state[0])

    def _before_head(self, states: torch.Tensor) -> torch.Tensor:
        """Applies the layers between decoder and output head, if there are any (ModernBERT decoder)."""
        layers, head = getattr(self.model, "lm_head", None), self.model.get_output_embeddings()
        return states if head is None or layers is None or layers is head else layers(states)


def inner_decoder(model: Any) -> nn.Module:
    """Returns the decoder of a causal language model. If `model` is a decoder, returns it unchanged."""
    from transformers import PreTrainedModel

    if model.get_output_embeddings() is None:
        return model
    decoder = model.get_decoder()
    # In some models `get_decoder` returns the output head, and in Llama 4 the model itself.
    decoder = decoder if isinstance(decoder, PreTrainedModel) else model.base_model
    inner = getattr(model, "model", None)
    decoder = inner if decoder is model and isinstance(inner, PreTrainedModel) else decoder
    # The language model of a nested model can be a class with an output head.
    return decoder if decoder is model else inner_decoder(decoder)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the decoder layers (`_no_split_modules` of transformers), without the layers of towers."""
    towers = tower_parts(model)
    return [module for module in sharded_layers(model) if module not in towers]


def sharded_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the layers of the decoder and of the towers, which are sharded one by one."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def refuse_untiled(layers: Sequence[nn.Module], name: str) -> None:
    """Refuses `model.tiled_mlp` for a model whose layers have experts or no MLP."""
    why = untiled(layers)
    if why is not None:
        raise Refusal.at(
            "model.tiled_mlp",
            f"{name} cannot be tiled: {why}",
            "remove it, and save memory with model.gradient_checkpointing or model.activation_offload",
            code="unsupported-model",
        )


def layout_of(batch: MicroBatch, kernel: str) -> Layout | DividedLayout:
    """Returns the attention layout (sequence bounds) of a micro-batch in the form that the kernel needs."""
    rows, width = batch.input_ids_NT.shape
    device = batch.input_ids_NT.device
    if batch.context is not None:
        return batch.context.layout(device, kernel)
    blocks = () if batch.images is None else batch.images.blocks
    if batch.packed:
        return make_layout(batch.lengths, device, kernel, batch.packed_index_E, blocks)
    return padded_layout(rows, width, device, kernel, blocks)


def own_attention(model: PreTrainedModel) -> str:
    """Returns which attention implementation of transformers is correct for the model. sdpa ignores soft caps and
    sinks."""
    config = text_config(model.config)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if model._supports_sdpa and not capped else "eager"


def _refuse_other_layers(
    model: PreTrainedModel, called: list[nn.Module], recurrent: list[nn.Module], trace: CallTrace
) -> None:
    """Raises `BeyondCausal` for layers that mix tokens without lockstep's attention, because they would mix packed
    sequences. Layers that text does not run through (cross-attention to images) mix no tokens."""
    if not called and not recurrent:
        raise BeyondCausal(OUTSIDE)
    if called and "position_ids" not in inspect.signature(inner_decoder(model).forward).parameters:
        raise BeyondCausal("it takes no position_ids, so a packed sequence would not begin at position 0")
    if layer_kinds(inner_decoder(model).config) & TOKENWISE_KINDS:
        # Layers of these kinds mix no tokens, so layers without attention are allowed. If such a layer mixes tokens,
        # the comparison with transformers (`check.py`) finds it.
        return
    names = set(model._no_split_modules or ())
    decoder = inner_decoder(model)
    layers = [module for name, module in inside(decoder) if type(module).__name__ in names and name in trace.called]
    mixing = {*called, *recurrent}
    others = [layer for layer in layers if mixing.isdisjoint(layer.modules())]
    if others:
        parts = sorted({type(part).__name__ for layer in others for part in layer.children()})
        raise BeyondCausal(
            f"{len(others)} of its layers call no attention; they mix tokens by other means ({', '.join(parts[:4])})"
        )
