"""The KV-cache blocks of sessions: a finished turn leaves its blocks, and the next turn of the session continues from
them."""

from __future__ import annotations

from lockstep.rollout.native.cached_spans import BlockPool, CachedSpan, SequenceState, StatePool
from lockstep.vision.spans import same_images_up_to


class ParkedSessions:
    """The cached tokens of sessions that wait for their next turn, the least recently used session first.

    A parked session has no row of the batch. Its blocks and its slot can be evicted at any time; the next turn then
    computes all its tokens again.
    """

    def __init__(self, pool: BlockPool, states: StatePool, block: int):
        self.pool, self.states, self.block = pool, states, block
        self.spans: dict[int, CachedSpan] = {}
        self.evicted = 0

    def park(self, sequence: SequenceState) -> None:
        """Takes over the blocks and the slot of a finished sequence. The last token of the sequence is not cached."""
        assert sequence.session is not None
        self.end(sequence.session)
        held = -(-sequence.cached // self.block)
        self.pool.drop(sequence.blocks[held:])
        self.spans[sequence.session] = CachedSpan(
            sequence.tokens[: sequence.cached],
            sequence.blocks[:held],
            sequence.cached,
            sequence.slot,
            images=sequence.images,
        )
        sequence.blocks, sequence.cached, sequence.slot = [], 0, 0

    def fit(self, sequence: SequenceState) -> bool:
        """Returns whether the sequence can continue from the parked tokens of its session. Tokens that differ from the
        tokens of the sequence are dropped first."""
        span = None if sequence.session is None else self.spans.get(sequence.session)
        if span is None:
            return False
        # The last token of a sequence is the input of its next pass, so it must not be cached.
        same = same_images_up_to(span.images, sequence.images, _common(span.tokens, sequence.tokens[:-1]))
        if same < span.cached:
            # The states of recurrent layers cannot go back. Keys and values can, to the end of a full block: an
            # earlier position may lie in a block that other sequences read.
            same = 0 if self.states.used else self._block_end(sequence, same)
            self.pool.drop(span.blocks[same // self.block :])
            span.tokens, span.blocks, span.cached = span.tokens[:same], span.blocks[: same // self.block], same
        assert sequence.session is not None
        if not same:
            self.end(sequence.session)
            return False
        # The sequence starts soon, so its session is evicted last.
        self.spans[sequence.session] = self.spans.pop(sequence.session)
        return True

    def _block_end(self, sequence: SequenceState, same: int) -> int:
        """Returns the end of the last full block among the first `same` tokens that divides no image whose tokens
        attend to each other in both directions."""
        end = same // self.block * self.block
        divided = [image.start for image in sequence.images if image.both_ways and image.start < end < image.stop]
        return self._block_end(sequence, divided[0]) if divided else end

    def cached(self, sequence: SequenceState) -> int:
        """Returns how many tokens of the sequence are parked."""
        span = None if sequence.session is None else self.spans.get(sequence.session)
        return 0 if span is None else span.cached

    def claim(self, sequence: SequenceState) -> CachedSpan | None:
        """Removes and returns the span from which the sequence continues, or None if nothing is parked. The caller owns
        the blocks and the slot of the span."""
        return None if sequence.session is None else self.spans.pop(sequence.session, None)

    def put_back(self, sequence: SequenceState, span: CachedSpan) -> None:
        """Parks a claimed span again."""
        assert sequence.session is not None
        self.spans[sequence.session] = span

    def end(self, session: int) -> None:
        """Frees what the session has parked, if anything."""
        span = self.spans.pop(session, None)
        if span is not None:
            release(span, self.pool, self.states)

    def free_blocks(self, blocks: int) -> bool:
        """Evicts sessions, the least recently used first, until `blocks` blocks are free. Returns False, and evicts
        none, if that is impossible. Blocks that others read too do not become free."""
        missing = blocks - self.pool.free
        if missing <= 0:
            return True
        if sum(len(span.blocks) for span in self.spans.values()) < missing:
            return False
        for count, freed in enumerate(self.pool.freed_by(self.spans.values()), start=1):
            if freed >= missing:
                self._evict(count)
                return True
        return False

    def free_slots(self, slots: int) -> bool:
        """Evicts sessions, the least recently used first, until `slots` slots are free. Returns False, and evicts none,
        if that is impossible."""
        missing = self.states.missing(slots)
        if missing > len(self.spans):
            return False
        self._evict(missing)
        return True

    def _evict(self, count: int) -> None:
        for session in list(self.spans)[:count]:
            self.end(session)
        self.evicted += count


def release(span: CachedSpan, pool: BlockPool, states: StatePool) -> None:
    """Frees the blocks and the slot of a span."""
    pool.drop(span.blocks)
    states.drop(span.slot)
    span.blocks, span.cached, span.slot = [], 0, 0


def _common(one: list[int], other: list[int]) -> int:
    """Returns the length of the common prefix of two lists."""
    if other[: len(one)] == one:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
