"""The files of examples/cluster: each is run as far as this machine can, with what a cluster adds put in its place."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from commands import lockstep, search_path
from conftest import write_sft_recipe
from hang import HANG
from lockstep.recipe import load_recipe
from runs import facts, stored

TEMPLATES = Path(__file__).parents[2] / "examples" / "cluster"
SCRIPTS = sorted(TEMPLATES.glob("*.sh"))


def run(script: str, folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script in a folder whose `bin` comes first on the PATH."""
    given = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{search_path()}", **environment}
    return subprocess.run(
        [str(TEMPLATES / script), *map(str, words)], cwd=folder, env=given, capture_output=True, text=True, timeout=HANG
    )


def program(folder: Path, name: str, text: str) -> None:
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    file.chmod(0o755)


RECORD = "import json, sys\nopen({file!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\nsys.exit({status})\n"


def recorder(folder: Path, name: str, status: int = 0) -> Path:
    """A command that only writes down its words."""
    file = folder / f"{name}.words"
    program(folder, name, RECORD.format(file=str(file), status=status))
    return file


def words_of(file: Path) -> list[list[str]]:
    return [yaml.safe_load(line) for line in file.read_text().splitlines()]


def test_every_template_is_listed_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "several-processes.md").read_text(encoding="utf-8")
    for file in TEMPLATES.iterdir():
        assert f"../examples/cluster/{file.name}" in guide, file.name


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_bash_and_can_be_executed(script: Path) -> None:
    assert os.access(script, os.X_OK)
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# SLURM.


@pytest.mark.parametrize(
    ("status", "restarts", "requeued", "ended"),
    [(0, 0, False, 0), (2, 0, False, 2), (75, 0, True, 0), (130, 3, True, 0), (75, 10, False, 75)],
)
def test_a_slurm_job_is_requeued_if_its_run_can_go_on(
    tmp_path: Path, status: int, restarts: int, requeued: bool, ended: int
) -> None:
    srun, scontrol = recorder(tmp_path, "srun", status), recorder(tmp_path, "scontrol")
    done = run("slurm.sh", tmp_path, "my.yaml", "a=b c", SLURM_JOB_ID="17", SLURM_RESTART_COUNT=str(restarts))
    assert done.returncode == ended, done.stderr
    assert words_of(srun)[0][-4:] == ["lockstep", "train", "my.yaml", "a=b c"]
    assert scontrol.exists() == requeued
    if requeued:
        assert words_of(scontrol) == [["requeue", "17"]]


