"""Reads tensors of safetensors files, complete or the part that a rank holds, in several threads.

The bytes are read into the memory of the target where that is possible: the target is in the host's memory, has the
stored dtype, and the part is contiguous in the file. Other targets, such as those on a device, are copied from a small
buffer of each thread. Files are not mapped, because a mapped file counts as memory of the process.
torch.distributed.checkpoint can read the same files, but it plans each call in Python, which takes minutes for a model
with 37,000 tensors, and importing it takes a second.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

# Threads that read at the same time. One thread is slower than a fast disk.
THREADS = 8
# Bytes that a thread reads at once: the size of its buffer.
BLOCK_BYTES = 2**22
# Of longer rows than this only the wanted part is read.
ROW_BYTES = 2**16
# Less than this is read by the calling thread, because starting threads takes longer.
THREADED_BYTES = 2**20
# The key of a header with the offsets of each slice, which torch.distributed.checkpoint writes.
SLICES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "I64": torch.int64,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredSlice:
    """A rectangular part of a tensor in a file: the complete tensor, or the part that a rank wrote."""

    file: Path
    begin: int
    """The position of the first byte in the file."""
    offsets: tuple[int, ...]
    """The position of the first element in the complete tensor."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """The dtype and the shape of a stored tensor, and its slices."""

    name: str
    kind: str
    """The name of the dtype in the file."""
    shape: torch.Size
    slices: tuple[StoredSlice, ...]

    @property
    def dtype(self) -> torch.dtype:
        if self.kind not in DTYPES:
            file = self.slices[0].file
            raise SafetensorError(f"{file}: {self.name} has the type {self.kind}, which torch cannot read")
        return DTYPES[self.kind]


@dataclass(frozen=True)
class _Block:
    """What one thread reads at once: the elements of a file from the byte `begin`, with the shape `shape`. The target
    is the part of them that `region` selects."""

    file: Path
    begin: int
    name: str
    shape: tuple[int, ...]
    region: tuple[slice, ...]
    target: torch.Tensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors of the files by name. Raises `SafetensorError` or `OSError` if a file cannot be read."""
    slices: dict[str, dict[tuple[int, ...], StoredSlice]] = {}
    kinds: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt"):
            pass  # checks the header and the size of the file
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        noted = header.pop("__metadata__", None) or {}
        offsets = json.loads(noted[SLICES]) if SLICES in noted else None
        for name, entry in header.items():
            shape = tuple(entry["shape"])
            if offsets is None:
                first = (0,) * len(shape)
            elif name in offsets:
                first = tuple(offsets[name][OFFSETS])
            else:
                raise SafetensorError(f"{file}: its metadata ({SLICES}) does not say where {name} belongs")
            if kinds.setdefault(name, entry["dtype"]) != entry["dtype"]:
                raise SafetensorError(f"{file}: {name} has the type {entry['dtype']}, in other files {kinds[name]}")
            one = StoredSlice(file, 8 + length + entry["data_offsets"][0], first, shape)
            slices.setdefault(name, {})[first] = one
    return {
        name: StoredTensor(name, kinds[name], _complete(found.values()), tuple(found.values()))
        for name, found in slices.items()
    }


def _complete(slices: Iterable[StoredSlice]) -> torch.Size:
    ends = ([offset + size for offset, size in zip(one.offsets, one.shape, strict=True)] for one in slices)
    return torch.Size([max(end) for end in zip(*ends, strict=True)])


def read_parts(parts: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]], stored: Mapping[str, StoredTensor]) -> None:
    """Reads parts of tensors. `parts` has for each name the target, and the position of its first element in the
    complete tensor."""
    regions = [region for name, (part, offsets) in parts.items() for region in _regions(part, offsets, stored[name])]
    regions.sort(key=lambda region: (str(region.file), region.begin))
    total = sum(region.target.numel() * region.dtype.itemsize for region in regions)
    # Blocks are made when a thread needs them: there may be millions.
    blocks, lock, failed = (block for region in regions for block in _divided(region)), Lock(), Event()

    def taken() -> Iterator[_Block]:
        while True:
            with lock:
                block = None if failed.is_set() else next(blocks, None)
            if block is None:
                return
            yield block

    def work(_: int) -> None:
        try:
            _read(taken())
        except BaseException:
            failed.set()
            raise

    count = min(THREADS, os.cpu_count() or 1) if total >= THREADED_BYTES else 1
    if count == 1:
        _read(taken())
        return
    with ThreadPoolExecutor(count) as threads:
        try:
            list(threads.map(work, range(count)))
        except BaseException:  # also Ctrl-C: the threads end after their blocks
            failed.set()
            raise


