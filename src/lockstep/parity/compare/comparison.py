"""What a comparison found, as plain values: the console, the json and the page show these and compute nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lockstep.recipe.section import Weight

Verdict = Literal["in step", "within noise", "cannot tell", "out of step", "not comparable"]
BarResult = Literal["met", "missed"]
TestResult = Literal["no difference", "small difference", "difference", "cannot tell"]
Kind = Literal["loss", "reward", "other"]


@dataclass(frozen=True)
class Figures:
    """How far curve b lies from curve a over their common steps. Percents are so named."""

    steps: int
    first: int
    last: int
    mean_error_percent: float
    """sum |a - b| / N x 100: an absolute difference, as the Ascend documents define it."""
    relative_error_percent: float | None
    """The mean of |a - b| / |a| x 100 over steps where a is not 0."""
    scaled_error_percent: float | None
    """sum |a - b| / sum |a| x 100: relative, and not at the mercy of a single step near 0."""
    worst: float
    worst_step: int
    drift: float
    """The mean of b - a: one-sided when near the mean error in size."""
    correlation: float | None
    parted_at: int | None
    """The first step from which on the curves stay apart by more than the bar, and by more than noise does: told of
    what is out of step alone. None when they end together."""


@dataclass(frozen=True)
class Noise:
    """The same figures between repeats of one side."""

    repeats: int
    mean_error_percent: float
    """The mean over all pairs of repeats."""
    excess_low: float
    excess_high: float
    """Bootstrap interval (95 %, over blocks of steps) in percent of: mean error between the sides less that between
    repeats."""


@dataclass(frozen=True)
class Finding:
    """A statistic that is not what repeats do (statistics.py)."""

    statistic: Literal["drift", "trend", "end", "window", "spike", "scatter", "opposed"]
    first: int
    last: int
    """Steps."""
    difference: float
    """The mean of b - a over these steps; of a trend what it adds from the first to the last; of scatter a ratio,
    of curves that move against each other the correlation of their moves."""
    noise: float
    """How large it may be by noise alone."""
    excess: float
    """How many times the critical deviate it is; above 1 is a finding."""


@dataclass(frozen=True)
class Power:
    """What would have been found, had it been there, in 95 of 100 comparisons. In the units of the metric."""

    repeats: int
    noise_sd: float
    """Of a single step of one run."""
    drift: float
    """The smallest one over the whole run."""
    collapse: float
    """The smallest one, over the last `collapse_steps` steps."""
    collapse_steps: int
    latest_step: int | None
    """The last step at which a collapse by ten noise standard deviations may begin and still be found."""
    drift_within: float = 0.0
    """How large the drift between the sides may be in truth: more is excluded with 95 %."""


@dataclass(frozen=True)
class Metric:
    name: str
    names: tuple[str, str]
    """As the two logs write it."""
    kind: Kind
    bar_percent: float | None
    figures: Figures
    noise: Noise | None
    verdict: Verdict | None
    """None: shown, not judged."""
    decided_by: str
    """In words: which figure met or missed which bar."""
    steps: list[int]
    a: list[float | None]
    b: list[float | None]
    repeats: list[list[float | None]] = field(default_factory=list)
    scaled: bool = False
    """Whether the scaled error is held against the bar, not the mean error."""
    only_a: int = 0
    only_b: int = 0
    """Steps that only one side logged, and that are left out."""
    matching: str = ""
    """In words: what was averaged before the comparison, and how many steps are left out."""
    findings: list[Finding] = field(default_factory=list)
    """Of judged metrics: the strongest first."""
    power: Power | None = None
    bar_result: BarResult | None = None
    """What the bar of the Ascend documents says by itself; None: not judged."""
    test_result: TestResult | None = None
    """What the statistical test says by itself. A small difference is certain, too small to count beside the bar."""
    incomplete: str = ""
    """In words: which planned steps are not compared. Then there is no pass."""


@dataclass(frozen=True)
class PhaseTimes:
    """Tokens a second in one phase, at equal work: the phase's tokens over its seconds, over the steps that match
    in length (over all common ones where none does)."""

    name: str
    a: float
    b: float

    @property
    def ratio(self) -> float:
        return self.b / self.a


@dataclass(frozen=True)
class Throughput:
    ratio: float | None
    """b over a: the mean of perf/throughput of the first 4 steps, as the Ascend documents define it."""
    a: float | None
    b: float | None
    matched_ratio: float | None
    """At equal response lengths."""
    matched_steps: int
    phases: list[PhaseTimes]
    warnings: list[str]


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on both sides, and what it is likely to do to the curves."""

    part: Literal["recipe", "own code", "data", "tokenizer", "weights", "versions", "engine", "determinism", "device"]
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
    """What could not be compared because a side does not tell (foreign logs have no recipe, for instance)."""
    samples: list[tuple[dict[str, Any] | None, dict[str, Any] | None]]
    """The first responses to the same prompts, side by side."""
    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """For the support table: method, model, hardware, versions of both sides, as far as they tell."""
    setup_known: bool = True
    """Whether both sides tell their set-up. If not, `differences` is empty because nobody could look for any."""
    remarks: list[str] = field(default_factory=list)
    """Steps that were moved, or that seem to be counted otherwise on the two sides."""

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        for phase in values["throughput"]["phases"]:
            phase["ratio"] = phase["b"] / phase["a"]
        return values
