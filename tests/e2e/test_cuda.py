"""The same recipe on an NVIDIA device: in step with the CPU, bf16 and fp16, resume, memory as planned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]


def losses(recipe_file: Path, name: str, *overrides: str) -> list[float]:
    recipe = load_recipe(str(recipe_file), [f"run.name={name}", *overrides])
    train_offline(recipe, Console.silent())
    return [m["train/loss"] for _, m in read_metrics(Path(recipe.run.folder) / name / "metrics.jsonl")]


def test_fp32_is_in_step_with_the_cpu(recipe_file: Path) -> None:
    cpu = losses(recipe_file, "cpu", "device=cpu")
    cuda = losses(recipe_file, "cuda", "device=cuda")
    assert cuda == pytest.approx(cpu, rel=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("lora", [False, True])
def test_half_precision_stays_near_fp32(recipe_file: Path, dtype: str, lora: bool) -> None:
    common = ["device=cuda", "run.steps=20", *(["model.lora.rank=4", "optim.lr=1e-2"] if lora else [])]
    exact = losses(recipe_file, "fp32", *common)
    half = losses(recipe_file, dtype, *common, f"model.dtype={dtype}")
    assert half[-1] < 0.8 * half[0]
    assert sum(abs(a - b) for a, b in zip(exact, half, strict=True)) / len(exact) < 0.02 * exact[0]


def test_packed_flash_equals_padded_and_twin(recipe_file: Path) -> None:
    common = ["device=cuda", "model.dtype=bf16"]
    flash = losses(recipe_file, "flash", *common)
    twin = losses(recipe_file, "twin", *common, "model.attention=sdpa")
    padded = losses(recipe_file, "padded", *common, "batch.tokens=null", "batch.micro_batch_size=4")
    assert twin == pytest.approx(flash, rel=1e-2)
    assert padded == pytest.approx(flash, rel=1e-2)


def test_a_deterministic_run_resumes_bit_identical(recipe_file: Path, tmp_path: Path) -> None:
    import shutil

    settings = [
        "device=cuda",
        "model.dtype=bf16",
        "run.deterministic=true",
        "checkpoint.every=3",
        "checkpoint.keep_last=9",
    ]
    whole = losses(recipe_file, "whole", *settings)
    losses(recipe_file, "part", *settings)
    shutil.rmtree(tmp_path / "runs" / "part" / "checkpoints" / "step_6")
    assert losses(recipe_file, "part", *settings) == whole


def test_the_first_backward_pass_prints_no_warning() -> None:
    """The thread of the backward pass has a CUDA context before its first product of matrices."""
    code = """
import torch
from lockstep.device.select import select
device = select("cuda")
device.use(0)
x = torch.ones(64, 64, device=device.torch_device(), requires_grad=True)
(x @ x).sum().backward()
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no current CUDA context" not in done.stderr, done.stderr
