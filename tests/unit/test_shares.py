"""Who generates what: shares of like cost, and prompts that are taken from who has no room for them yet."""

from __future__ import annotations

from dataclasses import dataclass

from hand_rollouts import question
from lockstep.rollout import collect as shares_module
from lockstep.rollout.collect import AskedAhead, ExpectedLengths, Shares, balanced
from lockstep.types import Prompt, Sampling


@dataclass
class Count:
    """In one process what a store is to several."""

    value: int = 0

    def take(self, count: int) -> int:
        self.value += count
        return self.value - count


def ranks(costs: list[float], count: int) -> list[Shares]:
    begun = [Count() for _ in range(count)]
    return [Shares(costs, rank, count, begun) for rank in range(count)]


def test_the_longest_go_first_to_who_has_the_least() -> None:
    assert balanced([3, 9, 1, 5, 4], 2) == [[1, 0], [3, 4, 2]]  # 9 + 3 and 5 + 4 + 1
    assert balanced([1, 1, 1, 1, 1], 3) == [[0, 3], [1, 4], [2]]
    assert balanced([2], 3) == [[0], [], []]
    assert balanced([1, 9, 2], 1) == [[0, 1, 2]]
    # What a rank was asked for before is its own, and counts: 9 is with the first, so 4 and 5 go to the second.
    assert balanced([3, 9, 1, 5, 4], 2, {1: 0}) == [[1, 0], [3, 4, 2]]
    assert balanced([3, 9, 1, 5, 4], 2, {1: 1, 3: 1}) == [[4, 0, 2], [1, 3]]


def test_what_was_asked_ahead_is_taken_where_it_was_asked() -> None:
    """Both ranks, side by side: 5 + 2 x 10 tokens go to the first, 3 + 2 x 4 and 1 + 2 x 4 to the second."""
    first, second = (AskedAhead(rank, 2) for rank in (0, 1))
    prompts = [Prompt(question(n), [1] * length) for n, length in enumerate((3, 5, 1))]
    sampled, greedy = Sampling(max_tokens=9), Sampling(max_tokens=9, temperature=0.0)
    asked = [one.ask(prompts, range(70, 73), 2, sampled, [4, 10, 4]) for one in (first, second)]
    assert [[(request.key, request.n, len(request.ids)) for request in own] for own in asked] == [
        [(71, 2, 5)],
        [(70, 2, 3), (72, 2, 1)],
    ]
    for one in (first, second):
        assert one.take([70, 71], 1, sampled) == one.take([70, 71], 2, greedy) == {}
        assert one.take([90, 72, 71], 2, sampled) == {1: 1, 2: 0}
        assert one.take([70, 71, 72], 2, sampled) == {0: 1}  # once


def test_a_share_whose_owner_has_not_come_is_left_alone_while_there_is_something_to_do() -> None:
    one, two = ranks([1.0] * 8, 2)
    assert one.begin(10) == [0, 2, 4, 6]
    assert one.help(10, idle=False) == []
    assert two.begin(1) == [1]
    one._look_at = 0.0
    # Three of its four are left: half of them, rounded up; then half of one.
    assert one.help(10, idle=False) == [3, 5]
    assert two.begin(2) == [7]
    assert one.help(10, idle=False) == one.help(10, idle=True) == two.help(1, idle=True) == []
    assert (one.taken, two.taken) == (2, 0)


def test_who_is_idle_takes_from_who_never_comes_until_nothing_is_left() -> None:
    one, _, three = ranks([float(cost) for cost in range(9, 0, -1)], 3)
    found = one.begin(3)
    while some := one.help(2, idle=True):
        found += some
    assert sorted(found) == list(range(9))
    assert one.taken == 6
    assert three.begin(5) == []


def test_the_others_are_not_asked_in_every_round() -> None:
    one, _ = ranks([1.0] * 4, 2)
    one.begin(9)
    asked = []
    own = one._begun[1].take
    one._begun[1].take = lambda count: (asked.append(count), own(count))[1]  # type: ignore[method-assign]
    for _ in range(100):
        assert one.help(1, idle=False) == []
    assert shares_module.LOOK_SECONDS > 0
    assert len(asked) < 100


def test_lengths_are_those_of_the_last_responses_or_the_others_on_average() -> None:
    lengths = ExpectedLengths()
    one, two, new = (Prompt(question(row), [1]) for row in range(3))
    assert lengths.of([one, new]) == [1.0, 1.0]
    lengths.learn(one, 10.0)
    lengths.learn(two, 30.0)
    lengths.learn(one, 20.0)
    assert lengths.of([one, two, new]) == [20.0, 30.0, 25.0]
