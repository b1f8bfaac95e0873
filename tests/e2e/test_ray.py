"""Two nodes of a Ray cluster on this machine, a rank on each: the numbers of one process, whatever falls over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import cold_lockstep, lockstep
from conftest import write_online_recipe, write_sft_recipe
from hang import HANG, wait_until
from kills import lines
from ranks import assert_none_left, ranks_of
from ray_clusters import addressed_cluster, bearers, is_on, patient, ports, ray_cluster
from runs import close, difference, facts, stored
from struck import struck

pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")
pytestmark = [pytest.mark.ray, pytest.mark.torchrun]
RAY = [
    *("parallel.launcher=ray", "parallel.devices=2", "checkpoint.every=2", "checkpoint.asynchronous=false"),
    *("run.export=false", "run.steps=4", "optim.eps=1e-4"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and a node, each with one processor, in two racks."""
    racks = [{"num_cpus": 1, "labels": {"rack": rack}} for rack in "ab"]
    with addressed_cluster(*racks) as found:
        yield found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write_sft_recipe(tmp_path_factory.mktemp("ray"), tiny_folder)


@pytest.fixture(scope="module")
def whole(cluster: Any, recipe: Path) -> Path:
    """The undisturbed run of two actors."""
    runs = recipe.parent / "whole"
    done = cold_lockstep("train", recipe, f"run.folder={runs}", *RAY)
    assert done.returncode == 0, done.stderr
    # Rank 0 as it is, the others by name.
    assert "\nstep 4/4  loss" in done.stdout
    assert "on each of 2 device(s)" in done.stdout
    assert not re.search(r"rank 0: |rank 1: step", done.stdout)
    assert_none_left(runs)
    # Each rank has a log file, and no rank is nicer than the driver.
    logs = sorted((runs / "run" / "logs").iterdir())
    assert [log.name for log in logs] == ["rank_0.log", "rank_1.log"]
    assert "\nstep 4/4  loss" in logs[0].read_text()
    return runs / "run"


