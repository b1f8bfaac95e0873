"""The states of recurrent modules during generation: one slot per sequence, next to the KV cache.

A recurrent module reads and writes its states through the cache interface of transformers. `StateCache` implements this
interface for one call of a module. The states of the sequences of the call are copied from their slots before the call
and back to their slots after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.functional import pad

from lockstep.device.base import sent
from lockstep.kernels.mixers import PackedMixer, state_attributes
from lockstep.kernels.recurrent.slot_state import SlotState

# Identifies a state of a module by its kind (CONVOLUTION or RECURRENT) and its index among the states of this kind.
StateKey = tuple[str, int]
CONVOLUTION, RECURRENT = "convolution", "recurrent"
# Two slots belong to no sequence. Idle rows of a batch write to the slot SPARE. The slot EMPTY contains zeros.
SPARE, EMPTY = 0, 1
RESERVED = 2


class StateCache:
    """The states that a recurrent module reads and writes in one call, with the methods of transformers' caches.

    Modules of older versions of transformers (5.17 to 5.20) ask `has_previous_state` and read the states from
    `layers[layer_idx]`. Modules of later versions call `get_conv_state`, `get_recurrent_state` and `is_recording_past`.
    """

    def __init__(self, states: dict[StateKey, Any] | None = None):
        self.states: dict[StateKey, Any] = {} if states is None else states
        """Tensors, or the `SlotState` of states that a module updates in place."""

    @property
    def layers(self) -> _OnlyLayer:
        return _OnlyLayer(self)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        # As in transformers, the inputs of the convolution mark the start of a sequence.
        return (CONVOLUTION, state_idx or 0) in self.states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((CONVOLUTION, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get((RECURRENT, state_idx))

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """Stores the last inputs of the convolution. Returns the inputs of the convolution: the stored inputs of
        earlier calls (or zeros), followed by `new`."""
        key = (CONVOLUTION, state_idx)
        before = self.states.get(key)
        width = new.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if before is not None:
            full, width = torch.cat([before, new], -1), before.shape[-1]
        else:
            full = pad(new, (max(0, width - new.shape[-1]), 0))
        self.states[key] = full[..., full.shape[-1] - width :]
        return full

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self.states[RECURRENT, state_idx] = new
        return new

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False, because transformers records earlier states only for assisted generation."""
        return False

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, new: torch.Tensor) -> None:
        self.update_recurrent_state(new, layer_idx)


@dataclass(frozen=True)
class _OnlyLayer:
    """The layers of a `StateCache`: under every index the layer of the module that is called."""

    cache: StateCache
    record_past = False

    def __getitem__(self, layer_idx: int) -> _OnlyLayer:
        return self

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        return self._states(CONVOLUTION)

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        return self._states(RECURRENT)

    def _states(self, wanted: str) -> dict[int, torch.Tensor]:
        return {number: state for (kind, number), state in self.cache.states.items() if kind == wanted}


