"""Sharded models (FSDP2) and the device mesh: each rank holds a slice of every parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.parallel.tensor import TensorGroup, is_sliced, refuse_groups
from lockstep.parallel.world import World
from lockstep.recipe.keys_parallel import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


# Sharded models (FSDP2): each rank holds a slice of every parameter, its gradient and its optimizer state.


@dataclass(frozen=True)
class Sharding:
    """Over which ranks, on which device of this one, and whether weights and gradients stay on the host between the
    passes of their layer."""

    mesh: DeviceMesh
    device: torch.device
    on_host: bool = False
    tensor: TensorGroup | None = None
    """The ranks that divide the modules of a layer; `mesh` has one rank of each such group."""
    every: DeviceMesh | None = None
    """With a tensor group: a mesh of all ranks, for what is not divided."""


def shard(root: nn.Module, layers: Iterable[nn.Module], sharding: Sharding | None) -> None:
    """Shard `layers` one by one and what remains at the root; on a mesh of two dimensions over the second one, with a
    copy of each slice along the first. Without a mesh there is nothing to do."""
    if sharding is None:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Gradients are summed in fp32 whatever the weights are.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    # Pinned, so that copies do not hold up the device.
    place = CPUOffloadPolicy(pin_memory=sharding.device.type != "cpu") if sharding.on_host else OffloadPolicy()
    for part in layers:
        fully_shard(part, mesh=sharding.mesh, mp_policy=policy, offload_policy=place)
    fully_shard(root, mesh=sharding.every or sharding.mesh, mp_policy=policy, offload_policy=place)
    for module in _sharded(root):
        # The loss is already divided by the global count: gradients are summed over ranks, not averaged. But each rank
        # of a tensor group has the same gradient of what lies outside of the layers.
        told = sharding.tensor.size if module is root and sharding.tensor is not None else 1
        module.set_gradient_divide_factor(float(told))
        module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def materialise(root: nn.Module, sharding: Sharding) -> None:
    """Give the slices of a sharded model that was built without storage theirs. What has values keeps them."""
    known = {name: p.detach().clone() for name, p in root.named_parameters() if not p.is_meta}
    buffers = [(module, name, buffer) for module in root.modules() for name, buffer in module._buffers.items()]
    root.to_empty(device=torch.device("cpu") if sharding.on_host else sharding.device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    parameters = dict(root.named_parameters())
    for name, value in known.items():
        parameters[name].copy_(value)


@contextmanager
def unit_gathered(module: nn.Module) -> Iterator[None]:
    """What is sharded with this module whole: of a layer all of it, of the root what no layer has, so that the modules
    below it can be entered and layers gather themselves. The root must have been entered once before."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def _sharded(root: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """Whole parameters on every rank, so that ranks can run forward passes independently (no collectives inside)."""
    modules = _sharded(root)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
        for module in modules:
            # The root keeps its parameters between forward and backward, as `fully_shard` sets it up.
            module.set_reshard_after_forward(module is not root, recurse=False)


def reshard(root: nn.Module) -> None:
    """Drop whole parameters that a forward pass left at the root: they would hide what is written into the shards."""
    for module in _sharded(root):
        module.reshard()


def held_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this rank holds of a tensor, and where in the whole that begins."""
    if not is_sliced(tensor):
        return tensor, (0,) * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()
    return tensor.to_local(), tuple(chunk.offsets)


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that one operator may take together: those of one mesh, sliced along the same dimensions of it."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, _sliced_along(tensor)) if is_sliced(tensor) else None
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _sliced_along(tensor: DTensor) -> tuple[int, ...]:
    """Dimensions of the mesh along which ranks have different slices."""
    return tuple(index for index, place in enumerate(tensor.placements) if not place.is_replicate())


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norm of all numbers of all tensors, each counted once (a collective when sharded)."""
    groups = by_mesh(tensors)
    if len(groups) <= 1:
        return whole(torch.nn.utils.get_total_norm(groups[0] if groups else []))
    return torch.linalg.vector_norm(torch.stack([_norm(group) for group in groups]))


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Of tensors of one mesh: the norm of this rank's slices, and those of the others squared and added."""
    norm = torch.nn.utils.get_total_norm([one.to_local() if is_sliced(one) else one for one in tensors])
    first = tensors[0]
    if is_sliced(first):
        square = norm.square()
        for dimension in _sliced_along(first):
            dist.all_reduce(square, group=first.device_mesh.get_group(dimension))
        norm = square.sqrt()
    return norm


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard (a collective: every rank must call it in the same order)."""
    return tensor.full_tensor() if is_sliced(tensor) else tensor


def whole_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As `whole`, on a device: slices that live on the host are brought there, and gathered by its collective."""
    if not is_sliced(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    own, mesh, places = tensor.to_local().to(device), tensor.device_mesh, tensor.placements
    sliced = DTensor.from_local(own, mesh, places, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return sliced.full_tensor()


@torch.no_grad()
def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full tensor into a parameter or state, sharded or not."""
    if is_sliced(target):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    target.copy_(value)


# The ranks as a grid: a row of it holds one copy of a model, sliced over the row; the rows hold the same slices.
#
# With tensor parallelism every place of the grid is a group of neighbouring ranks that divide the modules between
# them.


class Grid(NamedTuple):
    """`replicate` copies of a model, each in `shard` slices, each of which `tensor` ranks divide."""

    replicate: int
    shard: int
    tensor: int = 1


def grid_of(settings: Parallel, ranks: int) -> Grid:
    """How the recipe lays that many ranks out; refused where they do not come out even."""
    shard, replicate, tensor = settings.shard, settings.replicate, settings.tensor
    refuse_groups(tensor, ranks)
    every, ranks = ranks, ranks // tensor
    groups = "processes" if tensor == 1 else f"groups of {tensor} processes (parallel.tensor={tensor} of {every})"
    key, asked = ("shard", shard) if shard is not None else ("replicate", replicate)
    if asked is None:
        return Grid(1, ranks, tensor)
    if shard is not None and replicate is not None:
        if shard * replicate != ranks:
            raise Refusal.at(
                "parallel.shard",
                f"{shard} x parallel.replicate={replicate} is {shard * replicate}, and there are {ranks} {groups}",
                "remove one of the two, which is then found from the other, or start as many processes",
            )
        return Grid(replicate, shard, tensor)
    if ranks % asked:
        fitting = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
        raise Refusal.at(
            f"parallel.{key}", f"{asked} does not divide {ranks} {groups}", f"use {' or '.join(fitting)}, or remove it"
        )
    found = (ranks // asked, asked) if shard is not None else (asked, ranks // asked)
    return Grid(*found, tensor)


def refuse_offload(settings: Parallel, ranks: int) -> None:
    """Weights on the host are gathered layer by layer, which needs ranks to gather them from."""
    for key, asked in (("offload", settings.offload), ("offload_critic", settings.offload_critic)):
        if asked in ("params", "all") and ranks == 1:
            raise Refusal.at(
                f"parallel.{key}",
                f"{asked} needs several processes, and there is one",
                "use optimizer, which frees more, or start several processes",
            )


def sharding_of(settings: Parallel, device: Device, world: World, *, on_host: bool = False) -> Sharding | None:
    """The ranks for FSDP; None for a single one, which holds everything."""
    if world.size == 1:
        return None
    grid = grid_of(settings, world.size)
    own = device.torch_device(world.local_rank)
    copies = () if grid.replicate == 1 else ("replicate",)
    sizes = grid._asdict()
    if grid.tensor == 1:
        return Sharding(_mesh(device, world, sizes, (*copies, "shard")), own, on_host)
    mesh = _mesh(device, world, sizes, (*copies, "shard", "tensor"))
    # What the ranks of a tensor group have all of is sliced over them too.
    every = _mesh(device, world, sizes | {"shard": grid.shard * grid.tensor}, (*copies, "shard"))
    *slices, tensor = mesh.mesh_dim_names or ()
    return Sharding(mesh[tuple(slices)], own, on_host, TensorGroup(mesh[tensor]), every)


def _mesh(device: Device, world: World, sizes: dict[str, int], names: tuple[str, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    # Meshes of the same ranks and names are the same to torch, which remembers the mesh of an operator's result. In a
    # process that trains again it would be one whose groups are gone, or by their names are other groups now.
    own = tuple(f"{name}-{world.turn}" for name in names)
    return init_device_mesh(device.name, tuple(sizes[name] for name in names), mesh_dim_names=own)
