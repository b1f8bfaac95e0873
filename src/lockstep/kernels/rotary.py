"""Computes rotary embeddings that depend on the sequence length (longrope, dynamic NTK) separately per sequence.

transformers scales these embeddings by the longest sequence of the forward pass, and dynamic NTK also by earlier
passes. So without this module the longest sequence of a packed row or padded batch would change the embeddings of all
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Rope types that transformers scales by the longest sequence of the forward pass.
DYNAMIC, LONGROPE = "dynamic", "longrope"


def fixed_length(config: Any) -> int | None:
    """Returns the sequence length up to which rotary embeddings do not depend on the sequence length. Returns None if
    rotary embeddings never depend on the sequence length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # A config has one set of rope parameters for all layers, or one set per layer type.
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
    """Replaces the forward of a rotary embedding. The new forward runs the original one once for each sequence length
    of the batch.

    `lengths_NT` has the sequence length of each token of the forward pass. `lengths_NT` is None if no sequence exceeds
    the fixed length, and in forward passes that transformers starts itself.
    """

    def __init__(self, rope: nn.Module):
        self.rope, self.original_forward = rope, rope.forward
        self.fixed = fixed_length(rope.config)
        self.dynamic = any(DYNAMIC in str(kind) for kind in _kinds(rope).values())
        self.lengths_NT: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        if self.lengths_NT is None:
            return self._fresh(x, position_ids, *more, **named)
        if position_ids.dim() == 2 and len(position_ids) == 1:
            # transformers may pass one row of position ids for all rows of the batch.
            position_ids = position_ids.expand(self.lengths_NT.shape)
        if position_ids.shape != self.lengths_NT.shape:
            raise NotImplementedError(
                "a rotary embedding that depends on the sequence length supports only one position dimension"
            )
        parts: tuple[torch.Tensor, ...] | None = None
        for length in self.lengths_NT.unique().tolist():
            chosen = self.lengths_NT == length
            # transformers derives the sequence length from the largest position id. So the last position of the
            # sequence is appended to the input, and its result is dropped.
            last = position_ids.new_tensor([length - 1])
            positions = torch.cat([position_ids[chosen].clamp(max=length - 1), last])
            outputs = self._fresh(x, positions[None], *more, **named)
            parts = parts or tuple(part.new_zeros(*position_ids.shape, part.shape[-1]) for part in outputs)
            for part, output in zip(parts, outputs, strict=True):
                part[chosen] = output[0, :-1]
        return parts

    def _fresh(self, x: torch.Tensor, position_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        """Runs the original forward after a reset of its state. Without the reset dynamic NTK would keep the scale of
        the longest earlier pass."""
        rope: Any = self.rope
        for layers, kind in _kinds(rope).items():
            if DYNAMIC in str(kind):
                prefix = f"{layers}_" if layers is not None else ""
                setattr(rope, f"{prefix}inv_freq", getattr(rope, f"{prefix}original_inv_freq").to(x.device))
                setattr(rope, f"{prefix}max_seq_len_cached", rope.original_max_seq_len)
        return self.original_forward(x, position_ids, *more, **named)


def _kinds(module: nn.Module) -> dict[str | None, Any]:
    """Returns the rope type of each layer type. If all layers have the same rope type, the dictionary has the single
    key None."""
    rope_type = getattr(module, "rope_type", None)
    return rope_type if isinstance(rope_type, dict) else {None: rope_type}


def own_positions(model: nn.Module) -> list[OwnPositions]:
    """Installs `OwnPositions` on the rotary embeddings that depend on the sequence length. Returns all installed
    `OwnPositions`, including those of earlier calls."""
    installed = []
    for module in model.modules():
        if any(_moves({"rope_type": kind}) for kind in _kinds(module).values()):
            if not isinstance(module.forward, OwnPositions):
                module.forward = OwnPositions(module)
            installed.append(module.forward)
    return installed


@contextmanager
def sequences(
    moving: Sequence[OwnPositions],
    lengths: Sequence[int],
    shape: torch.Size,
    packed_index_E: torch.Tensor | None,
    packed: bool,
    own_T: torch.Tensor | None = None,
) -> Iterator[None]:
    """Sets the sequence lengths of a micro-batch on the rotary embeddings (see `types.MicroBatch`).

    With `own_T` (context parallelism), the forward pass computes only the tokens of the packed row at these indices.
    """
    moved = [rope for rope in moving if rope.fixed is not None and max(lengths) > rope.fixed]
    for rope in moved:
        lengths_NT = _lengths(lengths, rope, shape, packed_index_E, packed)
        rope.lengths_NT = lengths_NT if own_T is None else lengths_NT[:, own_T.to(lengths_NT.device)]
    try:
        yield
    finally:
        for rope in moved:
            rope.lengths_NT = None


def _lengths(
    lengths: Sequence[int], rope: OwnPositions, shape: torch.Size, packed_index_E: torch.Tensor | None, packed: bool
) -> torch.Tensor:
    assert rope.fixed is not None
    # All sequences up to the length `rope.fixed` have the same rotary embeddings. All longer sequences have the same
    # embeddings as each other, except with dynamic NTK.
    longest = max(lengths)
    lengths_S = torch.tensor(
        [rope.fixed if length <= rope.fixed else length if rope.dynamic else longest for length in lengths]
    )
    device = next(rope.rope.buffers()).device
    if not packed:
        return lengths_S[:, None].expand(shape).to(device)
    lengths_E = lengths_S.repeat_interleave(torch.tensor(lengths))
    if packed_index_E is None:
        return lengths_E[None].to(device)
    packed_E = packed_index_E.cpu()
    lengths_T = torch.zeros(shape[-1], dtype=torch.long).scatter_(0, packed_E, lengths_E)
    if not torch.equal(lengths_T[packed_E], lengths_E):
        raise NotImplementedError(
            "sequences of different lengths cannot share a prefix, because the rotary embedding depends on the length"
        )
    return lengths_T[None].to(device)