@dataclass(frozen=True)
class StateShape:
    """Shape and dtype of a state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


ModuleShapes = dict[StateKey, StateShape]


def measured_shapes(mixers: Sequence[PackedMixer], run: Callable[[], object]) -> list[ModuleShapes]:
    """Returns the states of each module, and sets whether it continues from its state on several tokens. `run` runs the
    decoder on a few tokens of one sequence."""
    for mixer in mixers:
        if mixer.cache_name is None and not state_attributes(mixer.module):
            kind = type(mixer.module).__name__
            raise NotImplementedError(f"{kind} keeps its state neither in a cache nor in a known attribute")
    shapes: dict[int, ModuleShapes] = {}

    def measure(mixer: PackedMixer, named: dict[str, Any]) -> Any:
        cache = StateCache()
        result = mixer.run(named, cache)
        shapes[mixer.number] = {
            key: StateShape(tuple(state.shape[1:]), state.dtype) for key, state in cache.states.items()
        }
        mixer.continues = _continues(mixer, named, cache)
        kinds = (frozenset({CONVOLUTION, RECURRENT}), frozenset({RECURRENT}))
        mixer.in_place = next((each for each in kinds if _works_in_place(mixer, named, cache, each)), frozenset())
        return result

    for mixer in mixers:
        mixer.measure = measure
    try:
        run()
    finally:
        for mixer in mixers:
            mixer.measure = None
    return [shapes[mixer.number] for mixer in mixers]


def _continues(mixer: PackedMixer, named: dict[str, Any], cache: StateCache) -> bool:
    """Returns whether the module continues from its stored recurrent state if a call has several tokens. Some modules
    of transformers ignore the stored state in such a call. The test changes the state and compares the outputs: a
    module that ignores the state gives equal outputs."""
    recurrent = [key for key in cache.states if key[0] == RECURRENT]
    outputs = []
    for factor in (1, 2):
        states = {key: state.clone() for key, state in cache.states.items()}
        for key in recurrent:
            states[key] = states[key] * factor + (factor - 1)
        result = mixer.run(named, StateCache(states))
        outputs.append(result[0] if isinstance(result, tuple) else result)
    return not recurrent or not torch.equal(*outputs)


@torch.no_grad()
def _works_in_place(mixer: PackedMixer, named: dict[str, Any], cache: StateCache, kinds: frozenset[str]) -> bool:
    """Returns whether a step of the module can update its states of these kinds in their slots. The module must hand a
    `SlotState` to a kernel that knows it, and give the same results."""
    chosen = [key for key in cache.states if key[0] in kinds]
    shape = tuple(named[mixer.input_name].shape[:2])
    token = _per_token(named, shape, lambda value: value[:, :1])
    copied, slotted = ({key: state.clone() for key, state in cache.states.items()} for _ in range(2))
    slots_B = torch.ones(1, dtype=torch.long, device=next(iter(cache.states.values())).device) if cache.states else None
    if not chosen or slots_B is None:
        return False
    stored = {key: SlotState(torch.cat([copied[key] + 1, copied[key]]), slots_B) for key in chosen}
    copies, slots = StateCache(copied), StateCache({**slotted, **stored})
    try:
        expected, found = _step(mixer, token, copies), _step(mixer, token, slots)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return False
    expected, found = (result[0] if isinstance(result, tuple) else result for result in (expected, found))
    pairs = [(found, expected)]
    for key, slot in stored.items():
        if slots.states[key] is not slot or not torch.equal(slot.states[:1], cache.states[key] + 1):
            return False
        pairs.append((slot.states[1:], copies.states[key].to(slot.states.dtype)))
    return all(torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-3) for a, b in pairs)


class StateSlots:
    """The states of all recurrent modules, indexed by slot. Two slots are reserved: `SPARE` and `EMPTY`."""

    def __init__(self, shapes: Sequence[ModuleShapes], slots: int, device: torch.device):
        self.slots = slots
        self.modules = [
            {
                key: torch.zeros((RESERVED + slots, *one.shape), dtype=one.dtype, device=device)
                for key, one in shape.items()
            }
            for shape in shapes
        ]

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for states in self.modules for state in states.values())

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies states in every module. `pairs` lists (source, target) slots."""
        if pairs and self.modules:
            device = next(iter(self.modules[0].values())).device
            source, target = (sent(torch.tensor(side), device) for side in zip(*pairs, strict=True))
            for states in self.modules:
                for state in states.values():
                    state.index_copy_(0, target, state.index_select(0, source))

    def read(self, mixer: PackedMixer, slots_B: torch.Tensor, in_place: frozenset[str] = frozenset()) -> StateCache:
        """Returns the states at these slots. States of the kinds `in_place` are not copied from their slots."""
        slotted = {
            key: SlotState(state, slots_B) if key[0] in in_place else state.index_select(0, slots_B)
            for key, state in self.modules[mixer.number].items()
        }
        return StateCache(slotted)

    def write(self, mixer: PackedMixer, slots_B: torch.Tensor, cache: StateCache) -> None:
        for key, state in self.modules[mixer.number].items():
            new = cache.states[key]
            if not isinstance(new, SlotState):
                state.index_copy_(0, slots_B, new.to(state.dtype))


def slot_bytes(shapes: Iterable[ModuleShapes]) -> int:
    """Returns the bytes of the states of one sequence."""
    return sum(one.bytes for shape in shapes for one in shape.values())


@dataclass(frozen=True)
class DecodeStates:
    """The states of a decode pass with one token of each of B sequences."""

    states: StateSlots
    slots_B: torch.Tensor

    def mix(self, mixer: PackedMixer, named: dict[str, Any]) -> Any:
        shape = tuple(named[mixer.input_name].shape[:2])
        cache = self.states.read(mixer, self.slots_B, in_place=mixer.in_place)
        # A transposed view has other strides, for which torch multiplies each sequence alone with the weights.
        result = _step(mixer, _per_token(named, shape, lambda value: value[0].unsqueeze(1)), cache)
        self.states.write(mixer, self.slots_B, cache)
        return _results(result, lambda value: value[:, 0].unsqueeze(0))


@dataclass(frozen=True)
class StateChunk:
    """The tokens `first` to `first + count` of a packed row, which continue the sequence of a slot. If `fresh` is true,
    the chunk starts at the first token of the sequence."""

    first: int
    count: int
    slot: int
    fresh: bool
    origin: int = -1
    """If this chunk was split from a larger chunk, `first` of the larger chunk; otherwise its own `first`."""

    def __post_init__(self) -> None:
        if self.origin < 0:
            object.__setattr__(self, "origin", self.first)

    def powers(self) -> Iterator[StateChunk]:
        """Splits the chunk into parts whose lengths are powers of two, longest first."""
        done = 0
        for power in range(self.count.bit_length() - 1, -1, -1):
            size = 1 << power
            if self.count & size:
                yield StateChunk(self.first + done, size, self.slot, self.fresh and not done, self.origin)
                done += size


