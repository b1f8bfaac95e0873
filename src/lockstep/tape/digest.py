"""Digests: a few numbers per tensor, which are enough to estimate the distance between two tensors.

A digest has three parts.

- Four statistics of the tensor.
- A sketch: random projections of eight blocks of rows. The distance between two sketches estimates the distance between
  the tensors. The blocks show in which rows two tensors differ.
- Three profiles, each as eight random projections: the column sums, the column sums of squares and the row sums of
  squares. In the sums of a profile, rounding errors average out, but a systematic error does not
  (`parity/replay/tolerances.py`).

The random signs of the projections depend only on the shape of the tensor. This makes the digest of a tensor the same
on every device and in every version. Tapes of earlier lockstep versions have digests without profiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch.nn.functional import pad

from lockstep.parallel.sharding import whole

BLOCKS, SKETCH = 8, 4
STATISTICS = ("norm", "mean", "largest", "not_finite")
# Length of a digest without profiles.
SHORT = len(STATISTICS) + BLOCKS * SKETCH
PROFILES = ("column_sums", "column_squares", "row_squares")
MARKS = 8
LENGTH = SHORT + len(PROFILES) * MARKS
# The maximum number of elements whose digests are computed together. A model has thousands of small tensors, so the
# number of device operations dominates the time.
TOGETHER = 2**26


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the digest of a tensor, which is `LENGTH` fp32 numbers on the device of the tensor. `on_host` copies many
    digests at once."""
    return digests({"": tensor})[""]


@torch.no_grad()
def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the digest of each tensor. Tensors of the same shape are stacked and processed together. If tensors are
    sharded, all ranks must call this function with the tensors in the same order."""
    alike: dict[tuple[torch.Size, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.shape, tensor.device), []).append(name)
    found: dict[str, torch.Tensor] = {}
    for (shape, _), names in alike.items():
        for part in _parts(names, max(1, TOGETHER // max(1, shape.numel()))):
            rows_NRC = torch.stack([_rows(whole(tensors[name].detach())).float() for name in part])
            found |= zip(part, _digested(rows_NRC).unbind(), strict=True)
    return {name: found[name] for name in tensors}


def _digested(rows_NRC: torch.Tensor) -> torch.Tensor:
    """Returns the digests of stacked matrices, computed only with elementwise products and sums. A device may compute
    matrix products in tf32 or bf16, so the digest of the same tensor would depend on the device."""
    count, rows, columns = rows_NRC.shape
    device = rows_NRC.device
    # All products use the same buffer to save memory, because each product is as large as the input.
    buffer_NRC = torch.empty_like(rows_NRC)
    signs_SC, signs_RS = _signs(columns, 1, device).T.contiguous(), _signs(rows, 2, device)
    projected_NRS = torch.stack([torch.mul(rows_NRC, sign_C, out=buffer_NRC).sum(2) for sign_C in signs_SC], 2)
    projected_NRS.mul_(signs_RS)
    # With 2, 4 or 8 devices, each shard of the tensor consists of complete blocks.
    run = max(1, -(-rows // BLOCKS))
    sketch_NBS = pad(projected_NRS, (0, 0, 0, BLOCKS * run - rows)).view(count, BLOCKS, run, SKETCH).sum(2)
    torch.mul(rows_NRC, rows_NRC, out=buffer_NRC)
    row_squares_NR, column_squares_NC = buffer_NRC.sum(2), buffer_NRC.sum(1)
    sum_NC = rows_NRC.sum(1)
    size_N = row_squares_NR.sum(1).sqrt()
    if rows_NRC.numel():
        mean_N = sum_NC.sum(1) / (rows * columns)
        largest_N = torch.abs(rows_NRC, out=buffer_NRC).amax((1, 2))
    else:
        mean_N, largest_N = size_N, size_N
    statistics = torch.stack([size_N, mean_N, largest_N, (~torch.isfinite(size_N)).float()], 1)
    column_marks, row_marks = _signs(columns, 3, device, MARKS), _signs(rows, 4, device, MARKS)
    sums = _marked(sum_NC, column_marks), _marked(column_squares_NC, column_marks), _marked(row_squares_NR, row_marks)
    return torch.cat([statistics, sketch_NBS.flatten(1), *sums], 1)


def _marked(profile_NP: torch.Tensor, marks_PM: torch.Tensor) -> torch.Tensor:
    """Projects each profile on every column of random signs in `marks_PM`, without a matrix product."""
    return (profile_NP[:, None] * marks_PM.T).sum(2)


def _parts(names: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def distances(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """Returns the estimated distance between two tensors, given their digests, for each block of rows. The distances
    are infinite if a sketch is not finite."""
    difference_BS = (sketch(a) - sketch(b)).view(BLOCKS, SKETCH)
    if not bool(torch.isfinite(difference_BS).all()):
        return [math.inf] * BLOCKS
    return (difference_BS.square().mean(1)).sqrt().tolist()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return math.hypot(*distances(a, b))


def sketch(a: torch.Tensor) -> torch.Tensor:
    """Returns the sketch in a digest. Sketches are linear: the sketch of the difference of two tensors is the
    difference of their sketches."""
    return a[len(STATISTICS) : SHORT].double()


def profiles(a: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Returns `MARKS` numbers for each profile of a digest. Returns None if the digest has no profiles."""
    if len(a) < LENGTH:
        return None
    return dict(zip(PROFILES, a[SHORT:LENGTH].double().view(-1, MARKS), strict=True))


def norm(a: torch.Tensor) -> float:
    return float(a[0])


def size_of(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the number of rows and columns of the matrix to which the digest reshapes a tensor of this shape."""
    return (math.prod(shape), 1) if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def relative(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """Estimates from two digests the distance of their tensors, divided by the larger of the two tensor norms. The
    relative distance of two zero tensors is 0."""
    difference, size = distance(a, b), max(norm(a), norm(b), floor)
    if not math.isfinite(difference) or not math.isfinite(size):
        return math.inf
    return difference / size if size else difference


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor.flatten(0, -2)


@lru_cache(maxsize=256)
def _signs(count: int, seed: int, device: torch.device, each: int = SKETCH) -> torch.Tensor:
    return sign_table(count, seed, each).to(device)


def sign_table(count: int, seed: int, each: int) -> torch.Tensor:
    """Returns random signs (1 and -1), which are identical on every device and version. The signs are part of the tape
    format."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + count)
    return torch.randint(0, 2, (count, each), generator=generator).float() * 2 - 1


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors to the CPU. Tensors of the same shape and dtype are copied in one transfer."""
    alike: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.shape, tensor.dtype), []).append(name)
    found: dict[str, torch.Tensor] = {}
    for names in alike.values():
        found |= zip(names, torch.stack([tensors[name] for name in names]).cpu().unbind(), strict=True)
    return {name: found[name] for name in tensors}
