"""Weight transport by shared memory, for a server on the same machine (`plugin/lockstep_shared.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lockstep.device.base import Device
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES
from lockstep.rollout.servers.adapter import Placed, ServerAdapter, ServerFailed
from lockstep.rollout.servers.collective_transport import first_visible
from lockstep.rollout.servers.plugin.lockstep_shared import TensorPlace, device_place, host_places
from lockstep.rollout.servers.weight_check import fingerprint

KEY = "rollout.weight_sync"
REMEDY = f"set {KEY}=files"

Weights = Sequence[tuple[str, torch.Tensor]]


class Unopened(ServerFailed):
    """The server cannot map the run's memory, and its weights are unchanged."""


@dataclass
class SharedMemory:
    """The memory locations of the weights of a run. The location of a tensor is computed once per tensor."""

    device: Device
    _places: dict[str, tuple[int, TensorPlace]] = field(default_factory=dict)

    def placed(self, weights: Weights, dtype: torch.dtype, folder: Path) -> Placed:
        """The locations of the weights. `folder`: host tensors are copied to a file that the server maps."""
        for name, tensor in weights:
            if why := _why_not_shared(tensor, dtype):
                raise Unopened(f"{name} {why}")
        tensors = [tensor for _, tensor in weights]
        sums = list(fingerprint(weights))
        if all(tensor.device.type == "cpu" for tensor in tensors):
            places = host_places(folder / "weights.bin", tensors, dtype)
        elif self.device.shares_memory:
            places = [self._device_place(name, tensor) for name, tensor in weights]
        else:
            raise Unopened(f"memory of a {self.device.name} device cannot be shared with another process")
        # Pending writes to these tensors must be complete.
        self.device.synchronise()
        shapes = [list(tensor.shape) for tensor in tensors]
        return Placed([name for name, _ in weights], shapes, sums, str(dtype).removeprefix("torch."), places)

    def _device_place(self, name: str, tensor: torch.Tensor) -> TensorPlace:
        address = tensor.data_ptr()
        cached = self._places.get(name)
        if cached is None or cached[0] != address:
            try:
                self._places[name] = cached = address, device_place(tensor)
            except RuntimeError as error:
                raise Unopened(f"{name} cannot be shared: {error}") from error
        return cached[1]


def _why_not_shared(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Why a tensor cannot be shared without a copy, for which the device may lack memory."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return "is sharded over several processes"
    if tensor.dtype != dtype:
        return f"has dtype {tensor.dtype}, and the server computes in {dtype}"
    return None if tensor.is_contiguous() else "is not contiguous"


def by_memory(
    settings: RolloutSettings, server_adapter: ServerAdapter, device: Device, processes: int, *, adapter: bool
) -> bool:
    """Whether weights go by shared memory. `auto` selects it if a single-process run starts the server on the device
    of the run: same machine, and no copy needed."""
    if not ENGINES[settings.engine].served or adapter:
        return False
    if settings.weight_sync != "auto":
        return settings.weight_sync == "memory"
    server = settings.server
    same_device = server.devices is None or server.devices == [first_visible(device)]
    exclusive = settings.url is None and processes == 1 and server.tensor_parallel == 1 and same_device
    return server_adapter.opens_memory and device.shares_memory and exclusive
