"""The bars, which of them decides, and what is then said of a metric and of the whole comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.parity.compare.comparison import Difference, Figures, Kind, Metric, Noise, Verdict
from lockstep.parity.compare.figures import Pair

BARS: dict[Kind, float] = {"loss": 2.0, "reward": 4.0, "other": 2.0}
"""In percent. Losses and rewards: those of the Ascend documents. Others are judged only when named; theirs is ours."""
SMALL = 5
"""A curve whose mean is below so many bars (as a number: 0.1 for a bar of 2 %) is too small for an absolute bar."""
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


def judge(bar: Bar, pair: Pair, figures: Figures, noise: Noise | None) -> tuple[Verdict, str]:
    """The verdict on one metric, and in words the figure and the bar that gave it."""
    left_out = f"; {pair.left_out:,} steps without a number on both sides are left out" if pair.left_out else ""
    one_sided = pair.steps[pair.one_sided]
    if len(one_sided):
        more = f" and at {len(one_sided) - 1:,} more" if len(one_sided) > 1 else ""
        return "out of step", f"at step {one_sided[0]}{more} only one side has a number: there they part{left_out}"
    met, words = _held_against(bar, figures)
    verdict, remark = _beside_noise(met, noise)
    return verdict, words + remark + left_out


def _held_against(bar: Bar, figures: Figures) -> tuple[bool, str]:
    """Whether the bar is met, and the sentence that says so."""
    if figures.worst == 0:
        return True, f"the same at all {figures.steps:,} steps"
    if not bar.scaled_because:
        met = figures.mean_error_percent <= bar.percent
        return met, f"mean error {_against(figures.mean_error_percent, met, bar.percent)}"
    reason = f"{bar.scaled_because}, so the scaled error decides: "
    if figures.scaled_error_percent is None:
        return False, f"{reason}A is 0 at every step and B is not"
    met = figures.scaled_error_percent <= bar.percent
    return met, reason + _against(figures.scaled_error_percent, met, bar.percent)


def _against(error: float, met: bool, bar: float) -> str:
    return f"{error:.3g} % {'<=' if met else '>'} {bar:g} %"


def _beside_noise(met: bool, noise: Noise | None) -> tuple[Verdict, str]:
    if noise is None:
        return ("in step", "") if met else ("out of step", "")
    interval = f"{noise.excess_low:+.3g} to {noise.excess_high:+.3g} %"
    if noise.excess_low <= 0:
        return ("in step", "") if met else ("within noise", f", yet repeats differ as much (excess {interval})")
    if met:
        return "in step", f", though by more than repeats do (excess {interval})"
    return "out of step", f", and repeats differ by less (excess {interval})"


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
    order: tuple[Verdict, ...] = ("out of step", "within noise", "in step")
    worst = next(verdict for verdict in order if any(metric.verdict == verdict for metric in judged))
    deciding = [metric for metric in judged if metric.verdict == worst]
    return worst, "; ".join(f"{metric.name}: {metric.decided_by}" for metric in deciding)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:12]}...{text[-12:]}"
