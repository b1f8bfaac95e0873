"""Alignment of steps: means and single steps, steps of one side only, and shifted counts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.errors import Refusal
from lockstep.parity.compare.align_curves import Curve, averaged, better_shift, intervals, match
from lockstep.parity.compare.compare_runs import compare
from lockstep.parity.compare.comparison import Comparison, Metric
from lockstep.parity.compare.logs import read_log
from lockstep.parity.compare.logs.log_curves import Evidence, Log, Series


def series(values: dict[int, float]) -> Series:
    return Series(np.array(list(values), dtype=np.int64), np.array(list(values.values()), dtype=float))


def log(values: dict[int, float], source: str = "a", means: frozenset[str] | None = None) -> Log:
    return Log(source, "jsonl", {"train/loss": series(values)}, {"train/loss": "loss"}, None, means)


OF_MEANS = frozenset({"train/loss"})
# Multiples of 1/16, whose sums are exact, so that "the same" is to the bit; they do not come again within 100 steps.
NOISY = {step: 2 + (37 * step * step + 11 * step) % 128 / 16 for step in range(1, 101)}
MEANS = {end: sum(NOISY[step] for step in range(end - 9, end + 1)) / 10 for end in range(10, 101, 10)}


def loss(comparison: Comparison) -> Metric:
    (metric,) = (one for one in comparison.metrics if one.name == "train/loss")
    return metric


# Means ---------------------------------------------------------------------------------------------------------------


def test_means_are_compared_with_means_of_the_same_steps() -> None:
    """By hand: steps 1 to 6 are 1 to 6; the means of two are 1.5, 3.5 and 5.5."""
    single = {step: float(step) for step in range(1, 7)}
    result = loss(compare(log({2: 1.5, 4: 3.5, 6: 5.75}, means=OF_MEANS), log(single, "b")))
    assert (result.steps, result.a, result.b) == ([2, 4, 6], [1.5, 3.5, 5.75], [1.5, 3.5, 5.5])
    assert result.figures.mean_error_percent == pytest.approx(100 * 0.25 / 3)
    assert re.fullmatch("A's values are means of 2 steps: B [^;]*", result.matching)
    assert (result.only_a, result.only_b) == (0, 0)
    # The other way round.
    result = loss(compare(log(single), log({2: 1.5, 4: 3.5, 6: 5.75}, "b", OF_MEANS)))
    assert (result.a, result.b) == ([1.5, 3.5, 5.5], [1.5, 3.5, 5.75])
    assert re.fullmatch("B's values are means of 2 steps: A [^;]*", result.matching)


def test_what_is_of_the_step_itself_is_not_averaged() -> None:
    result = loss(compare(log({10: NOISY[10], 20: NOISY[20]}, means=frozenset()), log(NOISY, "b")))
    assert result.a == result.b == [NOISY[10], NOISY[20]]
    assert result.matching == "left out: 98 steps that only B has"


def test_means_are_detected_if_the_format_does_not_say() -> None:
    result = loss(compare(log(NOISY), log(MEANS, "b")))
    assert (result.figures.steps, result.figures.worst) == (10, 0)
    errors = [abs(MEANS[end] - NOISY[end]) for end in MEANS]
    words = re.fullmatch(
        r"B's values look like means of 10 steps \(.* 0 % .* (\d+) % .*\): A is averaged over the same steps",
        result.matching,
    )
    assert words is not None
    assert float(words.group(1)) == pytest.approx(100 * sum(errors) / len(errors), abs=1)


def test_single_steps_are_not_taken_for_means() -> None:
    """Values of every tenth step, as they are and with noise as large as that of the curve."""
    rare = {end: NOISY[end] for end in MEANS}
    result = loss(compare(log(NOISY), log(rare, "b")))
    assert result.figures.worst == 0
    assert result.matching == "left out: 90 steps that only A has"
    other = {end: 2 + (53 * end * end + 7 * end) % 128 / 16 for end in MEANS}
    assert loss(compare(log(NOISY), log(other, "b"))).only_a == 90


def test_four_values_are_too_few_to_see_it() -> None:
    few = {end: MEANS[end] for end in (10, 20, 30, 40)}
    assert "averaged" not in loss(compare(log(NOISY), log(few, "b"))).matching
    assert "averaged" in loss(compare(log(NOISY), log(few, "b", OF_MEANS))).matching


def test_a_mean_whose_steps_are_not_all_there_is_left_out_and_counted() -> None:
    holes = {step: value for step, value in NOISY.items() if step not in (15, 47)}
    result = loss(compare(log(MEANS, means=OF_MEANS), log(holes, "b")))
    assert result.steps == [10, 30, 40, 60, 70, 80, 90, 100]
    assert result.figures.worst == 0
    assert (result.only_a, result.only_b) == (2, 18)
    assert re.fullmatch("A's values are means of 10 steps: B [^;]*; left out: 2 .* A .* 18 .* B .*", result.matching)


def test_a_first_step_that_is_logged_alone_begins_the_next_interval() -> None:
    """`logging_first_step`: the value at 10 is then the mean of steps 2 to 10."""
    result = {
        1: NOISY[1],
        10: sum(NOISY[step] for step in range(2, 11)) / 9,
        **{e: MEANS[e] for e in range(20, 101, 10)},
    }
    found = loss(compare(log(result, means=OF_MEANS), log(NOISY, "b")))
    assert found.steps == [1, *range(10, 101, 10)]
    assert found.figures.worst < 1e-12


def test_intervals() -> None:
    def pairs(*steps: int) -> list[tuple[int, int]]:
        starts, ends = intervals(series(dict.fromkeys(steps, 0.0)))
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    assert pairs(10, 20, 25) == [(0, 10), (10, 20), (20, 25)]
    assert pairs(110, 120) == [(100, 110), (110, 120)]  # a log that begins in the middle
    assert pairs(1, 10, 20) == [(0, 1), (1, 10), (10, 20)]
    assert pairs(7) == [(0, 7)]


def test_means_of_means_count_by_their_steps() -> None:
    """The mean of 1 to 10, logged as those of 1 to 4 (2.5) and of 5 to 10 (7.5), = (4 x 2.5 + 6 x 7.5) / 10."""
    found = averaged(series({10: 0.0, 20: 0.0}), Curve(series({4: 2.5, 10: 7.5, 20: 1.0}), mean=True))
    assert found is not None
    # The interval of 4 is taken to be as long as the next one, which begins before the first step: (0, 4].
    assert dict(zip(found.steps.tolist(), found.values.tolist(), strict=True)) == {10: 5.5, 20: 1.0}


def test_a_step_without_a_number_makes_a_mean_without_one() -> None:
    broken = {**NOISY, 33: float("nan"), 58: float("inf")}
    result = loss(compare(log(MEANS, means=OF_MEANS), log(broken, "b")))
    assert [step for step, value in zip(result.steps, result.b, strict=True) if value is None] == [40, 60]
    assert result.verdict == "out of step"


def test_means_that_cannot_be_matched_are_reported() -> None:
    a, b = (
        log({7: 1.0, 14: 1.0, 21: 1.0, 28: 1.0}, means=OF_MEANS),
        log({4: 1.0, 14: 1.0, 24: 1.0, 28: 1.0}, "b", OF_MEANS),
    )
    result = loss(compare(a, b))
    assert result.matching.startswith("B's values are means of 10 steps, but A ")


def test_both_with_the_same_means_are_compared_as_they_are() -> None:
    result = loss(compare(log(MEANS, means=OF_MEANS), log(MEANS, "b")))
    assert (result.matching, result.figures.steps) == ("", 10)


def test_repeats_are_averaged_too() -> None:
    single = {step: value + 0.5 for step, value in NOISY.items()}
    found = loss(compare(log(MEANS, means=OF_MEANS), log(NOISY, "b"), repeats=[log(single, "c")]))
    assert found.repeats == [[MEANS[end] + 0.5 for end in MEANS]]
    assert found.noise is not None
    assert found.noise.mean_error_percent == pytest.approx(50)


def test_only_the_first_of_each_side_decides() -> None:
    matched = match([Curve(series(NOISY)), Curve(series(MEANS), True)], [Curve(series(NOISY))])
    assert (len(matched.a[1].steps), matched.explanation) == (10, "")


def trained(folder: Path, **options: Any) -> Log:
    """transformers' Trainer on a linear regression, with a fixed seed."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.line = torch.nn.Linear(1, 1)

        def forward(self, x: Any, y: Any) -> dict[str, Any]:
            return {"loss": ((self.line(x) - y) ** 2).mean()}

    rows = [{"x": torch.tensor([i / 8]), "y": torch.tensor([3 - i / 4])} for i in range(32)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=13,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    trainer = Trainer(model=Line(), args=arguments, train_dataset=rows)
    trainer.train()
    trainer.save_state()
    return read_log(str(folder / "trainer_state.json"))


@pytest.mark.parametrize("first", [False, True])
def test_the_means_are_those_that_transformers_logs(tmp_path: Path, first: bool) -> None:
    """Two real runs that differ in `logging_steps` alone agree, and only after the averaging."""
    every = trained(tmp_path / "every", logging_steps=1)
    fourth = trained(tmp_path / "fourth", logging_steps=4, logging_first_step=first)
    result = compare(fourth, every)
    assert loss(result).steps == [*([1] if first else []), 4, 8, 12]
    assert loss(result).matching.startswith("A's values are means of 4 steps: B ")
    assert loss(result).figures.worst < 1e-4  # the Trainer writes few digits
    plain = [
        abs(fourth_ - dict(zip(*pair(every), strict=True))[step]) for step, fourth_ in zip(*pair(fourth), strict=True)
    ]
    assert max(plain) > 0.02


def pair(log: Log) -> tuple[list[int], list[float]]:
    curve = log.metrics["train/loss"]
    return curve.steps.tolist(), curve.values.tolist()


# Steps that only one side has ----------------------------------------------------------------------------------------


def test_steps_of_one_side_are_counted_and_shown(tmp_path: Path) -> None:
    a, b = (dict.fromkeys(steps, 1.0) for steps in (range(1, 11), range(4, 22)))
    result = loss(compare(log(a), log(b, "b")))
    assert (result.figures.steps, result.only_a, result.only_b) == (7, 3, 11)
    shown = run(tmp_path, a, b).output
    assert re.search("left out: 3 steps .* A .*11 steps .* B ", " ".join(shown.split()))
    assert "left out" not in run(tmp_path, a, a).output
    values = json.loads(run(tmp_path, a, b, "--json").stdout)
    assert (values["metrics"][0]["only_a"], values["metrics"][0]["only_b"]) == (3, 11)


def run(folder: Path, a: dict[int, float], b: dict[int, float], *options: str) -> Any:
    files = []
    for name, values in (("a", a), ("b", b)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"step": step, "loss": value}) + "\n" for step, value in values.items()))
        files.append(str(file))
    return CliRunner().invoke(app, ["compare", *files, *options], catch_exceptions=False)


