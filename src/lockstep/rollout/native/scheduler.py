"""The scheduler: continuous batching over a KV cache of limited size; sequences and cache blocks."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# What the engine keeps of a prompt and of each of its samples.


@dataclass(eq=False)
class Span:
    """Tokens whose keys and values go to the cache: `cached` of them are there, in `blocks`."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    cached: int = 0


@dataclass(eq=False)
class SharedPrompt(Span):
    """A prompt without its last token: computed once, read by all samples of the prompt."""

    waiting: int = 0
    running: int = 0

    @property
    def ready(self) -> bool:
        return self.cached == len(self.tokens)


@dataclass(eq=False)
class SequenceState(Span):
    """One continuation. Its last token is the one that is fed next, so it is never cached before the pass."""

    request: int = 0
    number: int = 0
    prompt: int = 0
    """Tokens of the prompt."""
    limit: int = 0
    """Tokens at which it ends, prompt included."""
    keys: tuple[int, int] = (0, 0)
    logprobs: list[float] = field(default_factory=list)
    stop: str = ""

    @property
    def ready(self) -> bool:
        """Everything before the last token is cached: the next pass can produce a token."""
        return self.cached == len(self.tokens) - 1

    @property
    def order(self) -> tuple[int, int]:
        """Who came first is served first."""
        return self.request, self.number


# Blocks of the key/value cache, counted by how many sequences read them.


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


# Who is computed next: continuous batching over a cache of limited size.
#
# A prompt's prefix (all but its last token) is computed once, in chunks under a token budget. Its samples then join
# the running batch as rows become free, first come first served; each feeds the prompt's last token as its first
# pass. Where a round is several tokens of each running sample, free rows are filled before it: a round of a small
# batch takes about as long as one of a large batch. When blocks run out, those who came later give way: prefixes that
# nobody runs on first, then the youngest running sample, which is computed again later. So the oldest one always goes
# on, and every request is finished.


