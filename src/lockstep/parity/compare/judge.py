"""The bars, which of them decides, and what is then said of a metric and of the whole comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

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
from lockstep.parity.compare.figures import Pair
from lockstep.parity.compare.findings import Examined
from lockstep.parity.compare.power import DEEP
from lockstep.parity.compare.statistics import FEWEST_STEPS

BARS: dict[Kind, float] = {"loss": 2.0, "reward": 4.0, "other": 2.0}
"""In percent. Losses and rewards: those of the Ascend documents. Others are judged only when named; theirs is ours."""
SMALL = 5
"""A curve whose mean is below so many bars (as a number: 0.1 for a bar of 2 %) is too small for an absolute bar."""
ALIKE = 2
"""Absolute and scaled error are told together where one is more than so many times the other."""
MATERIAL_DRIFT = 0.5
"""A drift over the whole run that the test finds decides beside a bar that is met if it is more than so many bars. What
lasts for a part of the run must be more than one. Anything smaller is a remark: two devices never round alike."""
ROUNDING = 1e-9
REWARDS = ("critic/rewards/mean", "critic/score/mean")
LOSS = "train/loss"
_EARNED = {"reward", "rewards", "score"}
_MEASURED = {"timing_s", "perf"}


@dataclass(frozen=True)
class Bar:
    """The bar of a metric, and why the scaled error is held against it; "" when the mean error is."""

    percent: float
    scaled_because: str

    def tolerance(self, a: np.ndarray) -> np.ndarray | float:
        """How far apart the curves may lie at each step."""
        return self.percent / 100 * (np.abs(a) if self.scaled_because else 1.0)


@dataclass(frozen=True)
class Judgement:
    """The worse of what the bar and the test say, in words why, and what each of them says by itself."""

    verdict: Verdict
    explanation: str
    parted_at: int | None
    bar: BarResult
    test: TestResult


def kind_of(name: str) -> Kind:
    """By the parts of the name: `actor/pg_loss` is a loss, `val-core/gsm8k/reward/mean@1` a reward."""
    *groups, last = name.split("/")
    if groups and groups[0] in _MEASURED:
        return "other"
    if last == "loss" or last.endswith("_loss"):
        return "loss"
    if last in _EARNED or (_EARNED & set(groups) and last.startswith("mean")):
        return "reward"
    return "other"


def bar_of(kind: Kind, pair: Pair, percent: float | None) -> Bar:
    """The bar of `percent`, or of the kind, and the figure that decides for this pair of curves."""
    percent = BARS[kind] if percent is None else percent
    if kind == "other":
        return Bar(percent, "neither a loss nor a reward")
    finite = pair.finite
    if not finite.any():
        return Bar(percent, "")
    largest = max(float(np.abs(pair.a[finite]).mean()), float(np.abs(pair.b[finite]).mean()))
    return Bar(percent, f"curve is near 0 (mean {largest:.2g})" if largest < SMALL * percent / 100 else "")


def judge(bar: Bar, pair: Pair, figures: Figures, examined: Examined, incomplete: str = "") -> Judgement:
    """The verdict on one metric, and in words the figure, the bar and the statistic that gave it. `incomplete` says
    which planned steps are not compared: then there is no pass."""
    judgement = _of_compared_steps(bar, pair, figures, examined)
    if pair.left_out:
        left_out = f"; {pair.left_out:,} steps without a number on both sides are left out"
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
        explanation = f"at step {one_sided[0]}{more} only one side has a number: there they part"
        return Judgement("out of step", explanation, figures.parted_at, "missed", "difference")
    met, explanation = _held_against(bar, figures)
    if figures.worst == 0 and figures.steps > 1:
        return Judgement("in step", explanation, None, "met", "no difference")
    allowed = np.broadcast_to(np.asarray(bar.tolerance(pair.a), dtype=np.float64), pair.steps.shape)
    judgement = _beside_noise(met, figures.parted_at, examined, float(allowed[pair.finite].mean()))
    return replace(judgement, explanation=explanation + judgement.explanation)


def _held_against(bar: Bar, figures: Figures) -> tuple[bool, str]:
    """Whether the bar is met, and the sentence that says so."""
    if figures.worst == 0:
        return True, f"the same at all {figures.steps:,} steps"
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
    """The scaled error beside the absolute one, where the curve is so small or so large that they tell two stories."""
    absolute, scaled = figures.mean_error_percent, figures.scaled_error_percent
    if scaled is None or ALIKE * min(absolute, scaled) >= max(absolute, scaled):
        return ""
    return f" ({scaled:.3g} % of the curve)"


def _beside_noise(met: bool, parted: int | None, examined: Examined, allowed: float) -> Judgement:
    """The verdict, what it says beside the bar, and the step of parting, which only curves out of step have."""
    late = [each for each in examined.findings if _is_parting(each, examined, allowed)]
    if late and parted is None:
        parted = late[0].first
    parting = "" if not met or parted is None else f", but apart by more than the bar from step {parted} on"
    # What began at a step is told by that step, what was there from the first one as a drift.
    began = [each for each in late if each.first > int(examined.steps[0])]
    drift = [each for each in examined.findings if late and each.statistic == "drift"]
    first = began or drift
    found = [*first, *(each for each in examined.findings if each not in first)]
    bar: BarResult = "met" if met and parted is None else "missed"
    if found and bar == "missed":
        told_of = f"; {told(found[0], _who(examined))}{_and_more(found)}"
        return Judgement("out of step", parting + told_of, parted, bar, "difference")
    if examined.power is None:
        few = len(examined.steps)
        steps = f"{few:,} common step{'s are' if few != 1 else ' is'}"
        lacking = f"{parting}; {steps} too few: {FEWEST_STEPS} at least are needed"
        return Judgement("cannot tell", lacking, None, bar, "cannot tell")
    if bar == "met":
        return _beside_a_bar_that_is_met(found, examined, allowed)
    if examined.repeats == 0:
        lacking = f"; what noise does is not known without repeats: {_suffices(examined, allowed)}"
        return Judgement("cannot tell", parting + lacking, None, bar, "cannot tell")
    power = examined.power
    if power.drift_within > allowed or power.collapse > DEEP * power.noise_sd:
        lacking = f", as repeats do, but a drift of {power.drift_within:.2g} is not excluded"
        explanation = f"{parting}{lacking}: {_suffices(examined, allowed)}"
        return Judgement("cannot tell", explanation, None, bar, "cannot tell")
    return Judgement("within noise", f"{parting}, yet every statistic is what repeats do", None, bar, "no difference")


def _beside_a_bar_that_is_met(found: Sequence[Finding], examined: Examined, allowed: float) -> Judgement:
    """The bar bounds the mean error alone. It passes neither a difference that the test finds and that is large beside
    the bar, nor noise that would hide a drift of the size of the bar."""
    assert examined.power is not None
    who = _who(examined)
    found = sorted(found, key=lambda each: each.statistic != "drift")  # the whole run before a part of it
    material = [each for each in found if _is_material(each, allowed)]
    if material and examined.repeats:
        explanation = f", but the test finds a difference: {told(material[0], who)}{_and_more(material)}"
        return Judgement("out of step", explanation, None, "met", "difference")
    if material:
        lacking = "whether runs of one side differ as much is not known without repeats (--repeat)"
        explanation = f", but the test finds a difference: {told(material[0], who)}; {lacking}"
        return Judgement("cannot tell", explanation, None, "met", "difference")
    if examined.power.drift_within > allowed:
        lacking = f", but noise may hide a drift of the size of the bar (up to {examined.power.drift_within:.2g})"
        explanation = f"{lacking}: {_suffices(examined, allowed)}"
        return Judgement("cannot tell", explanation, None, "met", "cannot tell")
    worth = [
        each
        for each in found
        if each.statistic != "opposed" and (examined.repeats or abs(each.difference) > allowed / 2)
    ]
    if not worth:
        return Judgement("in step", "", None, "met", "no difference")
    remark = f", though not by noise alone: {told(worth[0], who)}"
    return Judgement("in step", remark, None, "met", "small difference")


def _who(examined: Examined) -> str:
    return "noise stays" if examined.repeats == 0 else "repeats stay"


def _is_material(found: Finding, allowed: float) -> bool:
    """Whether a finding is large beside the bar."""
    if found.statistic in ("scatter", "opposed"):
        return False  # a ratio and a correlation: what they do to the curves is in the mean error
    share = MATERIAL_DRIFT if found.statistic == "drift" else 1.0
    return abs(found.difference) > allowed * share * (1 + ROUNDING)


def _is_parting(found: Finding, examined: Examined, allowed: float) -> bool:
    """Whether it lasts to the end and is larger than the bar."""
    lasts = found.statistic in ("end", "window") and found.last == int(examined.steps[-1])
    return lasts and abs(found.difference) > allowed


def told(found: Finding, who: str) -> str:
    """A finding in words."""
    if found.statistic == "scatter":
        return f"the difference scatters {found.difference:.2g} times as much from step to step as repeats do"
    if found.statistic == "opposed":
        moves = f"from step to step the curves move against each other (correlation {found.difference:.2g})"
        return f"{moves}, as no noise around one curve does: other steps or other data are compared"
    within = f", where {who} within {found.noise:.2g}"
    if found.statistic == "spike":
        return f"single step {found.first}: {found.difference:+.3g}{within}"
    if found.statistic == "trend":
        return f"trend: {found.difference:+.3g} from step {found.first} to {found.last}{within}"
    name = {"drift": "drift", "end": "end of the run", "window": "window"}[found.statistic]
    return f"{name}: {found.difference:+.3g} in the mean of steps {found.first} to {found.last}{within}"


def _and_more(found: Sequence[Finding]) -> str:
    return f"; also {', '.join(each.statistic for each in found[1:])}" if len(found) > 1 else ""


def _suffices(examined: Examined, allowed: float) -> str:
    power = examined.power
    assert power is not None
    wanted = examined.suffices(allowed)
    if wanted is None:
        return f"the noise (sd {power.noise_sd:.2g}) is too large beside the bar: larger batches would help"
    more = wanted.repeats - power.repeats
    repeats = f"{more} {'more ' if power.repeats else ''}repeat{'s' if more != 1 else ''} (--repeat)" if more else ""
    longer = f"runs of {wanted.steps:,} steps" if wanted.steps > len(examined.steps) else ""
    return f"{' and '.join(filter(None, [repeats, longer]))} would suffice"


def overall(
    metrics: Sequence[Metric], missing: Sequence[str], differences: Sequence[Difference]
) -> tuple[Verdict, str]:
    """The verdict on the comparison and its reason. `missing` says, of what should be judged, why it cannot be."""
    blocking = [each for each in differences if each.weight == "blocks"]
    if blocking:
        named = "; ".join(f"{each.key} ({_brief(each.a)} against {_brief(each.b)})" for each in blocking[:3])
        more = f"; and {len(blocking) - 3} more" if len(blocking) > 3 else ""
        return "not comparable", f"what is computed differs: {named}{more}"
    judged = [metric for metric in metrics if metric.verdict is not None]
    if missing or not judged:
        return "not comparable", "; ".join(missing) or "no metric that both have is judged: name one with --metric"
    order: tuple[Verdict, ...] = ("out of step", "cannot tell", "within noise", "in step")
    worst = next(verdict for verdict in order if any(metric.verdict == verdict for metric in judged))
    deciding = [metric for metric in judged if metric.verdict == worst]
    return worst, "; ".join(f"{metric.name}: {metric.decided_by}" for metric in deciding)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:12]}...{text[-12:]}"
