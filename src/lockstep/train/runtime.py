"""What a process of a run computes with: its device, the ranks beside it, and a console that only the first has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.device.base import Device
from lockstep.device.select import explain
from lockstep.parallel.context import with_context
from lockstep.parallel.stall import Stall
from lockstep.parallel.tensor import with_tensor
from lockstep.parallel.world import World, joined
from lockstep.recipe import Recipe
from lockstep.run.console import Console


@dataclass(frozen=True)
class Runtime:
    """`switches` are those of the device's libraries that make it deterministic, as they were set."""

    device: Device
    world: World
    console: Console
    switches: dict[str, str]


@contextmanager
def open_runtime(recipe: Recipe, console: Console) -> Iterator[Runtime]:
    """The device that the recipe names and the other ranks, joined until the run is over."""
    device, sentence = explain(recipe.device)
    # Before the first tensor and the first collective: libraries read these switches once.
    switches = device.deterministic(True) if recipe.run.deterministic else {}
    seconds = recipe.parallel.stall_seconds
    stall = None if seconds is None else Stall(seconds, Path(recipe.run.folder) / recipe.run.name)
    with joined(device, stall) as world:
        console = console if world.main else Console.silent()
        console.say(sentence)
        world = with_context(world, device, recipe.parallel.context, recipe.parallel.context_layout)
        world = with_tensor(world, recipe.parallel.tensor)
        yield Runtime(device, world, console, switches)
