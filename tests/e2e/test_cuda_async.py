"""Generation beside training on one NVIDIA device: two processes, weights through the host's memory, the probe."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from lockstep.device.select import select
from lockstep.preflight.async_worker import refuse_beside
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.online import train_online
from lockstep.train.online_async import train_online_async
from refusals import refuses
from runs import close, stored

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]


def responses(run: Path) -> list[str]:
    return [json.loads(line)["response"] for line in (run / "samples.jsonl").read_text().splitlines()]


def test_staleness_0_is_in_step_with_the_synchronous_loop(online_file: Path, tmp_path: Path) -> None:
    """The trainer of one run generates itself, in the other a process does; fp32, so that rounding moves no token."""
    common = ["device=cuda", "run.steps=3", "run.export=false", "log.samples=99"]
    train_online(load_recipe(str(online_file), ["run.name=turns", *common]), Console.silent())
    beside = load_recipe(str(online_file), ["run.name=beside", "rollout.max_staleness=0", *common])
    train_online_async(beside, Console.silent())
    turns, ahead = (tmp_path / "runs" / name for name in ("turns", "beside"))
    assert responses(ahead) == responses(turns)
    assert close(stored(ahead, 3), stored(turns, 3))
    assert all(metrics["async/staleness_max"] == 0 for _, metrics in read_metrics(ahead / "metrics.jsonl"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_staleness_stays_within_its_bound(online_file: Path, tmp_path: Path, dtype: str) -> None:
    words = ["device=cuda", f"model.dtype={dtype}", "run.steps=5", "run.export=false", "rollout.max_staleness=2"]
    train_online_async(load_recipe(str(online_file), words), Console.silent())
    for step, metrics in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl"):
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["async/staleness_max"] <= min(2, step - 1)


def test_what_one_device_cannot_do_is_refused(online_file: Path) -> None:
    device = select("cuda")
    words = ["device=cuda", "rollout.max_staleness=0"]
    recipe = load_recipe(str(online_file), [*words, "rollout.weight_sync=collective"])
    with refuses("rollout.weight_sync", "unsupported-combination", "nccl"):
        refuse_beside(recipe, device, 1, device.count())
    beyond = [*words, f"rollout.worker_device={device.count()}"]
    with refuses("rollout.worker_device", "too-few-devices", "cuda device"):
        refuse_beside(load_recipe(str(online_file), beyond), device, 1, device.count())
