"""Shards models with FSDP2, so that each rank has a slice of every parameter, and builds the device mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.parallel.expert import ExpertGroup, divided_experts, experts_gathered, refuse_expert_groups
from lockstep.parallel.tensor import TensorGroup, experts_shown, is_sliced, refuse_groups
from lockstep.parallel.world import World
from lockstep.recipe.keys_parallel import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded: the mesh of ranks and this rank's device. With `on_host`, weights and gradients are on
    the host while their layer is not running."""

    mesh: DeviceMesh
    device: torch.device
    on_host: bool = False
    tensor: TensorGroup | None = None
    """The tensor-parallel group of this rank. With tensor parallelism, `mesh` has only one rank of each group."""
    every: DeviceMesh | None = None
    """With tensor parallelism, a mesh of all ranks, for the parameters that tensor parallelism does not split."""
    expert: ExpertGroup | None = None
    """The expert-parallel group of this rank."""


def shard(root: nn.Module, layers: Iterable[nn.Module], sharding: Sharding | None) -> None:
    """Applies FSDP2 to `layers` and then to the root. On a two-dimensional mesh, parameters are sharded over the second
    dimension and replicated over the first (HSDP). Does nothing if `sharding` is None."""
    if sharding is None:
        return
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Gradients are reduced in fp32 for every weight dtype.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    # The host memory of offloaded weights is pinned, so that copies do not block the device.
    place = CPUOffloadPolicy(pin_memory=sharding.device.type != "cpu") if sharding.on_host else OffloadPolicy()
    for part in layers:
        if sharding.expert is not None:
            # The experts of a rank are sharded only over the ranks with the same experts.
            for experts in part.modules():
                if divided_experts(experts) is not None:
                    fully_shard(experts, mesh=sharding.expert.shards, mp_policy=policy, offload_policy=place)
        fully_shard(part, mesh=sharding.mesh, mp_policy=policy, offload_policy=place)
    fully_shard(root, mesh=sharding.every or sharding.mesh, mp_policy=policy, offload_policy=place)
    for module in _sharded(root):
        # The loss is already divided by the global count, so gradients are summed over ranks. For parameters outside
        # the layers, all ranks of a tensor-parallel group have the same gradient, so the sum is divided by the group
        # size.
        divisor = sharding.tensor.size if module is root and sharding.tensor is not None else 1
        module.set_gradient_divide_factor(float(divisor))
        module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def materialise(root: nn.Module, sharding: Sharding) -> None:
    """Allocates the shards of a model that was built on the meta device. Parameters that already have values keep these
    values."""
    values = {name: p.detach().clone() for name, p in root.named_parameters() if not p.is_meta}
    buffers = [(module, name, buffer) for module in root.modules() for name, buffer in module._buffers.items()]
    root.to_empty(device=torch.device("cpu") if sharding.on_host else sharding.device)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer
    parameters = dict(root.named_parameters())
    for name, value in values.items():
        parameters[name].copy_(value)


@contextmanager
def unit_gathered(module: nn.Module) -> Iterator[None]:
    """Gathers the parameters of this FSDP module inside the `with` block: a complete layer, or the root's parameters
    outside the layers. Inside the block, submodules of the root can be called; layers gather their parameters
    themselves. Divided experts show those of this rank. The root's forward must have run once before this function is
    called."""
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(module, FSDPModule):
        with experts_shown(module):
            yield
        return
    module.unshard()
    try:
        with experts_shown(module):
            yield
    finally:
        module.reshard()


