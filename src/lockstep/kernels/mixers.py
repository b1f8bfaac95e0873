"""Runs recurrent modules (gated delta rule, Mamba, lightning attention, short convolutions) on packed sequences.

A recurrent module of transformers carries a state and the inputs of its convolution from token to token. In a packed
row it would carry the state and these inputs from one sequence into the next sequence. So the forward of each recurrent
module is replaced: the packed row is regrouped to grids of sequences of similar length, and the module's own forward
runs once per grid. No model is named here: recurrent modules are found by the layer kinds of the config and by their
signature. transformers uses the kernels of flash-linear-attention, causal-conv1d and mamba-ssm inside the module's own
forward if they are installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.attention.keywords import CallTrace, carried_layout, carry_layout, inside
from lockstep.kernels.attention.layout import Layout
from lockstep.kernels.attention.rows import RowPass
from lockstep.kernels.attention.varlen import to_slots, to_tokens

# Layer kinds of transformers' configs that have a recurrent module, and kinds that mix no tokens.
RECURRENT_KINDS = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "hybrid", "hybrid_sliding"})
TOKENWISE_KINDS = frozenset({"mlp", "moe"})
# Parameters of a module's forward that only a module with a state between tokens has.
CACHE_PARAMETERS = ("cache_params", "past_key_values", "past_key_value")
STATE_PARAMETERS = frozenset({*CACHE_PARAMETERS, "use_cache"})

# Attributes in which modules keep their states that take no cache (RecurrentGemma), with the kinds of the states.
STATE_ATTRIBUTES = {"conv1d_state": "convolution", "recurrent_states": "recurrent"}

# Optional packages whose kernels transformers uses in recurrent modules.
RECURRENCE_PACKAGES = ("flash-linear-attention", "causal-conv1d", "mamba-ssm")
# Attribute of a linear layer with a LoRA adapter.
ADAPTER = "lora_A"


def layer_kinds(config: Any) -> set[str]:
    """Returns the layer kinds that the config of a decoder lists. Most configs whose layers are all of one kind have no
    such list."""
    names = ("layer_types", "layers_block_type")
    return {str(kind) for name in names for kind in getattr(config, name, None) or ()}


def state_attributes(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the attributes in which a module keeps its states, with the parts of the module that have them."""
    return [(part, name) for part in module.modules() for name in STATE_ATTRIBUTES if name in vars(part)]


class PackedMixer:
    """Replaces the forward of a recurrent module. The new forward starts every sequence of the pass with an empty
    state."""

    def __init__(self, module: nn.Module):
        self.module, self.original_forward = module, module.forward
        self.parameter_names = tuple(inspect.signature(module.forward).parameters)
        self.input_name = self.parameter_names[0]
        self.cache_name = next((name for name in CACHE_PARAMETERS if name in self.parameter_names), None)
        self.number = 0
        """Index of this module among the recurrent modules of the decoder."""
        self.measure: Callable[[PackedMixer, dict[str, Any]], Any] | None = None
        """A function that is called instead of the module while `measured_shapes` measures the shapes of its states."""
        self.continues = True
        """Whether the module continues from its state on several tokens at once. Known after its states are
        measured."""
        self.in_place: frozenset[str] = frozenset()
        """The kinds of states that a decoding step of the module can update in their slots. Known after its states are
        measured."""

    def __call__(self, *args: Any, layout: Any = None, **named: Any) -> Any:
        """Runs the module's own forward unchanged if there is no layout, as in passes that transformers starts."""
        layout = carried_layout(self.module) if layout is None else layout
        if layout is None:
            return self.original_forward(*args, **named)
        named |= zip(self.parameter_names, args, strict=False)
        if self.measure is not None:
            return self.measure(self, named)
        if isinstance(layout, RowPass):
            with _unfused(self.module):
                return self.original_forward(**named)
        if isinstance(layout, Layout):
            return self._packed(layout, named)
        states = getattr(layout, "states", None)
        if states is not None:
            return states.mix(self, named)
        raise NotImplementedError(
            f"{type(self.module).__name__} carries a state from token to token, so its tokens cannot be divided over "
            "processes"
        )

    def run(self, named: dict[str, Any], cache: Any) -> Any:
        """Runs the module's own forward with the states of `cache`, which the module updates."""
        if self.cache_name is None:
            return self._run_with_attributes(named, cache)
        return self.original_forward(**{**named, self.cache_name: cache})

    def _run_with_attributes(self, named: dict[str, Any], cache: Any) -> Any:
        attributes = {(STATE_ATTRIBUTES[name], 0): (part, name) for part, name in state_attributes(self.module)}
        for key, (part, name) in attributes.items():
            setattr(part, name, cache.states.get(key))
        try:
            result = self.original_forward(**{**named, "use_cache": True})
            cache.states.update({key: getattr(part, name) for key, (part, name) in attributes.items()})
        finally:
            for part, name in attributes.values():
                setattr(part, name, None)
        return result

    def _packed(self, layout: Layout, named: dict[str, Any]) -> Any:
        inputs_NTH = named[self.input_name]
        rows, width = inputs_NTH.shape[:2]
        with _unfused(self.module):
            if rows > 1:
                # A right-padded batch has one sequence per row, and padding after a sequence does not change its
                # outputs.
                return self.original_forward(**named)
            results = [self.original_forward(**grid) for grid in regrouped(named, (rows, width), layout)]
        if not isinstance(results[0], tuple):
            return joined(results, layout)
        return tuple(joined(parts, layout) for parts in zip(*results, strict=True))


