"""The ranks as a grid: a row of it holds one copy of a model, sliced over the row; the rows hold the same slices.

With tensor parallelism every place of the grid is a group of neighbouring ranks that divide the modules between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.parallel.shard import Sharding
from lockstep.parallel.tensor import TensorGroup, refuse_groups
from lockstep.parallel.world import World
from lockstep.recipe.keys_parallel import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
