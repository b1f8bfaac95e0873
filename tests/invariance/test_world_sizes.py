"""The number of processes, and how they share models and sequences, change nothing: 1 process against 2, 3 and 4.

SFT, DPO, GRPO and PPO, sharded, in copies, with modules or sequences divided by two, and with every offload. In fp32:
responses and their scores equal, metrics within 1e-4 (relative; 2e-5 absolute), weights within 1e-5. What one process
may have on the host changes no bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import job_ranks
from commands import torchrun
from conftest import write_online_recipe, write_sft_recipe
from lockstep.model.tiny import write_tiny
from preference_rows import write_recipe
from runs import difference, facts, samples, stored

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]
STEPS = 2
# eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
COMMON = [f"run.steps={STEPS}", "run.export=false", "optim.eps=1e-4", "optim.warmup=0", "log.samples=99"]
METHODS: dict[str, list[str]] = {
    "sft": [],
    "dpo": [],
    "grpo": ["batch.prompts_per_update=2", "algorithm.kl.where=loss"],
    "ppo": ["method=ppo", "rollout.n=1", "batch.prompts_per_update=2", "critic.lr=1e-3", "algorithm.kl.where=reward"],
}
DIVIDED = {"tensor": ["parallel.tensor_parallel=2"], "context": ["parallel.context_parallel=2"]}
LAYOUTS: dict[int, dict[str, list[str]]] = {
    2: {"sharded": [], "copies": ["parallel.replicate=2"], **DIVIDED},
    3: {"sharded": [], "copies": ["parallel.replicate=3"]},
    4: {
        "sharded": [],
        "hybrid": ["parallel.shard=2"],
        "tensor-copies": ["parallel.tensor_parallel=2", "parallel.replicate=2"],
    }
    | DIVIDED,
}


def offloads(method: str) -> dict[str, list[str]]:
    """Of all models that a method has."""
    keys = ["parallel.offload", *(["parallel.offload_critic"] if method == "ppo" else [])]
    frozen = ["parallel.offload_reference=true"] if method != "sft" else []
    return {f"host-{what}": [*(f"{key}={what}" for key in keys), *frozen] for what in ("optimizer", "params", "all")}


def job(recipe: Path, method: str, name: str, words: list[str]) -> list[str]:
    return [str(recipe), f"run.name={name}", *COMMON, *METHODS[method], *words]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe of each method, which one process has trained as `runs/one`, of a model of four heads and two of keys
    and values."""
    folder = tmp_path_factory.mktemp("worlds")
    write_tiny(folder / "model", hidden=128, layers=2)
    found: dict[str, Path] = {}
    for method in METHODS:
        (folder / method).mkdir()
        if method == "sft":
            found[method] = write_sft_recipe(folder / method, folder / "model")
        elif method == "dpo":
            found[method] = write_recipe(folder / method, folder / "model", "dpo")
        else:
            found[method] = write_online_recipe(folder / method, folder / "model")
    jobs = [job(recipe, method, "one", []) for method, recipe in found.items()]
    done = torchrun(job_ranks.write_jobs(folder, jobs), program=job_ranks.PROGRAM, processes=1)
    assert done.returncode == 0, done.stderr
    # What is compared has samples, and more than one step of them.
    assert all(len(samples(found[method].parent / "runs" / "one")) > STEPS for method in ("grpo", "ppo"))
    return found


def on_the_host(method: str) -> dict[str, list[str]]:
    """What one process may have there, each key by itself and all together. The weights it trains, with several."""
    keys = {"optimizer": "parallel.offload=optimizer"}
    keys |= {"reference": "parallel.offload_reference=true"} if method != "sft" else {}
    keys |= {"critic": "parallel.offload_critic=optimizer"} if method == "ppo" else {}
    return {f"host-{what}-1": [word] for what, word in keys.items()} | {"host-1": list(keys.values())}


def test_one_process_trains_the_same_whatever_is_on_the_host(recipes: dict[str, Path], tmp_path: Path) -> None:
    cases = [(method, name, words) for method in METHODS for name, words in on_the_host(method).items()]
    jobs = [job(recipes[method], method, name, words) for method, name, words in cases]
    done = torchrun(job_ranks.write_jobs(tmp_path, jobs), program=job_ranks.PROGRAM, processes=1)
    assert done.returncode == 0, done.stderr
    for method, name, _ in cases:
        run, one = (recipes[method].parent / "runs" / folder for folder in (name, "one"))
        assert samples(run) == samples(one), (method, name)
        assert facts(run) == facts(one), (method, name)
        for part in ("weights", "optimizer", *(("critic", "critic_optimizer") if method == "ppo" else ())):
            found, wanted = stored(run, STEPS, part), stored(one, STEPS, part)
            assert found.keys() == wanted.keys(), (method, name, part)
            assert all(torch.equal(found[tensor], wanted[tensor]) for tensor in wanted), (method, name, part)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_any_number_of_processes_trains_what_one_does(ranks: int, recipes: dict[str, Path], tmp_path: Path) -> None:
    """All runs in the same processes, each of which meets anew."""
    cases = [
        (method, f"{name}-{ranks}", words)
        for method in METHODS
        for name, words in (LAYOUTS[ranks] | offloads(method)).items()
    ]
    jobs = [job(recipes[method], method, name, words) for method, name, words in cases]
    done = torchrun(job_ranks.write_jobs(tmp_path, jobs), program=job_ranks.PROGRAM, processes=ranks)
    assert done.returncode == 0, done.stderr
    found = {}
    for method, name, _ in cases:
        runs = recipes[method].parent / "runs"
        parts = ("weights", "critic") if method == "ppo" else ("weights",)
        if told := difference(runs / name, runs / "one", STEPS, parts):
            found[f"{method}, {name}"] = told
    assert not found
