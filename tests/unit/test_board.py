"""Rows of recorded passes: who sits where, and what stands on the device of it."""

from __future__ import annotations

import pytest
import torch

from lockstep.rollout.native.cached_spans import SequenceState
from lockstep.rollout.native.decode_batch import DecodeBatch

SPARE = 99


@pytest.fixture
def batch() -> DecodeBatch:
    return DecodeBatch(8, 4, SPARE, torch.device("cpu"))


def sample(number: int, blocks: list[int], tokens: int = 5) -> SequenceState:
    ids = [100 * number + place for place in range(tokens)]
    return SequenceState(ids, blocks, tokens - 1, number=number, prompt=3, limit=20, keys=(number, -number))


def table(batch: DecodeBatch, row: int) -> list[int]:
    return batch.state.table_BM[row].tolist()


def test_a_sample_is_written_once_and_then_left_to_the_passes(batch: DecodeBatch) -> None:
    one, two = sample(1, [4, 5]), sample(2, [6])
    assert batch.assign_slots([one, two], within=2) == [0, 1]
    assert batch.state.tokens_B[:2].tolist() == [104, 204]
    assert batch.state.positions_B[:2].tolist() == [4, 4]
    assert batch.state.limits_B[:2].tolist() == [20, 20]
    assert batch.state.keys_B2[:2].tolist() == [[1, -1], [2, -2]]
    assert batch.state.done_B.tolist() == [False] * 2 + [True] * 6
    assert [table(batch, row)[:2] for row in range(3)] == [[4, 5], [6, 0], [SPARE, SPARE]]
    # What a pass wrote stays, also where the host does not know it yet; blocks that were added are added.
    batch.state.tokens_B[0], batch.state.positions_B[0] = 77, 9
    one.blocks.append(8)
    assert batch.assign_slots([one, two], within=2) == [0, 1]
    assert batch.state.tokens_B[:2].tolist() == [77, 204]
    assert batch.state.positions_B[:2].tolist() == [9, 4]
    assert table(batch, 0) == [4, 5, 8, 0]


def test_who_leaves_leaves_an_idle_row(batch: DecodeBatch) -> None:
    one, two, three = (sample(number, [number]) for number in (1, 2, 3))
    batch.assign_slots([one, two], within=4)
    assert batch.assign_slots([two], within=4) == [1]
    assert batch.state.done_B.tolist()[:2] == [True, False]
    assert table(batch, 0) == [SPARE] * 4
    # The free row is given to the next one.
    assert batch.assign_slots([two, three], within=4) == [1, 0]
    assert batch.state.done_B.tolist()[:2] == [False, False]
    assert table(batch, 0) == [3, 0, 0, 0]


def test_who_comes_back_to_other_blocks_is_written_anew(batch: DecodeBatch) -> None:
    """Between two rounds a sample may lose its blocks and start again, on as many others."""
    one, two = sample(1, [4, 5]), sample(2, [6, 7])
    batch.assign_slots([one, two], within=2)
    one.blocks = [1, 2]
    one.tokens.append(105)
    batch.assign_slots([one, two], within=2)
    assert table(batch, 0) == [1, 2, 0, 0]
    assert batch.state.tokens_B[0].item() == 105
    assert batch.state.positions_B[0].item() == 5


def test_a_smaller_pass_moves_those_behind_it(batch: DecodeBatch) -> None:
    samples = [sample(number, [number]) for number in range(5)]
    assert batch.assign_slots(samples, within=8) == [0, 1, 2, 3, 4]
    left = [samples[1], samples[4]]
    assert batch.assign_slots(left, within=2) == [1, 0]
    assert batch.state.tokens_B[:2].tolist() == [404, 104]
    assert batch.state.done_B.tolist() == [False, False] + [True] * 6
    assert table(batch, 4) == [SPARE] * 4
