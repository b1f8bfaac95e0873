"""Activations on the host with 2 processes, sharded and divided: bit for bit what they are on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import activation_ranks
import job_ranks
from commands import torchrun
from conftest import write_online_recipe, write_sft_recipe
from lockstep.model.tiny import write_tiny
from runs import facts, samples, stored

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]
COMMON = ["run.steps=2", "run.export=false", "optim.warmup=0"]
PPO = ["method=ppo", "rollout.n=1", "batch.prompts_per_update=2", "critic.lr=1e-3", "log.samples=99"]
LAYOUTS = {
    "sharded": ["sft"],
    "sharded-checkpointing": ["sft", "model.gradient_checkpointing=true"],
    "sharded-adapter": ["sft", "model.lora.rank=4", "model.dtype=bf16"],
    "weights-on-host": ["sft", "parallel.offload=all"],
    "context": ["sft", "parallel.context_parallel=2"],
    "tensor": ["sft", "parallel.tensor_parallel=2", "model.gradient_checkpointing=true"],
    "ppo": ["online", *PPO],
}


def test_two_processes_train_the_same_with_activations_on_the_host(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", hidden=128, layers=3)
    recipes = {}
    for kind, write in (("sft", write_sft_recipe), ("online", write_online_recipe)):
        (tmp_path / kind).mkdir()
        recipes[kind] = write(tmp_path / kind, tmp_path / "model")
    jobs = [
        [str(recipes[kind]), f"run.name={name}-{where}", *COMMON, *words, *more]
        for name, (kind, *words) in LAYOUTS.items()
        for where, more in (("device", []), ("host", [activation_ranks.KEY]))
    ]
    done = torchrun(job_ranks.write_jobs(tmp_path, jobs), program=activation_ranks.PROGRAM)
    assert done.returncode == 0, done.stderr
    for name, (kind, *_) in LAYOUTS.items():
        device, host = (tmp_path / kind / "runs" / f"{name}-{where}" for where in ("device", "host"))
        assert len(facts(host)) == 2, name
        assert facts(host) == facts(device), name
        assert samples(host) == samples(device), name
        for part in ("weights", "optimizer", *(["critic"] if kind == "online" else [])):
            mine, theirs = stored(host, 2, part), stored(device, 2, part)
            assert mine.keys() == theirs.keys(), (name, part)
            assert mine, (name, part)
            assert all(torch.equal(mine[key], theirs[key]) for key in mine), (name, part)
