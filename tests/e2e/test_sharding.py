"""Models sliced over some ranks and copied over others: the losses, gradients and weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import lockstep, torchrun
from conftest import write_sft_recipe
from lockstep.run import checkpoint as checkpoints
from runs import close, facts

pytestmark = pytest.mark.torchrun
# eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
COMMON = ["optim.eps=1e-4", "val.every=3"]
METRICS = ("train/loss", "train/grad_norm", "val/loss", "train/tokens", "train/trained_tokens")


def history(folder: Path) -> dict[str, list[float]]:
    return {name: [told[name] for _, told in facts(folder) if name in told] for name in METRICS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The recipe of a run that one process has trained, as `runs/one`."""
    recipe = write_sft_recipe(tmp_path_factory.mktemp("alone"), tiny_folder)
    done = lockstep("train", recipe, "run.name=one", *COMMON)
    assert done.returncode == 0, done.stderr
    return recipe


def assert_same(run: Path, one: Path) -> None:
    told, wanted = history(run), history(one)
    for name in METRICS:
        assert told[name] == pytest.approx(wanted[name], rel=1e-5), name
    mine, theirs = (checkpoints.read(checkpoints.folder_of(folder / "checkpoints", 6)) for folder in (run, one))
    assert close(mine.weights, theirs.weights)


@pytest.mark.parametrize(
    ("processes", "keys"),
    [(2, ["parallel.replicate=2"]), (4, ["parallel.shard=2"])],
    ids=["two copies", "two copies in two slices"],
)
def test_the_grid_of_ranks_changes_no_number(alone: Path, processes: int, keys: list[str]) -> None:
    """Two ranks with a slice each are in test_torchrun.py."""
    done = torchrun("train", alone, f"run.name=grid{processes}", *COMMON, *keys, processes=processes)
    assert done.returncode == 0, done.stderr
    runs = alone.parent / "runs"
    assert_same(runs / f"grid{processes}", runs / "one")
