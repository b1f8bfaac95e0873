"""Weight transfer by shared memory: the run sends the location of each tensor, and the workers of a server on the same
machine map the tensor. Both use this module. Device memory is copied once, into the server's weights.

The run imports this file as part of lockstep. The server imports this file without lockstep, so it may only import
torch.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

TensorPlace = dict[str, Any]
"""The location of a tensor, as JSON values."""
# Index of the device argument in the arguments of torch's function that rebuilds a shared tensor.
_DEVICE = 6
_CLASSES = {kind.__name__: kind for kind in (torch.Tensor, torch.storage.TypedStorage)}


# -- the run's side


def device_place(tensor: torch.Tensor) -> TensorPlace:
    """Returns the location of a device tensor (torch's IPC handle). Call `device_place` once per tensor, because each
    call makes torch keep another reference to the memory."""
    rebuild, arguments = reductions.reduce_tensor(tensor.detach())
    properties = torch.get_device_module(tensor.device.type).get_device_properties(tensor.device)
    return {"device": str(properties.uuid), "rebuild": rebuild.__name__, "said": [_to_json(each) for each in arguments]}


def host_places(file: Path, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[TensorPlace]:
    """Copies host tensors into one file that the run and the server map; returns the location of each tensor."""
    starts = [0]
    for tensor in tensors:
        # Each tensor starts at a multiple of 64 bytes, which is aligned for every dtype.
        starts.append(starts[-1] + -(-tensor.numel() * dtype.itemsize // 64) * 64)
    mapped = torch.from_file(str(file), shared=True, size=max(starts[-1], 1), dtype=torch.uint8)
    for start, tensor in zip(starts, tensors, strict=False):
        _part(mapped, start, dtype, tensor.shape).copy_(tensor.detach())
    return [{"file": str(file), "size": mapped.numel(), "start": start} for start in starts[:-1]]


# -- the server's side


def opened(place: TensorPlace, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Maps the tensor at a location into this process; raises ValueError if the tensor does not have this dtype and
    shape."""
    if "file" in place:
        mapped = torch.from_file(place["file"], shared=True, size=place["size"], dtype=torch.uint8)
        return _part(mapped, place["start"], dtype, shape)
    rebuild, arguments = place["rebuild"], [_from_json(each) for each in place["said"]]
    if not (rebuild.startswith("rebuild_") and rebuild.endswith("_tensor") and hasattr(reductions, rebuild)):
        raise ValueError(f"the server's torch ({torch.__version__}) has no function {rebuild}")
    arguments[_DEVICE] = _index_of(place["device"])
    tensor: torch.Tensor = getattr(reductions, rebuild)(*arguments)
    if (tensor.shape, tensor.dtype) != (torch.Size(shape), dtype):
        raise ValueError(f"found a tensor of {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")
    return tensor


def _index_of(uuid: str) -> int:
    devices = torch.get_device_module()
    for index in range(devices.device_count()):
        if str(devices.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"the server does not see the run's device {uuid}")


def _part(mapped: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size = torch.Size(shape)
    return mapped[start : start + size.numel() * dtype.itemsize].view(dtype).view(size)


# -- both


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, tuple):
        return {"tuple": list(value)}
    if isinstance(value, bytes):
        return {"bytes": b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    for name, kind in _CLASSES.items():
        if value is kind:
            return {"class": name}
    raise RuntimeError(f"torch {torch.__version__} uses an unsupported value in an IPC handle: {value!r}")


def _from_json(encoded: Any) -> Any:
    if not isinstance(encoded, dict):
        return encoded
    ((kind, value),) = encoded.items()
    if kind == "tuple":
        return tuple(value)
    if kind == "bytes":
        return b64decode(value)
    return getattr(torch, value) if kind == "dtype" else _CLASSES[value]
