"""Numbers on their way between host and device, without a wait for what the device still does."""

from __future__ import annotations

from collections.abc import Callable

import torch


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device. An ordinary copy waits until the device has done all that was asked of it before."""
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    # Other memory may be used again before a copy has read it.
    return tensor.to(device, non_blocking=tensor.is_pinned())


def fetched(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to bring a tensor to the host; the result waits for it, not for what the device is asked to do later."""
    if tensor.device.type != "cuda":
        return lambda: tensor.cpu()
    host = tensor.to("cpu", non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()

    def arrived() -> torch.Tensor:
        ready.synchronize()
        return host

    return arrived
