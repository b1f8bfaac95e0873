"""Fused AdamW with fp32 master weights in Triton. One kernel updates all parameters in one pass.

Gradients are read in bf16 or fp32. Moments and master weight are read and written once, and the model weight is written
in the same pass. The reference is torch's AdamW on the master weights (`train/optim.py`): gradients are cast to fp32
and clipped, and the updated master weights are copied to the model weights. `plain_step` computes the same update in
plain torch.
"""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from lockstep.device.base import first_sentence, sent
from lockstep.kernels.triton_math import runs_on

BLOCK = 4096
# Maps each supported dtype of weights and gradients to its Triton dtype.
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# A row of the table has six columns: the addresses of an entry's five tensors, and their number of elements.
COLUMNS = tl.constexpr(6)


class Entry(NamedTuple):
    """The tensors of one parameter that an AdamW step reads or writes, its weight decay, and the factor on its learning
    rate."""

    weight: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    decay: float
    ratio: float = 1.0


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    table,
    numbers,
    owners,
    parts,
    clip,
    keep_mean,
    take_mean,
    keep_square,
    take_square,
    epsilon,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Updates one block of one parameter. Each Triton program handles one block."""
    block = tl.program_id(0)
    entry = tl.load(owners + block)
    row = table + entry * COLUMNS
    weight = tl.load(row).to(tl.pointer_type(WEIGHT))
    gradient = tl.load(row + 1).to(tl.pointer_type(GRADIENT))
    master = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    mean = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    square = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        gradient = tl.multiple_of(gradient, 16)
        master = tl.multiple_of(master, 16)
        mean = tl.multiple_of(mean, 16)
        square = tl.multiple_of(square, 16)
    size = tl.load(row + 5)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    places = tl.load(parts + block).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    decay = tl.load(numbers + entry * 3)
    rate = tl.load(numbers + entry * 3 + 1)
    spread = tl.load(numbers + entry * 3 + 2)
    g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32) * tl.load(clip)
    p = tl.load(master + places, mask=inside, other=0.0)
    m = tl.load(mean + places, mask=inside, other=0.0)
    v = tl.load(square + places, mask=inside, other=0.0)
    p -= decay * p
    m = keep_mean * m + take_mean * g
    v = keep_square * v + take_square * g * g
    p -= tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(v), spread) + epsilon)
    tl.store(mean + places, m, mask=inside)
    tl.store(square + places, v, mask=inside)
    tl.store(master + places, p, mask=inside)
    tl.store(weight + places, p.to(WEIGHT), mask=inside)


def fits(parameters: Sequence[torch.Tensor]) -> bool:
    """Returns whether the kernel supports all parameters. The parameters must be unsharded, contiguous, of a supported
    dtype, and on one device on which the kernel passes the trial (`works`)."""
    supported = bool(parameters) and all(
        # A sharded parameter is a DTensor.
        type(p.data) is torch.Tensor
        and runs_on(p)
        and p.is_contiguous()
        and p.dtype in TYPES
        and p.device == parameters[0].device
        for p in parameters
    )
    return supported and all(works(parameters[0].device, dtype) for dtype in {p.dtype for p in parameters})


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether kernel and reference agree on a random parameter (the trial). If they differ, warns that torch's
    AdamW is used."""

    def make_entry() -> Entry:
        draw = torch.Generator().manual_seed(0)
        weight, gradient, mean = (torch.randn(BLOCK + 7, generator=draw).to(device) for _ in range(3))
        square = torch.rand(BLOCK + 7, generator=draw).to(device)
        return Entry(weight.to(dtype), gradient.to(dtype), weight, mean, square, 0.1)

    fused, plain = make_entry(), make_entry()
    clip = torch.tensor(0.5, device=device)
    try:
        AdamwUpdate([fused]).step([3.0], clip, lr=0.01, betas=(0.9, 0.99), eps=1e-8)
        plain_step([plain], [3.0], clip, lr=0.01, betas=(0.9, 0.99), eps=1e-8)
        max_error = max(float((a - b).abs().max()) for a, b in zip(fused[2:5], plain[2:5], strict=True))
        rounding_error = float((fused.weight.float() - fused.master).abs().max())
    except (TypeError, RuntimeError, ValueError, OSError, subprocess.SubprocessError, TritonError) as error:
        warnings.warn(
            f"torch's AdamW is used, because triton_adamw failed on a trial: {first_sentence(error)}", stacklevel=2
        )
        return False
    # The numbers in the trial are up to about 5. The tolerances are one unit in the last place of fp32 and of the
    # weight's dtype.
    if max_error > 2e-6 or rounding_error > 5 * torch.finfo(dtype).eps:
        warnings.warn("torch's AdamW is used, because triton_adamw gives different results", stacklevel=2)
        return False
    return True


