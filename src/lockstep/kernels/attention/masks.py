"""Reads the attention window of each layer from the model's masks: causal, or causal within a window.

In transformers, a model may pass a window to attention as a keyword, as a mask, or as both. Lockstep builds no masks.
Instead, lockstep runs the model once after loading (the probe pass), and stores the window on each attention module.
Only causal and sliding-window masks are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PROBE = "lockstep_probe"
# Names of attributes that are set on an attention module. WINDOW is the module's window, or None if a token sees all
# earlier tokens. SHAPE is the shape of its keys and values as (heads, key size, value size).
WINDOW, SHAPE = "lockstep_window", "lockstep_shape"
# Further attributes: HEADS is the number of query heads. SOFTCAP is the soft cap of the scores, or None.
HEADS, SOFTCAP = "lockstep_heads", "lockstep_softcap"
# A token position so far from the start that every window is shorter.
FAR = 10_000_019


class BeyondCausal(NotImplementedError):
    """Raised if a model's attention is neither causal nor causal within a sliding window."""


@dataclass(frozen=True)
class Seen:
    """The tokens that a causal mask lets a token see: all tokens up to itself, or only the last `window` of these
    tokens."""

    window: int | None


@dataclass(frozen=True)
class Mask:
    """A placeholder for a mask tensor. The mask is evaluated only when a layer uses it, because models also build masks
    that no layer uses."""

    function: Callable[..., torch.Tensor]


@dataclass
class MaskProbe:
    """The result of a probe forward pass: the modules that called attention."""

    called: list[nn.Module] = field(default_factory=list)


def read_mask(mask_function: Callable[..., torch.Tensor], heads: int) -> Seen:
    """Returns the window of a transformers mask function `(batch, head, query, key) -> seen`, which takes index
    tensors.

    Lockstep has one window for all `heads` of a layer, so a mask that shows different tokens to different heads is an
    error.
    """

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

    window = _window(sees)
    queries = _queries(window)
    steps = torch.arange(-3, 4)
    # Key positions in the middle are tested too, because a mask may show the first and last tokens and hide the tokens
    # between.
    between = queries[:, None] * torch.arange(1, 16) // 16
    edges = [steps.clone(), queries[:, None] + steps, between]
    if window is not None:
        edges.append(queries[:, None] - window + steps)
    for keys in edges:
        keys = keys.clamp(min=0).expand(len(queries), -1)
        expected = keys <= queries[:, None]
        if window is not None:
            expected &= keys > queries[:, None] - window
        differs = sees(queries[:, None], keys) != expected
        if differs.any():
            row, column = (int(index[0]) for index in differs.nonzero(as_tuple=True))
            query, key = int(queries[row]), int(keys[row, column])
            _refuse_chunks(sees)
            sees_or_not = "does not see" if expected[row, column] else "sees"
            raise BeyondCausal(f"it is not causal attention within a window: token {query} {sees_or_not} token {key}")
    return Seen(window)


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


def _refuse_chunks(sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Raises a specific error for chunked attention, the most common unsupported mask."""
    queries = torch.arange(1, 2**17)
    alone = (~sees(queries, queries - 1)).nonzero()
    if len(alone):
        chunk = int(queries[alone[0]])
        raise BeyondCausal(f"its attention is chunked (in the test: chunks of {chunk} tokens)")


def _queries(window: int | None) -> torch.Tensor:
    """Returns positions at which the edge of a window, chunk or block of any size can be detected."""
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


def _probe_mask(*_: Any, mask_function: Callable[..., torch.Tensor], **__: Any) -> Mask:
    return Mask(mask_function)


def _probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    sliding_window: int | None = None,
    softcap: float | None = None,
    probe: MaskProbe | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Records the window and the shapes of an attention module. Returns the values, as if each token saw only
    itself."""
    if probe is None:
        raise BeyondCausal(f"{type(module).__name__} does not receive the keywords of the forward pass")
    seen = read_mask(attention_mask.function, query.shape[1]) if isinstance(attention_mask, Mask) else None
    window = seen.window if seen is not None else sliding_window
    if seen is not None and sliding_window and window is not None and sliding_window != window:
        raise BeyondCausal(
            f"{type(module).__name__}: its mask has a window of {window}, but its attention has a window of "
            f"{sliding_window}"
        )
    if module in probe.called and getattr(module, WINDOW) != window:
        raise BeyondCausal(f"{type(module).__name__} uses attention with several windows in one forward pass")
    setattr(module, WINDOW, window)
    setattr(module, HEADS, query.shape[1])
    setattr(module, SOFTCAP, softcap)
    setattr(module, SHAPE, (value.shape[1], key.shape[-1], value.shape[-1]))
    probe.called.append(module)
    repeats = query.shape[1] // value.shape[1]
    return value.repeat_interleave(repeats, 1).transpose(1, 2).contiguous(), None


@contextmanager
def _attending(model: Any, implementation: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _of_its_own() -> Iterator[None]:
    """Converts the error of a model that does arithmetic with its mask to `BeyondCausal`."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if Mask.__name__ in str(error):
            raise BeyondCausal("it derives its own mask from the causal one") from error
        raise


@torch.no_grad()
def read_windows(model: Any, decoder: nn.Module) -> list[nn.Module]:
    """Sets the window on every attention module of a decoder. Returns the modules that use transformers' attention
    interface."""
    register_probe()
    probe = MaskProbe()
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[1, 2]], device=device)
    training = model.training
    model.eval()
    try:
        with _attending(model, PROBE), _of_its_own():
            decoder(input_ids=ids, position_ids=torch.tensor([[0, 1]], device=device), use_cache=False, probe=probe)
    finally:
        model.train(training)
    return probe.called