def _regions(part: torch.Tensor, offsets: tuple[int, ...], stored: StoredTensor) -> Iterator[_Block]:
    """Yields the region of each stored slice that a part of a tensor consists of."""
    if not part.numel():
        return
    found = 0
    for one in stored.slices:
        starts = [max(a, b) for a, b in zip(offsets, one.offsets, strict=True)]
        ends = [
            min(a + size, b + other)
            for a, size, b, other in zip(offsets, part.shape, one.offsets, one.shape, strict=True)
        ]
        if any(start >= end for start, end in zip(starts, ends, strict=True)):
            continue
        target, region = part, []
        for dimension, (start, end) in enumerate(zip(starts, ends, strict=True)):
            target = target.narrow(dimension, start - offsets[dimension], end - start)
            region.append(slice(start - one.offsets[dimension], end - one.offsets[dimension]))
        found += target.numel()
        yield _Block(one.file, one.begin, stored.name, one.shape, tuple(region), target, stored.dtype)
    if found != part.numel():
        raise ValueError(
            f"{stored.name}: the files have {found:,} of the {part.numel():,} elements of the part "
            f"{tuple(part.shape)} at {offsets}; the complete tensor there has the shape {tuple(stored.shape)}"
        )


def _divided(block: _Block) -> Iterator[_Block]:
    """Divides a block into blocks of at most `BLOCK_BYTES`. Of rows of which only a part is wanted, other blocks are
    read only if a row is longer than `ROW_BYTES`: shorter rows are read completely."""
    if not block.shape:
        yield block
        return
    first, *others = block.region
    row = block.shape[1:]
    row_bytes = math.prod(row) * block.dtype.itemsize
    complete = all(taken == slice(0, size) for taken, size in zip(others, row, strict=True))
    if row and row_bytes > (BLOCK_BYTES if complete else ROW_BYTES):
        for at, target in zip(range(first.start, first.stop), block.target, strict=True):
            begin = block.begin + at * row_bytes
            yield from _divided(replace(block, begin=begin, shape=row, region=tuple(others), target=target))
        return
    count = max(1, BLOCK_BYTES // max(1, row_bytes))
    for at in range(first.start, first.stop, count):
        target = block.target[at - first.start : at - first.start + count]
        begin, region = block.begin + at * row_bytes, (slice(0, len(target)), *others)
        yield replace(block, begin=begin, shape=(len(target), *row), region=region, target=target)


@torch.no_grad()
def _read(blocks: Iterable[_Block]) -> None:
    buffer = torch.empty(0, dtype=torch.uint8)
    opened: dict[Path, int] = {}
    with ExitStack() as stack:
        for block in blocks:
            target = block.target
            if block.file not in opened:
                opened[block.file] = stack.enter_context(block.file.open("rb", buffering=0)).fileno()
            direct = target.device.type == "cpu" and target.dtype == block.dtype and target.is_contiguous()
            if direct and target.numel() == math.prod(block.shape):
                _fill(opened[block.file], target, block)
                continue
            if len(buffer) < block.bytes:
                # Devices copy faster from pinned memory. Pinning takes long, so it is done once.
                pinned = target.device.type != "cpu"
                room = max(block.bytes, BLOCK_BYTES) if pinned else block.bytes
                buffer = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
            staged = buffer[: block.bytes].view(block.dtype).view(block.shape)
            _fill(opened[block.file], staged, block)
            target.copy_(staged[block.region])


def _fill(file: int, target: torch.Tensor, block: _Block) -> None:
    # A contiguous tensor may have any stride in a dimension of size 1, which `view` does not accept.
    view = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
    position = block.begin
    while view:
        count = os.preadv(file, [view], position)
        if not count:
            raise OSError(f"{block.file} ends at byte {position:,}, within the tensor {block.name}")
        view, position = view[count:], position + count
