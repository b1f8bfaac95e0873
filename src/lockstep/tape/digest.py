"""A tensor in a few numbers that tell how far two tensors are apart, without keeping either.

Four statistics, and a random projection of each of eight runs of rows. The projections of two tensors lie as far apart
as the tensors do, up to a factor near 1; the runs say in which rows. Then three profiles, each in eight random
projections: the sum of every column, and the sum of squares of every column and of every row. Rounding averages out in
such sums and what is systematic does not, so they tell the two apart (`parity/replay/systematic.py`). Signs come from
the shape alone, so that every device and version projects in the same way. Tapes of earlier versions have digests
without profiles.
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
# Where the distances end: all that a digest without profiles has.
SHORT = len(STATISTICS) + BLOCKS * SKETCH
PROFILES = ("column_sums", "column_squares", "row_squares")
MARKS = 8
LENGTH = SHORT + len(PROFILES) * MARKS


# Numbers that are digested together: a snapshot makes thousands of digests, mostly of small tensors, so what counts is
# the number of operators.
TOGETHER = 2**26


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """`LENGTH` numbers in fp32 on the tensor's device, so that many digests cross to the host at once."""
    return digests({"": tensor})[""]


@torch.no_grad()
def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of each tensor, those of one shape together (a collective when they are sharded: in the order given)."""
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
    """Products by element and sums alone: a device may run every matrix product in tf32 or bf16, and a projection that
    is one would then differ where the tensors do not."""
    count, rows, columns = rows_NRC.shape
    device = rows_NRC.device
    # One buffer for every product, which is as large as what is digested.
    buffer_NRC = torch.empty_like(rows_NRC)
    signs_SC, signs_RS = _signs(columns, 1, device).T.contiguous(), _signs(rows, 2, device)
    projected_NRS = torch.stack([torch.mul(rows_NRC, sign_C, out=buffer_NRC).sum(2) for sign_C in signs_SC], 2)
    projected_NRS.mul_(signs_RS)
    # The same cut that sharding over 2, 4 or 8 devices makes.
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
    """Each profile projected on every column of signs, without a matrix product."""
    return (profile_NP[:, None] * marks_PM.T).sum(2)


def _parts(names: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]


def distances(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """How far two digested tensors lie apart, by runs of rows; infinite where one is not finite."""
    difference_BS = (sketch(a) - sketch(b)).view(BLOCKS, SKETCH)
    if not bool(torch.isfinite(difference_BS).all()):
        return [math.inf] * BLOCKS
    return (difference_BS.square().mean(1)).sqrt().tolist()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return math.hypot(*distances(a, b))


def sketch(a: torch.Tensor) -> torch.Tensor:
    """Linear in the tensor: the sketch of a difference is the difference of sketches."""
    return a[len(STATISTICS) : SHORT].double()


def profiles(a: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """By name, `MARKS` numbers each; None of a digest without them."""
    if len(a) < LENGTH:
        return None
    return dict(zip(PROFILES, a[SHORT:LENGTH].double().view(-1, MARKS), strict=True))


def norm(a: torch.Tensor) -> float:
    return float(a[0])


def size_of(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as a digest sees it."""
    return (math.prod(shape), 1) if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def relative(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """The distance as a share of the larger tensor's norm. Two tensors of zeros are equal."""
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
    """1 and -1, the same on every device and in every version. Part of a tape's format."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + count)
    return torch.randint(0, 2, (count, each), generator=generator).float() * 2 - 1
