"""Reads the attention window of each layer from the model's masks: causal, or causal within a window or chunk.

In transformers, a model may pass a window to attention as a keyword, as a mask, or as both. Lockstep builds no masks.
After loading, lockstep runs the model once (the probe pass), and stores the window on each attention module. Only
causal, sliding-window and chunked masks are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.kernels.attention.kv_cache import CachedCall, CacheLayout, Plane

PROBE = "lockstep_probe"
# Names of attributes that are set on an attention module. WINDOW is the module's window, or None if a token sees all
# earlier tokens. SHAPE is the shape of the module's keys and values as (heads, key size, value size).
WINDOW, SHAPE = "lockstep_window", "lockstep_shape"
# Further attributes: HEADS is the number of query heads. SOFTCAP is the soft cap of the scores, or None.
HEADS, SOFTCAP = "lockstep_heads", "lockstep_softcap"
# CALLS has, for each attention call of a module in a forward pass, the index of the call in the KV cache's layout.
CALLS = "lockstep_calls"
# CHUNK is the chunk size of an attention module whose tokens see only the tokens of their own chunk, or None.
CHUNK = "lockstep_chunk"
# ROWS says whether the module derives its own mask from the causal mask, and so runs on right-padded rows (`rows.py`).
ROWS = "lockstep_rows"
# Keywords with which modules pass the tokens, or blocks of tokens, that their indexer has selected.
SELECTIONS = ("indices", "block_indices")
# The part of an attention module that adds compressed keys of earlier tokens to the keys (DeepSeek V4).
COMPRESSOR = "compressor"
# A token position so far from the start that every window is shorter.
FAR = 10_000_019
HOST = torch.device("cpu")


class BeyondCausal(NotImplementedError):
    """Raised if a model's attention is not causal, causal within a sliding window, or causal within chunks."""


class OwnMask(BeyondCausal):
    """Raised if modules derive their own mask from the causal one. `seen` is what the causal mask shows, or None if the
    model makes no causal mask."""

    def __init__(self, seen: Seen | None):
        super().__init__("it derives its own mask from the causal one")
        self.seen = seen


@dataclass(frozen=True)
class Seen:
    """The tokens that a causal mask lets a token see: all tokens up to itself, only the last `window` of these tokens,
    or only those in its own chunk of `chunk` tokens."""

    window: int | None
    chunk: int | None = None

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Returns whether tokens at the positions `query` see tokens at the positions `key`."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen


@dataclass(frozen=True)
class Mask:
    """A placeholder for a mask tensor. The mask is evaluated only when a layer uses it, because models also build masks
    that no layer uses."""

    function: Callable[..., torch.Tensor]


