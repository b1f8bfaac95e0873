"""The runtime of one process: its device, its ranks, its console and its random-number generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.device.base import Device
from lockstep.device.select import explain
from lockstep.parallel.stall import Stall
from lockstep.parallel.tensor import with_tensor
from lockstep.parallel.world import World, joined, with_context
from lockstep.recipe import Recipe
from lockstep.run.console import Console

# The random numbers of sampling and of each step depend only on the seed and the step, so checkpoints do not store a
# state for them. Dropout and other code use the global generators of torch (CPU and device), Python and NumPy, whose
# states are stored in checkpoints. Ranks of a tensor-parallel group process the same tokens and must use the same
# dropout masks, so they have the same random stream. All other ranks, including those of a context-parallel group, have
# separate streams (`World.engine`).

_PREFIX = "rng"


def generator_of(seed: tuple[int, ...]) -> torch.Generator:
    """Returns a random generator. The caller passes the run's seed and the step, so every rank gets the same
    generator."""
    return torch.Generator().manual_seed(seed_of(*seed))


def seed_of(*parts: int) -> int:
    """Combines several numbers into one seed."""
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:7], "big")


def seed_generators(seed: int, device: Device) -> None:
    """Seeds every global generator of this process."""
    device.seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # user code and model code may use the global NumPy generator


def generator_states(device: Device, rank: int) -> dict[str, torch.Tensor]:
    """Returns the generator states of this process, by their names in a checkpoint."""
    states = {
        "host": torch.get_rng_state(),
        "device": device.rng_state().cpu(),
        "python": _python_state(),
        "numpy": _numpy_state(),
    }
    return {f"{_PREFIX}/{name}/{rank}": state for name, state in states.items()}


def restore_generators(
    stored: Mapping[str, torch.Tensor], earlier_size: int, earlier_tensor: int, world: World, device: Device
) -> bool:
    """Restores the random generator states of this rank. Returns False if the checkpoint has no states for this rank,
    or if its states are from another device type.

    A checkpoint has one state per rank. The ranks of a tensor-parallel group have the same state, so the state of the
    first rank of the group is used.
    """
    if world.engine >= earlier_size // earlier_tensor:
        return False
    rank = world.engine * earlier_tensor
    on_device = stored[f"{_PREFIX}/device/{rank}"]
    if on_device.numel() != device.rng_state().numel():
        return False
    torch.set_rng_state(stored[f"{_PREFIX}/host/{rank}"])
    device.set_rng_state(on_device)
    # Checkpoints of earlier lockstep versions do not have the states of Python and NumPy.
    if (python := stored.get(f"{_PREFIX}/python/{rank}")) is not None:
        _restore_python(python)
    if (numpy := stored.get(f"{_PREFIX}/numpy/{rank}")) is not None:
        _restore_numpy(numpy)
    return True


# The generator states are stored as float64 tensors, because reading a pickle may execute code. float64 represents
# 32-bit integers exactly.


def _python_state() -> torch.Tensor:
    _, words, gauss = random.getstate()
    return torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64)


def _restore_python(state: torch.Tensor) -> None:
    *words, has_gauss, gauss = state.tolist()
    random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))


def _numpy_state() -> torch.Tensor:
    state: Any = np.random.get_state(legacy=True)
    _, words, *rest = state
    return torch.tensor([*words.tolist(), *rest], dtype=torch.float64)


def _restore_numpy(state: torch.Tensor) -> None:
    *words, position, has_gauss, gauss = state.tolist()
    legacy = ("MT19937", np.array(words, dtype=np.uint32), int(position), int(has_gauss), gauss)
    np.random.set_state(legacy)


@dataclass(frozen=True)
class Runtime:
    """Device, ranks and console of one process. `switches` are the settings that make the device libraries
    deterministic."""

    device: Device
    world: World
    console: Console
    switches: dict[str, str]


@contextmanager
def open_runtime(recipe: Recipe, console: Console) -> Iterator[Runtime]:
    """Opens the device of the recipe and joins the process group. Leaves the process group when the context ends."""
    device, sentence = explain(recipe.device)
    # The device libraries read the deterministic settings only once. So `device.deterministic` must be called before
    # the first tensor and the process group are created.
    switches = device.deterministic(True) if recipe.run.deterministic else {}
    seconds = recipe.parallel.stall_seconds
    stall = None if seconds is None else Stall(seconds, Path(recipe.run.folder) / recipe.run.name)
    with joined(device, stall) as world:
        console = console if world.main else Console.silent()
        console.say(sentence)
        world = with_context(world, device, recipe.parallel.context_parallel, recipe.parallel.context_layout)
        world = with_tensor(world, recipe.parallel.tensor_parallel)
        yield Runtime(device, world, console, switches)
