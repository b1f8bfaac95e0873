"""The scheduler: continuous batching of sequences over a KV cache with a limited number of blocks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.kernels.mixer_states import EMPTY
from lockstep.rollout.native.cached_spans import BlockPool, CachedSpan, SequenceState, SharedPrompt, StatePool
from lockstep.rollout.native.sessions import ParkedSessions, release

# Continuous batching over a KV cache of limited size.
#
# A prompt prefix (all but the last token) is prefilled once, in chunks under a token budget. The sequences of the
# prompt join the running batch in order of arrival, as rows become free. Each sequence starts with the last prompt
# token. If a round decodes several tokens per sequence, free rows are filled before decoding continues, because small
# and large batches take about the same time. When blocks run out, parked sessions are evicted first, then unused
# prefixes; then the youngest running sequence is preempted and recomputed later. The oldest sequence always makes
# progress, so every request finishes.
#
# A later turn of a session has an empty prefix: the sequence continues from the parked blocks of its session and
# prefills the new tokens itself, as a preempted sequence does.


@dataclass
class Work:
    """The work of one round, in this order: KV-cache blocks and states to copy, sequences and prefixes to prefill up to
    a position, and sequences to decode."""

    budget: int
    """Number of tokens that can still be prefilled in this round."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    """The states of recurrent layers to copy, as (source, target) slots."""
    prefill: list[tuple[CachedSpan, int]] = field(default_factory=list)
    decode: list[SequenceState] = field(default_factory=list)

    def compute(self, part: CachedSpan, stop: int) -> None:
        """Schedules the prefill of the tokens of `part` up to position `stop`, as far as the budget allows. An image
        whose tokens attend to each other in both directions is not divided, even if it exceeds the budget."""
        tokens = min(stop - part.cached, self.budget)
        for image in part.images if tokens else ():
            if image.both_ways and image.start < part.cached + tokens < image.stop:
                tokens = (image.start if image.start > part.cached else image.stop) - part.cached
        if tokens:
            self.budget = max(0, self.budget - tokens)
            self.prefill.append((part, part.cached + tokens))


class Scheduler:
    """Plans the rounds of prefill and decoding. `prefixes[i]` is the prompt prefix of request i until the last sequence
    of the request ends. At most `rows` sequences run, and at most `budget` tokens are prefilled per round."""

    def __init__(
        self,
        prefixes: Sequence[SharedPrompt],
        sequences: Sequence[SequenceState],
        *,
        blocks: int,
        block: int,
        rows: int,
        budget: int,
        slots: int | None = None,
    ):
        self.prefixes: dict[int, SharedPrompt] = {}
        self.num_requests = 0
        """The number of requests so far, which is also the index of the next request."""
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.pool = BlockPool(blocks)
        self.states = StatePool(slots)
        self.block, self.rows, self.budget = block, rows, budget
        self.parked = ParkedSessions(self.pool, self.states, block)
        self.preempted = 0
        self.on_preempt: Callable[[SequenceState], None] = lambda sequence: None
        """Called with a running sequence before it loses its blocks."""
        self.computed = 0
        """The number of tokens that were prefilled, again after an eviction included."""
        self.reused = 0
        """The number of prompt tokens that later turns took from parked blocks."""
        self.add(prefixes, sequences)

    def add(self, prefixes: Sequence[SharedPrompt], sequences: Sequence[SequenceState]) -> None:
        """Adds requests at the end of the queue; they get the next free request indices."""
        self.prefixes |= enumerate(prefixes, start=self.num_requests)
        self.num_requests += len(prefixes)
        self.waiting += sorted(sequences, key=lambda sequence: sequence.order)
        for sequence in sequences:
            prefix = self.prefixes[sequence.request]
            prefix.waiting += 1
            if self.parked.fit(sequence):
                prefix.tokens = []

    @staticmethod
    def least_blocks(limit: int, block: int) -> int:
        """Returns the number of blocks for a sequence of `limit` tokens, plus one for the partly filled last block of
        its prefix."""
        return -(-limit // block) + 1

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def left(self) -> list[SequenceState]:
        """Returns the unfinished sequences in order of arrival."""
        return sorted([*self.running, *self.waiting], key=lambda sequence: sequence.order)

    def next(self, tokens: int) -> Work:
        """Plans the next round, in which a sequence can produce up to `tokens` tokens."""
        work = Work(self.budget)
        # The oldest sequences are scheduled first. Because preemption affects only younger sequences, no sequence that
        # is already scheduled loses its blocks.
        for sequence in list(self.running):
            if sequence.blocks and not sequence.ready:
                work.compute(sequence, len(sequence.tokens) - 1)
            elif sequence.blocks and self._extend(sequence, self._stop_after(sequence, tokens)):
                work.decode.append(sequence)
        self._admit(work, tokens)
        if tokens > 1 and work.prefill:
            self._look_ahead(work)
            # This round only prefills. Decoding continues in the next round, which uses the blocks that this round
            # allocates.
            work.decode.clear()
        self.computed += sum(stop - part.cached for part, stop in work.prefill)
        assert work.prefill or work.decode, "the KV cache has room for a full sequence, so one sequence can always run"
        return work

    def schedule_ahead(self, tokens: int) -> Work:
        """Plans the next round before the tokens of the current round are known: the sequences that continue, and new
        sequences on rows that will be free. The new tokens of later turns are prefilled first. Returns empty work if
        the current round may change the schedule, because a prompt needs several passes or blocks may run out."""
        work = Work(self.budget)
        if tokens == 1 or not all(sequence.ready for sequence in self.running):
            return work
        continuing = [sequence for sequence in self.running if len(sequence.tokens) + tokens < sequence.limit]
        stops = [self._stop_after(sequence, 2 * tokens) for sequence in continuing]
        missing = (
            -(-stop // self.block) - len(sequence.blocks) for sequence, stop in zip(continuing, stops, strict=True)
        )
        added = self.waiting[: self.rows - len(continuing)]
        if not (self._start_at_once(added) and self.parked.free_blocks(sum(max(0, blocks) for blocks in missing))):
            return work
        for sequence, stop in zip(continuing, stops, strict=True):
            self._grow(sequence, stop)
        work.decode = continuing
        for sequence in added:
            if not self._start(sequence, self.prefixes[sequence.request], work, tokens):
                break
            if not sequence.ready and (sequence, len(sequence.tokens) - 1) in work.prefill[-1:]:
                work.decode.append(sequence)
        self.computed += sum(stop - part.cached for part, stop in work.prefill)
        return work

    def finish(self, sequence: SequenceState, *, park: bool = True) -> None:
        """Frees the blocks of a finished sequence, or parks them if the sequence has a session. Also frees the blocks
        of the sequence's prompt if no other sequence of this prompt is left."""
        self.running.remove(sequence)
        if park and sequence.session is not None:
            self.parked.park(sequence)
        else:
            self._release(sequence)
        self.prefixes[sequence.request].running -= 1
        self._drop_if_done(sequence.request)

    def end_session(self, session: int) -> None:
        """Frees the parked blocks of a session that has no further turn. An unfinished turn continues, and its blocks
        are freed when it ends."""
        self.parked.end(session)
        for sequence in (*self.running, *self.waiting):
            if sequence.session == session:
                sequence.session = None

    def cancel(self, sequence: SequenceState) -> None:
        """Removes a running or waiting sequence and frees its blocks."""
        if sequence in self.running:
            self.finish(sequence, park=False)
            return
        self.waiting.remove(sequence)
        self.prefixes[sequence.request].waiting -= 1
        self._drop_if_done(sequence.request)

    def _drop_if_done(self, request: int) -> None:
        """Removes a request if its last sequence has ended."""
        prefix = self.prefixes[request]
        if not prefix.waiting and not prefix.running:
            self._release(self.prefixes.pop(request))

    # -- admission

    def _admit(self, work: Work, tokens: int) -> None:
        """Starts waiting sequences whose prefix is cached, in order of arrival, and schedules the prefill of the other
        prefixes."""
        prefilled: set[int] = set()
        for sequence in self.waiting[: max(0, self.rows - len(self.running))]:
            prefix = self.prefixes[sequence.request]
            if prefix.ready:
                if not self._start(sequence, prefix, work, tokens):
                    return
            elif work.budget and sequence.request not in prefilled:
                if prefilled and len(prefix.tokens) - prefix.cached > work.budget:
                    # Leave this prefix for the next round, because a prefill chunk that continues a prefix is slower
                    # than a first chunk.
                    work.budget = 0
                elif self._allocate(prefix, sequence.request):
                    work.compute(prefix, len(prefix.tokens))
                    prefilled.add(sequence.request)
                else:
                    return

    def _look_ahead(self, work: Work) -> None:
        """Also prefills prefixes whose sequences have no free row yet, because one long pass is faster than two short
        passes. Uses only blocks that the running sequences cannot need."""
        needed = sum(-(-(sequence.limit - 1) // self.block) - len(sequence.blocks) for sequence in self.running)
        for request in dict.fromkeys(sequence.request for sequence in self.waiting):
            prefix = self.prefixes[request]
            if prefix.ready or prefix.blocks:
                continue
            blocks = -(-len(prefix.tokens) // self.block)
            if (
                len(prefix.tokens) > work.budget
                or self.pool.free < needed + blocks
                or self.states.missing(self._prefix_slots)
            ):
                return
            self._grow(prefix, len(prefix.tokens))
            prefix.slot = self.states.take()
            work.compute(prefix, len(prefix.tokens))

    def _start(self, sequence: SequenceState, prefix: SharedPrompt, work: Work, tokens: int) -> bool:
        """Starts the sequence on the parked blocks of its session or on the blocks of its prefix; returns False if the
        cache has no room."""
        stop = self._stop_after(sequence, tokens)
        # A claimed span is not evicted to make room for the rest of the sequence.
        parked = self.parked.claim(sequence)
        held = prefix.cached // self.block if parked is None else len(parked.blocks)
        if not (
            (parked is not None or self.states.missing(1) <= len(self.parked.spans))
            and self._has_room(-(-stop // self.block) - held, sequence.request)
            and (parked is not None or self.parked.free_slots(1))
        ):
            if parked is not None:
                self.parked.put_back(sequence, parked)
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda s: s.order)
        prefix.waiting -= 1
        prefix.running += 1
        if parked is None:
            self._start_on_prefix(sequence, prefix, stop, work)
        else:
            sequence.blocks, sequence.cached, sequence.slot = parked.blocks, parked.cached, parked.slot
            self.reused += parked.cached
            self._grow(sequence, stop)
        if sequence.ready:
            work.decode.append(sequence)
        else:
            work.compute(sequence, len(sequence.tokens) - 1)
        return True

    def _start_on_prefix(self, sequence: SequenceState, prefix: SharedPrompt, stop: int, work: Work) -> None:
        filled, partial = divmod(prefix.cached, self.block)
        sequence.blocks, sequence.cached = prefix.blocks[:filled], prefix.cached
        self.pool.share(sequence.blocks)
        self._grow(sequence, stop)
        if self.states.used:
            sequence.slot = self.states.take()
            # A sequence with an empty prefix starts with the initial states of the recurrent layers.
            work.state_copies.append((prefix.slot or EMPTY, sequence.slot))
        if partial:
            # The last block of the prefix is partly filled; each sequence continues in a copy.
            work.copies.append((prefix.blocks[filled], sequence.blocks[filled]))

    def _start_at_once(self, sequences: Sequence[SequenceState]) -> bool:
        """Returns whether waiting sequences need at most one prefill pass of their own tokens before they decode."""
        prefixes = [self.prefixes[sequence.request] for sequence in sequences]
        tokens = (
            len(sequence.tokens) - 1 - (self.parked.cached(sequence) or prefix.cached)
            for sequence, prefix in zip(sequences, prefixes, strict=True)
        )
        return all(prefix.ready for prefix in prefixes) and sum(tokens) <= self.budget

    def _allocate(self, prefix: SharedPrompt, request: int) -> bool:
        """Allocates the blocks of the prefix; returns False if the cache has no room."""
        if not self._has_room(-(-len(prefix.tokens) // self.block) - len(prefix.blocks), request):
            return False
        if not prefix.slot:
            while not self.parked.free_slots(self._prefix_slots) and not self.running and self._evict_prefix(request):
                pass
            if self.states.missing(self._prefix_slots):
                return False
            prefix.slot = self.states.take()
        self._grow(prefix, len(prefix.tokens))
        return True

    @property
    def _prefix_slots(self) -> int:
        """The number of free slots with which a prefix may take one. One slot per row stays free for sequences."""
        return 1 + max(0, self.rows - len(self.running))

    def _has_room(self, blocks: int, request: int) -> bool:
        """Returns whether `blocks` blocks can be allocated so that one free block per running sequence remains, to
        avoid preemption.

        Parked sessions are evicted, if that helps. If no sequence runs, prefixes of later requests are evicted too.
        """
        needed = blocks + len(self.running)
        while not self.parked.free_blocks(needed):
            if self.running or not self._evict_prefix(request):
                return False
        return True

    # -- space in the KV cache

    def _stop_after(self, sequence: SequenceState, tokens: int) -> int:
        """Returns how many tokens of the sequence are cached after a round of `tokens` passes; its last new token is
        not cached yet."""
        return min(len(sequence.tokens) + tokens - 1, sequence.limit - 1)

    def _grow(self, part: CachedSpan, stop: int) -> None:
        while len(part.blocks) * self.block < stop:
            part.blocks.append(self.pool.take())

    def _extend(self, sequence: SequenceState, stop: int) -> bool:
        """Allocates blocks for the first `stop` tokens of a running sequence; returns False if the sequence was
        preempted."""
        missing = -(-stop // self.block) - len(sequence.blocks)
        while not self.parked.free_blocks(missing):
            if self._evict_prefix(sequence.request):
                continue
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._grow(sequence, stop)
        return True

    def _evict_prefix(self, request: int) -> bool:
        """Evicts the youngest prefix that no running sequence uses, among requests later than `request`; returns False
        if there is no such prefix."""
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
        self.on_preempt(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=lambda s: s.order)
        prefix = self.prefixes[sequence.request]
        prefix.running -= 1
        prefix.waiting += 1

    def _release(self, part: CachedSpan) -> None:
        release(part, self.pool, self.states)