# A count that is off -------------------------------------------------------------------------------------------------


def test_a_count_from_zero_is_proposed_and_not_applied(tmp_path: Path) -> None:
    from_zero = {step - 1: value for step, value in NOISY.items()}
    found = compare(log(NOISY), log(from_zero, "b"))
    # One step late, without repeats, and this curve's neighbouring moves hardly go against each other: no finding.
    assert found.verdict == "cannot tell"
    (remark,) = found.remarks
    assert "shifted by +1 (mean error 0 % over 100 steps; " in remark
    assert remark.endswith("compare again with --shift 1")
    assert loss(found).steps == list(range(1, 100))
    shown = run(tmp_path, NOISY, from_zero)
    assert (shown.exit_code, "remark: train/loss: the curves agree much better" in shown.output) == (2, True)
    # As it was proposed:
    again = run(tmp_path, NOISY, from_zero, "--shift", "1")
    assert (again.exit_code, "agree much better" in again.output) == (0, False)
    assert "remark: B's steps are shifted by +1 (--shift)" in again.output
    applied = compare(log(NOISY), log(from_zero, "b"), shift=1)
    assert (applied.verdict, loss(applied).figures.worst, loss(applied).steps) == ("in step", 0, list(range(1, 101)))


def test_a_wrong_shift_is_reported_in_steps_of_the_log() -> None:
    from_zero = {step - 1: value for step, value in NOISY.items()}
    remarks = compare(log(NOISY), log(from_zero, "b"), shift=3).remarks
    assert remarks[0] == "B's steps are shifted by +3 (--shift)"
    assert remarks[1].endswith("compare again with --shift 1")


