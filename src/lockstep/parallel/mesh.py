"""The ranks as a grid: a row of it holds one copy of a model, sliced over the row; the rows hold the same slices."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.device_mesh import init_device_mesh

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.parallel.shard import Sharding
from lockstep.parallel.world import World
from lockstep.recipe.parallel import Parallel


class Grid(NamedTuple):
    """`replicate` copies of a model, each in `shard` slices."""

    replicate: int
    shard: int


def grid_of(settings: Parallel, ranks: int) -> Grid:
    """How the recipe lays that many ranks out; refused where they do not come out even."""
    shard, replicate = settings.shard, settings.replicate
    key, asked = ("shard", shard) if shard is not None else ("replicate", replicate)
    if asked is None:
        return Grid(1, ranks)
    if shard is not None and replicate is not None:
        if shard * replicate != ranks:
            raise Refusal.at(
                "parallel.shard",
                f"{shard} x parallel.replicate={replicate} is {shard * replicate}, and there are {ranks} processes",
                "remove one of the two, which is then found from the other, or start as many processes",
            )
        return Grid(replicate, shard)
    if ranks % asked:
        fitting = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
        raise Refusal.at(
            f"parallel.{key}", f"{asked} does not divide {ranks} processes", f"use {' or '.join(fitting)}, or remove it"
        )
    return Grid(ranks // asked, asked) if shard is not None else Grid(asked, ranks // asked)


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
    if grid.replicate == 1:
        mesh = init_device_mesh(device.name, (world.size,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device.name, tuple(grid), mesh_dim_names=("replicate", "shard"))
    return Sharding(mesh, device.torch_device(world.local_rank), on_host)
