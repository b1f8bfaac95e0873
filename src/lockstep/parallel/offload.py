"""Offloads frozen models to the CPU between forward passes, and activations between forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

# Offload of frozen models: the weights stay on the host between forward passes. The weights are copied to the device
# for each forward pass, and the copies are freed after it. The results are bitwise equal to those without offload.

# Size of a block of pinned memory and alignment of the tensors in a block, both in bytes.
BLOCK, ALIGNED = 2**30, 512
# Name of the module attribute that refers to the module's `Home`.
HOME = "lockstep_home"


class Home:
    """The host copy of an offloaded module's weights. `visits` is the number of forward passes in progress."""

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
    """Pinned host memory for many tensors, so that copies to `device` are asynchronous.

    Torch rounds every pinned allocation up to a power of two, which could nearly double the memory. So tensors share
    blocks whose size is a power of two. Each tensor is placed in the first block with enough free memory. A block is
    freed when the last of its tensors is freed.
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
        chunk = self._memory[self._used : self._used + size]
        # The next tensor starts at a multiple of ALIGNED bytes, which suits every dtype.
        self._used = min(len(self._memory), -(-(self._used + size) // ALIGNED) * ALIGNED)
        return chunk


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy of the tensor on the device. The tensor is copied even if the device is the CPU, so that writes to
    the copy do not change the original."""
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


def keep_on_host(module: nn.Module, device: torch.device) -> None:
    """Keeps the weights of a frozen, unsharded model on the host. The weights are on the device only inside a `with
    resident(module)` block."""
    setattr(module, HOME, Home(module, device))


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Keeps the weights of an offloaded module on its device inside the `with` block. Has no effect on modules that are
    not offloaded."""
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


# Offload of activations between forward and backward pass, which does not change any value. Tensors that autograd saves
# for a decoder layer are copied to the host while the layer computes, and freed on the device when the next layer is
# done. The tensors of a layer are prefetched during the backward of the layer above, so the device has the activations
# of about two layers at a time. Complete storages are copied. So tensors that share a storage still share it after the
# copy back, and keep their strides. Parameters, small tensors, ids and masks are not offloaded. The last layer is not
# offloaded, because its backward comes first.

# Storages below this many bytes are not offloaded, because starting a copy takes microseconds.
LEAST = 2**16


class ActivationOffload:
    """Offloads the activations of a model to the host. `layers` are the decoder layers of the model, which run on
    `device`."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device):
        self.layers, self.device = len(layers), device
        self._under_way: _KeepingPass | None = None
        for layer in layers:
            layer.register_forward_hook(self._layer_done)

    @cached_property
    def side_stream(self) -> _SideStream:
        """The device stream for copies, which is created on first use, on the current device."""
        return _SideStream(self.device)

    @contextmanager
    def waiting_on_host(self) -> Iterator[None]:
        """Offloads the activations of the forward pass that runs inside the `with` block."""
        if not torch.is_grad_enabled():
            yield
            return
        one = self._under_way = _KeepingPass(self.side_stream, self.layers)
        try:
            with saved_tensors_hooks(one.pack, one.unpack):
                yield
        finally:
            self._under_way = None
            one.end()

    def _layer_done(self, *_: Any) -> None:
        # With gradient checkpointing a layer also runs in the backward pass, where this hook does nothing.
        if self._under_way is not None:
            self._under_way.layer_done()


