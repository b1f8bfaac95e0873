"""The number of processes, and how they share models and sequences, change nothing: 1 process against 2, 3 and 4.

SFT, DPO, GRPO and PPO, sharded, in copies, with sequences divided by two, and with every offload. In fp32: responses
and their scores equal, metrics within 1e-4 (relative; 2e-5 absolute), weights within 1e-5.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import lockstep, torchrun
from conftest import write_online_recipe, write_sft_recipe
from preference_rows import write_recipe
from runs import difference, samples

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
OFFLOADS = ("optimizer", "params", "all")
LAYOUTS: dict[int, dict[str, list[str]]] = {
    2: {"sharded": [], "copies": ["parallel.replicate=2"], "context": ["parallel.context=2"]},
    3: {"sharded": [], "copies": ["parallel.replicate=3"]},
    4: {"sharded": [], "hybrid": ["parallel.shard=2"], "context": ["parallel.context=2"]},
}


def offloaded(method: str, what: str) -> list[str]:
    """Of all models that a method has."""
    words = [f"parallel.offload={what}"]
    words += [f"parallel.offload_critic={what}"] if method == "ppo" else []
    return words + (["parallel.offload_reference=true"] if method != "sft" else [])


def cases(ranks: int) -> list[tuple[str, str, list[str]]]:
    """Method, name and keys of every run of so many processes."""
    found = [(method, name, words) for method in METHODS for name, words in LAYOUTS[ranks].items()]
    return found + [(method, f"host-{what}", offloaded(method, what)) for method in METHODS for what in OFFLOADS]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Path]:
    """A recipe of each method, which one process has trained as `runs/one`."""
    found: dict[str, Path] = {}
    for method, words in METHODS.items():
        folder = tmp_path_factory.mktemp(method)
        if method == "sft":
            found[method] = write_sft_recipe(folder, tiny_folder)
        elif method == "dpo":
            found[method] = write_recipe(folder, tiny_folder, "dpo")
        else:
            found[method] = write_online_recipe(folder, tiny_folder)
        done = lockstep("train", found[method], "run.name=one", *COMMON, *words)
        assert done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_any_number_of_processes_trains_what_one_does(ranks: int, recipes: dict[str, Path]) -> None:
    found = {}
    for method, name, words in cases(ranks):
        keys = [f"run.name={name}-{ranks}", *COMMON, *METHODS[method], *words]
        done = torchrun("train", recipes[method], *keys, processes=ranks)
        runs = recipes[method].parent / "runs"
        parts = ("weights", "critic") if method == "ppo" else ("weights",)
        several, one = runs / f"{name}-{ranks}", runs / "one"
        told = done.stderr[-2000:] if done.returncode else difference(several, one, STEPS, parts)
        if told:
            found[f"{method}, {name}"] = told
    assert not found
    # GRPO and PPO have samples to compare.
    assert all(len(samples(recipes[method].parent / "runs" / "one")) > STEPS for method in ("grpo", "ppo"))
