"""Tensor parallelism with the kernels of an NVIDIA device: two processes on one, which gloo connects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensor_cuda
from commands import lockstep, torchrun
from conftest import write_online_recipe
from lockstep.model.tiny import write_tiny
from runs import facts

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.torchrun,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]
PROGRAM = Path(tensor_cuda.__file__)


def test_divided_models_compute_and_generate_as_whole_ones() -> None:
    done = torchrun(program=PROGRAM)
    assert done.returncode == 0, done.stderr


def test_a_divided_run_is_that_of_one_process(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", hidden=128, layers=2)
    recipe = write_online_recipe(tmp_path, tmp_path / "model")
    words = ["device=cuda", "run.steps=2", "log.samples=99", "run.export=false"]
    assert lockstep("train", recipe, "run.name=one", *words).returncode == 0
    done = torchrun("train", recipe, "run.name=two", "parallel.tensor_parallel=2", *words, program=PROGRAM)
    assert done.returncode == 0, done.stderr
    one, two = (facts(tmp_path / "runs" / name) for name in ("one", "two"))
    for name in ("critic/rewards/mean", "actor/loss", "actor/grad_norm"):
        ours, theirs = ([told[name] for _, told in run] for run in (two, one))
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4), name
