"""A complete comparison: judged metrics, bars, throughput, and the command with its exit codes."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from commands import lockstep
from lockstep.cli import app
from lockstep.errors import Refusal
from lockstep.parity.compare.compare_report import as_strict_json, table_lines
from lockstep.parity.compare.compare_runs import compare
from lockstep.parity.compare.comparison import Metric
from lockstep.parity.compare.logs.log_curves import Evidence, Log, Series
from lockstep.parity.compare.throughput_ratio import throughput
from lockstep.parity.compare.verdict import kind_of
from work import lines_run

NAN = float("nan")
RECIPE: dict[str, Any] = {
    "method": "sft",
    "device": "cpu",
    "run": {"name": "one", "folder": "runs", "seed": 0, "steps": 4, "deterministic": False},
    "model": {"path": "runs/warm/export", "dtype": "fp32", "lora": None},
    "data": {"train": [{"path": "rows.jsonl"}], "val": []},
    "optim": {"lr": 1e-4, "schedule": "constant"},
    "log": {"every": 1},
    "checkpoint": {"every": None},
}
ENV: dict[str, Any] = {
    "lockstep": "0.1.0",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "transformers": "5.22.2"},
    "device": {"name": "cpu", "chip": "Chip One", "count": 1, "torch": "2.13.0", "driver": "7.1", "memory": {}},
    "world_size": 1,
    "determinism": {},
}


def log(source: str = "a", written: dict[str, str] | None = None, **curves: list[float]) -> Log:
    """`train__loss=[...]` is train/loss from step 1 on; two values stand for eight steps that alternate."""
    curves = {name: values * 4 if len(values) == 2 else values for name, values in curves.items()}
    metrics = {
        name.replace("__", "/"): Series(np.arange(1, len(values) + 1), np.array(values, dtype=float))
        for name, values in curves.items()
    }
    return Log(source, "jsonl", metrics, written or {name: name for name in metrics})


def ours(log: Log, recipe: dict[str, Any] | None = None, chip: str = "Chip One", **sections: Any) -> Log:
    """The log as one of our run folders."""
    full = copy.deepcopy(RECIPE)
    for section, values in {**(recipe or {}), **sections}.items():
        full[section] = {**full.get(section, {}), **values} if isinstance(values, dict) else values
    env = {**ENV, "device": {**ENV["device"], "chip": chip}}
    return Log(log.source, "run folder", log.metrics, log.written, Evidence(full, env))


def judged(comparison: Any) -> list[Metric]:
    return [metric for metric in comparison.metrics if metric.verdict is not None]


# Which metrics are judged, by which bar ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train/loss", "loss"),
        ("actor/pg_loss", "loss"),
        ("critic/vf_loss", "loss"),
        ("loss", "loss"),
        ("critic/rewards/mean", "reward"),
        ("critic/score/mean", "reward"),
        ("val-core/gsm8k/reward/mean@1", "reward"),
        ("reward", "reward"),
        ("critic/rewards/max", "other"),
        ("reward/failed", "other"),
        ("timing_s/reward", "other"),
        ("actor/entropy", "other"),
        ("perf/throughput", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_offline_runs_are_judged_by_their_loss() -> None:
    a = log(train__loss=[3.0, 2.0], val__loss=[1.0, 1.0], critic__rewards__mean=[1.0, 1.0])
    b = log("b", train__loss=[3.001, 1.999], val__loss=[9.0, 9.0], critic__rewards__mean=[9.0, 9.0])
    got = compare(ours(a), ours(b))
    assert [(metric.name, metric.bar_percent, metric.verdict) for metric in judged(got)] == [
        ("train/loss", 2.0, "in step")
    ]
    assert (got.verdict, got.reason) == (
        "in step",
        "train/loss: absolute mean error 0.1 % <= 2 % (0.04 % of the curve)",
    )
    assert [metric.name for metric in got.metrics] == ["train/loss", "val/loss", "critic/rewards/mean"]
    assert got.metrics[1].figures.mean_error_percent == pytest.approx(800)
    assert got.metrics[1].decided_by == "shown, not judged"


def test_online_runs_are_judged_by_their_reward() -> None:
    a = log(train__loss=[3.0, 2.0], critic__rewards__mean=[0.8, 0.9], critic__score__mean=[0.8, 0.9])
    b = log("b", train__loss=[9.0, 9.0], critic__rewards__mean=[0.802, 0.898], critic__score__mean=[0.0, 0.0])
    for got in (compare(a, b), compare(ours(a, {"method": "grpo"}), ours(b, {"method": "grpo"}))):
        assert (got.verdict, got.reason) == ("in step", "critic/rewards/mean: absolute mean error 0.2 % <= 4 %")
    only_score = compare(log(critic__score__mean=[0.8, 0.8]), log(critic__score__mean=[0.9, 0.9]))
    assert only_score.verdict == "out of step"
    assert re.match(r"critic/score/mean: .* 10 % > 4 %; drift: \+0\.1 ", only_score.reason)


def test_a_named_metric_replaces_the_default_and_a_bar_adds_to_it() -> None:
    a = log(train__loss=[1.0, 1.0], val__loss=[1.0, 1.0], length=[100.0, 100.0])
    b = log(train__loss=[1.0, 1.0], val__loss=[1.03, 1.03], length=[101.0, 101.0])
    named = compare(a, b, metrics=["val/loss"])
    assert [(metric.name, metric.verdict) for metric in judged(named)] == [("val/loss", "out of step")]
    assert named.verdict == "out of step"
    looser = compare(a, b, bars={"val/loss": 7.0})
    assert [metric.name for metric in judged(looser)] == ["train/loss", "val/loss"]
    assert looser.verdict == "in step"
    assert compare(log(my_loss=[1.0, 1.0]), log(my_loss=[1.01, 1.01]), bars={"my_loss": 2.0}).verdict == "in step"
    # A metric that is neither a loss nor a reward is compared by its scaled error: 1 of 100 is 1 %, not 100 %.
    length = compare(a, b, metrics=["length"])
    assert re.match("length: .*scaled error .*: 1 % <= 2 %", length.reason)


def test_names_of_the_logs_themselves_and_two_names_at_once() -> None:
    a = log("a.json", {"train/loss": "loss"}, train__loss=[1.0, 1.0])
    b = log("b.json", train__loss=[5.0, 5.0], mine__loss=[1.01, 1.01])
    got = compare(a, b, metrics=["loss=mine/loss"])
    assert [(metric.name, metric.names) for metric in judged(got)] == [("train/loss=mine/loss", ("loss", "mine/loss"))]
    assert got.verdict == "in step"
    with pytest.raises(Refusal) as refusal:
        compare(a, b, metrics=["mine/los"])
    assert "[unknown-metric]: a.json has no metric mine/los" in str(refusal.value)
    with pytest.raises(Refusal, match=r"similar: mine/loss, train/loss$"):
        compare(a, b, bars={"loss=mine/los": 2.0})


def test_a_repeat_that_equals_its_run_is_reported_and_not_used() -> None:
    curve = [1 / step for step in range(1, 21)]
    other, again = ([value + 0.01 * sign for value in curve] for sign in (1, -1))
    got = compare(log(train__loss=curve), log(train__loss=other), [log(train__loss=curve), log(train__loss=again)])
    power = next(metric for metric in got.metrics if metric.name == "train/loss").power
    assert power is not None
    assert power.repeats == 1
    (remark,) = (each for each in got.unknown if "repeats" in each)
    assert "the noise of train/loss: 1 of its repeats equals another run of the same side at all steps" in remark
    assert "(another batch.tokens)" in remark


def test_a_curve_near_zero_is_judged_by_its_scaled_error() -> None:
    # Mean error 0.05 %, far below the bar; and yet the curves differ by an eighth: 0.0005 of 0.004.
    near = compare(log(train__loss=[0.004, 0.004]), log(train__loss=[0.0045, 0.0045]))
    assert near.verdict == "out of step"
    words = "train/loss: curve is near 0 (mean 0.0045), so the scaled error decides: 12.5 % > 2 %; drift: +0.0005 in "
    assert near.reason.startswith(words)
    # At 0.1 and above, five bars, the mean error decides: 1 % of an absolute difference, 10 % of a relative one.
    above = compare(log(train__loss=[0.1, 0.1]), log(train__loss=[0.11, 0.11]))
    assert above.reason == "train/loss: absolute mean error 1 % <= 2 % (10 % of the curve)"
    below = compare(log(train__loss=[0.08, 0.08]), log(train__loss=[0.09, 0.09]))
    assert below.verdict == "out of step"
    assert (
        compare(log(train__loss=[0.0] * 3), log(train__loss=[0.0] * 3)).reason
        == "train/loss: A and B are equal at all 3 steps"
    )
    born = compare(log(train__loss=[0.0, 0.0]), log(train__loss=[0.01, 0.01]))
    assert (born.verdict, "A is 0 at every step" in born.reason) == ("out of step", True)


def test_the_divergence_step_follows_the_deciding_bar() -> None:
    a = [1.0] * 20
    parted = compare(log(train__loss=a), log(train__loss=[1.0] * 10 + [1.03] * 10)).metrics[0]
    # 1.5 % in the mean and yet out of step: 3 % from step 11 to the end.
    assert (parted.figures.parted_at, parted.verdict) == (11, "out of step")
    assert re.match(r".* 1\.5 % <= 2 %, .*step 11 on; end of the run: \+0\.03 ", parted.decided_by)
    small = compare(log(train__loss=[0.01] * 20), log(train__loss=[0.01] * 10 + [0.0103] * 10)).metrics[0]
    assert small.figures.parted_at == 11


# Steps without numbers, and what cannot be compared -----------------------------------------------------------------


def test_a_number_on_one_side_only_is_out_of_step() -> None:
    got = compare(log(train__loss=[1.0, 1.0, 1.0]), log(train__loss=[1.0, NAN, math.inf]))
    assert got.verdict == "out of step"
    assert re.match("train/loss: at step 2 and at 1 more ", got.reason)
    assert got.metrics[0].b == [1.0, None, None]
    wholly = compare(log(train__loss=[1.0]), log(train__loss=[NAN]))
    assert wholly.verdict == "out of step"
    assert json.loads(as_strict_json(wholly))["metrics"][0]["figures"]["mean_error_percent"] is None


def test_no_number_on_both_sides_is_left_out_and_counted() -> None:
    got = compare(log(train__loss=[1.0, NAN, 1.0] + [1.0] * 6), log(train__loss=[1.01, NAN, 0.99] + [1.01, 0.99] * 3))
    assert got.verdict == "cannot tell"
    assert re.search(
        "1 steps at which neither A nor B has a number .*; incomplete: A .*step 1, B .*step 1$", got.reason
    )
    never = compare(log(train__loss=[NAN]), log(train__loss=[NAN]))
    assert (never.verdict, never.metrics) == ("not comparable", [])


def near(steps: int, first: int = 1, source: str = "b", seed: int = 1) -> Log:
    """A loss around 1 with noise of 0.1 %."""
    values = 1 + 0.001 * np.random.default_rng(seed).normal(size=steps)
    return Log(source, "jsonl", {"train/loss": Series(np.arange(first, first + steps), values)}, {})


def without(log: Log, *steps: int) -> Log:
    series = log.metrics["train/loss"]
    kept = ~np.isin(series.steps, steps)
    return Log(log.source, log.kind, {"train/loss": Series(series.steps[kept], series.values[kept])}, {})


def test_a_run_that_died_is_not_in_step() -> None:
    full, died = near(1000, seed=0), near(12)
    got = compare(full, died)
    assert (got.verdict, got.metrics[0].bar_result) == ("cannot tell", "met")
    assert got.reason.endswith("; incomplete: B ends at step 12 of 1,000")
    assert compare(died, full).reason.endswith("; incomplete: A ends at step 12 of 1,000")
    # The same to the last bit as far as it went, which is not all that was planned.
    same = compare(full, Log("b", "jsonl", {"train/loss": Series(*(x[:12] for x in _values(full)))}, {}))
    assert (same.verdict, same.metrics[0].incomplete) == ("cannot tell", "B ends at step 12 of 1,000")
    # What the user asks for is what is planned.
    selected = compare(full, near(20), steps=(1, 12))
    assert (selected.verdict, selected.metrics[0].steps, selected.metrics[0].incomplete) == (
        "in step",
        list(range(1, 13)),
        "",
    )
    assert any("steps 1 to 12" in remark and "--steps" in remark for remark in selected.remarks)
    # A difference is a difference, however early a run ended.
    far = Log("b", "jsonl", {"train/loss": Series(np.arange(1, 13), np.full(12, 2.0))}, {})
    assert compare(full, far).verdict == "out of step"


def _values(log: Log) -> tuple[np.ndarray, np.ndarray]:
    series = log.metrics["train/loss"]
    return series.steps, series.values


def test_nan_on_both_sides_is_not_in_step() -> None:
    a, b = near(200, seed=0), near(200)
    assert compare(a, b).verdict == "in step"
    for log in (a, b):
        log.metrics["train/loss"].values[100:] = NAN
    got = compare(a, b)
    assert got.verdict == "cannot tell"
    assert got.reason.endswith("step 100 of 200, B ends at step 100 of 200")


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (near(50, seed=0), without(near(50), 20, 21, 40), "B lacks 3 steps after step 19"),
        (
            without(near(50, seed=0), 7),
            without(near(50), 7),
            "A lacks 1 step after step 6, B lacks 1 step after step 6",
        ),
        (near(50, seed=0), near(40, first=11), "B begins at step 11, the other at 1"),
        # Step 0 is no update, and what one side logs every tenth step is not missing at the nine before.
        (near(51, first=0, seed=0), near(50), ""),
        (near(100, seed=0), without(near(100), *(step for step in range(1, 101) if step % 10)), ""),
        (near(105, seed=0), without(near(105), *(step for step in range(1, 106) if step % 10)), ""),
        (
            near(100, seed=0),
            without(near(80), *(step for step in range(1, 81) if step % 10)),
            "B ends at step 80 of 100",
        ),
    ],
)
def test_gaps_and_late_starts_count(a: Log, b: Log, why: str) -> None:
    got = compare(a, b, bars={"train/loss": 5.0})
    assert got.metrics[0].incomplete == why
    assert (got.verdict == "in step") == (why == "")


def test_the_recipe_says_how_many_steps_were_planned() -> None:
    """Both died at the same step: the curves alone cannot tell."""
    a, b = near(12, seed=0, source="a"), near(12)
    got = compare(*(replace(ours(log, run={"steps": 1000}), planned=1000) for log in (a, b)))
    assert got.reason.endswith("step 12 of 1,000, B ends at step 12 of 1,000")
    assert Evidence({"run": {"steps": 1000}}, {}).planned == 1000
    assert Evidence({"run": {"steps": 1000, "early_stopping": {"metric": "val/loss"}}}, {}).planned is None


def test_what_cannot_be_compared_says_why() -> None:
    late = Log("late", "jsonl", {"train/loss": Series(np.array([7, 8]), np.array([1.0, 1.0]))}, {})
    got = compare(log(train__loss=[1.0, 1.0, 1.0]), late)
    assert got.verdict == "not comparable"
    assert re.match("train/loss .*A .*steps 1 to 3, B .*steps 7 to 8", got.reason)
    absent = compare(log(train__loss=[1.0]), log("b.csv", other=[1.0]))
    assert absent.reason == "b.csv has no train/loss: choose another with --metric"


def test_recipes_that_compute_different_things_are_not_comparable() -> None:
    a, b = log(train__loss=[1.0, 1.0]), log("b", train__loss=[1.0, 1.0])
    got = compare(ours(a), ours(b, optim={"lr": 1e-5}))
    assert got.verdict == "not comparable"
    assert "optim.lr (0.0001 against 1e-05)" in got.reason
    assert got.metrics[0].verdict == "in step"  # the figures are there all the same
    assert compare(ours(a), ours(b, run={"name": "two"})).verdict == "in step"


# Noise --------------------------------------------------------------------------------------------------------------


def noisy(source: str, seed: int, shift: float = 0.0, sd: float = 0.03) -> Log:
    draw = np.random.default_rng(seed)
    curve = 2 * np.exp(-np.arange(80) / 80) + shift + sd * draw.normal(size=80)
    return log(source, train__loss=curve.tolist())


def test_verdicts_with_repeats() -> None:
    a, repeats = noisy("a", 0), [noisy(f"r{seed}", seed) for seed in (1, 2, 4, 5)]
    alone = compare(a, noisy("b", 3))
    assert alone.verdict == "cannot tell"  # 0.03 x 1.13 = 3.4 % between any two of these
    assert alone.reason.endswith("would suffice")
    same = compare(a, noisy("b", 3), repeats)
    assert (same.verdict, same.metrics[0].findings) == ("within noise", [])
    assert same.reason.endswith("within the noise of repeats")
    floor, power = same.metrics[0].noise, same.metrics[0].power
    assert floor is not None
    assert power is not None
    assert (floor.repeats, floor.mean_error_percent) == (4, pytest.approx(3.4, abs=0.6))
    assert (power.repeats, power.noise_sd, power.collapse_steps) == (4, pytest.approx(0.03, abs=0.006), 4)
    assert [len(curve) for curve in same.metrics[0].repeats] == [80] * 4
    other = compare(a, noisy("b", 3, shift=0.09), repeats)
    found = other.metrics[0].findings[0]
    assert (other.verdict, other.metrics[0].figures.parted_at) == ("out of step", 1)
    assert (found.statistic, found.first, found.last) == ("drift", 1, 80)
    assert found.difference == pytest.approx(0.09, abs=0.02)
    short = compare(a, noisy("b", 3), [log("r", train__loss=[2.0] * 7)])
    assert (short.verdict, short.metrics[0].noise) == ("cannot tell", None)
    assert any(sentence.startswith("the noise of train/loss") for sentence in short.unknown)
    ended = noisy("ended", 1)
    early = log("ended", train__loss=ended.metrics["train/loss"].values[:60].tolist())
    result = compare(a, noisy("b", 3), [early, *repeats[1:]])
    assert (result.metrics[0].power and result.metrics[0].power.repeats) == 3
    assert any(sentence.startswith("the noise of train/loss: 1 ") for sentence in result.unknown)
    # Within the bar, but by more than repeats: in step, with a remark.
    quiet = [noisy(name, seed, sd=0.0005) for name, seed in (("a", 0), ("r1", 1), ("r2", 2))]
    near = compare(quiet[0], noisy("b", 3, shift=0.01, sd=0.0005), quiet[1:])
    assert (near.verdict, near.metrics[0].test_result) == ("in step", "small difference")
    assert "drift: +0.0099" in near.reason


def test_a_repeat_belongs_to_the_side_whose_setting_it_shares() -> None:
    a, b = ours(noisy("a", 0), chip="Chip One"), ours(noisy("b", 1, sd=0.5), chip="Chip Two")
    again = ours(noisy("b2", 2, sd=0.5), chip="Chip Two", run={"name": "again", "seed": 5}, batch={"tokens": 99})
    got = compare(a, b, [again])
    (sentence,) = [sentence for sentence in got.unknown if "b2" in sentence]
    assert "another seed" in sentence
    assert got.metrics[0].noise is not None
    assert got.metrics[0].noise.mean_error_percent == pytest.approx(
        100 * np.abs(b.metrics["train/loss"].values - again.metrics["train/loss"].values).mean()
    )
    stranger = ours(noisy("c", 3), chip="Chip Three")
    result = compare(a, b, [stranger])
    assert any("whether c is a repeat" in sentence for sentence in result.unknown)
    assert result.metrics[0].noise is not None
    assert result.metrics[0].noise.mean_error_percent == pytest.approx(
        100 * np.abs(a.metrics["train/loss"].values - stranger.metrics["train/loss"].values).mean()
    )


# Throughput ---------------------------------------------------------------------------------------------------------


def online(lengths: list[float], seconds: list[float]) -> Log:
    """4 sequences a step with prompts of 10 tokens; half of the time is generation, a quarter each of the rest."""
    tokens = [4 * (10 + length) for length in lengths]
    return log(
        perf__throughput=[count / second for count, second in zip(tokens, seconds, strict=True)],
        perf__total_num_tokens=tokens,
        response_length__mean=lengths,
        prompt_length__mean=[10.0] * len(lengths),
        timing_s__step=seconds,
        timing_s__gen=[second / 2 for second in seconds],
        timing_s__old_log_prob=[second / 8 for second in seconds],
        timing_s__ref=[second / 8 for second in seconds],
        timing_s__update_actor=[second / 4 for second in seconds],
    )


def test_throughput_by_hand() -> None:
    a = online([30, 30, 30, 30, 30], [8, 1, 1, 1, 1])
    b = online([30, 30, 30.5, 60, 30], [8, 2, 2, 2, 2])
    got = throughput(a, b)
    # 160 tokens a step in A: 20, 160, 160, 160 tokens/s; 160, 160, 162, 280 in B: 20, 80, 81, 140.
    assert (got.a, got.b, got.ratio) == (125.0, 80.25, pytest.approx(80.25 / 125))
    # Matched: steps 2, 3 and 5 (the first is left out, the fourth has other lengths).
    # A 3 x 160 tokens in 3 s; B 160 + 162 + 160 tokens in 6 s.
    assert got.matched_steps == 3
    assert got.matched_ratio == pytest.approx((482 / 6) / (480 / 3))
    phases = {phase.name: phase for phase in got.phases}
    assert list(phases) == ["generation", "log-probs", "update"]
    assert phases["generation"].a == pytest.approx(3 * 120 / 1.5)
    assert phases["generation"].b == pytest.approx((120 + 122 + 120) / 3)
    assert phases["log-probs"].a == pytest.approx(480 / 0.75)
    assert phases["update"].ratio == pytest.approx((482 / 1.5) / (480 / 0.75))
    # Mean lengths 30 against (30 + 30 + 30.5 + 60 + 30) / 5 = 36.1.
    (warning,) = got.warnings
    assert warning.startswith("response_length/mean is 30 against 36.1 (+20.3%): perf/throughput ")


def test_offline_throughput_and_devices() -> None:
    def offline(devices: int, seconds: float) -> Log:
        return log(
            train__tokens=[100.0] * 5,
            timing_s__step=[seconds] * 5,
            perf__throughput=[100 / seconds / devices] * 5,
        )

    got = throughput(offline(1, 1.0), offline(2, 1.0))
    assert got.ratio == pytest.approx(0.5)
    assert got.matched_ratio == pytest.approx(0.5)  # a device's, as perf/throughput is
    assert [(phase.name, phase.ratio) for phase in got.phases] == [("update", pytest.approx(0.5))]
    (warning,) = got.warnings
    assert warning.startswith("A has 1 device(s) and B has 2")


def test_metrics_missing_for_a_ratio_are_reported() -> None:
    nothing = throughput(log(train__loss=[1.0]), log(train__loss=[1.0]))
    assert (nothing.ratio, nothing.matched_ratio, nothing.phases) == (None, None, [])
    assert len(nothing.warnings) == 2
    apart = throughput(online([10] * 4, [1] * 4), online([20] * 4, [1] * 4))
    assert (apart.matched_ratio, apart.matched_steps, len(apart.phases)) == (None, 0, 3)
    assert "no step has equal lengths" in apart.warnings[-1]
    seldom = Series(np.array([10, 20]), np.array([4.0, 6.0]))
    sparse = Log("x", "csv", {"perf/throughput": seldom}, {})
    assert throughput(sparse, sparse).ratio == 1.0
    assert "used steps: 10, 20" in throughput(sparse, sparse).warnings[0]


# What run folders tell besides ---------------------------------------------------------------------------------------


def sample(step: int, prompt: str, response: str, number: int = 0) -> dict[str, Any]:
    selected = [{"role": "user", "content": prompt}]
    return {"step": step, "kind": "train", "sample": number, "prompt": selected, "response": response}


def test_facts_and_samples() -> None:
    a, b = ours(log(train__loss=[1.0])), ours(log("b", train__loss=[1.0]), model={"lora": {"rank": 8}})
    assert a.evidence is not None
    assert b.evidence is not None
    a.evidence.samples.extend([sample(1, "1+1?", "2"), sample(1, "1+1?", "3", number=1), sample(1, "2+2?", "4")])
    b.evidence.samples.extend([sample(1, "1+1?", "II"), sample(2, "2+2?", "IV")])
    got = compare(a, b)
    assert got.facts["method"] == ("sft", "sft")
    assert got.facts["model"] == ("warm", "warm, LoRA rank 8")
    assert got.facts["hardware"][0] == "1 x Chip One (cpu)"
    b.evidence.env["device"]["emulated"] = True
    b.evidence.env["model"] = {"architecture": "Qwen2ForCausalLM", "parameters": 1_018_368}
    stand_in = compare(a, b).facts
    assert stand_in["hardware"][1] == "1 x Chip One (cpu, emulated)"
    assert stand_in["model"][1] == "Qwen2 1.02M (warm), LoRA rank 8"
    assert got.facts["versions"][0] == "lockstep 0.1.0, torch 2.13.0, transformers 5.22.2, driver 7.1"
    result = [tuple(side and side["response"] for side in both) for both in got.samples]
    assert result == [("2", "II"), ("3", None), ("4", None), (None, "IV")]
    foreign = compare(log(train__loss=[1.0]), a)
    assert foreign.facts["method"] == (None, "sft")


# Speed, the table and the command ------------------------------------------------------------------------------------


def test_no_loop_over_steps() -> None:
    """Ten thousand steps take the Python of a hundred, and twice the metrics twice of it."""
    draw = np.random.default_rng(0)

    def work(steps: int, count: int) -> int:
        def long() -> Log:
            metrics = {f"m{i}/loss": Series(np.arange(steps), draw.normal(size=steps)) for i in range(count)}
            return Log("x", "jsonl", metrics, {})

        a, b = long(), long()
        assert len(compare(a, b, metrics=["m0/loss"]).metrics) == count
        return lines_run(lambda: compare(a, b, metrics=["m0/loss"]))

    assert work(10_000, 10) <= 1.1 * work(100, 10)
    assert work(100, 50) <= 5.5 * work(100, 10)


def test_the_table_fits_80_columns() -> None:
    wild = [1e-12, -3e8, 5.0, 7.0]
    a = log(train__loss=wild, **{"val-core__a-very-long-data-source__reward__mean@1": wild})
    b = log(train__loss=[-1e-7, 2e8, 1.0, 0.0], **{"val-core__a-very-long-data-source__reward__mean@1": wild[::-1]})
    lines = table_lines(compare(a, b).metrics)
    rows = [line for line in lines if not line.startswith("  ") or line.startswith(" " * 19)]
    assert max(map(len, rows)) <= 80
    assert len(rows[1].split()) == 9  # no two cells run into each other


def test_constant_metrics_are_only_counted_on_the_console() -> None:
    a = log(train__loss=[1.0, 1.0], still__loss=[0.5, 0.5], other__loss=[0.5, 0.5], val__loss=[2.0, 1.0])
    b = log(train__loss=[1.0, 1.0], still__loss=[0.5, 0.5], other__loss=[0.6, 0.6], val__loss=[2.0, 1.0])
    lines = table_lines(compare(a, b).metrics)
    assert [line.split()[0] for line in lines if "/loss" in line] == ["train/loss", "other/loss", "val/loss"]
    assert lines[-1].startswith("1 more ")


def test_small_and_large_curves_are_reported_with_their_scaled_error() -> None:
    """A loss of 0.11 that is 17 % off passes the absolute bar; rewards of 100 that are 1 % off miss it."""
    small = compare(log(train__loss=[0.11, 0.11]), log(train__loss=[0.1287, 0.1287]))
    assert "absolute mean error 1.87 % <= 2 % (17 % of the curve)" in small.reason
    large = compare(log(critic__rewards__mean=[100.0, 100.0]), log(critic__rewards__mean=[101.0, 101.0]))
    assert "absolute mean error 100 % > 4 % (1 % of the curve)" in large.reason
    usual = compare(log(train__loss=[1.0, 1.0]), log(train__loss=[1.001, 0.999]))
    assert usual.reason == "train/loss: absolute mean error 0.1 % <= 2 %"


def test_unjudged_metrics_have_no_divergence_step() -> None:
    """Only a verdict of out of step has a divergence step."""
    a = log(train__loss=[1.0, 1.0], val__loss=[1.0, 1.0])
    b = log(train__loss=[1.0, 1.0], val__loss=[2.0, 2.0])
    got = compare(a, b)
    assert [(metric.verdict, metric.figures.parted_at) for metric in got.metrics] == [("in step", None), (None, None)]


def write_run(folder: Path, losses: list[float], recipe: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    full = {**RECIPE, **(recipe or {})}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(full), encoding="utf-8")
    (folder / "env.json").write_text(json.dumps(ENV), encoding="utf-8")
    (folder / "samples.jsonl").write_text(json.dumps(sample(1, "1+1?", "2")) + "\n", encoding="utf-8")
    lines = [{"step": step, "data": {"train/loss": loss}} for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("losses", "code", "verdict"),
    [([1.001, 0.999] * 4, 0, "in step"), ([1.5] * 8, 1, "out of step"), ([1.01] * 7, 2, "cannot tell")],
)
def test_exit_codes_of_the_command(tmp_path: Path, losses: list[float], code: int, verdict: str) -> None:
    a, b = write_run(tmp_path / "a", [1.0] * 8), write_run(tmp_path / "b", losses)
    done = CliRunner().invoke(app, ["compare", str(a), str(b)])
    assert (done.exit_code, f"verdict: {verdict}" in done.stdout) == (code, True), done.output
    assert (b / "report.html").exists()
    assert not (a / "report.html").exists()


def test_steps_of_the_command(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1.0, 0.9] * 10, {"run": {**RECIPE["run"], "steps": 40}})
    b = write_run(tmp_path / "b", [1.0, 0.9] * 5, {"run": {**RECIPE["run"], "steps": 40}})
    died = CliRunner().invoke(app, ["compare", str(a), str(b)])
    assert (died.exit_code, "step 20 of 40, B ends at step 10 of 40" in " ".join(died.stdout.split())) == (
        2,
        True,
    )
    selected = CliRunner().invoke(app, ["compare", str(a), str(b), "--steps", "1:10"])
    assert (selected.exit_code, "bar: met; statistical test: no difference" in selected.stdout) == (0, True), (
        selected.output
    )
    for words in ("10", "9:1", "a:b"):
        assert CliRunner().invoke(app, ["compare", str(a), str(b), "--steps", words]).exit_code == 2


def test_not_comparable_ends_with_2(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1.0, 1.0])
    b = write_run(tmp_path / "b", [1.0, 1.0], {"method": "dpo"})
    done = CliRunner().invoke(app, ["compare", str(a), str(b)])
    assert (done.exit_code, "verdict: not comparable" in done.stdout) == (2, True), done.output


def test_json_alone_is_on_stdout(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [1.0, 1.0]), write_run(tmp_path / "b", [1.01, "NaN"])  # type: ignore[list-item]
    done = lockstep("compare", a, b, "--json", "--report", tmp_path / "page.html", "--bar", "train/loss=5%")
    assert done.returncode == 1, done.stderr
    got = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON"))
    assert (got["verdict"], got["metrics"][0]["bar_percent"]) == ("out of step", 5.0)
    assert got["metrics"][0]["b"] == [1.01, None]
    assert (tmp_path / "page.html").exists()


def test_the_command_reads_foreign_logs_names_and_repeats(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    for name in "abcdef":
        rows = [f"{step},{1 + 0.04 * draw.normal()}" for step in range(1, 201)]
        (tmp_path / f"{name}.csv").write_text("step,my_loss\n" + "\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "names.yaml").write_text("my_loss: train/loss\n", encoding="utf-8")
    a, b, *more = (str(tmp_path / f"{name}.csv") for name in "abcdef")
    words = ["compare", a, b, "--names", str(tmp_path / "names.yaml")]
    alone = CliRunner().invoke(app, words)
    assert (alone.exit_code, "would suffice" in alone.stdout) == (2, True), alone.output
    repeated = CliRunner().invoke(app, [*words, *(word for each in more for word in ("--repeat", each))])
    assert (repeated.exit_code, "verdict: within noise" in repeated.stdout) == (0, True), repeated.output
    assert "found with 95 %: a drift of" in repeated.stdout
    by_own_name = CliRunner().invoke(app, ["compare", a, b, "--metric", "my_loss"])
    assert by_own_name.exit_code == 2
    assert not list(tmp_path.glob("*.html"))


def test_bad_options_are_refused(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1.0])
    for bar in ("train/loss", "train/loss=much", "train/loss=-1", "train/loss=nan"):
        assert CliRunner().invoke(app, ["compare", str(a), str(a), "--bar", bar]).exit_code == 2
    done = lockstep("compare", a, a, "--metric", "train/lost")
    assert done.returncode == 2
    assert "similar: train/loss" in done.stderr
    assert "Traceback" not in done.stderr


def test_recorded_in_the_support_table(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [1.0] * 8), write_run(tmp_path / "b", [1.01] * 8)
    table = tmp_path / "docs" / "support.md"
    done = CliRunner().invoke(app, ["compare", str(a), str(b), "--record", "--support", str(table)])
    assert done.exit_code == 0, done.output
    assert "sft" in table.read_text(encoding="utf-8")
    assert len(list((tmp_path / "docs" / "support").glob("*.json"))) == 1
