"""A frozen model whose weights live on the host between its passes: they are brought to the device for each, and what
was brought is thrown away after it. The numbers are those of a model that stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Where on a module stands what its visits need.
HOME = "lockstep_home"


class Home:
    """The weights on the host, and how many passes are under way."""

    def __init__(self, module: nn.Module, device: torch.device):
        self.device, self.visits = device, 0
        self.weights = [(parameter, on_host(parameter.detach(), device)) for parameter in module.parameters()]
        self.leave()

    def come(self) -> None:
        for parameter, weight in self.weights:
            parameter.data = on_device(weight, self.device)

    def leave(self) -> None:
        for parameter, weight in self.weights:
            parameter.data = weight


def on_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy in the host's memory, from where `device` can take it without a wait."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=device.type != "cpu")
    return host.copy_(tensor)


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
