"""Serving engines as Ray actors on another node than the rank: same samples, lost actors, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import cold_lockstep
from conftest import write_online_recipe
from hang import HANG, wait_until
from kills import lines
from ranks import ranks_of
from ray_clusters import addressed_cluster, bearers, is_on, parent
from runs import difference, facts
from sglang_server import write_package

pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")
pytestmark = [pytest.mark.ray, pytest.mark.torchrun]
STEPS = 8
WORDS = [
    *("rollout.engine=sglang", f"run.steps={STEPS}", "run.export=false", "log.samples=99"),
    *("checkpoint.every=2", "checkpoint.asynchronous=false"),
]
# The head has no room for an engine, and the other node no room for a rank beside two engines.
RAY = [
    *("parallel.launcher=ray", "parallel.devices=1", "parallel.ray.cpus_per_rank=1"),
    *("rollout.server.replicas=2", "rollout.server.cpus=2"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with addressed_cluster({"num_cpus": 1, "labels": {"rack": "a"}}, {"num_cpus": 4, "labels": {"rack": "b"}}) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("engines")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(write_package(folder / "package")), before]))
    yield write_online_recipe(folder, tiny_folder)
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """The undisturbed run without Ray, whose engine is a child process."""
    done = cold_lockstep("train", recipe, *WORDS, "run.name=whole")
    assert done.returncode == 0, done.stderr
    return recipe.parent / "runs" / "whole"


def engines(mark: str) -> dict[int, list[str]]:
    """The command lines of the engines of a run, by process."""
    return bearers({"LOCKSTEP_TEST": mark}, "sglang.launch_server")


def begun(recipe: Path, name: str, mark: str, log: Path, *own: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "lockstep", "train", str(recipe), *WORDS, *RAY, f"run.name={name}", *own]
    with log.open("ab") as file:
        environment = {**os.environ, "LOCKSTEP_TEST": mark}
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)


def test_engines_on_another_node_generate_the_same_and_a_lost_actor_is_restarted(
    cluster: Any, recipe: Path, whole: Path, tmp_path: Path
) -> None:
    run, log, mark = recipe.parent / "runs" / "placed", tmp_path / "log", str(tmp_path)
    process = begun(recipe, "placed", mark, log)
    try:
        wait_until(lambda: lines(run / "metrics.jsonl", 2).has_come() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        found = engines(mark)
        assert len(found) == 2, found
        for words in found.values():
            # Every engine has an address of its own, and refuses a request without the key of the run.
            address = f"http://{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{address}/model_info", timeout=HANG)
            # The key is no word of the command, and its file is gone as soon as the engine listens.
            assert not Path(words[words.index("--config") + 1]).exists()
        first = next(iter(found))
        os.kill(parent(parent(first)), signal.SIGKILL)  # the Ray actor, above the supervisor of the engine
        process.wait(timeout=HANG)
    finally:
        process.kill()
        process.wait()
    told = log.read_text()
    assert process.returncode == 0, told
    assert difference(run, whole, STEPS) == "", told
    record = json.loads((run / "env.json").read_text())["engine"]
    assert (record["servers"], record["started"], record["hand_over"]) == (2, True, "collective")
    logs = sorted(file.name for file in (run / "rollout").glob("sglang*.log"))
    assert logs == ["sglang_0.log", "sglang_1.log"]
    starts = [(run / "rollout" / name).read_text().count("started at") for name in logs]
    assert sorted(starts) == [1, 2], told
    wait_until(lambda: not bearers({"LOCKSTEP_TEST": mark}))


def test_a_killed_driver_leaves_no_engine_and_the_same_command_goes_on(
    cluster: Any, recipe: Path, whole: Path, tmp_path: Path
) -> None:
    run, log, mark = recipe.parent / "runs" / "again", tmp_path / "log", str(tmp_path)
    process = begun(recipe, "again", mark, log)
    try:
        wait_until(lambda: lines(run / "metrics.jsonl", 3).has_come() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        assert len(engines(mark)) == 2
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not bearers({"LOCKSTEP_TEST": mark}))
    assert len(facts(run)) < STEPS
    process = begun(recipe, "again", mark, log)
    assert process.wait(timeout=HANG) == 0, log.read_text()
    assert difference(run, whole, STEPS) == "", log.read_text()


def test_engines_without_room_are_refused(cluster: Any, recipe: Path) -> None:
    done = cold_lockstep("train", recipe, *WORDS, *RAY, "rollout.server.replicas=3", "run.name=refused")
    assert done.returncode == 2, done.stderr
    told = " ".join(done.stderr.split())
    assert "each of the 3 engines (rollout.server.replicas) needs 2 CPU" in told
    assert "room for 0 of 1 ranks" in told


@pytest.mark.parametrize(("engine_rack", "rank_rack"), [("a", "b"), ("b", "a")])
def test_engines_and_ranks_run_on_nodes_with_their_labels(
    cluster: Any, recipe: Path, tmp_path: Path, engine_rack: str, rank_rack: str
) -> None:
    log, mark, runs = tmp_path / "log", str(tmp_path), tmp_path / "runs"
    labels = [f"parallel.ray.labels={{rack: {rank_rack}}}", f"rollout.server.labels={{rack: {engine_rack}}}"]
    own = ["rollout.server.replicas=1", "rollout.server.cpus=1", "run.steps=1", f"run.folder={runs}"]
    process = begun(recipe, "labels", mark, log, *labels, *own)
    try:
        wait_until(lambda: bool(engines(mark)) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        nodes = {"a": cluster.head_node, "b": next(iter(cluster.worker_nodes))}
        (engine,), (rank,) = engines(mark), ranks_of(runs).values()
        assert is_on(engine, nodes[engine_rack])
        assert is_on(rank, nodes[rank_rack])
        assert process.wait(timeout=HANG) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def test_engines_without_room_on_nodes_with_their_labels_are_refused(cluster: Any, recipe: Path) -> None:
    done = cold_lockstep("train", recipe, *WORDS, *RAY, "rollout.server.labels={rack: a}", "run.name=refused")
    assert done.returncode == 2, done.stderr
    told = " ".join(done.stderr.split())
    assert "each of the 2 engines (rollout.server.replicas) needs 2 CPU on a node with rack=a" in told
    done = cold_lockstep("train", recipe, *WORDS, *RAY, "rollout.server.labels={rack: c}", "run.name=refused")
    assert done.returncode == 2, done.stderr
    assert "rollout.server.labels" in done.stderr
    assert "no node of the cluster has rack=c; the nodes have rack=a or b" in " ".join(done.stderr.split())
