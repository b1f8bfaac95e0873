"""What lives on the host, on an NVIDIA device: bit for bit the same run, and the memory that it frees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.device.cuda import Cuda
from lockstep.model.tiny import write_tiny
from lockstep.parallel.world import World
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.train.models import build_learner, load_reference
from lockstep.train.offline import train_offline
from preference_rows import write_recipe
from runs import facts, stored

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]
EXACT = ["device=cuda", "run.deterministic=true", "run.steps=4"]


def train(recipe_file: Path, *overrides: str) -> Path:
    recipe = load_recipe(str(recipe_file), [*EXACT, *overrides])
    train_offline(recipe, Console.silent())
    return Path(recipe.run.folder) / recipe.run.name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_optimizer_on_the_host_makes_the_same_updates(recipe_file: Path, dtype: str) -> None:
    device = train(recipe_file, "run.name=device", f"model.dtype={dtype}")
    host = train(recipe_file, "run.name=host", f"model.dtype={dtype}", "parallel.offload=optimizer")
    assert facts(host) == facts(device)
    for part in ("weights", "optimizer"):
        mine, theirs = stored(host, 4, part), stored(device, 4, part)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), part


def test_a_reference_on_the_host_says_the_same(tiny_folder: Path, tmp_path: Path) -> None:
    recipe_file = write_recipe(tmp_path, tiny_folder, "dpo")
    device = train(recipe_file, "run.name=device")
    assert facts(train(recipe_file, "run.name=host", "parallel.offload_reference=true")) == facts(device)


def allocated(build: object) -> int:
    """Bytes that what `build` makes holds on the device."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    built = build()  # type: ignore[operator]
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del built
    return held


def test_what_is_on_the_host_is_not_on_the_device(tmp_path: Path, recipe_file: Path) -> None:
    write_tiny(tmp_path / "larger", hidden=512, layers=4)
    device, place = Cuda(), torch.device("cuda", 0)

    def held(*words: str) -> tuple[int, int]:
        keys = ["device=cuda", f"model.path={tmp_path / 'larger'}", "model.dtype=bf16", *words]
        recipe = load_recipe(str(recipe_file), keys)
        parameters = 0

        def learner() -> object:
            nonlocal parameters
            found = build_learner(recipe, device, World(), place)
            parameters = sum(p.numel() for p in found.module.parameters())
            for parameter in found.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            found.optimizer.collect()
            found.optimizer.step(1e-4, found.optimizer.gradient_norm())
            return found

        return allocated(learner), parameters

    (kept, parameters), (moved, _) = held(), held("parallel.offload=optimizer")
    # A master and two moments of four bytes.
    assert (kept - moved) / (12 * parameters) == pytest.approx(1, abs=0.02)

    recipe_file = write_recipe(tmp_path, tmp_path / "larger", "dpo")
    on_device, on_host = (
        allocated(lambda: load_reference(load_recipe(str(recipe_file), ["device=cuda", *more]), device, World(), place))  # noqa: B023
        for more in ([], ["parallel.offload_reference=true"])
    )
    assert on_device / (4 * parameters) == pytest.approx(1, abs=0.02)
    assert on_host < 0.02 * on_device