def assert_equal(run: Path, whole: Path, steps: int = 4) -> None:
    assert facts(run) == facts(whole)
    weights, wanted = stored(run, steps), stored(whole, steps)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def begun(words: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        # A shell ignores Ctrl-C for what it runs in the background, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(process: subprocess.Popen[str], moment: Callable[[], bool]) -> None:
    wait_until(lambda: moment() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]


def test_two_actors_train_what_one_process_does(whole: Path, recipe: Path) -> None:
    alone = [word for word in RAY if not word.startswith("parallel.")]
    assert lockstep("train", recipe, "run.name=one", *alone).returncode == 0
    one = recipe.parent / "runs" / "one"
    for name in ("train/loss", "train/grad_norm", "train/trained_tokens"):
        wanted = [told[name] for _, told in facts(one)]
        assert [told[name] for _, told in facts(whole)] == pytest.approx(wanted, rel=1e-5)
    assert close(stored(whole, 4), stored(one, 4))


def test_every_actor_s_rank_has_a_rollout_worker(cluster: Any, tmp_path: Path, tiny_folder: Path) -> None:
    """On two nodes, each with a rank and the worker that it started: what two ranks generate in turns without Ray."""
    recipe = write_online_recipe(tmp_path, tiny_folder)
    words = ["run.steps=2", "run.export=false", "log.samples=99", "parallel.devices=2"]
    ahead = ["run.name=beside", "rollout.max_staleness=0", "parallel.launcher=ray", "parallel.ray.cpus_per_rank=1"]
    for own in (["run.name=turns"], ahead):
        done = cold_lockstep("train", recipe, *words, *own)
        assert done.returncode == 0, done.stderr
    turns, beside = (tmp_path / "runs" / name for name in ("turns", "beside"))
    assert difference(beside, turns, 2, leaving="async/") == ""
    assert all(metrics["async/staleness_max"] == 0 for _, metrics in facts(beside))
    assert sorted(file.name for file in (beside / "rollout").iterdir()) == ["worker_0.log", "worker_1.log"]


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(whole: Path, recipe: Path, tmp_path: Path) -> None:
    environment, once = struck(
        tmp_path / "blow", 1, signal.SIGKILL, lines(tmp_path / "runs" / "run" / "metrics.jsonl", 3)
    )
    words = ["train", recipe, f"run.folder={tmp_path / 'runs'}", *RAY, "parallel.max_restarts=1"]
    done = cold_lockstep(*words, **environment)
    assert once.exists(), done.stdout
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert done.stderr.count("restart 1 of 1") == 1
    assert "run after step 2" in " ".join(done.stdout.split())  # lines may be broken
    assert_equal(tmp_path / "runs" / "run", whole)
    assert_none_left(tmp_path / "runs")


def test_a_stopped_rank_is_named_and_the_run_ends(whole: Path, recipe: Path, tmp_path: Path) -> None:
    """Rank 0, in whose place nobody would know anything if it held the store. The same command goes on afterwards."""
    environment, once = struck(
        tmp_path / "blow", 0, signal.SIGSTOP, lines(tmp_path / "runs" / "run" / "metrics.jsonl", 3)
    )
    words = ["train", recipe, f"run.folder={tmp_path / 'runs'}", *RAY, "parallel.stall_seconds=8"]
    done = cold_lockstep(*words, **environment)
    assert once.exists(), done.stdout
    assert done.returncode == 75, done.stderr
    assert re.search(r"rank 1: +rank 0 .* no heartbeat for \d+ s; .*step \d", done.stderr)
    for rank in (0, 1):
        found = (tmp_path / "runs" / "run" / "stacks" / f"rank_{rank}.txt").read_text()
        assert re.search(r'File ".*lockstep/train/.*", line \d+ in ', found), found
    assert_none_left(tmp_path / "runs")
    done = cold_lockstep(*words)
    assert done.returncode == 0, done.stderr
    assert_equal(tmp_path / "runs" / "run", whole)


def test_ctrl_c_saves_and_a_cluster_of_its_own_ends_with_the_run(recipe: Path, tmp_path: Path) -> None:
    """Nothing of Ray is left either."""
    runs = tmp_path / "runs"
    words = ["train", str(recipe), f"run.folder={runs}", *RAY, "run.steps=100000", "checkpoint.every=100000"]
    own = {"RAY_ADDRESS": "local", "LOCKSTEP_TEST": str(tmp_path)}
    process = begun(words, **own)
    try:
        wait_for(process, lambda: lines(runs / "run" / "metrics.jsonl", 3).has_come())
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, said
    assert "the same command" in said
    assert len(list((runs / "run" / "checkpoints").glob("step_*"))) == 1
    wait_until(lambda: not bearers(own))


@pytest.mark.parametrize("own", [False, True], ids=["of a cluster that runs", "of its own cluster"])
def test_a_killed_driver_leaves_no_process(own: bool, cluster: Any, recipe: Path, tmp_path: Path) -> None:
    """Nor does a cluster of its own outlive it. The same command goes on: nobody holds the run folder."""
    runs = tmp_path / "runs"
    words = ["train", str(recipe), f"run.folder={runs}", *RAY]
    mark = {"LOCKSTEP_TEST": str(tmp_path)}
    process = begun([*words, "run.steps=100000"], **mark, **({"RAY_ADDRESS": "local"} if own else {}))
    try:
        wait_for(process, lambda: len(list(runs.glob("run/checkpoints/step_*"))) > 0)
        if own or os.geteuid() == 0:  # who may not lower the niceness of Ray's workers is told
            niceness = {os.getpriority(os.PRIO_PROCESS, rank) for rank in ranks_of(runs).values()}
            assert niceness == {os.getpriority(os.PRIO_PROCESS, 0)}
        # The ranks are told the mark on any cluster; so is all of a cluster that the driver starts.
        assert {process.pid, *ranks_of(runs).values()} <= bearers(mark).keys()
        assert len(ranks_of(runs)) == 2
    finally:
        process.kill()
        process.communicate(timeout=HANG)
    wait_until(lambda: not bearers(mark))
    if own:
        return
    left = max(int(folder.name.removeprefix("step_")) for folder in runs.glob("run/checkpoints/step_*"))
    done = cold_lockstep(*words, f"run.steps={left + 2}")
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in facts(runs / "run")] == list(range(1, left + 3))


BUNDLES = """
import json, sys
import ray
from lockstep.launch.ray_launcher import Cluster
from lockstep.recipe import load_recipe

quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
ray.init(num_cpus=2, num_gpus=2, resources={"NPU": 2}, **quiet)
found = {}
for device in ("cuda", "npu", "cpu", "auto"):
    words = [f"device={device}", "parallel.launcher=ray", "parallel.devices=2"]
    cluster = Cluster(load_recipe(sys.argv[1], words), ray)
    with cluster.placement.placed(0) as placed, cluster._actors(placed) as (actors, _):
        environments = cluster._environments(actors)
    told = [[one.get(name) for name in sys.argv[2:]] for one in environments]
    found[device] = [cluster.device, sorted(placed.ranks.bundle_specs[0]), told]
print(json.dumps(found))
"""


