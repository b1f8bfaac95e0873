"""Sessions of the scheduler, with a make-believe model: later turns continue from what was cached, nothing leaks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.native.cached_spans import BlockPool, CachedSpan, SequenceState, SharedPrompt, StatePool
from lockstep.rollout.native.scheduler import Scheduler
from lockstep.rollout.native.sessions import ParkedSessions
from pretended_runner import Pretender


@dataclass(frozen=True)
class Talk:
    """A trajectory: its prompt, and for each turn the tokens that it samples and those that its tool then returns."""

    prompt: int
    turns: list[tuple[int, int]]
    pauses: list[int]
    """How many rounds the tool takes after each turn."""
    forgets: int = 0
    """How many tokens of its history the second turn changes."""


@dataclass
class TalkingPretender(Pretender):
    """Also plays the tools: asks for the next turn of a session some rounds after the turn before."""

    talks: list[Talk] = field(default_factory=list)
    due: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    turn: dict[int, int] = field(default_factory=dict)
    rounds: int = 0

    def play_all(self) -> None:
        self.due = {
            number: (0, [1000 * (number + 1) + i for i in range(talk.prompt)]) for number, talk in enumerate(self.talks)
        }
        while self.due or self.scheduler.unfinished:
            self.ask()
            if self.scheduler.unfinished:
                self.play(self.scheduler.next(self.passes))
                self.check_blocks()
                for sample in [one for one in self.samples if one.stop]:
                    self.samples.remove(sample)
                    self.answer(sample)
            self.rounds += 1
            assert self.rounds < 20_000, "does not come to an end"
        self.check_blocks()

    def ask(self) -> None:
        ready = [number for number, (when, _) in self.due.items() if when <= self.rounds]
        for number in ready:
            _, tokens = self.due.pop(number)
            turn = self.turn.get(number, 0)
            request = self.scheduler.num_requests
            limit = len(tokens) + self.talks[number].turns[turn][0]
            sample = SequenceState(tokens, request=request, prompt=len(tokens), limit=limit, session=number)
            prefix = SharedPrompt(tokens[:-1])
            self.prefixes.append(prefix)
            self.samples.append(sample)
            self.lengths[sample.order] = limit
            self.scheduler.add([prefix], [sample])

    def answer(self, sample: SequenceState) -> None:
        assert sample.session is not None
        number = sample.session
        talk, turn = self.talks[number], self.turn.get(number, 0)
        self.turn[number] = turn + 1
        if turn + 1 == len(talk.turns):
            self.scheduler.end_session(sample.session)
            return
        tokens = list(sample.tokens)
        if turn == 0 and talk.forgets:
            tokens = [*tokens[: -talk.forgets], 9]
        tokens += [10**6 * (number + 1) + 100 * turn + i for i in range(talk.turns[turn][1])]
        self.due[number] = (self.rounds + talk.pauses[turn], tokens)


def talking(
    talks: list[Talk], *, blocks: int, block: int, rows: int, budget: int, passes: int = 1, slots: int | None = None
) -> TalkingPretender:
    scheduler = Scheduler([], [], blocks=blocks, block=block, rows=rows, budget=budget, slots=slots)
    return TalkingPretender(scheduler, [], [], {}, passes, talks=talks)


def longest(talk: Talk) -> int:
    return talk.prompt + sum(sampled + returned for sampled, returned in talk.turns) + 1


@st.composite
def talks_strategy(draw: st.DrawFn) -> list[Talk]:
    talks = []
    for _ in range(draw(st.integers(1, 5))):
        turns = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4))
        pauses = [draw(st.integers(0, 12)) for _ in turns]
        prompt = draw(st.integers(1, 12))
        talks.append(Talk(prompt, turns, pauses, draw(st.integers(0, prompt + turns[0][0]))))
    return talks


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    talks=talks_strategy(),
    block=st.sampled_from([1, 2, 4, 16]),
    spare=st.integers(0, 30),
    rows=st.integers(1, 5),
    budget=st.integers(1, 40),
    passes=st.sampled_from([1, 3, 8]),
    more_slots=st.one_of(st.none(), st.integers(1, 6)),
)
def test_every_turn_reads_its_own_history_and_nothing_leaks(
    talks: list[Talk], block: int, spare: int, rows: int, budget: int, passes: int, more_slots: int | None
) -> None:
    least = Scheduler.least_blocks(max(map(longest, talks)), block)
    slots = None if more_slots is None else rows + more_slots
    played = talking(talks, blocks=least + spare, block=block, rows=rows, budget=budget, passes=passes, slots=slots)
    played.play_all()
    assert played.turn == {number: len(talk.turns) for number, talk in enumerate(talks)}
    assert not played.scheduler.parked.spans
    assert played.scheduler.pool.free == least + spare
    assert len(played.scheduler.states._free) == (slots or 0)
    assert played.scheduler.computed == played.prefilled


SOME = [Talk(6, [(5, 3), (4, 2), (2, 0)], [3, 1, 0]), Talk(9, [(3, 7), (6, 1)], [0, 9])]


def test_only_new_tokens_are_computed() -> None:
    """A prompt without its last token, then after each turn what the tool returned: the last sampled token of the turn
    is computed with it, and the last token of the tool is the input of the first pass."""
    played = talking(SOME, blocks=100, block=4, rows=4, budget=100)
    played.play_all()
    assert played.prefilled == (5 + 3 + 2) + (8 + 7)
    # The tokens before the last one of each turn.
    assert played.scheduler.reused == (10 + 10 + 7) + 11
    assert played.scheduler.parked.evicted == 0


def test_sessions_are_evicted_when_blocks_run_out_the_least_recently_used_first() -> None:
    scheduler = Scheduler([], [], blocks=7, block=4, rows=3, budget=100)
    played = TalkingPretender(scheduler, [], [], {}, 1)
    for session in (7, 8):
        sample = SequenceState(list(range(8)), request=scheduler.num_requests, prompt=8, limit=9, session=session)
        played.lengths[sample.order] = 9
        played.samples.append(sample)
        scheduler.add([SharedPrompt(list(range(7)))], [sample])
        while scheduler.unfinished:
            played.play(scheduler.next(1))
    assert list(scheduler.parked.spans) == [7, 8]
    assert scheduler.pool.free == 3
    large = SequenceState([5], request=2, prompt=1, limit=18)
    played.lengths[large.order] = 18
    scheduler.add([SharedPrompt([])], [large])
    while scheduler.unfinished:
        played.play(scheduler.next(1))
    assert list(scheduler.parked.spans) == [8]
    assert scheduler.preempted == 0
    assert scheduler.pool.free == 5


def parked_sessions(blocks: int, spans: list[list[int]], slots: int | None = None) -> ParkedSessions:
    """Sessions 0, 1, ... with these blocks, each read by as many sessions as name it, and a slot for each."""
    pool, states = BlockPool(blocks), StatePool(slots)
    for _ in range(blocks):
        pool.take()
    held = {block for span in spans for block in span}
    pool.drop(set(range(blocks)) - held)
    parked = ParkedSessions(pool, states, 4)
    for session, span in enumerate(spans):
        pool.share(set(span) & {block for other in spans[:session] for block in other})
        parked.spans[session] = CachedSpan([], list(span), 4 * len(span), states.take())
    return parked


@pytest.mark.parametrize(
    ("blocks", "left"),
    [
        (2, [0, 1, 2]),  # two are free
        (4, [1, 2]),  # the oldest session has two blocks of its own, and one that the second reads too
        (5, [2]),  # the shared block is free when both are gone
        (6, [2]),
        (7, []),
        (8, [0, 1, 2]),  # all blocks together are seven
    ],
)
def test_no_more_sessions_are_evicted_than_needed_and_none_in_vain(blocks: int, left: list[int]) -> None:
    parked = parked_sessions(8, [[0, 1, 2], [2, 3], [4]])
    others = parked.pool.take()  # of a running sequence
    assert parked.pool.free == 2
    assert parked.free_blocks(blocks) == (blocks < 8)
    assert list(parked.spans) == left
    assert parked.evicted == 3 - len(left)
    parked.pool.drop([others])


def test_slots_are_freed_as_blocks_are() -> None:
    parked = parked_sessions(9, [[0], [1], [2]], slots=4)
    assert [parked.free_slots(1), len(parked.spans)] == [True, 3]
    assert [parked.free_slots(5), len(parked.spans)] == [False, 3]
    assert [parked.free_slots(3), list(parked.spans)] == [True, [2]]


def test_a_sequence_without_room_leaves_the_sessions_parked() -> None:
    """A long prompt waits, because a running sequence has most blocks; what the sessions hold would not suffice."""
    scheduler = Scheduler([], [], blocks=12, block=4, rows=3, budget=100)
    played = TalkingPretender(scheduler, [], [], {}, 1)

    def add(tokens: int, limit: int, session: int | None = None) -> None:
        start = 100 * scheduler.num_requests
        sample = SequenceState(
            list(range(start, start + tokens)), request=scheduler.num_requests, prompt=tokens, limit=limit
        )
        sample.session = session
        played.lengths[sample.order] = limit
        played.samples.append(sample)
        scheduler.add([SharedPrompt(sample.tokens[:-1])], [sample])

    add(8, 9, session=7)
    while scheduler.unfinished:
        played.play(scheduler.next(1))
    add(20, 24)
    played.play(scheduler.next(1))
    played.play(scheduler.next(1))
    add(28, 30)
    played.play(scheduler.next(1))
    assert list(scheduler.parked.spans) == [7]
    while scheduler.unfinished:
        played.play(scheduler.next(1))


def test_a_session_that_ends_in_its_turn_keeps_nothing() -> None:
    scheduler = Scheduler([], [], blocks=20, block=4, rows=3, budget=100)
    played = TalkingPretender(scheduler, [], [], {}, 1)
    sample = SequenceState([1, 2, 3], prompt=3, limit=7, session=1)
    played.lengths[sample.order] = 7
    scheduler.add([SharedPrompt([1, 2])], [sample])
    played.play(scheduler.next(1))
    scheduler.end_session(1)
    while scheduler.unfinished:
        played.play(scheduler.next(1))
    assert scheduler.pool.free == 20


def test_a_changed_history_is_reused_up_to_the_change() -> None:
    """Ten tokens are cached after the first turn, in blocks of four. The last three of eleven change: eight are the
    same, two full blocks. With recurrent states nothing is reused, because they cannot go back."""
    talk = Talk(6, [(5, 3), (4, 0)], [0, 0], forgets=3)
    for slots, reused in ((None, 8), (9, 0)):
        played = talking([talk], blocks=100, block=4, rows=2, budget=100, slots=slots)
        played.play_all()
        assert played.scheduler.reused == reused


def forget_blocks(self: ParkedSessions, session: int) -> None:
    self.spans.pop(session, None)


def free_twice(self: ParkedSessions, session: int) -> None:
    span = self.spans.pop(session, None)
    if span is not None:
        self.pool.drop(span.blocks)
        self.pool._free.extend(span.blocks)


@pytest.mark.parametrize("mutation", [forget_blocks, free_twice])
def test_the_model_notices_blocks_that_leak_or_are_freed_twice(
    monkeypatch: pytest.MonkeyPatch, mutation: object
) -> None:
    monkeypatch.setattr(ParkedSessions, "end", mutation)
    played = talking(SOME, blocks=100, block=4, rows=4, budget=100)
    with pytest.raises(AssertionError):
        played.play_all()


def test_the_model_notices_a_block_that_is_written_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parked span whose blocks are given back, but are still read by the next turn."""
    park = ParkedSessions.park

    def freed(self: ParkedSessions, sequence: SequenceState) -> None:
        blocks = list(sequence.blocks)
        park(self, sequence)
        BlockPool.drop(self.pool, blocks)

    monkeypatch.setattr(ParkedSessions, "park", freed)
    with pytest.raises((AssertionError, IndexError)):
        talking(SOME, blocks=100, block=4, rows=4, budget=100).play_all()