# Starts the two tasks of a step on this machine, with the variables of SLURM's prolog, and their output in its files.
SRUN = """
import os, subprocess, sys
words = sys.argv[1:]
flags = [word for word in words if word.startswith("--")]
command = words[len(flags):]
output = next(word.partition("=")[2] for word in flags if word.startswith("--output="))
tasks = []
for rank in range(2):
    environment = dict(os.environ, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS="2",
        SLURM_STEP_NODELIST="localhost", SLURM_STEP_TASKS_PER_NODE="2", SLURM_NODEID="0",
        SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    file = output.replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", str(rank))
    tasks.append(subprocess.Popen(command, env=environment, stdout=open(file, "ab"), stderr=subprocess.STDOUT))
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.slow
@pytest.mark.torchrun
def test_the_slurm_script_trains_two_tasks_and_goes_on_after_a_requeue(tmp_path: Path, tiny_folder: Path) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    program(tmp_path, "srun", SRUN)
    recorder(tmp_path, "scontrol")
    words = [recipe, "run.export=false", "checkpoint.every=2", "optim.eps=1e-4"]
    job = str(os.getpid())
    first = run("slurm.sh", tmp_path, *words, "run.steps=4", "optim.schedule=constant", SLURM_JOB_ID=job)
    logs = [tmp_path / f"lockstep-{job}-rank_{rank}.log" for rank in (0, 1)]
    assert first.returncode == 0, [log.read_text() for log in logs]
    assert "on each of 2 device(s)" in logs[0].read_text()
    again = run("slurm.sh", tmp_path, *words, "run.steps=6", "optim.schedule=constant", SLURM_JOB_ID=job)
    assert again.returncode == 0, [log.read_text() for log in logs]
    assert "after step 4" in " ".join(logs[0].read_text().split())
    one = lockstep("train", *words, "run.name=one", "run.steps=6", "optim.schedule=constant")
    assert one.returncode == 0, one.stderr
    runs = tmp_path / "runs"
    assert [step for step, _ in facts(runs / "run")] == list(range(1, 7))
    weights, wanted = stored(runs / "run", 6), stored(runs / "one", 6)
    assert all(torch.allclose(weights[name], wanted[name], rtol=0, atol=1e-5) for name in wanted)


# torchrun: tests/e2e/test_two_hosts.py runs the script on two hosts.


def test_the_torchrun_script_needs_the_first_node_and_passes_on_what_it_is_given(tmp_path: Path) -> None:
    torchrun = recorder(tmp_path, "torchrun")
    without = run("torchrun.sh", tmp_path, "my.yaml")
    assert without.returncode != 0
    assert "set HEAD to the name or address of the first node" in without.stderr
    assert run("torchrun.sh", tmp_path, "my.yaml", "a=b c", HEAD="node0", NODES="3", DEVICES="4").returncode == 0
    [words] = words_of(torchrun)
    assert words[-5:] == ["-m", "lockstep", "train", "my.yaml", "a=b c"]
    assert words[words.index("--rdzv-endpoint") + 1] == "node0:29500"
    assert (words[words.index("--nnodes") + 1], words[words.index("--nproc-per-node") + 1]) == ("3", "4")
    # torch itself reads them.
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(words)
    assert (read.module, read.training_script, int(read.max_restarts)) == (True, "lockstep", 3)
    assert (read.redirects, read.tee) == ("3", "0:3")


# Ray: tests/e2e/test_ray_jobs.py submits a job with the script.


def test_the_ray_script_submits_a_recipe_that_is_accepted(tmp_path: Path, recipe_file: Path) -> None:
    ray = recorder(tmp_path, "ray")
    assert run("ray-job.sh", tmp_path, "my.yaml").returncode != 0  # without RAY_ADDRESS
    done = run("ray-job.sh", tmp_path, "my.yaml", "run.folder=/shared", RAY_ADDRESS="http://head:8265", DEVICES="16")
    assert done.returncode == 0, done.stderr
    [words] = words_of(ray)
    assert words[:4] == ["job", "submit", "--address", "http://head:8265"]
    command = words[words.index("--") + 1 :]
    assert command[:3] == ["lockstep", "train", "my.yaml"]
    parallel = load_recipe(str(recipe_file), command[3:]).parallel
    assert (parallel.launcher, parallel.devices) == ("ray", 16)


# KubeRay.

# The fields of RayJob (ray.io/v1, KubeRay 1.2 to 1.7) that the template uses, as KubeRay's reference documents them.
FIELDS: dict[str, Any] = {
    "apiVersion": {},
    "kind": {},
    "metadata": {"name": {}},
    "spec": {
        **{name: {} for name in ("entrypoint", "submissionMode", "backoffLimit")},
        **{name: {} for name in ("shutdownAfterJobFinishes", "ttlSecondsAfterFinished")},
        "rayClusterSpec": {
            "rayVersion": {},
            "headGroupSpec": {"rayStartParams": {}, "template": {}},
            "workerGroupSpecs": {
                **{name: {} for name in ("groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams")},
                "template": {},
            },
        },
    },
}


def unknown(found: Any, fields: dict[str, Any], where: str = "") -> list[str]:
    if isinstance(found, list):
        return [name for one in found for name in unknown(one, fields, where)]
    if not fields or not isinstance(found, dict):
        return []
    wrong = [f"{where}.{name}" for name in found if name not in fields]
    return wrong + [
        name for key, value in found.items() if key in fields for name in unknown(value, fields[key], f"{where}.{key}")
    ]


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((TEMPLATES / "kuberay.yaml").read_text(encoding="utf-8"))
    return found


def test_the_rayjob_has_only_documented_fields(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert unknown(job, FIELDS) == []
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        # KubeRay and Ray read these as text.
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]


def test_the_rayjob_s_entrypoint_fits_its_nodes(job: dict[str, Any], recipe_file: Path) -> None:
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["lockstep", "train", "/shared/recipe.yaml"]
    recipe = load_recipe(str(recipe_file), words[3:])
    [group] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert recipe.parallel.devices == group["replicas"] * int(resources["nvidia.com/gpu"])
    assert recipe.parallel.launcher == "ray"
    constraints = (Path(__file__).parents[2] / "constraints-common.txt").read_text(encoding="utf-8")
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']}\n" in constraints


@pytest.mark.skipif(
    "LOCKSTEP_KUBERAY_CRD" not in os.environ, reason="LOCKSTEP_KUBERAY_CRD names no ray.io_rayjobs.yaml"
)
def test_the_rayjob_passes_the_schema_of_the_operator(job: dict[str, Any]) -> None:
    """With the operator's own file (helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml of KubeRay)."""
    jsonschema = pytest.importorskip("jsonschema")
    crd = yaml.load(Path(os.environ["LOCKSTEP_KUBERAY_CRD"]).read_text(), Loader=yaml.CSafeLoader)
    [version] = [one for one in crd["spec"]["versions"] if one["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    # The API server checks metadata itself, and drops unknown fields; here they are errors.
    schema["properties"]["metadata"] = {"type": "object"}
    _close(schema)
    found = jsonschema.Draft7Validator(schema).iter_errors(job)
    assert [f"{list(error.absolute_path)}: {error.message}" for error in found] == []


def _close(schema: Any) -> None:
    if isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" not in schema:
            schema["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        if schema.get("x-kubernetes-int-or-string"):
            schema.pop("anyOf", None)
    for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _close(one)