@dataclass
class Work:
    """One round: blocks to copy first, then stretches to compute up to a place, then samples that produce tokens."""

    budget: int
    """Tokens that may still be prefilled in the round."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    prefill: list[tuple[Span, int]] = field(default_factory=list)
    decode: list[SequenceState] = field(default_factory=list)

    def compute(self, part: Span, stop: int) -> None:
        """As much of `part` up to `stop` as the budget allows."""
        tokens = min(stop - part.cached, self.budget)
        if tokens:
            self.budget -= tokens
            self.prefill.append((part, part.cached + tokens))


class Scheduler:
    """`prefixes[i]` is that of request i, while one of its samples is left. At most `rows` samples run, and at most
    `budget` tokens are prefilled a round."""

    def __init__(
        self,
        prefixes: Sequence[SharedPrompt],
        sequences: Sequence[SequenceState],
        *,
        blocks: int,
        block: int,
        rows: int,
        budget: int,
    ):
        self.prefixes: dict[int, SharedPrompt] = {}
        self.asked = 0
        """Requests that ever came: the number of the next one."""
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.pool = BlockPool(blocks)
        self.block, self.rows, self.budget = block, rows, budget
        self.preempted = 0
        self.add(prefixes, sequences)

    def add(self, prefixes: Sequence[SharedPrompt], sequences: Sequence[SequenceState]) -> None:
        """Further requests, numbered on, which come behind all others."""
        self.prefixes |= enumerate(prefixes, start=self.asked)
        self.asked += len(prefixes)
        self.waiting += sorted(sequences, key=lambda sequence: sequence.order)
        for sequence in sequences:
            self.prefixes[sequence.request].waiting += 1

    @staticmethod
    def least_blocks(limit: int, block: int) -> int:
        """Blocks without which a sample of `limit` tokens could not be finished: its own, and its prefix's last."""
        return -(-limit // block) + 1

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def left(self) -> list[SequenceState]:
        """Who is not finished, in their order."""
        return sorted([*self.running, *self.waiting], key=lambda sequence: sequence.order)

    def next(self, tokens: int) -> Work:
        """The next round, in which a sample may produce up to `tokens` tokens."""
        work = Work(self.budget)
        # Oldest first: whoever must make room is behind, so nobody who has work loses its place any more.
        for sequence in list(self.running):
            if sequence.blocks and not sequence.ready:
                work.compute(sequence, len(sequence.tokens) - 1)
            elif sequence.blocks and self._extend(sequence, self._reach(sequence, tokens)):
                work.decode.append(sequence)
        self._admit(work, tokens)
        if tokens > 1 and work.prefill:
            self._look_ahead(work)
            # Nobody loses anything by waiting: what a sample was given for this round serves it in the next one.
            work.decode.clear()
        assert work.prefill or work.decode, "the cache holds one whole sample, so somebody can always go on"
        return work

    def schedule_ahead(self, tokens: int) -> Work:
        """A round behind one of `tokens` that is under way: those who run on, and newcomers on the rows that are known
        to be free after it. Empty where a look at the round may change who runs: a prompt must be computed before
        somebody can come, or blocks may run out.
        """
        work = Work(0)
        if tokens == 1 or not all(sequence.ready for sequence in self.running):
            return work
        staying = [sequence for sequence in self.running if len(sequence.tokens) + tokens < sequence.limit]
        stops = [self._reach(sequence, 2 * tokens) for sequence in staying]
        missing = (-(-stop // self.block) - len(sequence.blocks) for sequence, stop in zip(staying, stops, strict=True))
        if sum(max(0, blocks) for blocks in missing) > self.pool.free:
            return work
        newcomers = self.waiting[: self.rows - len(staying)]
        # Who lost its place comes back with tokens of its own to compute.
        if not all(self.prefixes[one.request].ready and len(one.tokens) == one.prompt for one in newcomers):
            return work
        for sequence, stop in zip(staying, stops, strict=True):
            self._grow(sequence, stop)
        work.decode = staying
        for sequence in newcomers:
            if not self._start(sequence, self.prefixes[sequence.request], work, tokens):
                break
        return work

    def finish(self, sequence: SequenceState) -> None:
        """The sample is done: its blocks are free, and those of a prompt with its last sample."""
        self.running.remove(sequence)
        self._release(sequence)
        self.prefixes[sequence.request].running -= 1
        self._forget(sequence.request)

    def cancel(self, sequence: SequenceState) -> None:
        """Nobody wants the sample any more, whether it runs or waits: what it holds is free at once."""
        if sequence in self.running:
            self.finish(sequence)
            return
        self.waiting.remove(sequence)
        self.prefixes[sequence.request].waiting -= 1
        self._forget(sequence.request)

    def _forget(self, request: int) -> None:
        """A request whose last sample is gone leaves nothing behind, however many there will ever be."""
        prefix = self.prefixes[request]
        if not prefix.waiting and not prefix.running:
            self._release(self.prefixes.pop(request))

    # -- the way in

    def _admit(self, work: Work, tokens: int) -> None:
        """Start samples whose prefix is there, in their order, and compute the prefixes of the others."""
        prefilled: set[int] = set()
        for sequence in self.waiting[: max(0, self.rows - len(self.running))]:
            prefix = self.prefixes[sequence.request]
            if prefix.ready:
                if not self._start(sequence, prefix, work, tokens):
                    return
            elif work.budget and sequence.request not in prefilled:
                if prefilled and len(prefix.tokens) - prefix.cached > work.budget:
                    # It opens the next round: a chunk that continues a sequence costs more than one that begins it.
                    work.budget = 0
                elif self._house(prefix, sequence.request):
                    work.compute(prefix, len(prefix.tokens))
                    prefilled.add(sequence.request)
                else:
                    return

    def _look_ahead(self, work: Work) -> None:
        """Compute prefixes that no row is free for yet along with the others: one long pass costs less than two short
        ones. On blocks only that nobody who runs can come to need."""
        needed = sum(-(-(sequence.limit - 1) // self.block) - len(sequence.blocks) for sequence in self.running)
        for request in dict.fromkeys(sequence.request for sequence in self.waiting):
            prefix = self.prefixes[request]
            if prefix.ready or prefix.blocks:
                continue
            blocks = -(-len(prefix.tokens) // self.block)
            if len(prefix.tokens) > work.budget or self.pool.free < needed + blocks:
                return
            self._grow(prefix, len(prefix.tokens))
            work.compute(prefix, len(prefix.tokens))

    def _start(self, sequence: SequenceState, prefix: SharedPrompt, work: Work, tokens: int) -> bool:
        """Let the sample run on the blocks of its prefix; False when there is no room."""
        stop = self._reach(sequence, tokens)
        filled, rest = divmod(prefix.cached, self.block)
        if not self._room_for(-(-stop // self.block) - filled, sequence.request):
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda s: s.order)
        prefix.waiting -= 1
        prefix.running += 1
        sequence.blocks, sequence.cached = prefix.blocks[:filled], prefix.cached
        self.pool.share(sequence.blocks)
        self._grow(sequence, stop)
        if rest:
            # The prefix's last block is filled in part; each sample goes on in a copy of its own.
            work.copies.append((prefix.blocks[filled], sequence.blocks[filled]))
        if sequence.ready:
            work.decode.append(sequence)
        else:
            work.compute(sequence, len(sequence.tokens) - 1)
        return True

    def _house(self, prefix: SharedPrompt, request: int) -> bool:
        """Blocks for the whole prefix; False when there is no room."""
        if not self._room_for(-(-len(prefix.tokens) // self.block) - len(prefix.blocks), request):
            return False
        self._grow(prefix, len(prefix.tokens))
        return True

    def _room_for(self, blocks: int, request: int) -> bool:
        """Whether a newcomer may take so many: one block is left to each who runs, so that it does not push them out.

        When nobody runs, prefixes of later requests give way.
        """
        while not self.running and self.pool.free < blocks and self._give_up_a_prefix(request):
            pass
        return self.pool.free >= blocks + len(self.running)

    # -- room in the cache

    def _reach(self, sequence: SequenceState, tokens: int) -> int:
        """Tokens that are cached after a round of `tokens` passes; the last one produced is not fed any more."""
        return min(len(sequence.tokens) + tokens - 1, sequence.limit - 1)

    def _grow(self, part: Span, stop: int) -> None:
        while len(part.blocks) * self.block < stop:
            part.blocks.append(self.pool.take())

    def _extend(self, sequence: SequenceState, stop: int) -> bool:
        """Blocks for the first `stop` tokens of a running sample; False when it lost its place over it."""
        missing = -(-stop // self.block) - len(sequence.blocks)
        while self.pool.free < missing:
            if self._give_up_a_prefix(sequence.request):
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._grow(sequence, stop)
        return True

    def _give_up_a_prefix(self, request: int) -> bool:
        """Free the youngest prefix that nobody runs on, of those that came after `request`."""
        for number, prefix in reversed(self.prefixes.items()):
            if number <= request:
                break
            if prefix.blocks and not prefix.running:
                self._release(prefix)
                return True
        return False

    def _preempt(self, sequence: SequenceState) -> None:
        self.preempted += 1
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=lambda s: s.order)
        prefix = self.prefixes[sequence.request]
        prefix.running -= 1
        prefix.waiting += 1

    def _release(self, part: Span) -> None:
        self.pool.drop(part.blocks)
        part.blocks, part.cached = [], 0