@dataclass(frozen=True)
class PrefillStates:
    """The states of a prefill pass over chunks of several sequences in one packed row."""

    states: StateSlots
    chunks: Sequence[StateChunk]

    def mix(self, mixer: PackedMixer, named: dict[str, Any]) -> Any:
        results: dict[int, list[Any]] = {chunk.first: [] for chunk in self.chunks}
        for group in self._split_groups if mixer.continues else self._groups(self.chunks):
            parts = self._run(mixer, named, group)
            for row, chunk in enumerate(group):
                results[chunk.origin].append(_results(parts, partial(_row, row)))
        return _along_tokens([part for chunk in self.chunks for part in results[chunk.first]])

    @cached_property
    def _split_groups(self) -> list[list[StateChunk]]:
        """Groups of chunks that run in one call, for modules that continue from a stored state. If chunks have many
        different lengths, they are split into parts whose lengths are powers of two, longest first. So the number of
        groups grows only with the logarithm of the chunk length."""
        groups = self._groups(self.chunks)
        split = self._groups([part for chunk in self.chunks for part in chunk.powers()])
        return min(groups, sorted(split, key=lambda group: -group[0].count), key=len)

    @staticmethod
    def _groups(chunks: Iterable[StateChunk]) -> list[list[StateChunk]]:
        """Groups chunks of equal length, which run in one call. Chunks are not padded to equal length, because padding
        would change the final state."""
        groups: dict[tuple[int, bool], list[StateChunk]] = {}
        for chunk in chunks:
            groups.setdefault((chunk.count, chunk.fresh), []).append(chunk)
        return list(groups.values())

    def _run(self, mixer: PackedMixer, named: dict[str, Any], group: Sequence[StateChunk]) -> Any:
        inputs = named[mixer.input_name]
        shape, device = tuple(inputs.shape[:2]), inputs.device
        slots_B = sent(torch.tensor([chunk.slot for chunk in group]), device)

        def rows(start: int, stop: int) -> dict[str, Any]:
            return _per_token(
                named, shape, lambda value: torch.cat([value[:, c.first + start : c.first + stop] for c in group])
            )

        count, fresh = group[0].count, group[0].fresh
        cache = StateCache() if fresh else self.states.read(mixer, slots_B)
        if fresh or (count > 1 and mixer.continues):
            result = mixer.run(rows(0, count), cache)
        else:
            result = _along_tokens([_step(mixer, rows(place, place + 1), cache) for place in range(count)])
        self.states.write(mixer, slots_B, cache)
        return result


def _step(mixer: PackedMixer, named: dict[str, Any], cache: StateCache) -> Any:
    """Runs a recurrent module on one token of each sequence, and limits the time step of a Mamba-2 module."""
    with _limited_time_step(mixer.module):
        return mixer.run(named, cache)


@contextmanager
def _limited_time_step(module: Any) -> Iterator[None]:
    """Applies the limits of a Mamba-2 module's time step, softplus(dt + bias). transformers applies these limits if a
    call has several tokens, but not if it has one. The values dt, one per head, are the last outputs of the input
    projection."""
    limits = getattr(module, "time_step_limit", None)
    if limits is None or tuple(limits) == (0.0, math.inf):
        yield
        return
    low, high = (_inverse_softplus(limit) for limit in limits)

    def limit(_: Any, inputs: Any, projected: torch.Tensor) -> torch.Tensor:
        bias = module.dt_bias.to(projected.dtype)
        rest, dt = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
        return torch.cat([rest, torch.maximum(torch.minimum(dt, high - bias), low - bias)], -1)

    hook = module.in_proj.register_forward_hook(limit)
    try:
        yield
    finally:
        hook.remove()


def _inverse_softplus(value: float) -> float:
    if value <= 0:
        return -math.inf
    return value + math.log(-math.expm1(-value)) if math.isfinite(value) else math.inf


def _per_token(
    named: dict[str, Any], shape: tuple[int, ...], change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """Applies the function `change` to all tensor arguments that have one entry per token."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(changed(part) for part in value)
        return change(value) if isinstance(value, torch.Tensor) and value.shape[:2] == shape else value

    return {name: changed(value) for name, value in named.items()}


def _results(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, tuple):
        return tuple(change(part) if isinstance(part, torch.Tensor) else part for part in result)
    return change(result)


def _row(row: int, value: torch.Tensor) -> torch.Tensor:
    return value[row : row + 1]


def _along_tokens(results: Sequence[Any]) -> Any:
    """Concatenates the results of consecutive tokens. Tuple entries that are not tensors become None."""
    if isinstance(results[0], tuple):
        return tuple(_along_tokens(parts) for parts in zip(*results, strict=True))
    return torch.cat(list(results), 1) if isinstance(results[0], torch.Tensor) else None
