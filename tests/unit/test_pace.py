"""What slows a CPU down: measured ratios, said in words; and threads that follow what a container may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.data.prepare.generated import write_arithmetic
from lockstep.device import cpu as pace
from lockstep.device import process_setup as threads
from lockstep.device.cpu import Cpu
from lockstep.device.process_setup import quota
from lockstep.kernels.bf16_matmul import prepare_products
from lockstep.model.load import load_config
from lockstep.preflight.run_checks import prepare_offline, prepare_online
from lockstep.recipe.loader import checked_recipe
from lockstep.run.console import Console


def test_the_ratio_is_of_the_best_rounds_and_the_first_does_not_count() -> None:
    """By a clock of hand-written times: a first round that is off, then 4 against 2 with noise upwards."""
    now = 0.0
    ones, others = iter([90.0, 5.0, 4.0, 6.0, 4.5, 7.0]), iter([1.0, 3.0, 2.0, 2.5, 9.0, 2.2])

    def taking(times: Iterator[float]) -> pace.Call:
        def call() -> None:
            nonlocal now
            now += next(times) / 10_000

        return call

    assert pace.ratio(taking(ones), taking(others), lambda: now) == pytest.approx(4.0 / 2.0)
    assert next(ones, None) is None


def test_what_is_slow_is_not_repeated() -> None:
    now, calls = 0.0, 0

    def call() -> None:
        nonlocal now, calls
        now, calls = now + 1.0, calls + 1

    assert pace.ratio(call, call, lambda: now) == 1.0
    assert calls == 4


@pytest.mark.parametrize(
    ("times", "said"),
    [(1.05, None), (3.44, "bf16 takes 3.4 times as long as fp32"), (0.5, None)],
)
def test_a_slow_dtype_is_said_with_its_ratio(monkeypatch: pytest.MonkeyPatch, times: float, said: str | None) -> None:
    monkeypatch.setattr(pace, "ratio", lambda *words: times)
    told = pace.slow_dtype(torch.bfloat16, 896, 4864)
    assert (told is None) == (said is None)
    if told is not None:
        assert str(said) in told
        assert "19 x 512 x 512" in told, "1e7 operations of a product whose sides are at most 512"
        assert "model.dtype=fp32" in told
    assert pace.slow_dtype(torch.float32, 896, 4864) is None


def test_the_trial_runs_real_products_and_leaves_the_process_as_it_was() -> None:
    before, state, given = torch.get_num_threads(), torch.get_rng_state(), torch.backends.mkldnn.enabled
    prepare_products(torch.bfloat16)
    product = torch.full((3, 4), 0.5).bfloat16() @ torch.full((4, 2), 0.5).bfloat16()
    try:
        torch.set_num_threads(2)
        Cpu().slowed_by(torch.bfloat16, 64, 128)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mkldnn.enabled == given
    assert product.eq(1.0).all()


def test_threads_that_stand_in_each_others_way_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "ratio", lambda *words: 4.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (8.25, 0.0, 0.0))
    told = pace.slow_threads(torch.float32, 64, 64)
    assert told is not None
    assert "2 threads take 4.0 times as long" in told
    assert "OMP_NUM_THREADS=1" in told
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert pace.slow_threads(torch.float32, 64, 64) is None


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_quota_of_a_container(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert quota(tmp_path / "none", own) is None
    # Version 2: the least of the group's own limit and those above it.
    two = tmp_path / "two"
    group(two, cpu__max="max 100000\n")
    group(two / "pods", cpu__max="150000 100000\n")
    group(two / "pods" / "mine", cpu__max="max 100000\n")
    own.write_text("0::/pods/mine\n")
    assert quota(two, own) == 2
    group(two / "pods" / "mine", cpu__max="50000 100000\n")
    assert quota(two, own) == 1
    own.write_text("0::/\n")
    assert quota(two, own) is None
    # Version 1, where a container sees its own group as the root.
    one = tmp_path / "one"
    group(one / "cpu", **{"cpu__cfs_quota_us": "400000\n", "cpu__cfs_period_us": "100000\n"})
    own.write_text("4:memory:/x\n1:cpu,cpuacct:/docker/abc\n")
    assert quota(one, own) == 4
    group(one / "cpu", **{"cpu__cfs_quota_us": "-1\n"})
    assert quota(one, own) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "3"),
        ({"OMP_NUM_THREADS": "7"}, "7"),
        (
            {"OMP_NUM_THREADS": "3", "LOCKSTEP_THREADS_FOLLOW_QUOTA": "3"},
            "3",
        ),  # left by a process that followed
    ],
)
def test_threads_follow_the_quota_unless_told_otherwise(given: dict[str, str], expected: str) -> None:
    code = (
        "import os, sys\n"
        "from lockstep.device import process_setup as threads\n"
        "threads.quota, threads.cores = lambda: 3, lambda: 64\n"
        "threads.follow_quota()\n"
        "print(os.environ.get('OMP_NUM_THREADS'), threads.each_of(2, 9))\n"
        "threads.share(2)\n"
        "print(os.environ.get('OMP_NUM_THREADS'), 'torch' in sys.modules)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **given}, capture_output=True, text=True, check=True
    )
    # Ranks side by side share what there is, and keep what the user said.
    each, shared = ("9", "7") if expected == "7" else ("4", "1")
    assert done.stdout.split() == [expected, each, shared, "False"]


def test_without_a_quota_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(threads.THREADS, raising=False)
    monkeypatch.setattr(threads, "quota", lambda: None)
    monkeypatch.delitem(sys.modules, "torch")
    threads.follow_quota()
    assert threads.THREADS not in os.environ


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_run_is_told_before_it_starts(
    method: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[torch.dtype, int, int]] = []

    def slowed_by(self: Cpu, dtype: torch.dtype, inner: int, outer: int) -> list[str]:
        asked.append((dtype, inner, outer))
        return ["bf16 takes 9.9 times as long"]

    monkeypatch.setattr(Cpu, "slowed_by", slowed_by)
    write_arithmetic(tmp_path, train_rows=8, val_rows=2)
    online = method == "grpo"
    values = {
        "method": method,
        "device": "cpu",
        "run": {"steps": 1},
        "model": {"path": str(tiny_folder), "dtype": "bf16"},
        "data": {"train": str(tmp_path / ("train.parquet" if online else "sft_train.parquet"))},
    }
    (prepare_online if online else prepare_offline)(checked_recipe(values), Cpu(), 1, Console.open())
    assert "warning: bf16 takes 9.9 times as long" in capsys.readouterr().out
    config = load_config(str(tiny_folder))
    assert asked == [(torch.bfloat16, config.hidden_size, config.intermediate_size)]
