"""Models sliced over some ranks and copied over others, and their checkpoints: the numbers of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from commands import HERE, changed_lockstep, lockstep, torchrun
from conftest import write_online_recipe, write_sft_recipe
from lockstep.run import checkpoint as checkpoints
from lockstep.run.folder import RunFolder
from runs import close, facts, stored

pytestmark = [pytest.mark.torchrun, pytest.mark.xdist_group("sharding")]
# eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
COMMON = ["optim.eps=1e-4", "val.every=3", "checkpoint.every=3", "checkpoint.keep_last=9"]
METRICS = ("train/loss", "train/grad_norm", "val/loss", "train/tokens", "train/trained_tokens")


def history(folder: Path) -> dict[str, list[float]]:
    return {name: [told[name] for _, told in facts(folder) if name in told] for name in METRICS}


def checkpoint_of(run: Path, step: int) -> Path:
    return checkpoints.folder_of(RunFolder(run).checkpoints, step)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The recipe of a run that one process has trained, as `runs/one`."""
    recipe = write_sft_recipe(tmp_path_factory.mktemp("alone"), tiny_folder)
    done = lockstep("train", recipe, "run.name=one", *COMMON)
    assert done.returncode == 0, done.stderr
    return recipe


@pytest.fixture(scope="module")
def four(alone: Path) -> Path:
    """The same by four, two copies in two slices each."""
    done = torchrun("train", alone, "run.name=four", *COMMON, "parallel.shard=2", processes=4)
    assert done.returncode == 0, done.stderr
    told = "".join(done.stdout.split())  # a long path is wrapped
    assert told.count("saved") == 2
    assert told.count("verified:loadedbyplaintransformers") == 1
    for step in (3, 6):
        assert f"saved{checkpoint_of(alone.parent / 'runs' / 'four', step)}" in told
    return alone.parent / "runs" / "four"


