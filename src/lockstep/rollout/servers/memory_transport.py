"""Weights by the memory that they are in: for a server on the run's own machine (`plugin/lockstep_shared.py`)."""

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

KEY = "rollout.hand_over"
REMEDY = f"set {KEY}=files"

Weights = Sequence[tuple[str, torch.Tensor]]


class Unopened(ServerFailed):
    """The server cannot open the run's memory, and has not touched its own weights."""


@dataclass
class SharedMemory:
    """Where the weights of a run are. A tensor's place is asked for once, and holds as long as the tensor lives."""

    device: Device
    _places: dict[str, tuple[int, TensorPlace]] = field(default_factory=dict)

    def placed(self, weights: Weights, dtype: torch.dtype, folder: Path) -> Placed:
        """`folder` is for weights in the host's memory, which others see as a file."""
        for name, tensor in weights:
            if why := _unsharable(tensor, dtype):
                raise Unopened(f"{name} {why}")
        tensors = [tensor for _, tensor in weights]
        sums = list(fingerprint(weights))
        if all(tensor.device.type == "cpu" for tensor in tensors):
            places = host_places(folder / "weights.bin", tensors, dtype)
        elif self.device.shares_memory:
            places = [self._device(name, tensor) for name, tensor in weights]
        else:
            raise Unopened(f"no other process opens the memory of a device of {self.device.name}")
        # What is still on its way to these tensors.
        self.device.synchronise()
        shapes = [list(tensor.shape) for tensor in tensors]
        return Placed([name for name, _ in weights], shapes, sums, str(dtype).removeprefix("torch."), places)

    def _device(self, name: str, tensor: torch.Tensor) -> TensorPlace:
        address = tensor.data_ptr()
        known = self._places.get(name)
        if known is None or known[0] != address:
            try:
                self._places[name] = known = address, device_place(tensor)
            except RuntimeError as error:
                raise Unopened(f"{name} cannot be shared: {error}") from error
        return known[1]


def _unsharable(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """A tensor that would have to be copied first: the device may have no room for that."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return "is divided among processes"
    if tensor.dtype != dtype:
        return f"is of {tensor.dtype}, and the server computes in {dtype}"
    return None if tensor.is_contiguous() else "is not contiguous"


def by_memory(
    settings: RolloutSettings, server_adapter: ServerAdapter, device: Device, processes: int, *, adapter: bool
) -> bool:
    """`auto` is memory where the run in one process has started the server on its own device: there it is known to be
    the same machine, and nothing has to be copied to share it."""
    if not ENGINES[settings.engine].served or adapter:
        return False
    if settings.hand_over != "auto":
        return settings.hand_over == "memory"
    server = settings.server
    there = server.devices is None or server.devices == [first_visible(device)]
    alone = settings.url is None and processes == 1 and server.tensor_parallel == 1 and there
    return server_adapter.opens_memory and device.shares_memory and alone
