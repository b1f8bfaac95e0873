"""`parallel.elastic`: with how many devices a run goes on that has lost some."""

from __future__ import annotations

from lockstep.errors import Refusal
from lockstep.parallel.context import refuse_ranks
from lockstep.parallel.mesh import grid_of, refuse_offload
from lockstep.recipe.keys_parallel import Parallel


def fitting_devices(settings: Parallel, there: int) -> int:
    """The most devices, of those that are there and no more than were asked for, that the recipe's layout comes out
    even on; 0 where there are too few for any."""
    most = min(settings.devices or 1, there)
    return next((devices for devices in range(most, 0, -1) if _fits(settings, devices)), 0)


def _fits(settings: Parallel, devices: int) -> bool:
    try:
        grid_of(settings, devices)
        refuse_ranks(settings.group, devices)  # whole groups of those that work together
        refuse_offload(settings, devices)
    except Refusal:
        return False
    return True


def layout_of(settings: Parallel) -> str:
    """The keys that a number of devices has to fit, in words."""
    asked = {
        "shard": settings.shard is not None,
        "replicate": settings.replicate is not None,
        "tensor": settings.tensor > 1,
        "context": settings.context > 1,
        "offload": settings.offload in ("params", "all"),
        "offload_critic": settings.offload_critic in ("params", "all"),
    }
    return " and ".join(f"parallel.{key}={getattr(settings, key)}" for key, said in asked.items() if said)


def refuse_rigid(settings: Parallel) -> None:
    """A layout that fits no fewer devices would lose the run with the first of them, hours from now."""
    asked = settings.devices or 1
    if not settings.elastic or asked == 1 or fitting_devices(settings, asked - 1):
        return
    both = settings.shard is not None and settings.replicate is not None
    way = "remove parallel.shard or parallel.replicate, which is then found from the other" if both else "ask for more"
    raise Refusal.at(
        "parallel.elastic",
        f"no fewer than {asked} devices fit {layout_of(settings)}",
        f"{way}, or remove parallel.elastic: a restart then waits for the lost devices",
    )
