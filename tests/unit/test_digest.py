"""Digests against their tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fault_kernels import kernels, products
from lockstep.tape.digest import (
    BLOCKS,
    LENGTH,
    SHORT,
    SKETCH,
    STATISTICS,
    digest,
    digests,
    distance,
    distances,
    relative,
)

SHAPES = [(7,), (1,), (64, 3), (8, 128), (33, 257), (5, 6, 32), (2, 3, 4, 16), (1, 512)]


def draw(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_are_those_of_the_tensor(shape: tuple[int, ...]) -> None:
    tensor = draw(shape, 0)
    found = dict(zip(STATISTICS, digest(tensor).tolist(), strict=False))
    numbers = tensor.flatten().double().tolist()
    assert found["norm"] == pytest.approx(math.sqrt(sum(x * x for x in numbers)), rel=1e-5)
    assert found["mean"] == pytest.approx(sum(numbers) / len(numbers), abs=1e-6)
    assert found["largest"] == pytest.approx(max(map(abs, numbers)), rel=1e-6)
    assert found["not_finite"] == 0


@pytest.mark.parametrize("together", [1, 40, 2**26])
def test_tensors_of_one_shape_are_digested_together(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.tape.digest.TOGETHER", together)
    tensors = {f"{shape} {seed}": draw(shape, seed) for seed in range(5) for shape in ((7,), (4, 5), (3, 0), (2, 2, 5))}
    tensors["bad"] = torch.full((4, 5), math.nan)
    found = digests(tensors)
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name], digest(tensor), equal_nan=True)
    assert found["bad"][STATISTICS.index("not_finite")] == 1
    assert found["(4, 5) 0"][STATISTICS.index("not_finite")] == 0


@pytest.mark.daily
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_digests_lie_as_far_apart_as_tensors(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Squared, the mean over many pairs is the real distance; a single pair stays near it."""
    ratios = []
    for seed in range(40):
        a, b = draw(shape, 2 * seed, dtype), draw(shape, 2 * seed + 1, dtype)
        real = float((a.double() - b.double()).norm())
        ratios.append((distance(digest(a), digest(b)) / real) ** 2)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.3)
    assert max(ratios) < 6


def test_a_small_difference_is_not_lost_in_a_large_tensor() -> None:
    a = draw((128, 256), 0)
    b = a + 1e-3 * draw((128, 256), 1)
    assert relative(digest(a), digest(b)) == pytest.approx(1e-3, rel=0.5)


def test_one_changed_element_is_seen_by_its_whole_size() -> None:
    """Every sign is 1 or -1, so a single difference is projected to exactly itself."""
    a = torch.zeros(24, 10)
    for row, column in itertools.product((0, 11, 23), (0, 9)):
        b = a.clone()
        b[row, column] = -3.0
        found = distances(digest(a), digest(b))
        assert found == [3.0 if block == row // 3 else 0.0 for block in range(BLOCKS)]


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_tensors_have_distance_0(shape: tuple[int, ...]) -> None:
    tensor = draw(shape, 3)
    assert distance(digest(tensor), digest(tensor.clone())) == 0.0
    assert relative(digest(tensor), digest(tensor.clone())) == 0.0
    assert relative(digest(torch.zeros(shape)), digest(torch.zeros(shape))) == 0.0


def test_memory_layout_does_not_matter() -> None:
    tensor = draw((16, 32), 4)
    scattered = tensor.t().contiguous().t()
    assert not scattered.is_contiguous()
    assert distance(digest(tensor), digest(scattered)) < 1e-5


def test_rows_and_columns_that_changed_places_are_told_apart() -> None:
    tensor = draw((16, 32), 5)
    for other in (tensor.flip(0), tensor.flip(1), tensor.roll(1, 0)):
        real = float((tensor - other).norm())
        assert distance(digest(tensor), digest(other)) > 0.3 * real


@pytest.mark.parametrize(("shape", "ranks"), list(itertools.product([(8,), (64, 3), (16, 5, 4), (24, 7)], [2, 4, 8])))
def test_runs_of_rows_are_whole_shards(shape: tuple[int, ...], ranks: int) -> None:
    """What changes in one rank's slice of the first axis shows in that rank's share of the runs, and nowhere else."""
    tensor = draw(shape, 6)
    for rank in range(ranks):
        other = tensor.clone()
        torch.chunk(other, ranks)[rank].add_(1.0)
        found = [block for block, apart in enumerate(distances(digest(tensor), digest(other))) if apart > 1e-3]
        share = BLOCKS // ranks
        assert found
        assert set(found) <= set(range(rank * share, (rank + 1) * share))


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 15, 17, 100])
def test_every_row_has_a_run(rows: int) -> None:
    tensor = draw((rows, 5), 6)
    found = []
    for row in range(rows):
        other = tensor.clone()
        other[row] += 1.0
        [block] = [b for b, apart in enumerate(distances(digest(tensor), digest(other))) if apart > 1e-3]
        found.append(block)
    assert found == [row // -(-rows // BLOCKS) for row in range(rows)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_infinitely_far(bad: float) -> None:
    fine = draw((16, 16), 7)
    broken = fine.clone()
    broken[3, 4] = bad
    assert digest(broken)[STATISTICS.index("not_finite")] == 1
    for pair in ((fine, broken), (broken, fine)):
        assert distance(digest(pair[0]), digest(pair[1])) == math.inf
        assert relative(digest(pair[0]), digest(pair[1])) == math.inf


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_an_empty_tensor_is_nothing(shape: tuple[int, ...]) -> None:
    found = digest(torch.zeros(shape))
    assert found.tolist() == [0.0] * LENGTH
    assert relative(found, found) == 0.0


def test_scalars_and_whole_numbers() -> None:
    assert digest(torch.tensor(-2.0))[:4].tolist() == [2.0, -2.0, 2.0, 0.0]
    ids = torch.tensor([[1, 2], [3, 4]])
    assert digest(ids)[0] == pytest.approx(30**0.5)
    assert digest(torch.tensor([True, False, True]))[0] == pytest.approx(2**0.5)


def test_a_share_of_the_larger_tensor_or_of_the_floor() -> None:
    a, b = torch.zeros(1, 1), torch.full((1, 1), 4.0)
    assert relative(digest(a), digest(b)) == 1.0
    assert relative(digest(b), digest(a)) == 1.0
    assert relative(digest(a), digest(b), floor=16.0) == 0.25


def test_signs_never_change() -> None:
    """A tape outlives the version that wrote it: the projection of a counting tensor, as it was first recorded."""
    sketch = digest(torch.arange(6.0).reshape(2, 3))[len(STATISTICS) : SHORT].reshape(BLOCKS, SKETCH)
    assert sketch[:2].tolist() == [[3.0, -1.0, 3.0, -1.0], [6.0, 4.0, 12.0, -4.0]]
    assert sketch[2:].abs().sum() == 0


def test_a_matrix_unit_of_less_precision_changes_no_digest() -> None:
    """A device may round the factors of every matrix product to bf16. Tensors that are the same stay the same."""
    tensors = {"embedding": draw((300, 128), 0), "layer": draw((4, 40, 64), 1), "vector": draw((128,), 2)}
    exact = digests(tensors)
    with kernels(products(round_to=torch.bfloat16)):
        rounded = tensors["embedding"] @ tensors["embedding"].T
        found = digests(tensors)
    assert not torch.allclose(rounded, tensors["embedding"] @ tensors["embedding"].T, rtol=1e-4), "products are exact"
    for name in tensors:
        assert torch.equal(found[name], exact[name]), name
