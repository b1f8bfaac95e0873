"""A frozen model whose weights live on the host between its passes: they are brought to the device for each, and what
was brought is thrown away after it. The numbers are those of a model that stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Bytes of a block of pinned memory, and what tensors in it begin at a multiple of.
BLOCK, ALIGNED = 2**30, 512
# Where on a module stands what its visits need.
HOME = "lockstep_home"


class Home:
    """The weights on the host, and how many passes are under way."""

    def __init__(self, module: nn.Module, device: torch.device):
        self.device, self.visits = device, 0
        room = HostRoom(device)
        self.weights = [(parameter, room.copy(parameter.detach())) for parameter in module.parameters()]
        self.leave()

    def come(self) -> None:
        for parameter, weight in self.weights:
            parameter.data = on_device(weight, self.device)

    def leave(self) -> None:
        for parameter, weight in self.weights:
            parameter.data = weight


class HostRoom:
    """Memory of the host for many tensors, from where `device` can take them without a wait (pinned).

    Torch rounds every pinned allocation up to a power of two, which would nearly double a large state. Tensors share
    blocks of such sizes instead: each goes to the first block with room, and a block lives as long as one of its own.
    """

    def __init__(self, device: torch.device, block: int = BLOCK):
        self._device, self._block = device, block
        self._blocks: list[_Block] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor.detach().clone()
        return self.empty(tensor.shape, tensor.dtype, pinned=True).copy_(tensor)

    def empty(self, shape: torch.Size, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        size = shape.numel() * dtype.itemsize
        block = next((one for one in self._blocks if one.free >= size), None)
        if block is None:
            most = max(self._block, 1 << (size - 1).bit_length() if size else 0)
            block = _Block(torch.empty(most, dtype=torch.uint8, pin_memory=pinned))
            self._blocks.append(block)
        return block.take(size).view(dtype).view(shape)


class _Block:
    def __init__(self, memory: torch.Tensor):
        self._memory, self._used = memory, 0

    @property
    def free(self) -> int:
        return len(self._memory) - self._used

    def take(self, size: int) -> torch.Tensor:
        found = self._memory[self._used : self._used + size]
        # The next begins where any number may.
        self._used = min(len(self._memory), -(-(self._used + size) // ALIGNED) * ALIGNED)
        return found


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, also where that is the host: what is written to one must not show in the other."""
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


def keep_on_host(module: nn.Module, device: torch.device) -> None:
    """From now on the weights of a frozen model, which is not sharded, are on the device inside of `resident` only."""
    setattr(module, HOME, Home(module, device))


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """The weights of a module that lives on the host, on its device; of any other they are there already."""
    home: Home | None = vars(module).get(HOME)
    if home is None:
        yield
        return
    if not home.visits:
        home.come()
    home.visits += 1
    try:
        yield
    finally:
        home.visits -= 1
        if not home.visits:
            home.leave()