def test_every_rank_is_given_its_own_accelerator(recipe: Path) -> None:
    """A node that only says it has accelerators: Ray hands them out, and nobody uses them."""
    names = ["RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"]
    command = [sys.executable, "-c", BUNDLES, str(recipe), *names]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RAY_ADDRESS": "local"})
    assert done.returncode == 0, done.stderr
    npu = ["npu", ["CPU", "NPU"], [["0", "0", None, "0"], ["1", "0", None, "1"]]]
    assert json.loads(done.stdout) == {
        "cuda": ["cuda", ["CPU", "GPU"], [["0", "0", "0", None], ["1", "0", "1", None]]],
        "npu": npu,
        "cpu": ["cpu", ["CPU"], [["0", "0", None, None], ["1", "1", None, None]]],
        "auto": npu,
    }


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["parallel.devices=3"], "nodes have 2 CPU in total (2 free), and room for 2 of 3 ranks"),
        (["parallel.ray.cpus_per_rank=2"], "each needs 2 CPU; the cluster's nodes have 2 CPU in total (2 free), and"),
        (["parallel.ray.strategy=STRICT_PACK"], "room for 1 of 2 ranks with parallel.ray.strategy=STRICT_PACK"),
        (["parallel.devices=3", "parallel.ray.wait_seconds=5"], "could not be placed after 5 s: each needs 1 CPU"),
        (["parallel.ray.runtime_env={colour: red}"], "parallel.ray.runtime_env"),
        (["parallel.ray.labels={rack: b}"], "each needs 1 CPU on a node with rack=b; the cluster's nodes have 2 CPU"),
        (["parallel.ray.labels={rack: c}"], "no node of the cluster has rack=c; the nodes have rack=a or b"),
        (
            ["parallel.ray.labels={rack: c}", "parallel.ray.wait_seconds=5"],
            "no node of the cluster has rack=c after 5 s; the nodes have rack=a or b",
        ),
    ],
    ids=[
        *("too many devices", "too many CPUs", "one node", "no node in time", "unknown environment"),
        *("too few with the label", "no label", "no label in time"),
    ],
)
def test_what_the_cluster_cannot_place_is_refused(cluster: Any, recipe: Path, words: list[str], why: str) -> None:
    done = cold_lockstep("train", recipe, *RAY, *words)
    assert done.returncode == 2, done.stderr
    assert why in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_run_waits_for_a_node_that_is_added(cluster: Any, whole: Path, recipe: Path, tmp_path: Path) -> None:
    """As an autoscaler adds it, which sees the placement group that waits. Each rank has a node of its own, and the
    variable of the runtime environment."""
    runs = tmp_path / "runs"
    (tmp_path / "reader.py").write_text(
        "import json, os\n\ndef rows(path):\n    assert os.environ['TOLD_BY_RAY'] == 'yes'\n"
        "    with open(path) as file:\n        yield from map(json.loads, file)\n"
    )
    own = ["parallel.ray.strategy=STRICT_SPREAD", "parallel.ray.wait_seconds=600", "parallel.devices=3"]
    own += ["parallel.ray.runtime_env={env_vars: {TOLD_BY_RAY: 'yes'}}", f"data.reader={tmp_path / 'reader.py'}:rows"]
    process = begun(["train", str(recipe), f"run.folder={runs}", *RAY, *own], PYTHONUNBUFFERED="1")
    told: list[str] = []
    added: Any = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line)
            if "waiting for 3 ranks on the Ray cluster" in line:
                with patient():
                    added = cluster.add_node(num_cpus=1, **ports())
        process.wait(timeout=HANG)
    finally:
        process.kill()
        process.communicate()
        if added is not None:
            cluster.remove_node(added)
    assert process.returncode == 0, "".join(told)
    assert "room for 2 of 3 ranks with parallel.ray.strategy=STRICT_SPREAD" in "".join(told)
    assert "on each of 3 device(s)" in "".join(told)
    assert len(list((runs / "run" / "logs").iterdir())) == 3
    wanted = [metrics["train/loss"] for _, metrics in facts(whole)]
    assert [metrics["train/loss"] for _, metrics in facts(runs / "run")] == pytest.approx(wanted, rel=1e-5)


