"""The result of a comparison as plain values. Console, JSON and page display these and compute nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lockstep.recipe.section import Weight

Verdict = Literal["in step", "within noise", "cannot tell", "out of step", "not comparable"]
BarResult = Literal["met", "missed"]
TestResult = Literal["no difference", "small difference", "difference", "cannot tell"]
Kind = Literal["loss", "reward", "other"]
SetupPart = Literal["recipe", "own code", "data", "tokenizer", "weights", "versions", "engine", "determinism", "device"]


@dataclass(frozen=True)
class Figures:
    """The error metrics: the distance of curve b from curve a over their common steps."""

    steps: int
    first: int
    last: int
    mean_error_percent: float
    """sum |a - b| / N x 100: an absolute difference, as the Ascend documents define it."""
    relative_error_percent: float | None
    """The mean of |a - b| / |a| x 100 over the steps at which a is not 0."""
    scaled_error_percent: float | None
    """sum |a - b| / sum |a| x 100: relative, and robust against single steps at which a is near 0."""
    worst: float
    worst_step: int
    drift: float
    """The mean of b - a. If its absolute value is near the mean error, b is mostly on one side of a."""
    correlation: float | None
    parted_at: int | None
    """The divergence step: from here to the end the curves differ by more than the bar and the noise. It is set only if
    the verdict is out of step."""


@dataclass(frozen=True)
class Noise:
    """The error between repeats of one side."""

    repeats: int
    mean_error_percent: float
    """The mean of the errors between all pairs of repeats."""
    excess_low: float
    excess_high: float
    """The mean error between the sides minus that between repeats, in percent: a 95 % bootstrap interval over blocks of
    steps."""


@dataclass(frozen=True)
class Finding:
    """A statistic that exceeds the noise of repeats (curve_tests.py)."""

    statistic: Literal["drift", "trend", "end", "window", "spike", "scatter", "opposed"]
    first: int
    last: int
    """The first and the last step of the finding."""
    difference: float
    """The mean of b - a over these steps. For a trend: the change from the first step to the last. For scatter: a
    ratio. For opposed moves: their correlation."""
    noise: float
    """The largest difference that noise explains."""
    excess: float
    """The absolute deviate divided by its critical value; above 1 is a finding."""


@dataclass(frozen=True)
class Power:
    """The smallest differences that the test finds in 95 of 100 comparisons, in the units of the metric."""

    repeats: int
    noise_sd: float
    """The standard deviation of a single step of one run."""
    drift: float
    """The smallest detectable drift over all steps."""
    collapse: float
    """The smallest detectable drop over the last `collapse_steps` steps."""
    collapse_steps: int
    latest_step: int | None
    """The last step at which a drop by ten noise standard deviations may begin so that the test still finds it."""
    drift_within: float = 0.0
    """The 95 % upper confidence limit of the true drift between the sides."""


@dataclass(frozen=True)
class Metric:
    name: str
    names: tuple[str, str]
    """The names in the two logs."""
    kind: Kind
    bar_percent: float | None
    figures: Figures
    noise: Noise | None
    verdict: Verdict | None
    """None: the metric is shown without a verdict."""
    decided_by: str
    """The explanation: which error metric met or missed which bar."""
    steps: list[int]
    a: list[float | None]
    b: list[float | None]
    repeats: list[list[float | None]] = field(default_factory=list)
    scaled: bool = False
    """Whether the scaled error is compared with the bar, instead of the mean error."""
    only_a: int = 0
    only_b: int = 0
    """Steps that only one side logged; they are left out."""
    matching: str = ""
    """A description of what was averaged before the comparison, and how many steps are left out."""
    findings: list[Finding] = field(default_factory=list)
    """The findings of metrics with a verdict, the strongest first."""
    power: Power | None = None
    bar_result: BarResult | None = None
    """The result of the bar of the Ascend documents alone; None if the metric has no verdict."""
    test_result: TestResult | None = None
    """The result of the statistical test alone. "small difference": significant, but small relative to the bar."""
    incomplete: str = ""
    """The planned steps that are not compared. If there are any, the metric does not pass."""


@dataclass(frozen=True)
class PhaseTimes:
    """Tokens per second in one phase, over the steps with equal lengths (if there are none, over all common steps)."""

    name: str
    a: float
    b: float

    @property
    def ratio(self) -> float:
        return self.b / self.a


@dataclass(frozen=True)
class Throughput:
    ratio: float | None
    """b divided by a: the mean of perf/throughput over the first 4 steps, as the Ascend documents define it."""
    a: float | None
    b: float | None
    matched_ratio: float | None
    """The ratio over steps with equal response lengths."""
    matched_steps: int
    phases: list[PhaseTimes]
    warnings: list[str]


@dataclass(frozen=True)
class Difference:
    """A difference in the set-up of the two sides, and its likely effect on the curves."""

    part: SetupPart
    key: str
    a: Any
    b: Any
    weight: Weight
    effect: str


@dataclass(frozen=True)
class Comparison:
    a: str
    b: str
    kinds: tuple[str, str]
    verdict: Verdict
    reason: str
    metrics: list[Metric]
    throughput: Throughput
    differences: list[Difference]
    unknown: list[str]
    """Comparisons that were impossible because a side lacks the information (foreign logs have no recipe)."""
    samples: list[tuple[dict[str, Any] | None, dict[str, Any] | None]]
    """The first responses of both sides to the same prompts."""
    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Data of the support table: method, model, hardware and versions of both sides; None if unknown."""
    setup_known: bool = True
    """Whether both sides recorded their set-up. If not, `differences` is empty."""
    remarks: list[str] = field(default_factory=list)
    """Remarks on shifted or selected steps, and on shifts that would make the curves agree better."""

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        for phase in values["throughput"]["phases"]:
            phase["ratio"] = phase["b"] / phase["a"]
        return values
