"""Decides the verdict on each metric from its bar (allowed error) and its statistical test, and the overall verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.parity.compare.align_curves import Pair
from lockstep.parity.compare.comparison import (
    BarResult,
    Difference,
    Figures,
    Finding,
    Kind,
    Metric,
    TestResult,
    Verdict,
)
from lockstep.parity.compare.curve_tests import DEEP, Examined
from lockstep.parity.compare.noise_model import MIN_STEPS

BARS: dict[Kind, float] = {"loss": 2.0, "reward": 4.0, "other": 2.0}
"""The bars (maximum allowed errors) in percent. The bars of losses and rewards are from the Ascend documents. Other
metrics are compared with a bar only if the user asks for a verdict on them."""
SMALL = 5
"""A curve is too small for an absolute bar if its mean is below this multiple of the bar. With a bar of 2 %, for
example, a curve is too small if its mean is below 0.1."""
ALIKE = 2
"""The absolute and the scaled error are both reported if one of them is more than this many times the other."""
MATERIAL_DRIFT = 0.5
"""A metric that meets its bar still fails if the test finds a drift over all steps that exceeds this fraction of the
bar. The metric also fails if the test finds a difference over a part of the run that exceeds the bar. Smaller
differences are only reported, because rounding differs between two devices."""
ROUNDING = 1e-9
REWARDS = ("critic/rewards/mean", "critic/score/mean")
LOSS = "train/loss"
_EARNED = {"reward", "rewards", "score"}
_MEASURED = {"timing_s", "perf"}


@dataclass(frozen=True)
class Bar:
    """The bar of a metric. `scaled_because` explains why the scaled error is compared with the bar. `scaled_because` is
    "" if the mean error is compared with the bar."""

    percent: float
    scaled_because: str

    def tolerance(self, a: np.ndarray) -> np.ndarray | float:
        """Returns the allowed distance of curve B from curve A at each step."""
        return self.percent / 100 * (np.abs(a) if self.scaled_because else 1.0)


@dataclass(frozen=True)
class Judgement:
    """The verdict (the worse result of the bar and the statistical test), its explanation, and the results of the bar
    and the test."""

    verdict: Verdict
    explanation: str
    parted_at: int | None
    bar: BarResult
    test: TestResult


def kind_of(name: str) -> Kind:
    """Returns whether the metric name denotes a loss (`actor/pg_loss`), a reward (`val-core/gsm8k/reward/mean@1`) or
    another metric."""
    *groups, last = name.split("/")
    if groups and groups[0] in _MEASURED:
        return "other"
    if last == "loss" or last.endswith("_loss"):
        return "loss"
    if last in _EARNED or (_EARNED & set(groups) and last.startswith("mean")):
        return "reward"
    return "other"


def bar_of(kind: Kind, pair: Pair, percent: float | None) -> Bar:
    """Returns the bar of a metric, which is `percent` or the default for losses, rewards or other metrics. The bar also
    says whether the mean error or the scaled error is compared with it."""
    percent = BARS[kind] if percent is None else percent
    if kind == "other":
        return Bar(percent, "neither a loss nor a reward")
    finite = pair.finite
    if not finite.any():
        return Bar(percent, "")
    largest = max(float(np.abs(pair.a[finite]).mean()), float(np.abs(pair.b[finite]).mean()))
    return Bar(percent, f"curve is near 0 (mean {largest:.2g})" if largest < SMALL * percent / 100 else "")


def judge(bar: Bar, pair: Pair, figures: Figures, examined: Examined, incomplete: str = "") -> Judgement:
    """Returns the verdict on one metric, and explains which error, bar and statistic decided it. `incomplete` names the
    planned steps that are not compared: if there are any, the metric does not pass."""
    judgement = _of_compared_steps(bar, pair, figures, examined)
    if pair.left_out:
        left_out = f"; {pair.left_out:,} steps at which neither A nor B has a number are not compared"
        judgement = replace(judgement, explanation=judgement.explanation + left_out)
    if not incomplete or pair.one_sided.any():
        return judgement
    passed = judgement.verdict in ("in step", "within noise")
    explanation = f"{judgement.explanation}; incomplete: {incomplete}"
    return replace(judgement, verdict="cannot tell" if passed else judgement.verdict, explanation=explanation)


def _of_compared_steps(bar: Bar, pair: Pair, figures: Figures, examined: Examined) -> Judgement:
    one_sided = pair.steps[pair.one_sided]
    if len(one_sided):
        more = f" and at {len(one_sided) - 1:,} more" if len(one_sided) > 1 else ""
        explanation = f"at step {one_sided[0]}{more} only one of A and B has a number"
        return Judgement("out of step", explanation, figures.parted_at, "missed", "difference")
    met, explanation = _compared_with_bar(bar, figures)
    if figures.worst == 0 and figures.steps > 1:
        return Judgement("in step", explanation, None, "met", "no difference")
    allowed = np.broadcast_to(np.asarray(bar.tolerance(pair.a), dtype=np.float64), pair.steps.shape)
    judgement = _with_test(met, figures.parted_at, examined, float(allowed[pair.finite].mean()))
    return replace(judgement, explanation=explanation + judgement.explanation)


def _compared_with_bar(bar: Bar, figures: Figures) -> tuple[bool, str]:
    """Returns whether the error of the metric meets the bar, and an explanation."""
    if figures.worst == 0:
        return True, f"A and B are equal at all {figures.steps:,} steps"
    if not bar.scaled_because:
        met = figures.mean_error_percent <= bar.percent
        return met, f"absolute mean error {_against(figures.mean_error_percent, met, bar.percent)}{_scaled(figures)}"
    reason = f"{bar.scaled_because}, so the scaled error decides: "
    if figures.scaled_error_percent is None:
        return False, f"{reason}A is 0 at every step and B is not"
    met = figures.scaled_error_percent <= bar.percent
    return met, reason + _against(figures.scaled_error_percent, met, bar.percent)


def _against(error: float, met: bool, bar: float) -> str:
    return f"{error:.3g} % {'<=' if met else '>'} {bar:g} %"


def _scaled(figures: Figures) -> str:
    """Returns the scaled error as text if it differs from the absolute error by more than the factor ALIKE. Returns ""
    otherwise."""
    absolute, scaled = figures.mean_error_percent, figures.scaled_error_percent
    if scaled is None or ALIKE * min(absolute, scaled) >= max(absolute, scaled):
        return ""
    return f" ({scaled:.3g} % of the curve)"


def _with_test(met: bool, divergence_step: int | None, examined: Examined, allowed: float) -> Judgement:
    """Combines the results of the bar and the test. Returns the verdict, the second part of its explanation and, if the
    verdict is out of step, the divergence step."""
    late = [each for each in examined.findings if _is_divergence(each, examined, allowed)]
    if late and divergence_step is None:
        divergence_step = late[0].first
    note = "" if not met or divergence_step is None else f", but outside the bar from step {divergence_step} on"
    # A difference that began during the run is described by its first step. A difference that exists from the first
    # step is described as a drift.
    began = [each for each in late if each.first > int(examined.steps[0])]
    drift = [each for each in examined.findings if late and each.statistic == "drift"]
    first = began or drift
    found = [*first, *(each for each in examined.findings if each not in first)]
    bar: BarResult = "met" if met and divergence_step is None else "missed"
    if found and bar == "missed":
        finding = f"; {describe(found[0], _who(examined))}{_and_more(found)}"
        return Judgement("out of step", note + finding, divergence_step, bar, "difference")
    if examined.power is None:
        few = len(examined.steps)
        steps = f"{few:,} common step{'s are' if few != 1 else ' is'}"
        remark = f"{note}; {steps} too few: at least {MIN_STEPS} are needed"
        return Judgement("cannot tell", remark, None, bar, "cannot tell")
    if bar == "met":
        return _judged_by_test(found, examined, allowed)
    if examined.repeats == 0:
        return Judgement("cannot tell", f"{note}; {_unknown_noise(examined, allowed)}", None, bar, "cannot tell")
    power = examined.power
    if power.drift_within > allowed or power.collapse > DEEP * power.noise_sd:
        remark = f", like repeats, but a drift of {power.drift_within:.2g} is not excluded"
        explanation = f"{note}{remark}: {_suffices(examined, allowed)}"
        return Judgement("cannot tell", explanation, None, bar, "cannot tell")
    return Judgement(
        "within noise", f"{note}, but every statistic is within the noise of repeats", None, bar, "no difference"
    )


def _judged_by_test(found: Sequence[Finding], examined: Examined, allowed: float) -> Judgement:
    """Returns the verdict on a metric that meets its bar, which limits only the mean error. The metric still fails if
    the test finds a difference that is large relative to the bar (`_is_material`), or if noise could hide a drift as
    large as the bar."""
    assert examined.power is not None
    who = _who(examined)
    found = sorted(found, key=lambda each: each.statistic != "drift")  # the drift comes first
    material = [each for each in found if _is_material(each, allowed)]
    if material and examined.repeats:
        explanation = f", but the test finds a difference: {describe(material[0], who)}{_and_more(material)}"
        return Judgement("out of step", explanation, None, "met", "difference")
    if material:
        remark = _unknown_noise(examined, None)
        explanation = f", but the test finds a difference: {describe(material[0], who)}; {remark}"
        return Judgement("cannot tell", explanation, None, "met", "difference")
    if examined.power.drift_within > allowed:
        remark = f", but noise may hide a drift of the size of the bar (up to {examined.power.drift_within:.2g})"
        explanation = f"{remark}: {_suffices(examined, allowed)}"
        return Judgement("cannot tell", explanation, None, "met", "cannot tell")
    worth = [
        each
        for each in found
        if each.statistic != "opposed" and (examined.repeats or abs(each.difference) > allowed / 2)
    ]
    if not worth:
        return Judgement("in step", "", None, "met", "no difference")
    remark = f", with a small difference beyond noise: {describe(worth[0], who)}"
    return Judgement("in step", remark, None, "met", "small difference")


def _who(examined: Examined) -> str:
    return "noise stays" if examined.repeats == 0 else "repeats stay"


def _is_material(found: Finding, allowed: float) -> bool:
    """Returns whether a significant difference exceeds the bar. For a drift over all steps, half of the bar is the
    limit."""
    if found.statistic in ("scatter", "opposed"):
        return False  # scatter and opposed moves are not in the units of the metric
    share = MATERIAL_DRIFT if found.statistic == "drift" else 1.0
    return abs(found.difference) > allowed * share * (1 + ROUNDING)


def _is_divergence(found: Finding, examined: Examined, allowed: float) -> bool:
    """Returns whether a significant difference lasts until the end of the run and exceeds the bar."""
    lasts = found.statistic in ("end", "window") and found.last == int(examined.steps[-1])
    return lasts and abs(found.difference) > allowed


def describe(found: Finding, who: str) -> str:
    """Describes a significant difference in words. `who` is the subject of the comparison, for example "repeats
    stay"."""
    if found.statistic == "scatter":
        return (
            f"from step to step the difference of A and B scatters {found.difference:.2g} times as much as repeats do"
        )
    if found.statistic == "opposed":
        moves = f"from step to step the curves move in opposite directions (correlation {found.difference:.2g})"
        return f"{moves}, which noise cannot cause: the steps or the data differ"
    within = f", where {who} within {found.noise:.2g}"
    if found.statistic == "spike":
        return f"single step {found.first}: {found.difference:+.3g}{within}"
    if found.statistic == "trend":
        return f"trend: {found.difference:+.3g} from step {found.first} to {found.last}{within}"
    name = {"drift": "drift", "end": "end of the run", "window": "window"}[found.statistic]
    return f"{name}: {found.difference:+.3g} in the mean of steps {found.first} to {found.last}{within}"


