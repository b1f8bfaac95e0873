"""`ray job submit -- lockstep train ...`: a run that a cluster starts by itself, from a folder in which nothing is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml

from commands import cold_lockstep, lockstep
from conftest import write_sft_recipe
from guide_commands import GUIDES, Folders
from hang import HANG, wait_until
from kills import lines
from ranks import assert_none_left, ranks_of
from ray_clusters import bearers, ray_cluster
from reward_models import write_reward_model
from runs import difference, facts, stored

pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")
pytest.importorskip("aiohttp_cors", reason="jobs need ray[default]; `make test-ray` installs it")
pytestmark = [pytest.mark.ray, pytest.mark.torchrun]
RAY = Path(sys.executable).parent / "ray"
SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "ray-job.sh"


@pytest.fixture(scope="module")
def jobs() -> Iterator[str]:
    """The address that jobs are sent to, of a head with two processors."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # What a job finds first is this environment's. A token of the user's does not matter.
    given = {"PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled"}
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    with patch.dict(os.environ, given), ray_cluster(head):
        yield f"http://127.0.0.1:{port}"


def submitted(jobs: str, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Given in a folder; returns when the job has ended, with what it said."""
    command = [str(RAY), "job", "submit", "--address", jobs, *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG)


def test_a_job_from_an_empty_folder_trains_what_one_process_does(jobs: str, tmp_path: Path, tiny_folder: Path) -> None:
    """With paths that hold everywhere, and with a copy of a folder to which they are relative."""
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    common = ["run.steps=3", "run.export=false", "optim.eps=1e-4", "checkpoint.every=3"]
    assert lockstep("train", recipe, "run.name=one", *common).returncode == 0
    two = [*common, "parallel.launcher=ray", "parallel.devices=2", f"run.folder={tmp_path / 'runs'}"]
    (tmp_path / "empty").mkdir()
    done = submitted(jobs, tmp_path / "empty", "--", "lockstep", "train", recipe, "run.name=absolute", *two)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout
    assert list((tmp_path / "empty").iterdir()) == []
    # Beside the recipe, and without a word of where that is.
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "recipe.yaml").write_text(recipe.read_text().replace(f"{tmp_path}/", ""))
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / "job" / name).write_bytes((tmp_path / name).read_bytes())
    command = ["lockstep", "train", "recipe.yaml", f"model.path={tiny_folder}"]
    copied = ["--working-dir", tmp_path / "job", "--", *command]
    done = submitted(jobs, tmp_path / "empty", *copied, "run.name=copied", *two)
    assert done.returncode == 0, done.stdout + done.stderr
    # By the script of examples/cluster.
    given = {
        **os.environ,
        "RAY_ADDRESS": jobs,
        "DEVICES": "2",
        "FOLDER": str(tmp_path / "job"),
    }
    words = [SCRIPT, *command[2:], "run.name=script", *two]
    done = subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("absolute", "copied", "script"):
        assert difference(tmp_path / "runs" / name, tmp_path / "runs" / "one", 3) == "", name
    assert_none_left(tmp_path / "runs")
    # A status that is not 0 is the job's too.
    refused = submitted(jobs, tmp_path / "empty", *copied, "run.folder=runs", *two[:-1])
    assert refused.returncode != 0
    assert "run.folder" in refused.stdout + refused.stderr


def processes_of(runs: Path) -> set[int]:
    """The driver of a job and its ranks."""
    words_of = bearers({}, "train", f"run.folder={runs}")
    return {process for process, words in words_of.items() if "submit" not in words}


def test_a_job_that_is_submitted_again_after_its_driver_was_lost_trains_what_an_undisturbed_run_does(
    jobs: str, tmp_path: Path, tiny_folder: Path
) -> None:
    recipe, runs = write_sft_recipe(tmp_path, tiny_folder), tmp_path / "again"
    words = ["parallel.devices=2", "run.steps=40", "optim.schedule=constant", "run.export=false"]
    words += ["checkpoint.every=2", "checkpoint.asynchronous=false"]
    done = cold_lockstep("train", recipe, *words)
    assert done.returncode == 0, done.stderr
    command = ["--", "lockstep", "train", recipe, f"run.folder={runs}", "parallel.launcher=ray", *words]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(submitted, jobs, tmp_path, *command)
        wait_until(lambda: lines(runs / "run" / "metrics.jsonl", 3).has_come() or first.done())
        assert not first.done(), first.result()
        (driver,) = processes_of(runs) - set(ranks_of(runs).values())
        os.kill(driver, signal.SIGKILL)
    assert first.result().returncode != 0
    wait_until(lambda: not processes_of(runs))
    run, whole = runs / "run", tmp_path / "runs" / "run"
    assert 3 <= len(facts(run)) < 40, "the driver was lost too late"
    again = submitted(jobs, tmp_path, *command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "run after step" in " ".join(again.stdout.split())  # lines may be broken
    assert facts(run) == facts(whole)
    weights, wanted = stored(run, 40), stored(whole, 40)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_job_with_openrlhfs_command_trains_on_the_cluster(jobs: str, tmp_path: Path, tiny_folder: Path) -> None:
    """`ray job submit -- python3 -m openrlhf.cli.train_ppo_ray ...`, with only the module name changed."""
    reward = write_reward_model(tiny_folder, tmp_path / "reward")
    program, words = GUIDES["REINFORCE++"].words(Folders(tiny_folder, reward, tmp_path))
    module = ["python3", "-m", f"lockstep.compat.openrlhf.cli.{program}"]
    (tmp_path / "empty").mkdir()
    done = submitted(jobs, tmp_path / "empty", "--", *module, *words, "--actor_num_gpus_per_node", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    environment = json.loads((tmp_path / "run" / "env.json").read_text(encoding="utf-8"))
    assert environment["world_size"] == 2
    assert json.loads((tmp_path / "run" / "migration.json").read_text(encoding="utf-8"))["program"] == "train_ppo_ray"
    recipe = yaml.safe_load((tmp_path / "run.yaml").read_text(encoding="utf-8"))
    assert recipe["parallel"] == {"launcher": "ray", "devices": 2, "offload": "optimizer"}  # --adam_offload
    assert_none_left(tmp_path)
