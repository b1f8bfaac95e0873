"""Weights by the memory that they are in, both ends of it: a run says where each tensor is, and the workers of a server
on the same machine open it there. In a device's memory nothing is copied but into the server's own weights.

A run imports it from lockstep, a server from this folder, where lockstep need not be: it imports torch alone.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

TensorPlace = dict[str, Any]
"""Where a tensor is, in what JSON can say."""
# Among what torch says of a tensor in a device's memory: the number of the device, as its own process counts.
_DEVICE = 6
_CLASSES = {kind.__name__: kind for kind in (torch.Tensor, torch.storage.TypedStorage)}


# -- the run's end


def device_place(tensor: torch.Tensor) -> TensorPlace:
    """Of a tensor in a device's memory, as torch's own processes tell each other. To be asked for once as long as the
    tensor lives: each time torch counts one more process that may have it."""
    rebuild, said = reductions.reduce_tensor(tensor.detach())
    properties = torch.get_device_module(tensor.device.type).get_device_properties(tensor.device)
    return {"device": str(properties.uuid), "rebuild": rebuild.__name__, "said": [_to_json(each) for each in said]}


def host_places(file: Path, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[TensorPlace]:
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


def opened(place: TensorPlace, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor itself, in the memory where it is."""
    if "file" in place:
        whole = torch.from_file(place["file"], shared=True, size=place["size"], dtype=torch.uint8)
        return _part(whole, place["start"], dtype, shape)
    rebuild, said = place["rebuild"], [_from_json(each) for each in place["said"]]
    if not (rebuild.startswith("rebuild_") and rebuild.endswith("_tensor") and hasattr(reductions, rebuild)):
        raise ValueError(f"this torch ({torch.__version__}) has no {rebuild}")
    said[_DEVICE] = _index_of(place["device"])
    found: torch.Tensor = getattr(reductions, rebuild)(*said)
    if (found.shape, found.dtype) != (torch.Size(shape), dtype):
        raise ValueError(f"a tensor of {found.dtype} {list(found.shape)} in the place of one of {dtype} {list(shape)}")
    return found


def _index_of(uuid: str) -> int:
    devices = torch.get_device_module()
    for index in range(devices.device_count()):
        if str(devices.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"the server does not see the run's device {uuid}")


def _part(whole: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size = torch.Size(shape)
    return whole[start : start + size.numel() * dtype.itemsize].view(dtype).view(size)


# -- both


def _to_json(said: Any) -> Any:
    if said is None or isinstance(said, bool | int):
        return said
    if isinstance(said, tuple):
        return {"tuple": list(said)}
    if isinstance(said, bytes):
        return {"bytes": b64encode(said).decode()}
    if isinstance(said, torch.dtype):
        return {"dtype": str(said).removeprefix("torch.")}
    for name, kind in _CLASSES.items():
        if said is kind:
            return {"class": name}
    raise RuntimeError(f"torch {torch.__version__} says of a tensor's place what is not known here: {said!r}")


def _from_json(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    ((kind, value),) = said.items()
    if kind == "tuple":
        return tuple(value)
    if kind == "bytes":
        return b64decode(value)
    return getattr(torch, value) if kind == "dtype" else _CLASSES[value]
