"""Who is computed next: continuous batching over a cache of limited size.

A prompt's prefix (all but its last token) is computed once, in chunks under a token budget. Its samples then join the
running batch as rows become free, first come first served; each feeds the prompt's last token as its first pass.
When blocks run out, prefixes that nobody runs on are given up first, then the youngest running sample, which is
computed again later. The oldest one always goes on, so every request is finished.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.rollout.native.blocks import BlockPool
from lockstep.rollout.native.sequence import Prefix, Sample, Stretch


@dataclass(frozen=True)
class Work:
    """One round: blocks to copy first, then stretches to compute up to a place, then samples that produce tokens."""

    copies: list[tuple[int, int]]
    prefill: list[tuple[Stretch, int]]
    decode: list[Sample]


class Scheduler:
    def __init__(
        self, prefixes: Sequence[Prefix], samples: Sequence[Sample], *, blocks: int, block: int, rows: int, budget: int
    ):
        self.prefixes = prefixes
        self.waiting = sorted(samples, key=lambda sample: sample.order)
        self.running: list[Sample] = []
        self.pool = BlockPool(blocks)
        self.block, self.rows, self.budget = block, rows, budget
        self.preempted = 0
        self._copies: dict[int, int] = {}
        for sample in self.waiting:
            prefixes[sample.request].waiting += 1

    @staticmethod
    def least_blocks(limit: int, block: int) -> int:
        """Blocks without which a sample of `limit` tokens could not be finished: its own, and its prefix's last."""
        return -(-limit // block) + 1

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def next(self, tokens: int) -> Work:
        """The next round, in which a sample may produce up to `tokens` tokens."""
        self._copies = {}
        # Oldest first: whoever must make room is behind, so nobody in this list loses its place any more.
        decode = [s for s in list(self.running) if s.blocks and s.ready and self._extend(s, self._reach(s, tokens))]
        prefill, left = self._recompute()
        started, more = self._admit(tokens, left)
        copies = [(source, target) for target, source in self._copies.items()]
        # A prefix may have given way to a sample in front of it that starts now.
        work = Work(copies, [(part, stop) for part, stop in prefill + more if part.blocks], decode + started)
        assert work.prefill or work.decode, "the cache holds one whole sample, so somebody can always go on"
        return work

    def finish(self, sample: Sample) -> None:
        """The sample is done: its blocks are free, and those of a prompt with its last sample."""
        self.running.remove(sample)
        self._release(sample)
        prefix = self.prefixes[sample.request]
        prefix.running -= 1
        if not prefix.waiting and not prefix.running:
            self._release(prefix)

    # -- the way in

    def _recompute(self) -> tuple[list[tuple[Stretch, int]], int]:
        """What samples that lost their place had already produced; and what is left of the budget."""
        left = self.budget
        work: list[tuple[Stretch, int]] = []
        for sample in self.running:
            if not sample.ready and left:
                stop = min(len(sample.tokens) - 1, sample.cached + left)
                left -= stop - sample.cached
                work.append((sample, stop))
        return work, left

    def _admit(self, tokens: int, left: int) -> tuple[list[Sample], list[tuple[Stretch, int]]]:
        """Samples that start now, and prefixes that must be computed before theirs can."""
        started: list[Sample] = []
        prefill: dict[int, tuple[Stretch, int]] = {}
        for sample in self.waiting[: max(0, self.rows - len(self.running))]:
            prefix = self.prefixes[sample.request]
            if prefix.ready:
                if not self._start(sample, prefix, tokens):
                    break
                if sample.ready:
                    started.append(sample)
            elif sample.request not in prefill and left:
                if not self._afford(-(-len(prefix.tokens) // self.block) - len(prefix.blocks), prefix):
                    break
                while len(prefix.blocks) * self.block < len(prefix.tokens):
                    prefix.blocks.append(self.pool.take())
                stop = min(len(prefix.tokens), prefix.cached + left)
                left -= stop - prefix.cached
                prefill[sample.request] = (prefix, stop)
        return started, list(prefill.values())

    def _start(self, sample: Sample, prefix: Prefix, tokens: int) -> bool:
        stop = self._reach(sample, tokens)
        if not self._afford(-(-stop // self.block) - len(prefix.blocks) + 1, prefix):
            return False
        self.pool.share(prefix.blocks)
        sample.blocks, sample.cached = list(prefix.blocks), prefix.cached
        self.waiting.remove(sample)
        insort(self.running, sample, key=lambda s: s.order)
        prefix.waiting -= 1
        prefix.running += 1
        return self._extend(sample, stop)

    def _afford(self, blocks: int, prefix: Prefix) -> bool:
        """Whether a newcomer may take so many: one block is left to each who runs, so that it does not push them out.

        When nobody runs, prefixes other than its own give way.
        """
        if not self.running:
            while self.pool.free < blocks and self._give_up_a_prefix(prefix):
                pass
        return self.pool.free >= blocks + len(self.running)

    # -- room in the cache

    def _reach(self, sample: Sample, tokens: int) -> int:
        """Tokens that are cached after a round of `tokens` passes; the last one produced is not fed any more."""
        return min(len(sample.tokens) + tokens - 1, sample.limit - 1)

    def _extend(self, sample: Sample, stop: int) -> bool:
        """Blocks for the first `stop` tokens, those to be written its own; False when it lost its place over it."""
        while len(sample.blocks) * self.block < stop:
            if not self._make_room(sample):
                return False
            sample.blocks.append(self.pool.take())
        place = sample.cached // self.block
        if place < len(sample.blocks) and self.pool.shared(sample.blocks[place]):
            # Others read this block: write to a copy of it.
            if not self._make_room(sample):
                return False
            own = self.pool.take()
            self._copies[own] = sample.blocks[place]
            self.pool.drop([sample.blocks[place]])
            sample.blocks[place] = own
        return True

    def _make_room(self, sample: Sample) -> bool:
        while not self.pool.free:
            if self._give_up_a_prefix(None):
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sample:
                return False
        return True

    def _give_up_a_prefix(self, spared: Prefix | None) -> bool:
        for prefix in reversed(self.prefixes):
            if prefix.blocks and not prefix.running and prefix is not spared:
                self._release(prefix)
                return True
        return False

    def _preempt(self, sample: Sample) -> None:
        self.preempted += 1
        self.running.remove(sample)
        self._release(sample)
        insort(self.waiting, sample, key=lambda s: s.order)
        prefix = self.prefixes[sample.request]
        prefix.running -= 1
        prefix.waiting += 1

    def _release(self, part: Stretch) -> None:
        self.pool.drop(part.blocks)
        part.blocks, part.cached = [], 0
