"""The scheduler alone, with a make-believe model: whatever the sizes, everything is finished and nothing is shared
that is written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draws import draws
from lockstep.rollout.native.cached_spans import BlockPool, SequenceState, SharedPrompt
from lockstep.rollout.native.scheduler import Scheduler
from pretended_runner import Job, pretend


@st.composite
def jobs_strategy(draw: st.DrawFn) -> list[Job]:
    jobs = []
    for _ in range(draw(st.integers(1, 6))):
        prompt, most = draw(st.integers(1, 20)), draw(st.integers(1, 12))
        lengths = draw(st.lists(st.integers(prompt + 1, prompt + most), min_size=1, max_size=4))
        jobs.append(Job(prompt, lengths, prompt + most))
    return jobs


@settings(max_examples=draws(120, 400), derandomize=True)
@given(
    jobs=jobs_strategy(),
    block=st.sampled_from([1, 2, 4, 16]),
    spare=st.integers(0, 12),
    rows=st.integers(1, 8),
    budget=st.integers(1, 40),
    passes=st.sampled_from([1, 3, 8]),
    prefix_slots=st.one_of(st.none(), st.integers(1, 4)),
)
def test_everything_is_finished_once_and_nothing_is_mixed_up(
    jobs: list[Job], block: int, spare: int, rows: int, budget: int, passes: int, prefix_slots: int | None
) -> None:
    """Also with recurrent layers, which have a slot per row and a few for prefixes."""
    least = Scheduler.least_blocks(max(job.limit for job in jobs), block)
    slots = None if prefix_slots is None else rows + prefix_slots
    played = pretend(jobs, blocks=least + spare, block=block, rows=rows, budget=budget, passes=passes, slots=slots)
    played.run()
    assert len(played.scheduler.states._free) == (slots or 0)
    assert sorted(played.finished) == sorted(played.lengths)
    assert played.scheduler.pool.free == least + spare
    assert all(not part.blocks and not part.cached for part in [*played.prefixes, *played.samples])


def test_a_prompt_is_prefilled_once_and_its_blocks_are_shared() -> None:
    # Ten prefix tokens are two whole blocks of 4 and a half-filled one. Eight samples of 11 + 3 tokens feed 13 of
    # them: each holds the two shared blocks, a copy of the third and a fourth.
    played = pretend([Job(11, [14] * 8, 14)], blocks=100, block=4, rows=8, budget=100)
    played.run()
    assert played.prefilled == 10
    assert played.most_blocks == 3 + 8 * 2
    assert played.scheduler.preempted == 0


def test_a_prefix_of_whole_blocks_is_not_copied() -> None:
    played = pretend([Job(9, [12] * 2, 12)], blocks=100, block=4, rows=8, budget=100)
    played.scheduler.next(1)
    for prefix in played.prefixes:
        prefix.cached = 8
    work = played.scheduler.next(1)
    assert not work.copies
    assert [sample.blocks[:2] for sample in work.decode] == [[0, 1], [0, 1]]
    assert work.decode[0].blocks[2] != work.decode[1].blocks[2]


def test_a_chunk_of_a_prompt_is_no_longer_than_the_budget() -> None:
    played = pretend([Job(24, [25], 26)], blocks=100, block=4, rows=8, budget=10)
    stops = []
    for _ in range(3):
        ((part, stop),) = played.scheduler.next(1).prefill
        stops.append(stop)
        part.cached = stop
    assert stops == [10, 20, 23]
    assert played.scheduler.next(1).decode == played.samples


def test_a_prompt_that_does_not_fit_the_rest_of_the_budget_opens_the_next_round() -> None:
    played = pretend([Job(7, [8], 9), Job(7, [8], 9), Job(3, [4], 9)], blocks=100, block=4, rows=8, budget=10)
    assert [stop for _, stop in played.scheduler.next(1).prefill] == [6]


def test_rows_are_filled_before_a_long_round() -> None:
    """Three prompts of 7 in passes of 10: with several tokens a round nobody decodes until all three are there."""
    jobs = [Job(7, [9], 9)] * 3
    rounds = {}
    for tokens in (1, 8):
        played = pretend(jobs, blocks=100, block=4, rows=8, budget=10, passes=tokens)
        rounds[tokens] = []
        for _ in range(4):
            work = played.scheduler.next(tokens)
            rounds[tokens].append((len(work.prefill), len(work.decode)))
            for part, stop in work.prefill:
                part.cached = stop
    assert rounds == {1: [(1, 0), (1, 1), (1, 2), (0, 3)], 8: [(1, 0), (1, 0), (1, 0), (0, 3)]}


def test_a_pass_over_prompts_takes_along_those_that_wait_for_a_row() -> None:
    jobs = [Job(7, [9], 9)] * 4
    prefilled = {
        tokens: [
            part.tokens
            for part, _ in pretend(jobs, blocks=100, block=4, rows=1, budget=20).scheduler.next(tokens).prefill
        ]
        for tokens in (1, 8)
    }
    # Three prefixes of six tokens fit into twenty.
    assert [len(prefixes) for prefixes in prefilled.values()] == [1, 3]


def test_nothing_is_taken_along_on_blocks_that_somebody_may_need() -> None:
    """The first needs 12 blocks of 4 for its 49 tokens, of which it holds the prompt's two at first; 14 are there."""
    jobs = [Job(7, [50], 50)] + [Job(7, [9], 9)] * 3
    played = pretend(jobs, blocks=14, block=4, rows=1, budget=100)
    assert len(played.scheduler.next(8).prefill) == 4
    assert played.scheduler.running == []
    played = pretend([Job(1, [50], 50), *jobs[1:]], blocks=14, block=4, rows=2, budget=100)
    # It runs at once, on two blocks of the 13 that 49 tokens take; only the prompt with a row of its own is computed.
    assert len(played.scheduler.next(8).prefill) == 1