def _sharded(root: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in root.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered(root: nn.Module) -> Iterator[None]:
    """Gathers the full parameters on every rank inside the `with` block, so that ranks can run forward passes without
    communication."""
    modules = _sharded(root)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        with experts_gathered(root):
            yield
    finally:
        for module in modules:
            module.reshard()
        for module in modules:
            # Restores the setting of `fully_shard`: only the root keeps its parameters between forward and backward.
            module.set_reshard_after_forward(module is not root, recurse=False)


def reshard(root: nn.Module) -> None:
    """Frees the full parameters that a forward pass left at the root, so that only shards remain. While full parameters
    exist, writes to the shards have no effect."""
    for module in _sharded(root):
        module.reshard()


def held_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Returns this rank's local part of a tensor, and the offset of that part in the full tensor."""
    if not is_sliced(tensor):
        return tensor, (0,) * tensor.ndim
    (chunk,) = tensor.__create_chunk_list__()
    return tensor.to_local(), tuple(chunk.offsets)


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups tensors so that one multi-tensor operator can process a group: tensors of a group are sharded over the
    same dimensions of the same mesh."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        key = (tensor.device_mesh, _sliced_along(tensor)) if is_sliced(tensor) else None
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


def _sliced_along(tensor: DTensor) -> tuple[int, ...]:
    """Returns the mesh dimensions along which the tensor is sharded."""
    return tuple(index for index, place in enumerate(tensor.placements) if not place.is_replicate())


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the norm over all elements of all tensors, each counted once. If tensors are sharded, all ranks must call
    this function."""
    groups = by_mesh(tensors)
    if not groups or (len(groups) == 1 and not any(map(_is_large, groups[0]))):
        return whole(torch.nn.utils.get_total_norm(groups[0] if groups else []))
    return torch.linalg.vector_norm(torch.stack([_norm(group) for group in groups]))


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the norm of tensors of one mesh. The squared norms of the ranks' shards are summed over the mesh."""
    parts = [(one.to_local() if is_sliced(one) else one, _is_large(one)) for one in tensors]
    norms = [_large_norm(part) for part, large in parts if large]
    if small := [part for part, large in parts if not large]:
        norms += torch._foreach_norm(small)
    norm, first = torch.linalg.vector_norm(torch.stack(norms)), tensors[0]
    if is_sliced(first):
        square = norm.square()
        for dimension in _sliced_along(first):
            dist.all_reduce(square, group=first.device_mesh.get_group(dimension))
        norm = square.sqrt()
    return norm


# On a CPU, torch sums the squares of a tensor in fp32 one after the other: the norm of 20 million elements is up to 0.5
# % too small. Tensors with more than LARGE elements are summed in parts of PART elements, and the parts in fp64.
LARGE, PART = 2**17, 1024


def _is_large(tensor: torch.Tensor) -> bool:
    """Shards of a tensor have different sizes, but all ranks must decide alike: the whole tensor counts."""
    return tensor.device.type == "cpu" and tensor.numel() > LARGE


def _large_norm(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    even = len(flat) // PART * PART
    parts = [torch.linalg.vector_norm(flat[:even].view(-1, PART), dim=1), flat[even:]]
    return torch.linalg.vector_norm(torch.cat(parts), dtype=torch.float64).float()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor of a DTensor. All ranks must call this function."""
    return tensor.full_tensor() if is_sliced(tensor) else tensor


def as_sharded(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """Returns the shard of this rank as a DTensor of the full `shape`. Writes to the DTensor change `local`, also if
    `local` is on the host: `DTensor.from_local` would copy it to the device of the mesh."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(*shape, device="meta").stride()
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(torch.Size(shape), stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def whole_on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the full tensor on a device. Shards on the host are first copied to the device, whose backend gathers
    them."""
    if not is_sliced(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    local, mesh, places = tensor.to_local().to(device), tensor.device_mesh, tensor.placements
    sliced = DTensor.from_local(local, mesh, places, run_check=False, shape=tensor.shape, stride=tensor.stride())
    return sliced.full_tensor()


@torch.no_grad()
def fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a full tensor into a parameter or optimizer state, sharded or not."""
    if is_sliced(target):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
    target.copy_(value)


# The device mesh. Each row of the mesh has one copy of a model, sharded over the ranks of the row. With tensor
# parallelism every entry of the mesh is a group of neighbouring ranks. Expert-parallel groups are parts of a row.


class Grid(NamedTuple):
    """The sizes of the mesh, with `replicate` copies of a model, each in `shard` shards, each shard split over `tensor`
    ranks. The experts of a layer are divided over `expert` of the `shard` entries."""

    replicate: int
    shard: int
    tensor: int = 1
    expert: int = 1


def grid_of(settings: Parallel, ranks: int) -> Grid:
    """Returns the mesh sizes of the recipe for this number of ranks. Raises `Refusal` if the number of ranks does not
    fit these sizes."""
    grid = _grid_without_experts(settings, ranks)
    refuse_expert_groups(settings.expert_parallel, grid.shard)
    return grid._replace(expert=settings.expert_parallel)


def _grid_without_experts(settings: Parallel, ranks: int) -> Grid:
    shard, replicate, tensor = settings.shard, settings.replicate, settings.tensor_parallel
    refuse_groups(tensor, ranks)
    every, ranks = ranks, ranks // tensor
    groups = (
        "processes" if tensor == 1 else f"groups of {tensor} processes (parallel.tensor_parallel={tensor} of {every})"
    )
    key, size = ("shard", shard) if shard is not None else ("replicate", replicate)
    if size is None:
        return Grid(1, ranks, tensor)
    if shard is not None and replicate is not None:
        if shard * replicate != ranks:
            raise Refusal.at(
                "parallel.shard",
                f"{shard} x parallel.replicate={replicate} is {shard * replicate}, but there are {ranks} {groups}",
                "remove one of these two keys, which is then derived from the other, or start as many processes",
                code="wrong-process-count",
            )
        return Grid(replicate, shard, tensor)
    if ranks % size:
        fitting = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
        raise Refusal.at(
            f"parallel.{key}",
            f"{size} does not divide {ranks} {groups}",
            f"use {' or '.join(fitting)}, or remove it",
            code="wrong-process-count",
        )
    shape = (ranks // size, size) if shard is not None else (size, ranks // size)
    return Grid(*shape, tensor)


def refuse_offload(settings: Parallel, ranks: int) -> None:
    """Raises `Refusal` if offload of weights is requested with a single rank. The offload of weights is part of FSDP
    and needs several ranks."""
    for key, value in (("offload", settings.offload), ("offload_critic", settings.offload_critic)):
        if value in ("params", "all") and ranks == 1:
            raise Refusal.at(
                f"parallel.{key}",
                f"{value} needs several processes, but only one was started",
                "set it to optimizer, which frees more memory, or start several processes",
                code="wrong-process-count",
            )


def sharding_of(settings: Parallel, device: Device, world: World, *, on_host: bool = False) -> Sharding | None:
    """Returns the FSDP mesh and settings, or None for a single rank."""
    if world.size == 1:
        return None
    grid = grid_of(settings, world.size)
    local_device = device.torch_device(world.local_rank)
    copies = () if grid.replicate == 1 else ("replicate",)
    sizes = {"replicate": grid.replicate, "shard": grid.shard, "tensor": grid.tensor}
    if grid.tensor == 1:
        mesh = _mesh(device, world, sizes, (*copies, "shard"))
        return Sharding(mesh, local_device, on_host, expert=_expert_group(grid, device, world, None))
    mesh = _mesh(device, world, sizes, (*copies, "shard", "tensor"))
    # Parameters that tensor parallelism does not split are sharded over the ranks of the tensor-parallel group too.
    every = _mesh(device, world, sizes | {"shard": grid.shard * grid.tensor}, (*copies, "shard"))
    *slices, tensor = mesh.mesh_dim_names or ()
    group = TensorGroup(mesh[tensor])
    experts = _expert_group(grid, device, world, group)
    return Sharding(mesh[tuple(slices)], local_device, on_host, group, every, experts)


def _expert_group(grid: Grid, device: Device, world: World, tensor: TensorGroup | None) -> ExpertGroup | None:
    if grid.expert == 1:
        return None
    copies = () if grid.replicate == 1 else ("replicate",)
    sizes = {"replicate": grid.replicate, "shard": grid.shard // grid.expert, "expert": grid.expert * grid.tensor}
    mesh = _mesh(device, world, sizes, (*copies, "shard", "expert"))
    *slices, experts = mesh.mesh_dim_names or ()
    if tensor is None:
        peers = mesh[experts].get_group()
    else:
        sizes = {"all": world.size // sizes["expert"], "peer": grid.expert, "tensor": grid.tensor}
        peers = _mesh(device, world, sizes, ("all", "peer", "tensor")).get_group(1)
    return ExpertGroup(mesh[experts], peers, grid.expert, mesh[tuple(slices)], tensor)


def _mesh(device: Device, world: World, sizes: dict[str, int], names: tuple[str, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    # Torch caches meshes by ranks and names. If a process trains a second time, the process groups of the cached mesh
    # are already destroyed. So each mesh gets new names.
    dim_names = tuple(f"{name}-{world.turn}" for name in names)
    return init_device_mesh(device.name, tuple(sizes[name] for name in names), mesh_dim_names=dim_names)
