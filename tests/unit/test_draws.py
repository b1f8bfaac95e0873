"""Random streams: who draws the same numbers, and which stream a rank continues after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.device.cpu import Cpu
from lockstep.model.load import load_policy
from lockstep.parallel.context import ContextGroup
from lockstep.parallel.world import World
from lockstep.recipe.schema import Lora, Model
from lockstep.run.runtime import generator_states, restore_generators, seed_generators

DEVICE = Cpu()


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    """Whatever a test draws, the next one does not notice."""
    before = generator_states(DEVICE, 0)
    yield
    assert restore_generators(before, 1, 1, World(), DEVICE)


def worlds(size: int, tensor: int = 1, context: int = 1) -> list[World]:
    """The ranks of a layout, as each of them sees it."""
    groups = [None if context == 1 else ContextGroup(rank % context, context, "ring", ()) for rank in range(size)]
    return [World(rank, size, tensor=tensor, context=group) for rank, group in enumerate(groups)]


def drawn() -> tuple[float, ...]:
    numbers = torch.rand(()).item(), torch.randn(()).item(), random.random(), random.gauss(0, 1)
    return (*numbers, float(np.random.rand()), float(np.random.randn()))


def trained(layout: list[World]) -> tuple[dict[str, torch.Tensor], dict[int, tuple[float, ...]]]:
    """The states that the ranks store after some draws, and by stream what they would draw next."""
    stored: dict[str, torch.Tensor] = {}
    following: dict[int, tuple[float, ...]] = {}
    for world in layout:
        seed_generators(7 + world.engine, DEVICE)
        for _ in range(3):
            drawn()
        stored |= generator_states(DEVICE, world.rank)
        told = drawn()
        assert following.setdefault(world.engine, told) == told, "peers of a tensor group draw alike"
    return stored, following


LAYOUTS = {
    "one": (1, 1, 1),
    "dp2": (2, 1, 1),
    "dp4": (4, 1, 1),
    "tp2": (2, 2, 1),
    "cp2": (2, 1, 2),
    "dp2-tp2": (4, 2, 1),
}


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("now", LAYOUTS)
def test_every_stream_goes_on_and_tensor_peers_share_one(before: str, now: str) -> None:
    layout = LAYOUTS[before]
    stored, following = trained(worlds(*layout))
    found: dict[int, tuple[float, ...]] = {}
    for world in worlds(*LAYOUTS[now]):
        seed_generators(1000, DEVICE)  # as any rank before it resumes
        known = restore_generators(stored, layout[0], layout[1], world, DEVICE)
        assert known == (world.engine in following)
        if known:
            told = drawn()
            assert told == following[world.engine]
            assert found.setdefault(world.engine, told) == told
    assert len(set(found.values())) == len(found), "other ranks draw otherwise"


def test_a_state_of_another_device_is_not_used() -> None:
    stored = generator_states(DEVICE, 0)
    stored["rng/device/0"] = torch.zeros(16, dtype=torch.uint8)  # a counter-based generator's: a seed and an offset
    assert not restore_generators(stored, 1, 1, World(), DEVICE)


def test_checkpoints_without_states_of_python_and_numpy_restore_those_of_torch() -> None:
    seed_generators(3, DEVICE)
    stored = {
        name: state for name, state in generator_states(DEVICE, 0).items() if "/host/" in name or "/device/" in name
    }
    wanted = torch.rand(3)
    assert restore_generators(stored, 1, 1, World(), DEVICE)
    assert torch.equal(torch.rand(3), wanted)


def test_loading_a_model_leaves_the_generators_of_devices_alone(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference or teacher may be loaded after a resume; `torch.manual_seed` would reset the device's stream."""
    seeded: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    before = torch.get_rng_state()
    load_policy(Model(path=str(tiny_folder), lora=Lora(rank=2, alpha=4.0)), torch.device("cpu"), "sdpa", 0)
    assert seeded == []
    assert torch.equal(torch.get_rng_state(), before)