# Without labels Ray places one run after the other on alternate nodes, so each node comes twice in a row.
@pytest.mark.parametrize(("selector", "rack"), [("a", "a"), ("'!b'", "a"), ("b", "b"), ("'!in(a, c)'", "b")])
def test_ranks_run_on_nodes_with_their_labels(
    cluster: Any, recipe: Path, tmp_path: Path, selector: str, rack: str
) -> None:
    words = ["train", str(recipe), f"run.folder={tmp_path}", *RAY, "parallel.devices=1"]
    process = begun([*words, f"parallel.ray.labels={{rack: {selector}}}"])
    try:
        wait_for(process, lambda: bool(ranks_of(tmp_path)))
        node = cluster.head_node if rack == "a" else next(iter(cluster.worker_nodes))
        assert is_on(ranks_of(tmp_path)[0], node)
        said, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said


def test_a_run_waits_for_a_node_with_its_label(cluster: Any, recipe: Path, tmp_path: Path) -> None:
    """There is room on the other nodes."""
    own = ["parallel.devices=1", "parallel.ray.labels={rack: c}", "parallel.ray.wait_seconds=600"]
    process = begun(["train", str(recipe), f"run.folder={tmp_path}", *RAY, *own], PYTHONUNBUFFERED="1")
    told: list[str] = []
    added: Any = None
    try:
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line)
            if "waiting for 1 ranks on the Ray cluster" in line:
                with patient():
                    added = cluster.add_node(num_cpus=1, labels={"rack": "c"}, **ports())
        process.wait(timeout=HANG)
    finally:
        process.kill()
        process.communicate()
        if added is not None:
            cluster.remove_node(added)
    assert process.returncode == 0, "".join(told)
    assert "on a node with rack=c" in "".join(told)


def test_a_lost_node_is_done_without(cluster: Any, recipe: Path, tmp_path: Path) -> None:
    """Rank 0 or 1 was on it; one is left, and trains the same."""
    runs = tmp_path / "runs"
    long = ["run.steps=60", "optim.schedule=constant"]
    elastic = ["parallel.max_restarts=1", "parallel.elastic=true"]
    process = begun(["train", str(recipe), f"run.folder={runs}", *RAY, *long, *elastic])
    try:
        wait_for(process, lambda: bool(list(runs.glob("run/checkpoints/step_*"))))
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)
        said, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    assert "was lost with its actor" in said
    assert "the run continues with 1" in said
    assert not ranks_of(runs)
    alone = [word for word in RAY if not word.startswith("parallel.")]
    assert lockstep("train", recipe, "run.name=long", *alone, *long).returncode == 0
    told, wanted = facts(runs / "run"), facts(recipe.parent / "runs" / "long")
    assert [step for step, _ in told] == list(range(1, 61))
    assert [one["train/loss"] for _, one in told] == pytest.approx([one["train/loss"] for _, one in wanted], rel=1e-4)
    assert close(stored(runs / "run", 60), stored(recipe.parent / "runs" / "long", 60))


def test_a_lost_head_ends_the_run_and_the_same_command_goes_on_in_a_new_cluster(recipe: Path, tmp_path: Path) -> None:
    """The head has the GCS, without which no actor can be placed or found. Nothing of the run is left, and the resumed
    run is bit-identical to an undisturbed one."""
    runs, steps = tmp_path / "runs", 40
    words = ["train", str(recipe), *RAY, f"run.steps={steps}", "optim.schedule=constant"]
    alone = [word for word in words if word != "parallel.launcher=ray"]
    done = cold_lockstep(*alone, f"run.folder={tmp_path / 'whole'}")
    assert done.returncode == 0, done.stderr
    mark = {"LOCKSTEP_TEST": str(tmp_path)}
    with ray_cluster({"num_cpus": 2}) as first:
        process = begun([*words, f"run.folder={runs}"], RAY_ADDRESS=first.address, **mark)
        try:
            wait_for(process, lambda: lines(runs / "run" / "metrics.jsonl", 3).has_come())
            first.remove_node(first.head_node, allow_graceful=False)
            said, _ = process.communicate(timeout=HANG)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode not in (0, 2), said
    assert "the Ray cluster was lost" in " ".join(said.split())
    wait_until(lambda: not bearers(mark))
    assert len(facts(runs / "run")) < steps, "the head was lost too late"
    with ray_cluster({"num_cpus": 2}) as second:
        done = cold_lockstep(*words, f"run.folder={runs}", RAY_ADDRESS=second.address)
    assert done.returncode == 0, done.stderr
    assert_equal(runs / "run", tmp_path / "whole" / "run", steps)
