"""Micro-batches hold every row once, within the budget, evenly over devices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.batching import cost, micro_batch, plan_micro_batches, to_device
from lockstep.data.dataset import Dataset, Loader, steps_and_rows
from lockstep.types import Example, Origin


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    devices=st.integers(1, 4),
    tokens=st.integers(100, 400),
)
def test_packing_keeps_every_row_under_the_budget(lengths, devices, tokens):
    plan = plan_micro_batches(lengths, devices=devices, tokens=tokens, rows=None)
    assert len(plan) == devices
    assert len({len(share) for share in plan}) == 1
    members = [i for share in plan for batch in share for i in batch]
    assert sorted(members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= tokens for share in plan for batch in share)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), devices=st.integers(1, 4), rows=st.integers(1, 9)
)
def test_fixed_row_counts(lengths, devices, rows):
    plan = plan_micro_batches(lengths, devices=devices, tokens=None, rows=rows)
    assert len({len(share) for share in plan}) == 1
    members = [i for share in plan for batch in share for i in batch]
    assert sorted(members) == list(range(len(lengths)))
    assert all(len(batch) <= rows for share in plan for batch in share)


def test_devices_get_like_work():
    lengths = [1000, 10, 10, 10, 500, 500, 20, 30, 900, 100]
    plan = plan_micro_batches(lengths, devices=2, tokens=2000, rows=None)
    work = [sum(cost(lengths[i]) for batch in share for i in batch) for share in plan]
    assert max(work) / min(work) < 1.05


def example(ids, trained, row=0):
    return Example(ids, trained, Origin("f", row))


def test_packed_by_hand():
    batch = micro_batch([example([5, 6, 7], [0, 1, 1]), example([8, 9], [1, 1])], packed=True, pad_id=0)
    assert batch.input_ids_NT.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids_NT.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.lengths == (3, 2)
    # 6 and 7 are predicted from 5 and 6; 8 opens its row and is predicted by nothing; 9 from 8.
    assert batch.predictors_K.tolist() == [0, 1, 3]
    assert batch.targets_K.tolist() == [6, 7, 9]


def test_padded_by_hand():
    batch = micro_batch([example([5, 6, 7], [0, 1, 1]), example([8, 9], [0, 1])], packed=False, pad_id=3)
    assert batch.input_ids_NT.tolist() == [[5, 6, 7], [8, 9, 3]]
    assert batch.position_ids_NT.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert batch.predictors_K.tolist() == [0, 1, 3]
    assert batch.targets_K.tolist() == [6, 7, 9]
    assert batch.tokens == 5
    assert not batch.packed


@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_keeps_the_origins_of_its_rows(packed):
    rows = [example([5, 6, 7], [0, 1, 1], row=4), example([8, 9], [0, 1], row=2)]
    batch = micro_batch(rows, packed=packed, pad_id=0)
    assert batch.origins == (Origin("f", 4), Origin("f", 2))
    assert batch.index_K.tolist() == [0, 1, 2]
    assert batch.packed_index_E is None


def test_targets_have_their_place_in_the_update_and_on_the_rank():
    rows = [example([5, 6, 7], [0, 1, 1]), example([8, 9], [0, 1])]
    batch = micro_batch(rows, packed=True, pad_id=0, starts=[10, 3], places=[1, 0])
    assert batch.index_K.tolist() == [10, 11, 3]
    assert batch.local_index_K is not None
    assert batch.local_index_K.tolist() == [1, 2, 0]


def test_no_rows_train_nothing():
    batch = micro_batch([], packed=True, pad_id=3)
    assert batch.input_ids_NT.tolist() == [[3]]
    assert len(batch.targets_K) == 0


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"), [(1, None, (4, 10)), (2, None, (7, 20)), (3, None, (10, 30)), (None, 5, (5, 15))]
)
def test_steps_of_ten_rows_by_three(epochs, steps, expected):
    assert steps_and_rows(10, 3, epochs=epochs, steps=steps) == expected


def test_updates_run_on_over_the_epoch_and_visit_every_row():
    rows = [example([i, i], [0, 1], row=i) for i in range(10)]
    dataset = Dataset([rows[:6], rows[6:]], None, [])
    loader = Loader(dataset.sources, dataset.weights, rows_per_update=3, seed=5, shuffle=True, total_rows=20)
    seen = [[e.origin.row for e in loader.take(step)] for step in range(7)]
    assert [len(part) for part in seen] == [3, 3, 3, 3, 3, 3, 2]
    flat = [row for part in seen for row in part]
    assert sorted(flat[:10]) == list(range(10))
    assert sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    # A loader asked for a late update first gives the same rows: that is what a resume does.
    again = Loader(dataset.sources, dataset.weights, rows_per_update=3, seed=5, shuffle=True, total_rows=20)
    assert [e.origin.row for e in again.take(5)] == seen[5]


def test_a_row_over_the_budget_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(ValueError, match=r"row of 10 tokens .* of 5"):
        plan_micro_batches([3, 10], devices=1, tokens=5, rows=None)


def test_an_empty_share_holds_no_token() -> None:
    assert micro_batch([], packed=True, pad_id=0).tokens == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_to_the_device_wait_unless_the_memory_is_pinned(pinned, monkeypatch) -> None:
    """Pageable memory may be given to somebody else before an asynchronous copy has read it."""
    asked = []
    own = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: pinned)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, device, **how: asked.append(how["non_blocking"]) or own(t, device)
    )
    to_device(micro_batch([example([1, 2, 3], [0, 1, 1])], packed=True, pad_id=0), torch.device("cpu"))
    assert asked == [pinned] * 4
