"""The rows of one update: every target exactly once over all ranks, rows whole, and in the order of the rows."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draws import draws
from lockstep.data.array_store import Joined, Store, stored
from lockstep.data.batching import shared_beginnings
from lockstep.data.updates import Update, arrange, even_groups, row_size, row_sizes, sequence_counts
from lockstep.parallel.world import World
from lockstep.types import Example, LabeledResponse, Origin, Ranking, ScoredExample, StepLabels


def row(number: int, prompt: int, *answers: int) -> Ranking:
    """A prompt with answers of these lengths; all rows have tokens of their own."""
    draw = random.Random(number)
    opening = [draw.randrange(10, 250) for _ in range(prompt)]
    made = [[draw.randrange(10, 250) for _ in range(length)] for length in answers]
    return Ranking(
        tuple(
            Example([*opening, *answer], [0] * prompt + [1] * len(answer), Origin("rows.jsonl", number))
            for answer in made
        )
    )


def everything(items: Sequence[Ranking], world_size: int, **cut: int | None) -> list[Update[Ranking]]:
    settings_ = {"tokens": None, "rows": None, **cut}
    return [arrange(items, World(rank, world_size), pad_id=0, **settings_) for rank in range(world_size)]


def words(items: Sequence[Ranking]) -> list[int]:
    """The targets of all rows, sequence after sequence."""
    return [word for item in items for example in item.examples for _, word in example.scored_tokens()]


rows = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=12
)


@settings(max_examples=draws(25, 60))
@given(
    rows=rows,
    ranks=st.integers(1, 4),
    cut=st.sampled_from([{"tokens": 60}, {"tokens": 500}, {"rows": 1}, {"rows": 3}]),
)
def test_targets_are_shared_out_exactly_once_and_rows_stay_whole(rows, ranks, cut) -> None:
    items = [row(number, prompt, *answers) for number, (prompt, answers) in enumerate(rows)]
    updates = everything(items, ranks, **cut)
    wanted = words(items)
    seen: list[int] = []
    holders: dict[int, set[tuple[int, int]]] = {}
    for rank, update in enumerate(updates):
        assert update.targets == len(wanted)
        assert len(update.batches) == len(updates[0].batches), "the ranks step together"
        for number, batch in enumerate(update.batches):
            # A target's place among all of the update's is where its word stands there.
            assert [wanted[place] for place in batch.index_K.tolist()] == batch.targets_K.tolist()
            seen += batch.index_K.tolist()
            for place in batch.index_K.tolist():
                holders.setdefault(int(update.item_S[update.sequence_K[place]]), set()).add((rank, number))
            if cut.get("tokens"):
                assert batch.input_ids_NT.numel() <= cut["tokens"]
            # What a loss relies on: a sequence's targets side by side and in order, the best of a row first.
            sequences = update.sequence_K[batch.index_K].tolist()
            for sequence in dict.fromkeys(sequences):
                first = sequences.index(sequence)
                length = int(update.lengths_S[sequence])
                start = int(update.lengths_S[:sequence].sum())
                assert batch.index_K[first : first + length].tolist() == list(range(start, start + length))
            members = list(dict.fromkeys(int(update.item_S[sequence]) for sequence in sequences))
            of_rows = [s for item in members for s in (update.item_S == item).nonzero()[:, 0].tolist()]
            assert list(dict.fromkeys(sequences)) == of_rows
    assert sorted(seen) == list(range(len(wanted)))
    assert all(len(where) == 1 for where in holders.values()), "a row was cut in two"
    assert holders.keys() == set(range(len(items)))


def test_what_is_counted_over_an_update() -> None:
    """Rows of two sequences, one, and three."""
    items = [row(0, 3, 2, 1), row(1, 2, 4), row(2, 1, 1, 3, 2)]
    (update,) = everything(items, 1, tokens=500)
    assert update.lengths_S.tolist() == [2, 1, 4, 1, 3, 2]
    assert update.item_S.tolist() == [0, 0, 1, 2, 2, 2]
    assert update.sequence_K.tolist() == [0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 5, 5]
    assert update.targets == 13
    (batch,) = update.batches
    sequences, local = update.sequences_of(batch)
    # Longest rows stand first on the line; their numbers are those of the rows.
    assert sorted(sequences.tolist()) == list(range(6))
    assert sequences[local].tolist() == update.sequence_K[batch.index_K].tolist()


def test_a_packed_row_takes_what_it_does_not_share() -> None:
    item = row(0, 10, 3, 5)
    assert row_size(item, packed=True) == 10 + 3 + 5
    assert row_size(item, packed=False) == 15
    (update,) = everything([item, row(1, 4, 2)], 1, tokens=24)
    assert [batch.input_ids_NT.numel() for batch in update.batches] == [24]
    assert update.batches[0].tokens == 13 + 15 + 6
    (padded,) = everything([item, row(1, 4, 2)], 1, rows=2)
    assert padded.batches[0].input_ids_NT.shape == (3, 15)
    assert padded.batches[0].packed_index_E is None


def test_rows_do_not_share_with_their_neighbours() -> None:
    """Two rows of the same prompt stay apart: only the sequences of one row stand together."""
    twin = Ranking(tuple(Example(e.ids, e.loss_mask, Origin("rows.jsonl", 9)) for e in row(0, 5, 2).examples))
    (update,) = everything([row(0, 5, 2), twin], 1, tokens=100)
    assert update.batches[0].input_ids_NT.numel() == 14
    assert shared_beginnings(row(0, 5, 2).examples) == [0]


@pytest.mark.parametrize("cut", [{"tokens": 64}, {"rows": 2}])
def test_a_rank_without_a_row_runs_something_that_trains_nothing(cut) -> None:
    updates = everything([row(0, 3, 2, 2)], 3, **cut)
    shares = [[len(batch.targets_K) for batch in update.batches] for update in updates]
    assert sorted(shares) == [[0], [0], [4]]
    for update in updates:
        (batch,) = update.batches
        sequences, local = update.sequences_of(batch)
        assert len(sequences) == (2 if len(batch.targets_K) else 0)
        assert len(local) == len(batch.targets_K)
        assert update.lengths_S.tolist() == [2, 2]


def test_other_items_are_arranged_alike() -> None:
    """Probes ask at places of their own: a word for each verdict, or one number for the whole text."""
    steps = StepLabels(
        ScoredExample([1, 2, 3, 4, 5], bytes(5), Origin("x", 0), positions=(1, 4), token_ids=(7, 8, 9)),
        ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)),
    )
    update = arrange([steps, steps], World(), tokens=100, rows=None, pad_id=0)
    assert update.targets == 12
    assert update.batches[0].targets_K.tolist() == [7, 8, 9] * 4
    assert update.batches[0].predictors_K.tolist() == [1, 1, 1, 4, 4, 4, 6, 6, 6, 9, 9, 9]
    judged = LabeledResponse(Example([1, 2, 3], [0, 0, 1], Origin("x", 1)), True)
    assert arrange([judged], World(), tokens=100, rows=None, pad_id=0).batches[0].targets_K.tolist() == [3]


def test_the_same_rows_are_arranged_alike_every_time() -> None:
    items = [row(number, 3 + number % 4, 2, 5) for number in range(9)]
    first, second = (everything(items, 2, tokens=80)[1] for _ in range(2))
    assert all(torch.equal(a.index_K, b.index_K) for a, b in zip(first.batches, second.batches, strict=True))


@given(count=st.integers(1, 700), size=st.integers(1, 300))
def test_groups_are_of_like_size(count: int, size: int) -> None:
    groups = list(even_groups(range(count), size))  # type: ignore[type-var]
    assert [i for group in groups for i in group] == list(range(count))
    sizes = [len(group) for group in groups]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-count // size)


def test_no_group_is_left_with_a_single_row() -> None:
    """The divergence of KTO needs two, so 513 rows are 256 and 257, not 512 and 1."""
    assert [len(group) for group in even_groups(range(513), 512)] == [256, 257]  # type: ignore[type-var]


def as_store(items: Sequence[Ranking]) -> Store[Ranking]:
    encoded = [
        Ranking(tuple(Example(array("q", e.ids), bytes(e.loss_mask), e.origin) for e in item.examples))
        for item in items
    ]
    data = stored(encoded, range(len(items)), {}, lambda number: Origin("rows.jsonl", number))
    assert data is not None
    return Store(data, lambda number: Origin("rows.jsonl", number))


def test_sizes_of_rows_by_hand(monkeypatch) -> None:
    """A prompt of 10 with answers of 3 and 5, and a prompt of 4 with one answer of 2; listed, stored and joined."""
    items = [row(0, 10, 3, 5), row(1, 4, 2)]
    expected = {(True, True): [18, 6], (True, False): [28, 6], (False, True): [15, 6], (False, False): [15, 6]}
    kept = as_store(items)
    # Items of a store must not be built for their sizes.
    monkeypatch.setattr(Store, "_at", lambda self, index: pytest.fail("an item was built"))
    for some, times in ((items, 1), (kept, 1), (Joined([kept, items]), 2), (Joined([kept]), 1)):
        for (packed, shared), sizes in expected.items():
            found = row_sizes(some, packed=packed, shared=shared)
            assert found.tolist() == sizes * times
            assert found.dtype == np.int64
        assert row_sizes(some, packed=True).tolist() == [18, 6] * times
        counts = sequence_counts(some)
        assert counts.tolist() == [2, 1] * times
        assert counts.dtype == np.int64
    for nothing in ([], Joined([])):
        assert row_sizes(nothing, packed=True).dtype == sequence_counts(nothing).dtype == np.int64
        assert len(row_sizes(nothing, packed=True)) == len(sequence_counts(nothing)) == 0


def test_numbers_of_an_update_are_of_all_ranks() -> None:
    (update,) = everything([row(0, 3, 2)], 1, tokens=20)
    assert update.local_only is False
    assert [batch.origins for batch in update.batches] == [(Origin("rows.jsonl", 0),)]
