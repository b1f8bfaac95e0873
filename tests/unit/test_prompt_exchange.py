"""Unfinished responses that move between the rollout workers of two ranks, through a real store."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from lockstep.rollout.worker.prompt_exchange import MovedPrompt, OpenRequests, PromptExchange
from lockstep.rollout.worker.worker_protocol import Ask, Begun
from lockstep.types import Completion, PartialResponse, Request, Sampling

SAMPLING = Sampling(max_tokens=8, seed=3)


@pytest.fixture
def ranks() -> list[PromptExchange]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [PromptExchange(rank, store) for rank in range(3)]


def prompt(rank: int = 0, number: int = 7) -> MovedPrompt:
    begun = Begun(PartialResponse([4, 5], [-0.5, -0.25]), (1, 2))
    return MovedPrompt(rank, number, Request([1, 2], 3, 2), SAMPLING, 2, {1: begun})


def response(sample: int, *ids: int) -> Completion:
    return Completion(0, sample, list(ids), [-1.0] * len(ids), "length")


def test_an_idle_rank_gets_prompts_and_returns_the_response(ranks: list[PromptExchange]) -> None:
    busy, idle, other = ranks
    assert busy.claim() is None  # nobody waits
    idle.want(idle=True)
    assert idle.received() == []
    ticket = busy.claim()
    assert ticket is not None
    assert other.claim() is None  # one rank fills a ticket
    busy.fill(ticket, [prompt()])
    assert idle.received() == [prompt()]
    assert idle.received() == []
    idle.give_back(0, 7, response(1, 4, 5, 6))
    assert busy.returned() == [(7, response(1, 4, 5, 6))]
    assert busy.returned() == other.returned() == []


def test_a_rank_that_is_no_longer_idle_gets_nothing(ranks: list[PromptExchange]) -> None:
    busy, first, second = ranks
    first.want(idle=True)
    second.want(idle=True)
    first.want(idle=False)
    ticket = busy.claim()  # the older ticket is passed over
    assert ticket is not None
    busy.fill(ticket, [prompt()])
    assert first.received() == []
    assert second.received() == [prompt()]
    # It waits again with a new ticket.
    first.want(idle=True)
    assert busy.claim() == ticket + 1


def test_a_rank_that_is_idle_again_keeps_its_ticket(ranks: list[PromptExchange]) -> None:
    busy, idle, _ = ranks
    for now in (True, False, True):
        idle.want(idle=now)
    assert busy.claim() == 0


def test_a_rank_does_not_fill_its_own_ticket(ranks: list[PromptExchange]) -> None:
    own, other, _ = ranks
    own.want(idle=True)
    assert own.claim() is None
    assert own.received() == []
    other.want(idle=True)
    assert own.claim() == 1


def opened(rank: int = 0, *, exact: bool = False, whole: bool = False) -> OpenRequests:
    return OpenRequests(rank, exact=exact, whole=whole)


def test_a_sample_that_moved_returns_to_the_rank_that_asked_for_it() -> None:
    ours, theirs = opened(0), opened(1)
    ours.add(Ask({5: Request([1], 3, 3)}, SAMPLING), version=2)
    begun = Begun(PartialResponse([9], [-1.0]), (2,))
    (moved,) = ours.give({5: {2: begun}})
    assert (ours.here, ours.moved) == (2, 1)
    ask = theirs.take(moved, 40)
    assert ask.begun == {40: {2: begun}}
    assert theirs.here == 1
    theirs.answer(40, response(2, 9, 8))
    assert theirs.answers == {}
    assert theirs.for_others == [(0, 5, response(2, 9, 8))]
    ours.answer(5, response(2, 9, 8))
    ours.answer(5, response(2, 9, 8))  # a second time
    assert ours.answers == {5: [response(2, 9, 8)]}
    assert ours.here == 2


def test_a_moved_sample_moves_on_and_home_again() -> None:
    ours, theirs = opened(0), opened(1)
    ours.add(Ask({5: Request([1], 3, 2)}, SAMPLING), version=2)
    (moved,) = ours.give_all()
    theirs.take(moved, 40)
    (back,) = theirs.give_all()
    assert (back.rank, back.number, back.version) == (0, 5, 2)
    theirs.answer(40, response(0, 1))  # generated before it moved: another worker has it now
    assert theirs.for_others == []
    ask = ours.take(back, 41)
    assert sorted(ask.begun[5]) == [0, 1]
    assert ours.here == 2
    ours.answer(5, response(0, 1))
    ours.answer(5, response(1, 2))
    assert len(ours.answers[5]) == 2
    assert ours.again() == []


def test_a_worker_that_starts_again_gets_what_is_left() -> None:
    kept, exact = opened(), opened(exact=True)
    for one in (kept, exact):
        one.add(Ask({1: Request([1], 3, 2), 2: Request([2], 4, 2)}, SAMPLING), version=0)
        one.answer(1, response(0, 7))
        one.answer(2, response(0, 7))
        one.answer(2, response(1, 7))
    (again,) = kept.again()
    assert again.begun == {1: {1: Begun()}}
    # The rounding depends on the batch, so the batch is the same.
    (whole,) = exact.again()
    assert (list(whole.requests), whole.begun) == ([1, 2], {})
    exact.answer(1, response(1, 7))
    assert exact.again() == []


def test_all_samples_of_an_environment_move_together() -> None:
    ours, theirs = opened(0, whole=True), opened(1, whole=True)
    ours.add(Ask({1: Request([1], 3, 2)}, SAMPLING), version=0)
    ours.answer(1, response(0, 7))
    (again,) = ours.again()
    assert again.begun == {}
    (moved,) = ours.give_all()
    assert sorted(moved.begun) == [0, 1]
    theirs.take(moved, 9)
    for sample in range(2):
        theirs.answer(9, response(sample, 8))
    for rank, number, completion in theirs.for_others:
        assert rank == 0
        ours.answer(number, completion)
    assert ours.answers == {1: [response(0, 7), response(1, 8)]}