@pytest.mark.parametrize(("first", "last", "by"), [(1, 40, 60), (1001, 1100, -1000), (24, 103, -3)])
def test_a_resumed_count_is_found(first: int, last: int, by: int) -> None:
    """Shifted steps of B with a little noise, also without a common step."""
    resumed = {step: NOISY[step + by] + step % 3 / 100 for step in range(first, last + 1)}
    found = better_shift(Curve(series(NOISY)), Curve(series(resumed)))
    assert found is not None
    assert (found.by, found.steps) == (by, last - first + 1)
    assert found.error_percent == pytest.approx(1, abs=0.1)
    (remark,) = compare(log(NOISY), log(resumed, "b")).remarks
    assert f"--shift {by}" in remark
    assert ("no step in common" in remark) == (first == 1001)


def test_means_and_single_steps_that_count_from_zero() -> None:
    from_zero = {step - 1: value for step, value in NOISY.items()}
    found = better_shift(Curve(series(MEANS), True), Curve(series(from_zero)))
    assert found is not None
    assert (found.by, found.steps, found.error_percent) == (1, 10, 0)


def test_where_no_shift_is_clearly_best_none_is_proposed() -> None:
    steps = np.arange(1, 101)
    draw = np.random.default_rng(0)
    smooth = np.exp(-steps / 30)
    curves = {
        "the same": (smooth, smooth),
        "flat": (np.ones(100), np.ones(100)),
        "flat and apart": (np.ones(100), np.full(100, 1.5)),
        "independent noise": (smooth + draw.normal(0, 0.1, 100), smooth + draw.normal(0, 0.1, 100)),
        "rounding": (smooth, smooth + draw.normal(0, 1e-4, 100)),
        "one level higher": (smooth, smooth + 0.1),
    }
    for name, (a, b) in curves.items():
        assert better_shift(Curve(Series(steps, a)), Curve(Series(steps, b))) is None, name
    short = {step: NOISY[step] for step in range(1, 8)}
    assert better_shift(Curve(series(short)), Curve(series({step - 1: value for step, value in short.items()}))) is None
    assert better_shift(Curve(series({})), Curve(series(NOISY))) is None
    # The only shift with enough steps in common is not the best of any.
    eight = {step: NOISY[step] for step in range(1, 9)}
    assert better_shift(Curve(series(eight)), Curve(series({step + 500: 9.0 for step in eight}))) is None