@dataclass
class MaskProbe:
    """The result of a probe forward pass: the modules that called attention, and the planes of their KV cache."""

    in_rows: ClassVar[bool] = False
    """Whether the pass has right-padded rows and a mask of numbers (`rows.py`)."""
    called: list[nn.Module] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    """The masks that the model has made for its layers."""
    unreached: list[nn.Module] = field(default_factory=list)
    """Attention modules that did not receive the keywords of the forward pass."""
    calls: list[CachedCall] = field(default_factory=list)
    planes: list[Plane] = field(default_factory=list)
    _tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(tuple(self.planes), tuple(self.calls))

    def add(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> None:
        """Records an attention call. Keys or values of an earlier call are not cached again."""
        keys, new_keys = self._plane(key)
        values, new_values = self._plane(value)
        setattr(module, CALLS, (*(getattr(module, CALLS) if module in self.called else ()), len(self.calls)))
        self.calls.append(CachedCall(keys, values, new_keys, new_values))
        self.called.append(module)

    def _plane(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """Returns the index of the tensor's plane, and whether the plane is new."""
        for index, (earlier, content) in enumerate(self._tensors):
            same = earlier.data_ptr() == tensor.data_ptr() and earlier.shape == tensor.shape
            # A tensor that was changed in place since the earlier call is a new tensor.
            if same and earlier.stride() == tensor.stride() and torch.equal(content, tensor):
                return index, False
        # The tensor is kept, so that its memory is not reused during the pass.
        self._tensors.append((tensor, tensor.clone()))
        self.planes.append(Plane(tensor.shape[1], tensor.shape[-1]))
        return len(self.planes) - 1, True


def read_mask(mask_function: Callable[..., torch.Tensor], heads: int, device: torch.device = HOST) -> Seen:
    """Returns the window of a transformers mask function `(batch, head, query, key) -> seen`, which takes index
    tensors. These tensors are on `device`, the device of the model, because a mask function may hold tensors of its
    own.

    Lockstep has one window for all `heads` of a layer, so a mask that shows different tokens to different heads is an
    error.
    """
    with device:
        return _read_mask(mask_function, heads)


def _read_mask(mask_function: Callable[..., torch.Tensor], heads: int) -> Seen:
    def sees(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros(1, dtype=torch.long)
        query, key = torch.broadcast_tensors(query, key)
        head_H = torch.arange(heads).view(-1, *[1] * query.dim())
        seen_H = torch.as_tensor(mask_function(nothing, head_H, query, key)).expand(heads, *query.shape)
        differs = (seen_H != seen_H[0]).flatten(1).any(1)
        if differs.any():
            head = int(differs.nonzero()[0])
            raise BeyondCausal(f"its heads see different tokens (head {head} and head 0 differ)")
        return seen_H[0]

    found = Seen(_window(sees))
    why = _mismatch(sees, found)
    if why is not None and (chunk := _chunk(sees)) is not None:
        found = Seen(None, chunk)
        why = _mismatch(sees, found)
    if why is not None:
        raise BeyondCausal(f"it is not causal attention within a window: {why}")
    return found


def _mismatch(sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], found: Seen) -> str | None:
    """Returns the first difference between a mask and the window or chunk that was found for it, or None."""
    size = found.window or found.chunk
    queries = _queries(size)
    steps = torch.arange(-3, 4)
    # Key positions in the middle are tested too, because a mask may show the first and last tokens and hide the tokens
    # between.
    between = queries[:, None] * torch.arange(1, 16) // 16
    edges = [steps.clone(), queries[:, None] + steps, between]
    if found.window is not None:
        edges.append(queries[:, None] - found.window + steps)
    if found.chunk is not None:
        edges.append(queries[:, None] // found.chunk * found.chunk + steps)
    for keys in edges:
        keys = keys.clamp(min=0).expand(len(queries), -1)
        expected = found.sees(queries[:, None], keys)
        differs = sees(queries[:, None], keys) != expected
        if differs.any():
            row, column = (int(index[0]) for index in differs.nonzero(as_tuple=True))
            sees_or_not = "does not see" if expected[row, column] else "sees"
            return f"token {int(queries[row])} {sees_or_not} token {int(keys[row, column])}"
    return None


def _window(sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> int | None:
    """Returns the number of tokens that the token at position FAR sees, including itself. Returns None if this token
    sees all earlier tokens."""
    query = torch.tensor([FAR])
    if bool(sees(query, torch.tensor([0]))):
        return None
    hidden, seen = 0, FAR
    if not bool(sees(query, query)):
        raise BeyondCausal("its mask does not let a token see itself")
    while seen - hidden > 1:
        middle = (hidden + seen) // 2
        if bool(sees(query, torch.tensor([middle]))):
            seen = middle
        else:
            hidden = middle
    return FAR - seen + 1


def _chunk(sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> int | None:
    """Returns the position of the first token that does not see the token before it, which is the size of a chunk."""
    queries = torch.arange(1, 2**17)
    alone = (~sees(queries, queries - 1)).nonzero()
    return int(queries[alone[0]]) if len(alone) else None


def _queries(window: int | None) -> torch.Tensor:
    """Returns positions at which the edge of a window, chunk or block of any size can be detected. `window` is the
    window or chunk size that was found."""
    around = [0, 1, 2, 3, 5, 8, 13, 64, 127, 128, 129, 1000, 4096, 8191, 8192, 8193, 100_003, FAR - 1, FAR, FAR + 1]
    if window is not None:
        around += [times * window + step for times in (1, 2, 3) for step in (-1, 0, 1)]
        # Block attention that looks like a window at position FAR differs from a window a few tokens later.
        around += [FAR + share * window // 7 for share in range(1, 8)]
    return torch.tensor(sorted({max(0, position) for position in around}))


def register_probe() -> None:
    """Registers the probe with transformers, both as an attention function and as a mask function."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PROBE, _probe_attention)
    AttentionMaskInterface.register(PROBE, _probe_mask)


# The probe of the current pass. Transformers does not pass keywords of the forward pass to a mask function.
_PROBES: list[MaskProbe] = []


@contextmanager
def probing(probe: MaskProbe) -> Iterator[None]:
    _PROBES.append(probe)
    try:
        yield
    finally:
        _PROBES.pop()


def _probe_mask(*_: Any, mask_function: Callable[..., torch.Tensor], **__: Any) -> Mask:
    mask = Mask(mask_function)
    _PROBES[-1].masks.append(mask)
    return mask


def _probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    sliding_window: int | None = None,
    softcap: float | None = None,
    probe: MaskProbe | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of the probe pass, which records the window and the shapes of the module. Returns the
    values, as if each token saw only itself."""
    if probe is None:
        probe = _PROBES[-1]
        probe.unreached.append(module)
    selects = any(extra.get(name) is not None for name in SELECTIONS) or hasattr(module, COMPRESSOR)
    if not probe.in_rows and (selects or isinstance(attention_mask, torch.Tensor)):
        raise TypeError(f"the layer selects tokens besides its {Mask.__name__}")
    if isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point():
        lowest = torch.finfo(attention_mask.dtype).min
        if ((attention_mask != 0) & (attention_mask > lowest)).any() and _selects(module):
            # The scores do not depend on positions, so repeated tokens have equal scores.
            raise BeyondCausal("it selects tokens by scores that are equal for repeated tokens, which is ambiguous")
    is_mask = isinstance(attention_mask, Mask)
    seen = read_mask(attention_mask.function, query.shape[1], query.device) if is_mask else None
    window, chunk = (seen.window, seen.chunk) if seen is not None else (sliding_window, None)
    if seen is not None and sliding_window and window is not None and sliding_window != window:
        raise BeyondCausal(
            f"{type(module).__name__}: its mask has a window of {window}, but its attention has a window of "
            f"{sliding_window}"
        )
    if module in probe.called and (getattr(module, WINDOW), getattr(module, CHUNK)) != (window, chunk):
        raise BeyondCausal(f"{type(module).__name__} uses attention with several windows in one forward pass")
    setattr(module, WINDOW, window)
    setattr(module, CHUNK, chunk)
    setattr(module, ROWS, isinstance(attention_mask, torch.Tensor))
    setattr(module, HEADS, query.shape[1])
    setattr(module, SOFTCAP, softcap)
    setattr(module, SHAPE, (value.shape[1], key.shape[-1], value.shape[-1]))
    probe.add(module, key, value)
    # Compressed keys and values come after those of the tokens.
    own = value[:, :, : query.shape[2]].repeat_interleave(query.shape[1] // value.shape[1], 1)
    return own.transpose(1, 2).contiguous(), None


def _selects(module: Any) -> bool:
    """Returns whether a module that adds scores to its mask also selects tokens by these scores. Doge selects tokens of
    sequences that are longer than its `keep_window_size`. The longest sequence of published models is not."""
    kept = getattr(module, "keep_window_size", None)
    return kept is None or bool(kept < module.config.max_position_embeddings)


@contextmanager
def attending(model: Any, implementation: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _of_its_own(probe: MaskProbe, model: Any) -> Iterator[None]:
    """Converts the error of a model that does arithmetic with its mask to `OwnMask`."""
    try:
        with probing(probe):
            yield
    except (AttributeError, TypeError) as error:
        if Mask.__name__ not in str(error):
            raise
        heads = model.config.get_text_config(decoder=True).num_attention_heads
        device = model.get_input_embeddings().weight.device
        seen = {read_mask(mask.function, heads, device) for mask in probe.masks}
        if len(seen) > 1:
            raise BeyondCausal("it derives its own masks from several masks") from error
        raise OwnMask(seen.pop() if seen else None) from error


@torch.no_grad()
def read_windows(model: Any, decoder: nn.Module) -> MaskProbe:
    """Sets the window on every attention module of a decoder. Returns the modules that use transformers' attention
    interface, and the planes of their KV cache."""
    register_probe()
    probe = MaskProbe()
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[1, 2]], device=device)
    training = model.training
    model.eval()
    try:
        with attending(model, PROBE), _of_its_own(probe, model):
            decoder(input_ids=ids, position_ids=torch.tensor([[0, 1]], device=device), use_cache=False, probe=probe)
    finally:
        model.train(training)
    return probe
