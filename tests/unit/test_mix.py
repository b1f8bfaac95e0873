"""The order of rows: every row once, shares by weight, nothing repeated early, and the same bits everywhere."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.sources.mix import Mixture, _numbers, permutation
from lockstep.errors import Refusal
from work import lines_run

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)
SEEDS = st.integers(-(2**70), 2**70)
WEIGHTS = st.floats(0.1, 10, allow_nan=False)


@st.composite
def weighted(draw: st.DrawFn) -> Mixture:
    """A mixture in which every source has at least one row an epoch."""
    sizes = draw(st.lists(st.integers(5, 30), min_size=1, max_size=3))
    weights = [draw(WEIGHTS) for _ in sizes]
    total = sum(map(Fraction, weights))
    weights = [max(weight, float(total / sum(sizes)) * 1.5) for weight in weights]
    return Mixture(sizes, weights, draw(SEEDS), draw(st.booleans()))


@given(SIZES, SEEDS, st.booleans(), st.integers(0, 5))
def test_without_weights_every_row_comes_once_an_epoch(sizes: list[int], seed: int, shuffle: bool, epoch: int) -> None:
    mixture = Mixture(sizes, None, seed, shuffle)
    every = [(source, row) for source, size in enumerate(sizes) for row in range(size)]
    order = mixture.order(epoch)
    assert len(order) == mixture.epoch_length == len(every)
    assert sorted(order) == every
    if not shuffle:
        assert list(order) == every


@given(weighted(), st.integers(0, 6))
def test_shares_follow_the_weights(mixture: Mixture, epoch: int) -> None:
    seen = Counter(source for source, _ in mixture.order(epoch))
    assert mixture.counts is not None
    assert [seen[source] for source in range(len(mixture.sizes))] == mixture.counts
    assert sum(mixture.counts) == mixture.epoch_length


@given(st.lists(WEIGHTS, min_size=2, max_size=5), st.sampled_from([1.0, 0.25, 1024.0]))
def test_counts_are_the_nearest_whole_rows_and_scale_free(weights: list[float], scale: float) -> None:
    mixture = Mixture([1000] * len(weights), weights, 0, True)
    total = sum(map(Fraction, weights))
    assert mixture.counts is not None
    for count, weight in zip(mixture.counts, weights, strict=True):
        assert abs(count - mixture.epoch_length * Fraction(weight) / total) < 1
    assert Mixture([1000] * len(weights), [weight * scale for weight in weights], 0, True).counts == mixture.counts


@given(weighted())
def test_no_row_comes_again_before_all_of_its_source_have_come(mixture: Mixture) -> None:
    visits = list(chain.from_iterable(mixture.order(epoch) for epoch in range(8)))
    for source, size in enumerate(mixture.sizes):
        rows = [row for from_source, row in visits if from_source == source]
        for start in range(0, len(rows), size):
            walk = rows[start : start + size]
            assert len(set(walk)) == len(walk)
            assert set(walk) <= set(range(size))
            if len(walk) == size:
                assert set(walk) == set(range(size))


@settings(max_examples=20)
@given(weighted(), st.integers(0, 4))
def test_an_epoch_needs_no_other_epoch(mixture: Mixture, epoch: int) -> None:
    expected = list(mixture.order(epoch))
    mixture.order(epoch + 1)
    assert list(mixture.order(epoch)) == expected


def test_half_weight_visits_the_other_half_next() -> None:
    mixture = Mixture([4, 12], [2, 14], 3, True)
    halves = [[row for source, row in mixture.order(epoch) if source == 0] for epoch in range(2)]
    assert len(halves[0]) == len(halves[1]) == 2
    assert sorted(halves[0] + halves[1]) == [0, 1, 2, 3]


def test_largest_remainder_by_hand() -> None:
    # 10 rows by 1:1:1 are quotas of 3.33 each, the first gets the row left over; by 1:3:5 1.11, 3.33, 5.56.
    assert Mixture([4, 3, 3], [1, 1, 1], 0, True).counts == [4, 3, 3]
    assert Mixture([4, 3, 3], [1, 3, 5], 0, True).counts == [1, 3, 6]


def test_unshuffled_weights_interleave_evenly_and_walk_on() -> None:
    mixture = Mixture([4, 2], [1, 2], 0, False)
    # Two rows of source 0 stand at 1/4 and 3/4, four of source 1 at 1/8, 3/8, 5/8, 7/8.
    assert list(mixture.order(0)) == [(1, 0), (0, 0), (1, 1), (1, 0), (0, 1), (1, 1)]
    assert list(mixture.order(1)) == [(1, 0), (0, 2), (1, 1), (1, 0), (0, 3), (1, 1)]


def test_seed_and_epoch_change_the_order() -> None:
    orders = [tuple(Mixture([50], None, seed, True).order(epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


def test_weighted_epochs_differ_in_rows_and_in_interleaving() -> None:
    epochs = [list(Mixture([50, 50], [1, 1], 0, True).order(epoch)) for epoch in range(3)]
    assert len({tuple(source for source, _ in epoch) for epoch in epochs}) == 3
    # Equal weights make an epoch one whole permutation of each source.
    assert len({tuple(row for source, row in epoch if source == 0) for epoch in epochs}) == 3


def test_generator_gives_the_published_numbers() -> None:
    # First outputs of splitmix64 for seed 1234567, as listed for the reference C code.
    assert _numbers(3, 1234567).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_permutation_equals_plain_integer_arithmetic() -> None:
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mix(mix(mix(golden ^ 42) + golden & mask ^ 1) + golden & mask ^ 5)
    numbers = [mix((key + (i + 1) * golden) & mask) for i in range(1000)]
    assert permutation(1000, 42, 1, 5).tolist() == sorted(range(1000), key=numbers.__getitem__)


def test_pinned_orders() -> None:
    """A change here changes the data order of every run in the world and breaks every resume."""
    assert list(Mixture([3, 2], None, 42, True).order(0)) == [(1, 1), (0, 0), (0, 1), (0, 2), (1, 0)]
    assert list(Mixture([3, 2], None, 42, True).order(1)) == [(1, 0), (1, 1), (0, 1), (0, 0), (0, 2)]
    assert list(Mixture([3, 3], [1, 2], 42, True).order(0)) == [(1, 2), (0, 2), (0, 0), (1, 0), (1, 1), (1, 2)]


def test_shuffling_has_no_visible_bias() -> None:
    # 6,000 permutations of 3: each of the 6 orders 1,000 times, standard deviation 29.
    seen = Counter(tuple(permutation(3, seed, epoch).tolist()) for seed in range(60) for epoch in range(100))
    assert len(seen) == 6
    assert all(abs(count - 1000) < 5 * 29 for count in seen.values())


def test_a_million_rows_take_no_more_python_than_a_thousand() -> None:
    few, many = (Mixture([700 * times, 300 * times], [1, 1], 0, True) for times in (1, 1000))
    assert lines_run(lambda: many.order(3)) <= 1.1 * lines_run(lambda: few.order(3))
    order = many.order(3)
    assert len(order) == 1_000_000
    assert isinstance(order[10][1], int)
    assert list(order[5:7]) == [order[5], order[6]]


@pytest.mark.parametrize(
    ("sizes", "weights", "why"),
    [
        ([], None, "there is none"),
        ([3, 0], None, r"source 1 \[no-rows\]"),
        ([3, 3], [1.0], "1 for 2 sources"),
        ([3, 3], [1.0, 0.0], r"source 1 \[out-of-range\]: 0\.0 "),
        ([3, 3], [float("nan"), 1.0], r"source 0 \[out-of-range\]: nan "),
        ([3, 3], [1.0, float("inf")], r"source 1 \[out-of-range\]: inf "),
        ([3, 3], [1000.0, 1.0], r"source 1 \[too-few-rows\].*1\.0 of 1001\.0 .* epoch of 6"),
    ],
)
def test_refuses(sizes: list[int], weights: list[float] | None, why: str) -> None:
    with pytest.raises(Refusal, match=why):
        Mixture(sizes, weights, 0, True)


def test_the_remedy_for_a_starved_source_works() -> None:
    with pytest.raises(Refusal, match="raise the weight to 200 or more"):
        Mixture([3, 3], [1000.0, 1.0], 0, True)
    assert Mixture([3, 3], [1000.0, 200.0], 0, True).counts == [5, 1]


def test_negative_epoch() -> None:
    with pytest.raises(ValueError, match="epoch -1"):
        Mixture([3], None, 0, True).order(-1)
