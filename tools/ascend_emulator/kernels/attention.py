"""Attention as torch_npu's operators document it: layouts, masks and sparse modes, softmax with its statistics.

Shapes: B batch, N query heads, K key heads, S queries, T keys, D head size. "Heads first" is [B, N, S, D].
A mask that is true hides a key. Sparse modes: 0 the mask inside a band, 1 the mask as it is, 2 causal from the upper
left corner, 3 causal from the lower right corner, 4 a band from the lower right corner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ascend_emulator.kernels.reference import NotInReference, limit

UNLIMITED = 2147483647
COMPRESSED = 2048  # the fixed side of the triangle that modes 2, 3 and 4 take instead of a full mask


@dataclass(frozen=True)
class Masking:
    mask: torch.Tensor | None
    sparse_mode: int = 0
    before: int = UNLIMITED
    after: int = UNLIMITED

    def hidden(self, queries: int, keys: int) -> torch.Tensor | None:
        """True where a key is hidden from a query; None when every key is open to every query."""
        if self.sparse_mode in (2, 3, 4):
            self._require_triangle()
            corner = 0 if self.sparse_mode == 2 else keys - queries
            if self.sparse_mode == 4:
                return outside_band(queries, keys, self.before, self.after, corner)
            return outside_band(queries, keys, queries + keys, 0, corner)
        if self.sparse_mode not in (0, 1):
            raise NotInReference(f"the emulated attention has no sparse_mode {self.sparse_mode}")
        if self.mask is None:
            return None
        hidden = self.mask.bool()
        if self.sparse_mode == 0 and min(self.before, self.after) < UNLIMITED:
            return hidden | outside_band(queries, keys, self.before, self.after, 0)
        return hidden

    def part(self, queries: int, keys: int) -> Masking:
        """The masking of one packed sequence: a full mask has the size of the longest sequence."""
        if self.mask is None or self.sparse_mode not in (0, 1):
            return self
        return Masking(self.mask[..., :queries, :keys], self.sparse_mode, self.before, self.after)

    def require_whole(self, name: str, queries: int, keys: int) -> None:
        """Modes 0 and 1 need the full mask; the compressed triangle has rows of another length."""
        assert self.mask is not None
        limit(
            name,
            tuple(self.mask.shape[-2:]) == (queries, keys),
            f"sparse_mode {self.sparse_mode} takes the full mask of {queries} x {keys}, got {tuple(self.mask.shape)}",
        )

    def _require_triangle(self) -> None:
        """The device would compute something else without it, and say nothing."""
        if self.mask is None or self.mask.shape[-2:] != (COMPRESSED, COMPRESSED):
            found = "no mask" if self.mask is None else f"a mask of {tuple(self.mask.shape)}"
            raise RuntimeError(f"sparse_mode {self.sparse_mode} needs the mask of 2048x2048 elements, got {found}")
        if not torch.equal(self.mask.reshape(COMPRESSED, COMPRESSED).bool(), triangle()):
            raise RuntimeError(f"sparse_mode {self.sparse_mode} needs the mask that is true above the diagonal")


@cache  # four million elements, and used in every call
def triangle() -> torch.Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)


def outside_band(queries: int, keys: int, before: int, after: int, corner: int) -> torch.Tensor:
    """Hides the keys further than `before` behind and `after` ahead of a query's place, which is its row + corner."""
    place = torch.arange(queries)[:, None] + corner
    key = torch.arange(keys)[None]
    return (key > place + after) | (key < place - before)


def to_heads_first(x: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if layout == "SBH":
        return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    raise NotInReference(f"the emulated attention has no layout {layout!r}")


def from_heads_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "BSND":
        x = x.transpose(1, 2)
    elif layout == "BSH":
        x = x.transpose(1, 2).flatten(2)
    elif layout == "SBH":
        x = x.permute(2, 0, 1, 3).flatten(2)
    return x.contiguous()


def packed_slices(ends: list[int]) -> list[slice]:
    """The sequences of a packed dimension, from the running sums of their lengths; zeros at the end are none."""
    slices, start = [], 0
    for end in ends:
        if end < start:
            if end != 0:
                raise RuntimeError(f"the lengths of packed sequences are running sums, got {ends}")
            end = start
        slices.append(slice(start, end))
        start = end
    return slices


def for_every_query_head(x: torch.Tensor, query_heads: int) -> torch.Tensor:
    """[B, K, T, D] -> [B, N, T, D] in float32."""
    return x.float().repeat_interleave(query_heads // x.shape[1], 1)


def masked_scores(query: torch.Tensor, key: torch.Tensor, scale: float, masking: Masking) -> torch.Tensor:
    """[B, N, S, T] in float32."""
    scores = query.float() @ for_every_query_head(key, query.shape[1]).mT * scale
    hidden = masking.hidden(*scores.shape[-2:])
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def softmax_statistics(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest score and the sum of the exponentials below it, both [B, N, S, 1]."""
    if scores.shape[-1] == 0:  # a sequence without keys has no largest score
        return (scores.sum(-1, keepdim=True),) * 2
    largest = scores.amax(-1, keepdim=True)
    largest.masked_fill(largest.isneginf(), 0)
    return largest, (scores - largest).exp().sum(-1, keepdim=True)


def softmax_weights(scores: torch.Tensor, largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """A query that no key is open to gets zeros, which is the documented answer of the causal modes."""
    return (scores - largest).exp() / total.masked_fill(total == 0, 1)
