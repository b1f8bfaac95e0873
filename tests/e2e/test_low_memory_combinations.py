"""Low-memory settings together: quantised weights with each key of `parallel`, with an 8-bit optimizer, killed and
resumed, and the settings that `plan --fit` lists."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import job_ranks
from commands import lockstep, torchrun
from conftest import run, write_online_recipe, write_sft_recipe
from kills import killed, lines
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.run.checkpoint import folder_of
from lockstep.run.console import Console
from lockstep.train.offline import train_offline
from runs import difference, facts, stored

# eps above the noise of gradients: Adam's first steps would blow a rounding difference up to a whole step.
NF4 = ["model.quantize=nf4", "model.lora.rank=4", "optim.eps=1e-4", "optim.lr=1e-2", "optim.warmup=0", "run.steps=2"]
# Matrices of an adapter with 4,096 elements have moments in 8 bits.
EIGHT_BITS = ["model.quantize=nf4", "model.lora.rank=32", "optim.name=adamw8bit", "optim.lr=1e-2", "run.export=false"]
LAYOUTS = {
    "copies": ["parallel.replicate=2"],
    "ring": ["parallel.context_parallel=2"],
    "gather": ["parallel.context_parallel=2", "parallel.context_layout=gather"],
    "ulysses": ["parallel.context_parallel=2", "parallel.context_layout=ulysses"],
    "host": ["parallel.offload=params", "model.gradient_checkpointing=true", "model.tiled_mlp=32"],
}
ONLINE_LAYOUTS = {
    "copies": ["parallel.replicate=2"],
    "context": ["parallel.context_parallel=2"],
    "host": ["parallel.offload=optimizer", "parallel.offload_critic=optimizer"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of two tensor-parallel ranks has complete blocks of inputs."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny(folder, hidden=128, layers=2)
    return folder


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("online", [False, True], ids=["sft", "ppo"])
def test_quantised_weights_with_each_parallel_key(tmp_path: Path, model: Path, online: bool) -> None:
    recipe = write_online_recipe(tmp_path, model) if online else write_sft_recipe(tmp_path, model)
    words = [*NF4, "run.export=false", *(["method=ppo", "rollout.n=1", "log.samples=99"] if online else [])]
    layouts = ONLINE_LAYOUTS if online else LAYOUTS
    jobs = [[str(recipe), *words, *layout, f"run.name={name}"] for name, layout in layouts.items()]
    done = torchrun(job_ranks.write_jobs(tmp_path, jobs), program=job_ranks.PROGRAM, processes=2)
    assert done.returncode == 0, done.stderr
    one = lockstep("train", recipe, *words, "run.name=one")
    assert one.returncode == 0, one.stderr
    parts = ("weights", "critic") if online else ("weights",)
    for name in layouts:
        assert difference(tmp_path / "runs" / name, tmp_path / "runs" / "one", 2, parts) == "", name


@pytest.mark.slow
@pytest.mark.torchrun
def test_quantised_weights_and_8_bit_moments_go_on_after_a_kill_and_as_two(tmp_path: Path, model: Path) -> None:
    recipe, runs = write_sft_recipe(tmp_path, model), tmp_path / "runs"
    words = [*EIGHT_BITS, "run.steps=4", "checkpoint.every=2", "checkpoint.keep_last=9"]
    done = lockstep("train", recipe, "run.name=whole", *words)
    assert done.returncode == 0, done.stderr
    state = stored(runs / "whole", 4, "optimizer")
    assert any(tensor.dtype == torch.uint8 for tensor in state.values())
    killed(["train", recipe, "run.name=killed", *words], lines(runs / "killed" / "metrics.jsonl", 3))
    done = lockstep("train", recipe, "run.name=killed", *words)
    assert done.returncode == 0, done.stderr
    for part in ("weights", "optimizer"):
        mine, theirs = (stored(runs / name, 4, part) for name in ("killed", "whole"))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert facts(runs / "killed") == facts(runs / "whole")
    # Two ranks go on from the checkpoint of one.
    shutil.copytree(runs / "whole", runs / "two")
    shutil.rmtree(folder_of(runs / "two" / "checkpoints", 4))
    done = torchrun("train", recipe, "run.name=two", *words)
    assert done.returncode == 0, done.stderr
    assert "after step 2" in " ".join(done.stdout.split())
    for key, value in stored(runs / "whole", 4).items():
        # Gradients of two ranks are summed in another order, and 8-bit codes of the moments can differ by one.
        assert float((stored(runs / "two", 4)[key] - value).abs().mean()) < 2e-4, key


@pytest.mark.slow
def test_settings_of_plan_fit_train(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each printed line is a list of arguments with which the recipe trains."""
    recipe = write_sft_recipe(tmp_path, model)
    words = ["model.dtype=bf16", "run.export=false", "run.steps=1", "optim.warmup=0"]
    assert run("plan", recipe, *words, "--fit", "h200:0.03") == 0
    printed = capsys.readouterr().out.splitlines()
    listed = [line.partition(": ")[2].split() for line in printed if line[:1].isdigit() and "=" in line]
    assert len(listed) > 2
    for number, setting in enumerate(listed):
        train_offline(load_recipe(str(recipe), [*words, *setting, f"run.name=fit{number}"]), Console.silent())
        assert facts(tmp_path / "runs" / f"fit{number}")[0][1]["train/loss"] > 0