def test_a_shift_of_long_runs_is_found_wherever_it_is() -> None:
    draw = np.random.default_rng(1).random(20_000)
    complete = Series(np.arange(1, 20_001), draw)
    assert better_shift(Curve(complete), Curve(Series(complete.steps - 1, draw))).by == 1  # type: ignore[union-attr]
    part = Series(np.arange(1, 10_001), draw[7_654:17_654])
    assert better_shift(Curve(complete), Curve(part)).by == 7_654  # type: ignore[union-attr]


# What a log does not tell --------------------------------------------------------------------------------------------


def test_the_set_up_of_a_foreign_log_is_unknown(tmp_path: Path) -> None:
    found = compare(log(NOISY), log(NOISY, "b"))
    assert not found.setup_known
    assert found.differences == []
    one_sided = replace(log(NOISY), evidence=Evidence({"method": "sft"}, {}))
    assert not compare(one_sided, log(NOISY, "b")).setup_known
    assert compare(one_sided, one_sided).setup_known
    shown = run(tmp_path, NOISY, NOISY)
    assert "set-up differences\n  unknown" in shown.output
    assert json.loads(run(tmp_path, NOISY, NOISY, "--json").stdout)["setup_known"] is False


def test_an_option_names_the_metric_of_a_tensorboard_csv(tmp_path: Path) -> None:
    export = tmp_path / "export.csv"
    export.write_text("Wall time,Step,Value\n" + "".join(f"1.5,{step},{value}\n" for step, value in NOISY.items()))
    refused = CliRunner().invoke(app, ["compare", str(export), str(export)])
    assert isinstance(refused.exception, Refusal)
    shown = CliRunner().invoke(app, ["compare", str(export), str(export), "--value", "train/loss"])
    assert shown.exit_code == 0
    assert "A and B are equal at all 100 steps" in shown.output
