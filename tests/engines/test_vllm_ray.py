"""GRPO with a real vLLM server that is a Ray actor on another node than the rank, and an actor that is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import write_online_recipe
from hang import HANG, wait_until
from kills import lines
from ray_clusters import addressed_cluster, bearers, is_on, parent
from runs import facts

pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")
pytestmark = pytest.mark.ray


def test_a_lost_actor_of_vllm_is_started_again_on_its_node(python: str, embedded: Path, tmp_path: Path) -> None:
    recipe, log, runs = write_online_recipe(tmp_path, embedded), tmp_path / "log", tmp_path / "runs"
    mark = {"LOCKSTEP_TEST": str(tmp_path)}
    words = ["rollout.engine=vllm", "rollout.server.replicas=1", "rollout.server.cpus=1", "parallel.launcher=ray"]
    words += [f"rollout.server.python={python}", "rollout.server.env={OMP_NUM_THREADS: '1'}", "parallel.devices=1"]
    words += ["parallel.ray.cpus_per_rank=1", "parallel.ray.labels={rack: a}", "rollout.server.labels={rack: b}"]
    words += ["run.steps=6", "checkpoint.every=2", "run.export=false"]
    command = [sys.executable, "-m", "lockstep", "train", str(recipe), *words]

    def servers() -> list[int]:
        """vLLM's processes of the run, the first of which is the server."""
        return sorted(bearers(mark, "vllm.entrypoints.openai.api_server"))

    racks = [{"num_cpus": 1, "labels": {"rack": rack}} for rack in "ab"]
    with addressed_cluster(*racks) as cluster, log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **mark})
        try:
            metrics = runs / "run" / "metrics.jsonl"
            wait_until(lambda: lines(metrics, 2).has_come() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            server = servers()[0]
            assert is_on(server, next(iter(cluster.worker_nodes)))
            os.kill(parent(parent(server)), signal.SIGKILL)  # the Ray actor, above the supervisor of the engine
            assert process.wait(timeout=HANG) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
        wait_until(lambda: not bearers(mark))
    assert (runs / "run" / "rollout" / "vllm_0.log").read_text().count("started at") == 2, log.read_text()
    steps = facts(runs / "run")
    assert [step for step, _ in steps] == list(range(1, 7))
    assert max(metrics["training/rollout_probs_diff_max"] for _, metrics in steps) < 1e-3
