"""Blocks of the key/value cache, counted by how many sequences read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    def __init__(self, count: int):
        self._free = deque(range(count))
        self._readers = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        block = self._free.popleft()
        self._readers[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._readers[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._readers[block] -= 1
            if not self._readers[block]:
                self._free.append(block)
