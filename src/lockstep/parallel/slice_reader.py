"""Reads tensors of safetensors files, complete or the part that a rank holds, in several threads.

The bytes are read into the memory of the target where that is possible: the target is in the host's memory, has the
stored dtype, and the part is contiguous in the file. Other targets, such as those on a device, are copied from a small
buffer of each thread. torch.distributed.checkpoint can read the same files, but it plans each call in Python, which
takes minutes for a model with 37,000 tensors, and importing it takes a second.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

# Threads that read at the same time. One thread is slower than a fast disk.
THREADS = 8
# Bytes that a thread reads at once: the size of its buffer.
BLOCK_BYTES = 2**22
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

    dtype: torch.dtype
    shape: torch.Size
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True)
class _Block:
    """A part of a target that one thread reads at once. `begin` is the position in the file, or None if the elements
    are not contiguous there. `region` selects the elements in the stored slice."""

    file: Path
    begin: int | None
    name: str
    region: tuple[slice, ...]
    target: torch.Tensor
    dtype: torch.dtype


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors of the files by name. Raises `SafetensorError` or `OSError` if a file cannot be read."""
    slices: dict[str, dict[tuple[int, ...], StoredSlice]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        with safe_open(file, framework="pt"):
            pass  # checks the header and the size of the file
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
        noted = header.pop("__metadata__", None) or {}
        offsets = json.loads(noted[SLICES]) if SLICES in noted else {}
        for name, entry in header.items():
            shape = tuple(entry["shape"])
            first = tuple(offsets[name][OFFSETS]) if offsets else (0,) * len(shape)
            one = StoredSlice(file, 8 + length + entry["data_offsets"][0], first, shape)
            slices.setdefault(name, {})[first] = one
            if entry["dtype"] not in DTYPES:
                raise SafetensorError(f"{file}: {name} has the type {entry['dtype']}, which torch cannot read")
            dtypes[name] = DTYPES[entry["dtype"]]
    return {
        name: StoredTensor(dtypes[name], _complete(found.values()), tuple(found.values()))
        for name, found in slices.items()
    }


def _complete(slices: Iterable[StoredSlice]) -> torch.Size:
    ends = ([offset + size for offset, size in zip(one.offsets, one.shape, strict=True)] for one in slices)
    return torch.Size([max(end) for end in zip(*ends, strict=True)])


def read_parts(parts: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]], stored: Mapping[str, StoredTensor]) -> None:
    """Reads parts of tensors. `parts` has for each name the target, and the position of its first element in the
    complete tensor."""
    blocks = [block for name, (part, offsets) in parts.items() for block in _blocks(name, part, offsets, stored[name])]
    blocks.sort(key=lambda block: (str(block.file), block.begin or 0))
    total = sum(block.target.numel() * block.dtype.itemsize for block in blocks)
    count = min(THREADS, os.cpu_count() or 1, len(blocks)) if total >= THREADED_BYTES else 1
    remaining, lock = iter(blocks), Lock()

    def taken() -> Iterator[_Block]:
        while True:
            with lock:
                block = next(remaining, None)
            if block is None:
                return
            yield block

    if count <= 1:
        _read(taken())
        return
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda _: _read(taken()), range(count)))


def _blocks(name: str, part: torch.Tensor, offsets: tuple[int, ...], stored: StoredTensor) -> Iterator[_Block]:
    """Yields the blocks of the file in which a part of a tensor is."""
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
        yield from _divided(name, target, tuple(region), one, stored.dtype)
    if found != part.numel():
        raise ValueError(
            f"{name}: the files have {found:,} of the {part.numel():,} elements of the part {tuple(part.shape)} at "
            f"{offsets}; the complete tensor there has the shape {tuple(stored.shape)}"
        )


def _divided(
    name: str, target: torch.Tensor, region: tuple[slice, ...], one: StoredSlice, dtype: torch.dtype
) -> Iterator[_Block]:
    """Divides a region of a stored slice into blocks of at most `BLOCK_BYTES`, or of one row if that is longer."""
    if not region:
        yield _Block(one.file, one.begin, name, region, target, dtype)
        return
    row = math.prod(one.shape[1:])
    contiguous = all(taken == slice(0, size) for taken, size in zip(region[1:], one.shape[1:], strict=True))
    rows = max(1, BLOCK_BYTES // max(1, math.prod(target.shape[1:]) * dtype.itemsize))
    for first in range(0, target.shape[0], rows):
        some = target[first : first + rows]
        at = region[0].start + first
        begin = one.begin + at * row * dtype.itemsize if contiguous else None
        yield _Block(one.file, begin, name, (slice(at, at + len(some)), *region[1:]), some, dtype)


@torch.no_grad()
def _read(blocks: Iterable[_Block]) -> None:
    buffer = torch.empty(0, dtype=torch.uint8)
    opened: dict[Path, Any] = {}
    mapped: dict[Path, Any] = {}
    with ExitStack() as stack:
        for block in blocks:
            target = block.target
            if block.begin is None:
                if block.file not in mapped:
                    mapped[block.file] = stack.enter_context(safe_open(block.file, framework="pt"))
                target.copy_(mapped[block.file].get_slice(block.name)[block.region])
                continue
            if block.file not in opened:
                opened[block.file] = stack.enter_context(block.file.open("rb", buffering=0))
            if target.device.type == "cpu" and target.dtype == block.dtype and target.is_contiguous():
                _fill(opened[block.file].fileno(), target, block)
                continue
            size = target.numel() * block.dtype.itemsize
            if len(buffer) < size:
                # Devices copy faster from pinned memory. Pinning takes long, so it is done once.
                pinned = target.device.type != "cpu"
                room = max(size, BLOCK_BYTES) if pinned else size
                buffer = torch.empty(room, dtype=torch.uint8, pin_memory=pinned)
            staged = buffer[:size].view(block.dtype).view(target.shape)
            _fill(opened[block.file].fileno(), staged, block)
            target.copy_(staged)


def _fill(file: int, target: torch.Tensor, block: _Block) -> None:
    assert block.begin is not None
    view = target.reshape(-1).view(torch.uint8).numpy().data
    position = block.begin
    while view:
        count = os.preadv(file, [view], position)
        if not count:
            raise OSError(f"{block.file} ends at byte {position:,}, within the tensor {block.name}")
        view, position = view[count:], position + count
