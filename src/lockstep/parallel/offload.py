"""CPU offload: frozen models between their passes, and activations between forward and backward."""

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

# A frozen model whose weights live on the host between its passes: they are brought to the device for each, and what
# was brought is thrown away after it. The numbers are those of a model that stays.

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


# Activations that wait on the host between the forward and the backward pass. What comes back has the same bits.
#
# What autograd keeps of a decoder layer is copied to the host while the layer computes, and leaves the device when
# the next layer is done. It comes back while the layer above goes backward: about two layers are on the device at a
# time. Whole storages travel, so views come back as views of one storage, with their strides. Left alone are
# parameters, what is small, ids and masks, and the last layer, which goes backward at once.

# Bytes of the smallest storage that travels: a copy takes microseconds to begin.
LEAST = 2**16


class ActivationOffload:
    """For the passes of a model with these layers on `device`."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device):
        self.layers, self.device = len(layers), device
        self._under_way: _KeepingPass | None = None
        for layer in layers:
            layer.register_forward_hook(self._layer_done)

    @cached_property
    def beside(self) -> _Beside:
        """Made when the device is in use: it is a stream of the current one."""
        return _Beside(self.device)

    @contextmanager
    def waiting_on_host(self) -> Iterator[None]:
        """Around a forward pass."""
        if not torch.is_grad_enabled():
            yield
            return
        one = self._under_way = _KeepingPass(self.beside, self.layers)
        try:
            with saved_tensors_hooks(one.pack, one.unpack):
                yield
        finally:
            self._under_way = None
            one.end()

    def _layer_done(self, *_: Any) -> None:
        # With gradient checkpointing a layer runs again in the backward pass; that is nobody's forward pass.
        if self._under_way is not None:
            self._under_way.layer_done()


class _Beside:
    """Copies on a stream of their own, in their order. On a CPU a stream is a name only."""

    def __init__(self, device: torch.device):
        self.device = device
        self._api = torch.get_device_module(device)
        self._stream = self._api.Stream()

    def current(self) -> Any:
        return self._api.current_stream()

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Each first tensor into the second, after all that the current stream was given; an event that says when."""
        self._stream.wait_stream(self.current())
        with torch.no_grad(), self._api.stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
        done = self._api.Event()
        done.record(self._stream)
        return done


class _Storage:
    """The numbers of one storage: `host` has them from the first copy's end, `here` is the one on the device or None.
    `coming` says when those that were asked for have come."""

    def __init__(self, beside: _Beside, host: torch.Tensor, here: torch.Tensor):
        self.beside, self.host = beside, host
        self.here: torch.Tensor | None = here
        self.coming: Any = None

    def arrived(self) -> torch.Tensor:
        """For what the current stream does from now on."""
        assert self.here is not None
        if self.coming is not None:
            self.beside.current().wait_event(self.coming)
            self.coming = None
        return self.here

    def __del__(self) -> None:
        # Asked for and never used: its memory is free for others only when nothing is written to it any more.
        if self.coming is not None:
            self.beside.current().wait_event(self.coming)


class _Kept(NamedTuple):
    """A tensor of a layer, as autograd keeps it."""

    storage: _Storage
    layer: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Stays(NamedTuple):
    """One of the last layer."""

    tensor: torch.Tensor


@dataclass
class _Layer:
    """What was first kept in it. Autograd holds the storages, and lets go of each when it is done with it."""

    storages: list[weakref.ref[_Storage]] = field(default_factory=list)
    sent: Any = None
    asked_for: bool = False

    def alive(self) -> list[_Storage]:
        return [storage for one in self.storages if (storage := one()) is not None]


class _KeepingPass:
    def __init__(self, beside: _Beside, layers: int):
        self._beside, self._last = beside, layers - 1
        self._layers = [_Layer()]
        # The weak reference is held so that no other storage gets the same address meanwhile.
        self._known: dict[Any, tuple[StorageWeakRef, weakref.ref[_Storage]]] = {}

    def pack(self, tensor: torch.Tensor) -> _Kept | _Stays | torch.Tensor:
        if not _travels(tensor, self._beside.device):
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
        if kept.storage.here is None:
            # One that layers share, first kept in a lower one.
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
        # What was changed in place since it was kept is another one.
        key = (storage._cdata, tensor._version, tensor.dtype)
        found = self._known[key][1]() if key in self._known else None
        if found is None:
            count = storage.nbytes() // tensor.itemsize
            here = tensor.detach().as_strided((count,), (1,), 0)
            host = torch.empty(count, dtype=tensor.dtype, pin_memory=self._beside.device.type != "cpu")
            found = _Storage(self._beside, host, here)
            layer = self._layers[-1]
            layer.sent = self._beside.copy([(here, host)])
            layer.storages.append(weakref.ref(found))
            self._known[key] = StorageWeakRef(storage), weakref.ref(found)
        return found

    def _leave(self, number: int) -> None:
        """Off the device, once the copies on the host are whole."""
        if number < 0 or self._layers[number].sent is None:
            return
        layer = self._layers[number]
        self._beside.current().wait_event(layer.sent)
        layer.sent = None
        for storage in layer.alive():
            storage.here = None

    def _ask_for(self, number: int) -> None:
        if 0 <= number < len(self._layers) and not self._layers[number].asked_for:
            self._layers[number].asked_for = True
            self._bring([storage for storage in self._layers[number].alive() if storage.here is None])

    def _bring(self, storages: Sequence[_Storage]) -> None:
        if not storages:
            return
        for storage in storages:
            storage.here = torch.empty_like(storage.host, device=self._beside.device, pin_memory=False)
        coming = self._beside.copy([(storage.host, storage.here) for storage in storages if storage.here is not None])
        for storage in storages:
            storage.coming = coming


def _travels(tensor: torch.Tensor, device: torch.device) -> bool:
    """Not a parameter or a view of one: a sharded model's are gathered again anyway."""
    if type(tensor) is not torch.Tensor or isinstance(tensor._base, nn.Parameter):
        return False
    plain = tensor.layout == torch.strided and tensor.is_floating_point() and not tensor.is_neg()
    return plain and tensor.device.type == device.type and tensor.untyped_storage().nbytes() >= LEAST


# Numbers of the parameters that are updated together: their state is on the device meanwhile.
TOGETHER = 2**27
