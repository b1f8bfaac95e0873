"""Rotary positions that move with a sequence's length (longrope, dynamic NTK): each sequence gets those of its own.

transformers scales them by the longest sequence of the forward pass, and dynamic ones by what was run before too. On
a packed line, or in a padded batch, the longest row would then move the positions of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Kinds of rotary embedding that transformers scales by the longest sequence of the forward pass.
DYNAMIC, LONGROPE = "dynamic", "longrope"


def fixed_length(config: Any) -> int | None:
    """Up to how many tokens a sequence's positions are the same whatever its length; None where they always are."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set for all layers, or a set for each kind of layer.
    lengths = [
        _fixed(rope, config) for rope in (parameters, *parameters.values()) if isinstance(rope, dict) and _moves(rope)
    ]
    return min(lengths, default=None)


def _moves(rope: dict[str, Any]) -> bool:
    kind = str(rope.get("rope_type"))
    return DYNAMIC in kind or kind == LONGROPE


def _fixed(rope: dict[str, Any], config: Any) -> int:
    original = rope.get("original_max_position_embeddings") if rope["rope_type"] == LONGROPE else None
    return original or config.max_position_embeddings


class OwnPositions:
    """The forward of a rotary embedding, run for the sequences of each length by themselves.

    `lengths_NT` holds for each token of the pass how long its sequence is; None where no sequence is beyond the fixed
    length, or where the pass is one of transformers' own.
    """

    def __init__(self, rope: nn.Module):
        self.rope, self.together = rope, rope.forward
        self.fixed = fixed_length(rope.config)
        self.dynamic = any(DYNAMIC in str(kind) for kind in _kinds(rope).values())
        self.lengths_NT: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        if self.lengths_NT is None:
            return self._fresh(x, position_ids, *more, **named)
        if position_ids.dim() == 2 and len(position_ids) == 1:
            # transformers' own: one row of positions for all rows.
            position_ids = position_ids.expand(self.lengths_NT.shape)
        if position_ids.shape != self.lengths_NT.shape:
            raise NotImplementedError("positions that move with the length, in several dimensions, are not supported")
        parts: tuple[torch.Tensor, ...] | None = None
        for length in self.lengths_NT.unique().tolist():
            chosen = self.lengths_NT == length
            # The last position tells transformers how long the sequence is, whichever of its tokens are here; what
            # stands behind it is padding.
            last = position_ids.new_tensor([length - 1])
            positions = torch.cat([position_ids[chosen].clamp(max=length - 1), last])
            own = self._fresh(x, positions[None], *more, **named)
            parts = parts or tuple(part.new_zeros(*position_ids.shape, part.shape[-1]) for part in own)
            for part, found in zip(parts, own, strict=True):
                part[chosen] = found[0, :-1]
        return parts

    def _fresh(self, x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        """As if nothing had been run before: a dynamic embedding keeps the scale of the longest pass so far."""
        rope: Any = self.rope
        for layers, kind in _kinds(rope).items():
            if DYNAMIC in str(kind):
                prefix = f"{layers}_" if layers is not None else ""
                setattr(rope, f"{prefix}inv_freq", getattr(rope, f"{prefix}original_inv_freq").to(x.device))
                setattr(rope, f"{prefix}max_seq_len_cached", rope.original_max_seq_len)
        return self.together(x, position_ids, *more, **named)


def _kinds(module: nn.Module) -> dict[str | None, Any]:
    """The kind of rotary embedding for each kind of layer, or for all (None)."""
    found = getattr(module, "rope_type", None)
    return found if isinstance(found, dict) else {None: found}


def own_positions(model: nn.Module) -> list[OwnPositions]:
    """Put `OwnPositions` in where a model's positions move; those that were put in, the earlier ones included."""
    found = []
    for module in model.modules():
        if any(_moves({"rope_type": kind}) for kind in _kinds(module).values()):
            if not isinstance(module.forward, OwnPositions):
                module.forward = OwnPositions(module)
            found.append(module.forward)
    return found


@contextmanager
def sequences(
    moving: Sequence[OwnPositions],
    lengths: Sequence[int],
    shape: torch.Size,
    line_E: torch.Tensor | None,
    packed: bool,
    own_T: torch.Tensor | None = None,
) -> Iterator[None]:
    """Tell the rotary embeddings how long the sequences of a micro-batch are (see `types.MicroBatch`).

    `own_T`: the pass has these tokens of the line alone.
    """
    moved = [rope for rope in moving if rope.fixed is not None and max(lengths) > rope.fixed]
    for rope in moved:
        found = _lengths(lengths, rope, shape, line_E, packed)
        rope.lengths_NT = found if own_T is None else found[:, own_T.to(found.device)]
    try:
        yield
    finally:
        for rope in moved:
            rope.lengths_NT = None


def _lengths(
    lengths: Sequence[int], rope: OwnPositions, shape: torch.Size, line_E: torch.Tensor | None, packed: bool
) -> torch.Tensor:
    assert rope.fixed is not None
    # All sequences within the fixed length have the same positions; so have all beyond it, unless they are dynamic.
    longest = max(lengths)
    lengths_S = torch.tensor(
        [rope.fixed if length <= rope.fixed else length if rope.dynamic else longest for length in lengths]
    )
    device = next(rope.rope.buffers()).device
    if not packed:
        return lengths_S[:, None].expand(shape).to(device)
    lengths_E = lengths_S.repeat_interleave(torch.tensor(lengths))
    if line_E is None:
        return lengths_E[None].to(device)
    line = line_E.cpu()
    lengths_T = torch.zeros(shape[-1], dtype=torch.long).scatter_(0, line, lengths_E)
    if not torch.equal(lengths_T[line], lengths_E):
        raise NotImplementedError("sequences of other lengths share a beginning whose positions move with the length")
    return lengths_T[None].to(device)