@contextmanager
def _unfused(module: nn.Module) -> Iterator[None]:
    """Disables training kernels that read the weights of linear layers directly, because these kernels would ignore
    LoRA adapters."""
    training = module.training
    if training and any(hasattr(part, ADAPTER) for part in module.modules()):
        module.training = False
    try:
        yield
    finally:
        module.training = training


def regrouped(named: dict[str, Any], shape: tuple[int, int], layout: Layout) -> list[dict[str, Any]]:
    """Returns the keyword arguments of each grid of sequences. Tensors with one entry per token of the packed row are
    regrouped; all other arguments are passed unchanged."""
    sizes = [bucket.count * bucket.width for bucket in layout.buckets]

    def split(value: Any) -> Sequence[Any]:
        if isinstance(value, tuple) and any(isinstance(part, torch.Tensor) for part in value):
            return list(zip(*(split(part) for part in value), strict=True))
        if not isinstance(value, torch.Tensor) or value.shape[:2] != shape:
            return [value] * len(sizes)
        grids = to_slots(value[0], layout).split(sizes)
        return [
            grid.unflatten(0, (bucket.count, bucket.width)) for grid, bucket in zip(grids, layout.buckets, strict=True)
        ]

    parts = {name: split(value) for name, value in named.items()}
    return [{name: values[index] for name, values in parts.items()} for index in range(len(sizes))]


def joined(outputs: Sequence[Any], layout: Layout) -> torch.Tensor | None:
    """Returns the outputs of all grids as one packed row. Returns None for results without one entry per token, such as
    final states."""
    shapes = [(bucket.count, bucket.width) for bucket in layout.buckets]
    if any(
        not isinstance(output, torch.Tensor) or output.shape[:2] != shape
        for output, shape in zip(outputs, shapes, strict=True)
    ):
        return None
    rows = [output.flatten(0, 1) for output in outputs]
    return to_tokens(rows[0] if len(rows) == 1 else torch.cat(rows), layout)[None]


def recurrent_modules(decoder: nn.Module) -> list[nn.Module]:
    """Returns the innermost modules with a state between tokens: recurrent modules and attention modules. Returns an
    empty list if the config lists no recurrent layers."""
    if not layer_kinds(decoder.config) & RECURRENT_KINDS:
        return []
    stateful = [module for module in decoder.modules() if module is not decoder and _has_state(module)]
    return [
        module for module in stateful if not any(part is not module and part in stateful for part in module.modules())
    ]


def _has_state(module: nn.Module) -> bool:
    if isinstance(module.forward, PackedMixer):
        return True
    return not STATE_PARAMETERS.isdisjoint(inspect.signature(module.forward).parameters)


def install_mixers(decoder: nn.Module, modules: Sequence[nn.Module], trace: CallTrace) -> list[PackedMixer]:
    """Installs `PackedMixer` on the recurrent modules of a decoder; `trace` records the module calls of a test forward
    pass. Returns all installed `PackedMixer`, including those of earlier calls."""
    mixers = []
    for name, module in inside(decoder):
        if not any(module is one for one in modules):
            continue
        if not isinstance(module.forward, PackedMixer):
            module.forward = PackedMixer(module)
        mixers.append(module.forward)
        _refuse_bypassed(name, module, trace)
        carry_layout(decoder, name, trace)
    for number, mixer in enumerate(mixers):
        mixer.number = number
    return mixers


def _refuse_bypassed(name: str, module: nn.Module, trace: CallTrace) -> None:
    """Raises `Refusal` for an adapter without effect: the recurrent module reads the weight of the adapter's layer
    instead of calling the layer."""
    for inner, part in module.named_modules():
        if hasattr(part, ADAPTER) and f"{name}.{inner}" not in trace.called:
            raise Refusal.at(
                "model.lora.targets",
                f"{name}.{inner} has an adapter, but {type(module).__name__} reads the layer's weight without calling "
                "the layer, so the adapter has no effect",
                f"add {inner} to model.lora.exclude",
                code="unfit-adapter",
            )
