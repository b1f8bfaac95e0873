"""The result of `lockstep compare` as dataclasses. The outputs (console, JSON, HTML) only display the values in these
dataclasses."""

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
    """sum |a - b| / N x 100 over the N common steps. The mean error is an absolute difference, as the Ascend documents
    define it."""
    relative_error_percent: float | None
    """The mean of |a - b| / |a| x 100 over the steps at which a is not 0."""
    scaled_error_percent: float | None
    """sum |a - b| / sum |a| x 100. The scaled error is robust against single steps at which a is near 0."""
    worst: float
    worst_step: int
    drift: float
    """The mean of b - a. If the absolute value of the drift is near the mean error, curve b is mostly above or mostly
    below curve a."""
    correlation: float | None
    parted_at: int | None
    """The divergence step: from this step to the end the curves differ by more than the bar (the allowed error) and by
    more than noise. The divergence step is None unless the verdict is out of step."""


@dataclass(frozen=True)
class Noise:
    """The error between repeated runs of the same set-up."""

    repeats: int
    mean_error_percent: float
    """The mean of the errors between all pairs of repeats."""
    excess_low: float
    excess_high: float
    """The bounds, in percent, of a 95 % bootstrap interval over blocks of steps. The interval is for this difference:
    the mean error between A and B minus the mean error between repeats."""


@dataclass(frozen=True)
class Finding:
    """A difference between A and B that exceeds the noise of repeats and that one statistic of curve_tests.py found."""

    statistic: Literal["drift", "trend", "end", "window", "spike", "scatter", "opposed"]
    first: int
    last: int
    """The first and the last step of the difference."""
    difference: float
    """The mean of b - a from step `first` to step `last`. For the statistic trend, `difference` is the change of b - a
    from step `first` to step `last`. For scatter, `difference` is the scatter of b - a divided by the scatter of
    repeats. For opposed moves, `difference` is the correlation of the moves."""
    noise: float
    """The largest value of `difference` that noise explains."""
    excess: float
    """The absolute test statistic divided by its critical value. A value above 1 is significant."""


@dataclass(frozen=True)
class Power:
    """The smallest differences that the test finds in 95 of 100 comparisons, in the units of the metric."""

    repeats: int
    noise_sd: float
    """The standard deviation of the noise at a single step of one run."""
    drift: float
    """The smallest detectable drift over all steps."""
    collapse: float
    """The smallest detectable drop over the last `collapse_steps` steps."""
    collapse_steps: int
    latest_step: int | None
    """A drop by ten noise standard deviations is detectable if it begins at this step or earlier."""
    drift_within: float = 0.0
    """The 95 % upper confidence limit of the true drift between A and B."""


@dataclass(frozen=True)
class Metric:
    name: str
    names: tuple[str, str]
    """The names of the metric in log A and in log B."""
    kind: Kind
    bar_percent: float | None
    figures: Figures
    noise: Noise | None
    verdict: Verdict | None
    """The verdict is None if the metric is shown but not judged."""
    decided_by: str
    """Explains the verdict: names the error metric and the bar (the allowed error), and says whether the error meets
    the bar."""
    steps: list[int]
    a: list[float | None]
    b: list[float | None]
    repeats: list[list[float | None]] = field(default_factory=list)
    scaled: bool = False
    """True if the scaled error is compared with the bar (the allowed error), False for the mean error."""
    only_a: int = 0
    only_b: int = 0
    """The numbers of steps that only log A or only log B contains and that are therefore not compared."""
    matching: str = ""
    """Describes which values were averaged before the comparison and how many steps are not compared."""
    findings: list[Finding] = field(default_factory=list)
    """The significant differences, the strongest first. A metric without a verdict has an empty list."""
    power: Power | None = None
    copies: int = 0
    """The number of repeats that equal another run of their side at all steps. They are not used."""
    bar_result: BarResult | None = None
    """Whether the error meets the bar (the allowed error) of the Ascend documents, without the statistical test. A
    metric without a verdict has None."""
    test_result: TestResult | None = None
    """The result of the statistical test, without the bar. The result "small difference" means that a difference is
    significant, but too small for the metric to fail."""
    incomplete: str = ""
    """Describes the planned steps that are not compared. A metric for which this text is not empty does not pass."""


@dataclass(frozen=True)
class PhaseTimes:
    """Tokens per second of both runs in one phase of a step, over the steps at which both runs have equal response
    lengths (offline: token counts). If no step has equal lengths, the rates are computed over all common steps."""

    name: str
    a: float
    b: float

    @property
    def ratio(self) -> float:
        return self.b / self.a


@dataclass(frozen=True)
class Throughput:
    ratio: float | None
    """The mean of perf/throughput over the first 4 steps of run B divided by that of run A, as the Ascend documents
    define it."""
    a: float | None
    b: float | None
    matched_ratio: float | None
    """The throughput ratio over the steps at which both runs have equal response lengths (offline: equal token
    counts)."""
    matched_steps: int
    phases: list[PhaseTimes]
    warnings: list[str]


@dataclass(frozen=True)
class Difference:
    """A difference between the set-ups of A and B, and its likely effect on the curves."""

    part: SetupPart
    key: str
    a: Any
    b: Any
    weight: Weight
    effect: str


@dataclass(frozen=True)
class KnownDifference:
    """A setting of a migrated run that lockstep treats differently from the trainer of the other log."""

    peer: str
    """The other trainer and its version."""
    key: str
    how: str
    metrics: list[str]
    """The compared metrics that the difference concerns."""
    everywhere: bool
    """Whether the difference concerns all metrics."""

    @property
    def concerns(self) -> str:
        if self.everywhere:
            return "all metrics"
        more = f" and {len(self.metrics) - 3} more" if len(self.metrics) > 3 else ""
        return ", ".join(self.metrics[:3]) + more


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
    """Descriptions of what could not be compared because a log lacks the information. For example, logs of other
    frameworks have no recipe."""
    samples: list[tuple[dict[str, Any] | None, dict[str, Any] | None]]
    """The first responses of A and B to the same prompts."""
    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Data of the support table: method, model, dtype, hardware and versions of A and B. An unknown value is None."""
    setup_known: bool = True
    """Whether A and B both recorded their set-up. If A or B did not record its set-up, `differences` is empty."""
    remarks: list[str] = field(default_factory=list)
    """Remarks on shifted or selected steps, and on shifts of B's steps with which the curves would agree better."""
    known: list[KnownDifference] = field(default_factory=list)
    """Known differences, if one side is a migrated run and the other side is a log of another trainer."""

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        for phase in values["throughput"]["phases"]:
            phase["ratio"] = phase["b"] / phase["a"]
        return values