def plain_step(
    entries: Sequence[Entry],
    steps: Sequence[float],
    clip: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Reference implementation of `AdamwUpdate.step`."""
    for entry, count in zip(entries, steps, strict=True):
        gradient, rate = entry.gradient.float() * clip, lr * entry.ratio
        entry.master.sub_(rate * entry.decay * entry.master)
        entry.mean.mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
        entry.square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        spread = (1 - betas[1] ** count) ** 0.5
        entry.master.addcdiv_(
            entry.mean, (entry.square.sqrt() / spread).add_(eps), value=-rate / (1 - betas[0] ** count)
        )
        entry.weight.copy_(entry.master)


class AdamwUpdate:
    """One AdamW update of some parameters. The addresses of the tensors are sent to the device before the gradient norm
    is available, so that the device does not wait for the host."""

    def __init__(self, entries: Sequence[Entry]):
        # Keeps the tensors alive until the kernel is launched. A gradient that is not contiguous is copied.
        self.entries = [entry._replace(gradient=entry.gradient.contiguous()) for entry in entries]
        self.kinds: dict[_Kind, list[int]] = {}
        for index, entry in enumerate(self.entries):
            if entry.master.numel():
                self.kinds.setdefault(_kind(entry), []).append(index)
        self.tables = {kind: _Table([self.entries[i] for i in members]) for kind, members in self.kinds.items()}

    def step(
        self, steps: Sequence[float], clip: torch.Tensor, *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        """Runs the update. `steps` has the step count of each entry, including this update. The device scalar `clip`
        scales the gradients."""
        for kind, members in self.kinds.items():
            table = self.tables[kind]
            # The bias corrections and learning rates are computed on the host in double precision.
            numbers = []
            for i in members:
                rate, count = lr * self.entries[i].ratio, steps[i]
                bias = rate / (1 - betas[0] ** count), (1 - betas[1] ** count) ** 0.5
                numbers.append([rate * self.entries[i].decay, *bias])
            _step[(len(table.owners),)](
                table.addresses,
                sent(torch.tensor(numbers, dtype=torch.float32), clip.device),
                table.owners,
                table.parts,
                clip,
                betas[0],
                1 - betas[0],
                betas[1],
                1 - betas[1],
                eps,
                WEIGHT=TYPES[kind.weight],
                GRADIENT=TYPES[kind.gradient],
                ALIGNED=kind.aligned,
                BLOCK=BLOCK,
                num_warps=8,
            )


class _Kind(NamedTuple):
    """The properties of an `Entry` for which the kernel is compiled. Aligned tensors are accessed with vector
    instructions."""

    weight: torch.dtype
    gradient: torch.dtype
    aligned: bool


def _kind(entry: Entry) -> _Kind:
    numbers = [entry.master.numel(), *(tensor.data_ptr() for tensor in entry[:5])]
    return _Kind(entry.weight.dtype, entry.gradient.dtype, all(number % 16 == 0 for number in numbers))


class _Table:
    """The table of tensor addresses and sizes in device memory."""

    def __init__(self, entries: Sequence[Entry]):
        device = entries[0].master.device
        addresses = [[tensor.data_ptr() for tensor in entry[:5]] for entry in entries]
        sizes = tuple(entry.master.numel() for entry in entries)
        rows = [[*row, size] for row, size in zip(addresses, sizes, strict=True)]
        self.addresses = sent(torch.tensor(rows, dtype=torch.int64), device)
        self.owners, self.parts = _blocks(sizes, device)


@lru_cache(maxsize=16)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns for every block the index of its entry, and the index of the block within that entry."""
    counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
    owners = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    parts = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    return owners.to(device, torch.int32), parts.to(device, torch.int32)
