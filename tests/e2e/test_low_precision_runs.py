"""Runs with low-precision rollouts: mismatch metrics, validation, kills, several processes, learning."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import lockstep, torchrun
from conftest import question_rows, run, write_jsonl
from hang import HANG
from kills import killed, lines
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train import advantages
from lockstep.train.online import train_online
from refusals import refuses
from runs import close, facts, stored
from warm_starts import warm_started

INT8 = "rollout.precision=int8"


def train(recipe: Path, *overrides: str) -> None:
    train_online(load_recipe(str(recipe), ["run.export=false", *overrides]), Console.silent())


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [metrics for _, metrics in read_metrics(run / "metrics.jsonl")]


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.daily("int8")
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_the_mismatch_of_every_step_is_that_of_its_tokens(
    online_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    told: list[tuple[list[float], list[float]]] = []
    correct = advantages.correct

    def spy(trainer_K: torch.Tensor, rollout_logprobs_K: torch.Tensor, *rest: Any, **named: Any) -> Any:
        told.append((trainer_K.tolist(), rollout_logprobs_K.tolist()))
        return correct(trainer_K, rollout_logprobs_K, *rest, **named)

    monkeypatch.setattr(advantages, "correct", spy)
    cap = 1.0005
    train(online_file, f"rollout.precision={precision}", "run.steps=3", f"algorithm.rollout_correction.cap={cap}")
    steps = metrics_of(tmp_path / "runs" / "run")
    assert len(told) == len(steps) == 3
    for (trainer, engine), metrics in zip(told, steps, strict=True):
        off = [a - b for a, b in zip(trainer, engine, strict=True)]
        ratios = [math.exp(each) for each in off]
        weights = [min(ratio, cap) for ratio in ratios]
        count = len(off)
        expected = {
            "rollout_corr/kl": -sum(off) / count,
            "rollout_corr/k3": sum(ratio - each - 1 for ratio, each in zip(ratios, off, strict=True)) / count,
            "rollout_corr/capped_share": sum(ratio > cap for ratio in ratios) / count,
            "rollout_corr/weight_mean": sum(weights) / count,
            "rollout_corr/effective_share": sum(weights) ** 2 / count / sum(weight**2 for weight in weights),
            "training/rollout_logprob_diff_mean": sum(map(abs, off)) / count,
        }
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
        # The engine rounds, so the numbers are not those of a run in full precision.
        assert metrics["training/rollout_logprob_diff_mean"] > 1e-5
        assert 0 < metrics["rollout_corr/capped_share"] < 1


@pytest.mark.slow
def test_a_mismatch_over_its_limit_stops_the_run(online_file: Path) -> None:
    with refuses("rollout.max_logprob_diff", code="logprobs-differ"):
        train(online_file, INT8, "rollout.max_logprob_diff=1e-7")


@pytest.mark.slow
def test_bypass_measures_the_mismatch_too(online_file: Path, tmp_path: Path) -> None:
    train(online_file, INT8, "run.steps=1", "algorithm.rollout_correction.bypass=true")
    (metrics,) = metrics_of(tmp_path / "runs" / "run")
    assert metrics["rollout_corr/k3"] > 0
    assert metrics["training/rollout_logprob_diff_mean"] > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["rollout.kv_cache=fp8"],
        pytest.param(["rollout.kv_cache=fp8", INT8, "model.lora.rank=4"], marks=pytest.mark.slow),
    ],
    ids=["cache", "cache, weights, adapter"],
)
def test_a_cache_in_fp8_is_measured_and_corrected(online_file: Path, tmp_path: Path, words: list[str]) -> None:
    train(online_file, "run.steps=2", *words)
    for metrics in metrics_of(tmp_path / "runs" / "run"):
        assert 0 < metrics["rollout_corr/k3"] < 0.1
        assert 0.9 < metrics["rollout_corr/effective_share"] < 1


@pytest.mark.slow
def test_validation_generates_with_the_trained_weights(online_file: Path, tmp_path: Path) -> None:
    val = write_jsonl(tmp_path / "val.jsonl", question_rows(5))
    words = [f"val.questions={val}", "val.max_new_tokens=6", "val.at_start=true", "val.every=1", "run.steps=1"]
    runs = tmp_path / "runs"
    train(online_file, "run.name=low", INT8, *words)
    train(online_file, "run.name=full", *words)
    low, full = (
        [s for s in samples_of(runs / name) if s["kind"] == "val" and s["step"] == 0] for name in ("low", "full")
    )
    assert low
    assert low == full
    kinds = {(sample["kind"], sample.get("precision")) for sample in samples_of(runs / "low")}
    assert kinds == {("val", None), ("train", "int8")}
    assert not any("precision" in sample for sample in samples_of(runs / "full"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_killed_and_resumed_is_bit_identical(online_file: Path, tmp_path: Path, precision: str) -> None:
    words = [f"rollout.precision={precision}", "checkpoint.every=2", "log.samples=8", "run.export=false"]
    runs = tmp_path / "runs"
    train(online_file, "run.name=whole", *words)
    killed(["train", online_file, "run.name=killed", *words], lines(runs / "killed" / "metrics.jsonl", 3))
    done = lockstep("train", online_file, "run.name=killed", *words)
    assert done.returncode == 0, done.stderr
    assert facts(runs / "killed") == facts(runs / "whole")
    assert (runs / "killed" / "samples.jsonl").read_text() == (runs / "whole" / "samples.jsonl").read_text()
    one, two = (stored(runs / name, 4) for name in ("killed", "whole"))
    assert all(torch.equal(one[name], two[name]) for name in two)


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("lora", [False, True], ids=["full", "adapter"])
def test_two_processes_sample_and_train_what_one_does(online_file: Path, tmp_path: Path, lora: bool) -> None:
    # A weight that differs in its last bit can be rounded to another code, so the second step may differ a little more.
    words = [INT8, "log.samples=99", "run.export=false", "run.steps=2", "checkpoint.every=1"]
    words += ["model.lora.rank=4"] if lora else []
    train(online_file, "run.name=one", *words)
    two = torchrun("train", online_file, "run.name=two", *words)
    assert two.returncode == 0, two.stderr
    single, double = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert [s["response"] for s in samples_of(single)] == [s["response"] for s in samples_of(double)]
    assert close(stored(single, 2), stored(double, 2))
    for one, other in zip(metrics_of(single), metrics_of(double), strict=True):
        for name in ("rollout_corr/k3", "rollout_corr/effective_share"):
            assert other[name] == pytest.approx(one[name], rel=1e-2, abs=1e-6), name


@pytest.mark.slow
def test_a_process_beside_the_trainer_gets_every_update(online_file: Path, tmp_path: Path) -> None:
    """With staleness 0 the worker's weights are those of the trainer, so it samples what the trainer would."""
    words = [INT8, "log.samples=99", "run.steps=3"]
    train(online_file, "run.name=turns", *words)
    train(online_file, "run.name=beside", "rollout.max_staleness=0", *words)
    told = [[(s["response"], s["score"]) for s in samples_of(tmp_path / "runs" / name)] for name in ("turns", "beside")]
    assert told[0] == told[1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_low_precision_rollouts_lift_held_out_accuracy(warm_start: Path, precision: str) -> None:
    words = ["batch.prompts=16", "rollout.n=8", "run.steps=40", "val.every=1000", "run.export=false"]
    reached = []
    for name, more in (("full", []), (precision, [f"rollout.precision={precision}"])):
        done = lockstep(
            "train",
            "grpo-arithmetic",
            f"run.name={name}",
            f"run.folder={warm_start / 'runs'}",
            f"model.path={warm_start / 'runs' / 'warmup-arithmetic' / 'export'}",
            f"data.train={warm_start / 'data' / 'train.parquet'}",
            f"val.questions={warm_start / 'data' / 'val.parquet'}",
            *words,
            *more,
            timeout=4 * HANG,
        )
        assert done.returncode == 0, done.stderr
        accuracy = [one["val/accuracy"] for one in metrics_of(warm_start / "runs" / name) if "val/accuracy" in one]
        assert accuracy[-1] >= accuracy[0] + 0.25
        reached.append(accuracy[-1])
    # Two runs of 200 held-out sums that differ by less than their noise: two deviations of a share near a half.
    assert reached[1] >= reached[0] - 2 * (0.5 * 0.5 * 2 / 200) ** 0.5


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_started(tmp_path_factory.mktemp("warm"))


# -- training with fp8 matmuls -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fp8_training_resumes_bit_identical(recipe_file: Path, tmp_path: Path) -> None:
    words = ["model.matmul=fp8", "model.matmul_exclude_ends=0", "run.steps=4", "checkpoint.every=2", "run.export=false"]
    runs = tmp_path / "runs"
    assert run("train", recipe_file, "run.name=whole", *words) == 0
    killed(["train", recipe_file, "run.name=parts", *words], lines(runs / "parts" / "metrics.jsonl", 3))
    assert run("train", recipe_file, "run.name=parts", *words) == 0
    plain = ["model.matmul=null" if word == "model.matmul=fp8" else word for word in words]
    plain.remove("model.matmul_exclude_ends=0")
    assert run("train", recipe_file, "run.name=plain", *plain) == 0
    one, two = (stored(runs / name, 4) for name in ("parts", "whole"))
    assert all(torch.equal(one[name], two[name]) for name in two)
    losses = [[metrics["train/loss"] for metrics in metrics_of(runs / name)] for name in ("whole", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert losses[0] != losses[1]


def test_an_online_run_trains_and_generates_in_fp8(online_file: Path, tmp_path: Path) -> None:
    words = ["model.matmul=fp8", "model.matmul_exclude_ends=0", "rollout.precision=fp8", "run.steps=2"]
    train(online_file, *words)
    for metrics in metrics_of(tmp_path / "runs" / "run"):
        assert metrics["actor/grad_norm"] > 0
        assert 0 < metrics["rollout_corr/k3"] < 0.1


@pytest.mark.slow
def test_fp8_training_stays_in_step_with_bf16(warm_start: Path) -> None:
    """From random weights at this learning rate, runs in bf16 with other micro-batches differ by 1.5 % in the mean and
    by 2.9 % in some windows of ten steps: rounding grows. So repeats in bf16 measure the noise of the verdict."""
    runs = warm_start / "runs"
    sides = {"sft-bf16": [], "sft-fp8": ["model.matmul=fp8"]}
    repeats = {f"sft-bf16-{tokens}": [f"batch.tokens={tokens}"] for tokens in (2048, 1024)}
    for name, more in (sides | repeats).items():
        words = [f"run.name={name}", f"run.folder={runs}", *more]
        words += [f"model.path={warm_start / 'model'}", f"data.train={warm_start / 'data' / 'sft_train.parquet'}"]
        words += [f"val.questions={warm_start / 'data' / 'val.parquet'}", "model.dtype=bf16", "run.export=false"]
        done = lockstep("train", "warmup-arithmetic", *words, timeout=4 * HANG)
        assert done.returncode == 0, done.stderr
    again = [word for name in repeats for word in ("--repeat", runs / name)]
    done = lockstep("compare", runs / "sft-bf16", runs / "sft-fp8", *again, "--metric", "train/loss", timeout=HANG)
    assert done.returncode == 0, done.stdout
    # The first steps are not chaotic yet (bf16 against bf16: 0.1 %), so there the fp8 matmuls themselves are measured:
    # 0.9 %, and 1.7 % with model.matmul_exclude_ends=0.
    start = lockstep("compare", runs / "sft-bf16", runs / "sft-fp8", "--steps", "1:20", "--json", timeout=HANG)
    (loss,) = [one["figures"] for one in json.loads(start.stdout)["metrics"] if one["name"] == "train/loss"]
    assert loss["mean_error_percent"] < 1.5
