"""The processes of a converted command: started, or refused with what to type instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lockstep.compat import command_devices
from lockstep.compat.command_devices import set_devices
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal

VERL = ["algorithm.adv_estimator=grpo", "data.train_files=t", "actor_rollout_ref.model.path=m"]
VERL += ["actor_rollout_ref.rollout.name=vllm", "data.val_files=v"]
OPENRLHF = ["--pretrain", "m", "--prompt_data", "t", "--input_key", "q", "--remote_rm_url", "f.py"]
OPENRLHF += ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4"]


class Accelerators(Cpu):
    """A machine with four devices, of which each process needs its own."""

    meets_itself = False

    def count(self) -> int:
        return 4


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "/absent")


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.device.select.select", lambda name: Accelerators())


def verl(*words: str) -> Conversion:
    return convert_verl("main_ppo", [*VERL, *words])


def openrlhf(*words: str) -> Conversion:
    return convert_openrlhf("train_ppo_ray", [*OPENRLHF, *words])


def written(done: Conversion, program: str = "main_ppo") -> dict[str, Any]:
    set_devices(done, program)
    return {key: value.value for key, value in done.recipe.items() if key.startswith("parallel.")}


def refusal(done: Conversion, program: str = "main_ppo") -> Any:
    with pytest.raises(Refusal) as refused:
        set_devices(done, program)
    (problem,) = refused.value.problems
    assert problem.code == "wrong-process-count"
    return problem


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("done", "program"),
    [
        (lambda: verl("trainer.n_gpus_per_node=4"), "main_ppo"),
        (lambda: openrlhf("--actor_num_gpus_per_node", "4"), "train_ppo_ray"),
        (verl, "main_ppo"),  # the default of 8 means the devices of this machine
    ],
)
def test_the_devices_of_one_machine_are_started(done: Callable[[], Conversion], program: str) -> None:
    assert written(done(), program) == {"parallel.devices": 4}


@pytest.mark.usefixtures("four")
def test_more_devices_than_the_machine_has_are_refused() -> None:
    problem = refusal(verl("trainer.n_gpus_per_node=8"))
    assert ("trainer.n_gpus_per_node" in problem.where, "trainer.n_gpus_per_node=4" in problem.remedy) == (True, True)
    problem = refusal(openrlhf("--actor_num_gpus_per_node", "8"), "train_ppo_ray")
    assert "--actor_num_gpus_per_node 4" in problem.remedy


def test_processes_share_a_cpu() -> None:
    assert written(verl("trainer.n_gpus_per_node=2", "trainer.device=cpu")) == {"parallel.devices": 2}
    assert written(verl("trainer.n_gpus_per_node=1")) == {}
    assert written(verl("trainer.device=cpu")) == {}
    refusal(verl("trainer.n_gpus_per_node=1000", "trainer.device=cpu"))


@pytest.mark.slow
def test_several_nodes_need_torchrun_or_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = refusal(verl("trainer.n_gpus_per_node=8", "trainer.nnodes=2"))
    assert "--nnodes 2 --nproc-per-node 8" in problem.remedy
    assert "-m lockstep.compat.verl main_ppo" in problem.remedy
    problem = refusal(openrlhf("--actor_num_gpus_per_node", "4", "--actor_num_nodes", "3"), "train_ppo_ray")
    assert "--nnodes 3 --nproc-per-node 4" in problem.remedy
    assert "-m lockstep.compat.openrlhf train_ppo_ray" in problem.remedy
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(command_devices, "find_spec", lambda name: name)
    expected = {"parallel.launcher": "ray", "parallel.devices": 16}
    assert written(verl("trainer.n_gpus_per_node=8", "trainer.nnodes=2")) == expected


def test_a_rank_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert written(verl("trainer.n_gpus_per_node=8", "trainer.nnodes=2")) == {}


def test_programs_of_torchrun_and_deepspeed_start_no_processes() -> None:
    sft = convert_verl("fsdp_sft_trainer", ["data.train_files=t", "model.partial_pretrain=m", "optim.lr=1e-5"])
    assert written(sft, "fsdp_sft_trainer") == {}
    dpo = convert_openrlhf("train_dpo", ["--pretrain", "m", "--dataset", "t"])
    assert written(dpo, "train_dpo") == {}
