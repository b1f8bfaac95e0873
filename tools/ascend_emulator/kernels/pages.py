"""Keys and values in pages, as the generation operators document them, with the documented limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LARGEST_PAGE = 512
SINGLE_TOKEN_MULTIPLE = 16
PROMPT_MULTIPLE = 128


@dataclass(frozen=True)
class Pages:
    """Row b of the table names, in order, the pages of sequence b.

    A cache is [pages, page size, heads x head size] or, where the layout of the queries allows it, [pages, heads, page
    size, head size].
    """

    table: torch.Tensor
    size: int
    heads: int
    heads_first_allowed: bool
    multiple: int = SINGLE_TOKEN_MULTIPLE

    def sequences(self, cache: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """[heads, length, head size] for each row of the table."""
        self._check(cache, lengths)
        return [self._sequence(cache, row, length) for row, length in zip(self.table, lengths, strict=True)]

    def _sequence(self, cache: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
        used = row[: self._pages_for(length)].long()
        # The device does not look; it would read whatever lies there.
        if used.numel() and not (int(used.min()) >= 0 and int(used.max()) < cache.shape[0]):
            raise RuntimeError(f"block_table names pages {used.tolist()} of a cache of {cache.shape[0]}")
        pages = cache[used]
        if cache.dim() == 3:
            pages = pages.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return pages.transpose(0, 1).flatten(1, 2)[:, :length]

    def _pages_for(self, length: int) -> int:
        return -(-length // self.size)

    def _check(self, cache: torch.Tensor, lengths: list[int]) -> None:
        if self.size <= 0 or self.size > _LARGEST_PAGE or self.size % self.multiple:
            raise RuntimeError(f"block_size must be a multiple of {self.multiple} up to 512, got {self.size}")
        if self.table.dim() != 2 or self.table.dtype != torch.int32 or self.table.shape[0] != len(lengths):
            raise RuntimeError(
                f"block_table must be int32 with {len(lengths)} rows, got {self.table.dtype} {tuple(self.table.shape)}"
            )
        if self._pages_for(max(lengths)) > self.table.shape[1]:
            raise RuntimeError(
                f"block_table has {self.table.shape[1]} pages a sequence, too few for {max(lengths)} keys"
            )
        flat = cache.dim() == 3 and cache.shape[1] == self.size
        heads_first = cache.dim() == 4 and cache.shape[1:3] == (self.heads, self.size) and self.heads_first_allowed
        if not flat and not heads_first:
            raise RuntimeError(
                f"a cache of {tuple(cache.shape)} is not [pages, {self.size}, heads x size]"
                + (f" or [pages, {self.heads}, {self.size}, size]" if self.heads_first_allowed else "")
            )