def going_on(limits: list[int], blocks: int, rows: int = 8) -> tuple[list[int], list[int], int]:
    """Who goes on after a round of 8 passes, how many blocks each then has, and how many are free."""
    played = pretend([Job(1, [limit], limit) for limit in limits], blocks=blocks, block=4, rows=rows, budget=100)
    assert len(played.scheduler.next(8).decode) == min(rows, len(limits))
    staying = [sample.request for sample in played.scheduler.schedule_ahead(8).decode]
    return staying, [len(sample.blocks) for sample in played.samples], played.scheduler.pool.free


def test_who_goes_on_before_a_round_is_read() -> None:
    # A prompt of one token and 16 passes feed 16 tokens, four blocks. The second ends with the round's last token, and
    # keeps the two blocks of that; the third feeds 11 of its 12 tokens.
    assert going_on([40, 9, 12], blocks=20) == ([0, 2], [4, 2, 3], 11)
    assert going_on([9, 5], blocks=20) == ([], [2, 1], 17)


def test_who_waits_takes_the_row_of_one_who_is_known_to_end() -> None:
    # Nobody ends: nobody comes.
    assert going_on([40, 40], blocks=20, rows=1) == ([0], [4, 0], 16)
    # The first ends with the round; the second feeds 8 tokens in its first round, on two blocks.
    assert going_on([9, 40, 40], blocks=20, rows=1) == ([1], [2, 2, 0], 16)
    # One block is left to each who runs; without it nobody comes, and the others go on.
    assert going_on([40, 9, 40], blocks=8, rows=2) == ([0], [4, 2, 0], 2)


def test_nobody_goes_on_where_a_look_may_change_who_runs() -> None:
    # The second's prompt of two tokens is not computed: its row is free, and it cannot come.
    played = pretend([Job(1, [9], 9), Job(2, [9], 9)], blocks=20, block=4, rows=1, budget=100)
    assert len(played.scheduler.next(8).decode) == 1
    assert played.scheduler.schedule_ahead(8).decode == []
    # Two blocks each and two more each: eight, and there are seven.
    assert going_on([40, 40], blocks=7) == ([], [2, 2], 3)
    assert going_on([40, 40], blocks=8) == ([0, 1], [4, 4], 0)


def test_the_youngest_gives_way() -> None:
    jobs = [Job(2, [18], 18), Job(2, [18], 18)]
    played = pretend(jobs, blocks=Scheduler.least_blocks(18, 4) + 1, block=4, rows=2, budget=100)
    played.run()
    assert played.scheduler.preempted == 1
    assert played.finished == [(0, 0), (1, 0)]


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    """The old and large request must not wait until all the small ones behind it are through."""
    jobs = [Job(40, [44], 44)] + [Job(2, [8], 8)] * 30
    played = pretend(jobs, blocks=Scheduler.least_blocks(44, 4), block=4, rows=4, budget=4)
    played.run()
    assert (0, 0) in played.finished[:12]


def test_prefixes_do_not_take_turns_in_giving_way() -> None:
    """Two prompts of which the cache holds one at a time, each in several chunks."""
    jobs = [Job(30, [32], 32), Job(30, [32], 32)]
    played = pretend(jobs, blocks=Scheduler.least_blocks(32, 4), block=4, rows=2, budget=7)
    played.run()
    assert played.prefilled == 2 * 29


def test_a_pool_counts_its_readers() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert {first, second} == {0, 1}
    assert pool.free == 0
    pool.share([first])
    pool.drop([first, second])
    assert pool.free == 1
    pool.drop([first])
    assert pool.free == 2


def test_a_pool_too_small_for_one_sample_is_noticed() -> None:
    played = pretend([Job(2, [18], 18)], blocks=3, block=4, rows=2, budget=100)
    with pytest.raises(AssertionError, match="has room for a full sequence"):
        played.run()


def test_cancelled_sequences_leave_nothing_behind() -> None:
    """Two requests of two sequences on one row: one runs, three wait. A prompt goes with its last sequence."""
    played = pretend([Job(6, [9, 9], 9), Job(6, [9, 9], 9)], blocks=20, block=4, rows=1, budget=100)
    scheduler, (first, second, third, fourth) = played.scheduler, played.samples
    played.play(scheduler.next(1))
    played.play(scheduler.next(1))
    assert scheduler.running == [first]
    assert scheduler.left() == [first, second, third, fourth]
    scheduler.cancel(second)
    assert scheduler.waiting == [third, fourth]
    assert (scheduler.prefixes[0].waiting, scheduler.prefixes[0].running) == (0, 1)
    scheduler.cancel(first)
    assert list(scheduler.prefixes) == [1]
    assert scheduler.running == []
    assert scheduler.pool.free == 20
    scheduler.cancel(third)
    assert list(scheduler.prefixes) == [1]
    assert scheduler.unfinished
    scheduler.cancel(fourth)
    assert not scheduler.prefixes
    assert not scheduler.unfinished
    # Later requests have the next numbers.
    later = SequenceState([7, 8], request=2, prompt=2, limit=9)
    scheduler.add([SharedPrompt([7])], [later])
    assert list(scheduler.prefixes) == [2]
    assert scheduler.num_requests == 3
    assert scheduler.prefixes[2].waiting == 1
    assert scheduler.left() == [later]


def test_blocks_of_the_longest_sequence() -> None:
    assert [Scheduler.least_blocks(limit, 4) for limit in (1, 4, 5, 8, 9)] == [2, 2, 3, 3, 4]