def assert_same(run: Path, one: Path) -> None:
    told, wanted = history(run), history(one)
    for name in METRICS:
        assert told[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert close(stored(run, 6), stored(one, 6))


@pytest.mark.slow
def test_copies_change_no_number(alone: Path) -> None:
    """Two ranks with a slice each are in test_torchrun.py."""
    done = torchrun("train", alone, "run.name=two", *COMMON, "parallel.replicate=2")
    assert done.returncode == 0, done.stderr
    assert_same(alone.parent / "runs" / "two", alone.parent / "runs" / "one")


def test_copies_and_slices_change_no_number(alone: Path, four: Path) -> None:
    assert_same(four, alone.parent / "runs" / "one")
    path = checkpoint_of(four, 6)
    assert {file.name for file in path.iterdir()} == {"shards", "state.json", "manifest.json"}
    # Every rank wrote a part, none of them the whole: two copies of each slice are written once.
    sizes = [file.stat().st_size for file in (path / "shards").iterdir()]
    whole = sum(file.stat().st_size for file in checkpoint_of(alone.parent / "runs" / "one", 6).glob("*.safetensors"))
    assert len(sizes) == 4
    assert sum(sizes) == pytest.approx(whole, rel=0.1)
    assert max(sizes) < whole / 2


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_four_ranks_go_on_as_fewer(alone: Path, four: Path, tmp_path: Path, processes: int) -> None:
    """From the third step, whose checkpoint was written while the fourth was computed."""
    run = shutil.copytree(four, tmp_path / "four")
    shutil.rmtree(checkpoint_of(run, 6))
    words = ["train", alone, "run.name=four", *COMMON, f"run.folder={tmp_path}"]
    done = lockstep(*words) if processes == 1 else torchrun(*words, processes=processes)
    assert done.returncode == 0, done.stderr
    assert "after step 3" in " ".join(done.stdout.split())
    assert_same(run, alone.parent / "runs" / "one")


@pytest.mark.slow
def test_a_checkpoint_of_one_process_goes_on_in_two(alone: Path, tmp_path: Path) -> None:
    run = shutil.copytree(alone.parent / "runs" / "one", tmp_path / "one")
    shutil.rmtree(checkpoint_of(run, 6))
    # As a version before the keys of the processes wrote it.
    state = json.loads((checkpoint_of(run, 3) / "state.json").read_text())
    assert state["version"] == 1
    del state["recipe"]["parallel"], state["recipe"]["checkpoint"]["asynchronous"]
    (checkpoint_of(run, 3) / "state.json").write_text(json.dumps(state))
    files = [checkpoint_of(run, 3) / name for name in ("model.safetensors", "optimizer.safetensors", "state.json")]
    checkpoints.write_manifest(checkpoint_of(run, 3), checkpoints.told_of(checkpoint_of(run, 3), files))
    done = torchrun("train", alone, "run.name=one", *COMMON, f"run.folder={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "after step 3" in " ".join(done.stdout.split())
    assert "parallel" not in done.stdout
    assert_same(run, alone.parent / "runs" / "one")


# For every day the test before this one has that ranks go on.
@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_killed_while_it_writes_leaves_the_checkpoint_before(alone: Path, tmp_path: Path, goes_on: bool) -> None:
    words = ["train", alone, f"run.folder={tmp_path}", "run.name=killed", *COMMON]
    run = tmp_path / "killed"
    change = (
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "from kills import Moment, die_at\n"
        "if os.environ['RANK'] == '1':\n"
        f"    die_at(Moment({str(RunFolder(run).checkpoints / '.writing-step_6' / 'shards' / '*')!r}))\n"
    )
    done = torchrun(*words, program=changed_lockstep(tmp_path, change))
    assert done.returncode != 0
    assert checkpoints.steps_in(RunFolder(run).checkpoints) == [3]
    if not goes_on:
        return
    again = torchrun(*words)
    assert again.returncode == 0, again.stderr
    assert "after step 3" in " ".join(again.stdout.split())
    assert_same(run, alone.parent / "runs" / "one")
    assert not list(RunFolder(run).checkpoints.glob(".*"))


def test_a_damaged_slice_is_passed_over_aloud(alone: Path, four: Path, tmp_path: Path) -> None:
    run = shutil.copytree(four, tmp_path / "four")
    file = next((checkpoint_of(run, 6) / "shards").glob("shard-00003-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x20
    file.write_bytes(content)
    done = lockstep("train", alone, "run.name=four", *COMMON, f"run.folder={tmp_path}", "run.export=false")
    assert done.returncode == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert f"step_6 is damaged ({file.name} has a wrong checksum" in said
    assert "after step 3" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_everything_on_the_host_changes_no_number(alone: Path, tmp_path: Path, tiny_folder: Path) -> None:
    """Weights, gradients and optimizer of two ranks; then of a policy and a critic, and the weights of a reference."""
    done = torchrun("train", alone, "run.name=host", *COMMON, "parallel.offload=all")
    assert done.returncode == 0, done.stderr
    assert_same(alone.parent / "runs" / "host", alone.parent / "runs" / "one")

    recipe = write_online_recipe(tmp_path, tiny_folder)
    words = [
        "method=ppo",
        "rollout.n=1",
        "run.steps=2",
        "critic.lr=1e-3",
        "algorithm.kl.where=reward",
        "log.samples=99",
    ]
    assert lockstep("train", recipe, "run.name=one", *words).returncode == 0
    keys = ["parallel.offload=params", "parallel.offload_critic=optimizer", "parallel.offload_reference=true"]
    done = torchrun("train", recipe, "run.name=host", *words, *keys)
    assert done.returncode == 0, done.stderr
    one, host = tmp_path / "runs" / "one", tmp_path / "runs" / "host"
    assert (one / "samples.jsonl").read_text().count("\n") > 2
    said = [[json.loads(line)["response"] for line in (run / "samples.jsonl").open()] for run in (one, host)]
    assert said[0] == said[1]
    for part in ("weights", "critic"):
        assert close(stored(host, 2, part), stored(one, 2, part)), part
