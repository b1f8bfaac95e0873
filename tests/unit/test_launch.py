"""SLURM's variables, and the number of processes that a recipe names."""

from __future__ import annotations

import pytest

from lockstep.errors import Refusal
from lockstep.launch.launcher import adopt_slurm, first_host, refuse_other_count

STEP = {
    "SLURM_JOB_ID": "41007",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}


def adopted(**changed: str | None) -> dict[str, str]:
    environment = {name: value for name, value in {**STEP, **changed}.items() if value is not None}
    before = dict(environment)
    adopt_slurm(environment)
    return {name: value for name, value in environment.items() if before.get(name) != value}


def test_a_task_of_srun_is_a_rank() -> None:
    assert adopted() == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20_000 + (41_007 + 62) % 20_000),
    }


@pytest.mark.parametrize(
    ("tasks", "node", "here"),
    [
        ("4(x2)", "1", "4"),
        ("4(x2),3", "2", "3"),
        ("5,3", "1", "3"),
        ("8", "0", "8"),
        ("8", "1", None),
        ("?", "0", None),
    ],
)
def test_the_tasks_of_a_node_are_its_ranks(tasks: str, node: str, here: str | None) -> None:
    assert adopted(SLURM_STEP_TASKS_PER_NODE=tasks, SLURM_NODEID=node).get("LOCAL_WORLD_SIZE") == here


@pytest.mark.parametrize(
    "changed",
    [{"SLURM_STEP_ID": None}, {"SLURM_NTASKS": "1"}, {"RANK": "0"}],
    ids=["the batch script", "one task", "torchrun"],
)
def test_other_processes_of_a_job_stay_as_they_are(changed: dict[str, str | None]) -> None:
    assert adopted(**changed) == {}


def test_a_step_of_another_size_than_the_job_and_an_address_of_ones_own() -> None:
    found = adopted(SLURM_STEP_NUM_TASKS="6", SLURM_STEP_NODELIST="gpu09", MASTER_PORT="7")
    assert (found["WORLD_SIZE"], found["MASTER_ADDR"]) == ("6", "gpu09")
    assert "MASTER_PORT" not in found


def test_half_of_slurms_variables_are_refused() -> None:
    with pytest.raises(Refusal, match="SLURM_LOCALID"):
        adopted(SLURM_LOCALID=None)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login1", "login1"),
        ("gpu[03-05,11],login1", "gpu03"),
        ("a-b-7,a-b-8", "a-b-7"),
        ("rack[2,4]-n[1-3]", "rack2-n1"),
        ("n[8]", "n8"),
    ],
)
def test_the_first_node(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_no_node_is_refused() -> None:
    with pytest.raises(Refusal, match="names no node"):
        first_host("")


def test_the_recipe_and_the_processes_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_other_count(None)
    refuse_other_count(1)
    with pytest.raises(Refusal, match="is 2, but there are 1 processes") as caught:
        refuse_other_count(2)
    assert "torchrun" in caught.value.problems[0].remedy
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    refuse_other_count(4)
    with pytest.raises(Refusal, match="is 2, but there are 4 processes"):
        refuse_other_count(2)
