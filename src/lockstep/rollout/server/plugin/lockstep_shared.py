"""Weights by the memory that they are in, both ends of it: a run says where each tensor is, and the workers of a server
on the same machine open it there. On a CUDA device nothing is copied but into the server's own weights.

A run imports it from lockstep, a server from this folder, where lockstep need not be: it imports torch alone.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

Place = dict[str, Any]
"""Where a tensor is, in what JSON can say."""


# -- the run's end


def cuda_place(tensor: torch.Tensor) -> Place:
    """Of a tensor in a CUDA device's memory. To be asked for once as long as the tensor lives: each time torch counts
    one more process that may have it."""
    _, said = reduce_tensor(tensor.detach())
    offset, handle, size, start = said[3], said[7], said[8], said[9]
    counter, counted, event, wait = said[11:15]
    return {
        "cuda": str(torch.cuda.get_device_properties(tensor.device).uuid),
        "offset": offset,
        "handle": _text(handle),
        "storage": [size, start],
        "counter": [_text(counter), counted],
        "event": [_text(event), wait],
    }


def host_places(file: Path, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Place]:
    """Of tensors that are copied into one file, which both sides map into their memory."""
    starts = [0]
    for tensor in tensors:
        # Each begins where a number of any size may.
        starts.append(starts[-1] + -(-tensor.numel() * dtype.itemsize // 64) * 64)
    whole = torch.from_file(str(file), shared=True, size=max(starts[-1], 1), dtype=torch.uint8)
    for start, tensor in zip(starts, tensors, strict=False):
        _part(whole, start, dtype, tensor.shape).copy_(tensor.detach())
    return [{"file": str(file), "size": whole.numel(), "start": start} for start in starts[:-1]]


# -- the server's end


def opened(place: Place, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor itself, in the memory where it is."""
    if "file" in place:
        whole = torch.from_file(place["file"], shared=True, size=place["size"], dtype=torch.uint8)
        return _part(whole, place["start"], dtype, shape)
    size = torch.Size(shape)
    (stored, start), (counter, counted), (event, wait) = place["storage"], place["counter"], place["event"]
    found: torch.Tensor = rebuild_cuda_tensor(
        torch.Tensor,
        size,
        torch.empty(size, device="meta").stride(),
        place["offset"],
        torch.storage.TypedStorage,
        dtype,
        _index_of(place["cuda"]),
        _bytes(place["handle"]),
        stored,
        start,
        False,
        _bytes(counter),
        counted,
        _bytes(event),
        wait,
    )
    return found


def _index_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"the server does not see the run's device {uuid}")


def _part(whole: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size = torch.Size(shape)
    return whole[start : start + size.numel() * dtype.itemsize].view(dtype).view(size)


def _text(said: bytes | None) -> str | None:
    return None if said is None else b64encode(said).decode()


def _bytes(said: str | None) -> bytes | None:
    return None if said is None else b64decode(said)