def _and_more(found: Sequence[Finding]) -> str:
    return f"; also {', '.join(each.statistic for each in found[1:])}" if len(found) > 1 else ""


def _unknown_noise(examined: Examined, allowed: float | None) -> str:
    """Explains why the noise between runs of the same set-up is unknown. `allowed` is the drift that further repeats
    would exclude."""
    if examined.copies:
        equal = "the repeat equals another run" if examined.copies == 1 else "all repeats equal another run"
        return f"the noise is unknown, because {equal} of the same side: give repeats with other batch.tokens"
    if allowed is None:
        return "the noise is unknown without repeats (--repeat)"
    return f"the noise is unknown without repeats: {_suffices(examined, allowed)}"


def _suffices(examined: Examined, allowed: float) -> str:
    power = examined.power
    assert power is not None
    wanted = examined.suffices(allowed)
    if wanted is None:
        return f"the noise (sd {power.noise_sd:.2g}) is too large for the bar: larger batches would help"
    more = wanted.repeats - power.repeats
    repeats = f"{more} {'more ' if power.repeats else ''}repeat{'s' if more != 1 else ''} (--repeat)" if more else ""
    longer = f"runs of {wanted.steps:,} steps" if wanted.steps > len(examined.steps) else ""
    return f"{' and '.join(filter(None, [repeats, longer]))} would suffice"


def overall(
    metrics: Sequence[Metric], missing: Sequence[str], differences: Sequence[Difference]
) -> tuple[Verdict, str]:
    """Returns the verdict of the comparison and its reason. `missing` contains the reasons why metrics that need a
    verdict have none."""
    blocking = [each for each in differences if each.weight == "blocks"]
    if blocking:
        named = "; ".join(f"{each.key} ({_brief(each.a)} against {_brief(each.b)})" for each in blocking[:3])
        more = f"; and {len(blocking) - 3} more" if len(blocking) > 3 else ""
        return "not comparable", f"the runs compute different things: {named}{more}"
    judged = [metric for metric in metrics if metric.verdict is not None]
    if missing or not judged:
        return "not comparable", "; ".join(
            missing
        ) or "no metric gets a verdict: choose a metric that both logs contain with --metric"
    order: tuple[Verdict, ...] = ("out of step", "cannot tell", "within noise", "in step")
    worst = next(verdict for verdict in order if any(metric.verdict == verdict for metric in judged))
    deciding = [metric for metric in judged if metric.verdict == worst]
    return worst, "; ".join(f"{metric.name}: {metric.decided_by}" for metric in deciding)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:12]}...{text[-12:]}"