class _SideStream:
    """A separate device stream for copies between device and host."""

    def __init__(self, device: torch.device):
        self.device = device
        self._api = torch.get_device_module(device)
        self._stream = self._api.Stream()

    def current(self) -> Any:
        return self._api.current_stream()

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Copies the first tensor of each pair into the second on the side stream, after all work queued on the current
        stream. Returns an event that marks the end of the copies."""
        self._stream.wait_stream(self.current())
        with torch.no_grad(), self._api.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        done = self._api.Event()
        done.record(self._stream)
        return done


class _Storage:
    """One offloaded storage. `host` is the host copy; it is valid when the first copy to the host has ended.
    `device_tensor` is the device copy, or None. `coming` is the event of a running prefetch, or None."""

    def __init__(self, side_stream: _SideStream, host: torch.Tensor, device_tensor: torch.Tensor):
        self.side_stream, self.host = side_stream, host
        self.device_tensor: torch.Tensor | None = device_tensor
        self.coming: Any = None

    def arrived(self) -> torch.Tensor:
        """Returns the device copy of the storage. The current stream waits until the prefetch has ended."""
        assert self.device_tensor is not None
        if self.coming is not None:
            self.side_stream.current().wait_event(self.coming)
            self.coming = None
        return self.device_tensor

    def __del__(self) -> None:
        # If the storage was prefetched but not used, its memory may be reused only after the copy has ended.
        if self.coming is not None:
            self.side_stream.current().wait_event(self.coming)


class _Kept(NamedTuple):
    """What autograd saves for a tensor of an offloaded layer: the offloaded storage, and where the tensor is in the
    storage."""

    storage: _Storage
    layer: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Stays(NamedTuple):
    """What autograd saves for a tensor of the last layer, which is not offloaded."""

    tensor: torch.Tensor


@dataclass
class _Layer:
    """The storages that autograd saved first in this layer. Autograd owns each storage and frees it after use."""

    storages: list[weakref.ref[_Storage]] = field(default_factory=list)
    sent: Any = None
    asked_for: bool = False

    def alive(self) -> list[_Storage]:
        return [storage for one in self.storages if (storage := one()) is not None]


class _KeepingPass:
    def __init__(self, side_stream: _SideStream, layers: int):
        self._side_stream, self._last = side_stream, layers - 1
        self._layers = [_Layer()]
        # The key contains the address of a storage. The weak reference prevents a new storage from getting the same
        # address.
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_Storage]]] = {}

    def pack(self, tensor: torch.Tensor) -> _Kept | _Stays | torch.Tensor:
        if not _travels(tensor, self._side_stream.device):
            return tensor
        number = len(self._layers) - 1
        if number >= self._last:
            return _Stays(tensor)
        return _Kept(self._storage(tensor), number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: _Kept | _Stays | torch.Tensor) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if isinstance(kept, _Stays):
            self._ask_for(self._last - 1)
            return kept.tensor
        self._ask_for(kept.layer)
        if kept.storage.device_tensor is None:
            # Several layers saved this storage, and a lower layer saved it first, so it was not prefetched with this
            # layer.
            self._bring([kept.storage])
        self._ask_for(kept.layer - 1)
        return kept.storage.arrived().as_strided(kept.size, kept.stride, kept.offset)

    def layer_done(self) -> None:
        self._leave(len(self._layers) - 2)
        self._layers.append(_Layer())

    def end(self) -> None:
        for number in range(len(self._layers)):
            self._leave(number)
        self._known.clear()

    def _storage(self, tensor: torch.Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        # The version is part of the key, so a storage that was modified in place since it was saved is saved again.
        key = (storage._cdata, tensor._version, tensor.dtype)
        saved = self._known[key][1]() if key in self._known else None
        if saved is None:
            count = storage.nbytes() // tensor.itemsize
            flat = tensor.detach().as_strided((count,), (1,), 0)
            host = torch.empty(count, dtype=tensor.dtype, pin_memory=self._side_stream.device.type != "cpu")
            saved = _Storage(self._side_stream, host, flat)
            layer = self._layers[-1]
            layer.sent = self._side_stream.copy([(flat, host)])
            layer.storages.append(weakref.ref(saved))
            self._known[key] = StorageWeakRef(storage), weakref.ref(saved)
        return saved

    def _leave(self, number: int) -> None:
        """Frees the device memory of a layer when its copies to the host are complete."""
        if number < 0 or self._layers[number].sent is None:
            return
        layer = self._layers[number]
        self._side_stream.current().wait_event(layer.sent)
        layer.sent = None
        for storage in layer.alive():
            storage.device_tensor = None

    def _ask_for(self, number: int) -> None:
        if 0 <= number < len(self._layers) and not self._layers[number].asked_for:
            self._layers[number].asked_for = True
            self._bring([storage for storage in self._layers[number].alive() if storage.device_tensor is None])

    def _bring(self, storages: Sequence[_Storage]) -> None:
        if not storages:
            return
        for storage in storages:
            storage.device_tensor = torch.empty_like(storage.host, device=self._side_stream.device, pin_memory=False)
        coming = self._side_stream.copy(
            [(storage.host, storage.device_tensor) for storage in storages if storage.device_tensor is not None]
        )
        for storage in storages:
            storage.coming = coming


def _travels(tensor: torch.Tensor, device: torch.device) -> bool:
    """Returns whether a saved tensor is offloaded. Parameters and their views are not offloaded, because a sharded
    model gathers them again anyway."""
    if type(tensor) is not torch.Tensor or isinstance(tensor._base, nn.Parameter):
        return False
    plain = tensor.layout == torch.strided and tensor.is_floating_point() and not tensor.is_neg()
    return plain and tensor.device.type == device.type and tensor.untyped_storage().nbytes() >= LEAST


# With an offloaded optimizer, parameters are updated in groups of about this many elements. Only the optimizer state of
# one group is on the device at a time.
TOGETHER = 2**27
