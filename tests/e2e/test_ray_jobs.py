"""`ray job submit -- lockstep train ...`: a run that a cluster starts by itself, from a folder in which nothing is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from commands import lockstep
from conftest import write_sft_recipe
from guide_commands import GUIDES, Folders
from hang import HANG
from ranks import assert_none_left
from ray_clusters import ray_cluster
from reward_models import write_reward_model
from runs import difference

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
    # What a job finds first is this environment's.
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{RAY.parent}{os.pathsep}{path}"
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    try:
        with ray_cluster(head):
            yield f"http://127.0.0.1:{port}"
    finally:
        os.environ["PATH"] = path


def submitted(jobs: str, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Given in a folder; returns when the job has ended, with what it said."""
    command = [str(RAY), "job", "submit", "--address", jobs, *map(str, words)]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG)


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
        "RAY_AUTH_MODE": "token",
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
