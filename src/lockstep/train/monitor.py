"""Early stopping, detection of updates that change nothing, and warnings of an online run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.recipe.measure import Measure, measure_of
from lockstep.recipe.registry import estimator_row, loss_row
from lockstep.recipe.schema import EarlyStopping
from lockstep.reward.scorer import active_weights
from lockstep.train.advantages import Learned
from lockstep.train.step import Learner

# When a run ends before its last step: a metric has stopped to improve, or the updates change nothing.
#
# What was measured before a resume is read from the metrics of the run, so the decision is that of an undisturbed run
# also where the settings changed in between. The number is that of the first process, and all processes decide by it.

# A warning of idle updates is repeated after this many steps without one.
QUIET = 20


class EarlyStop:
    """Without settings it never stops."""

    def __init__(self, settings: EarlyStopping | None, world: World):
        self.settings, self.world = settings, world
        self._measure: Measure | None = None if settings is None else measure_of(settings.metric)
        self._best: tuple[float, int] | None = None
        """The best value so far that was an improvement, and its step."""
        self._waited = 0
        """Measurements since."""

    @property
    def reached(self) -> bool:
        return self.settings is not None and self._waited >= self.settings.patience

    @property
    def validated(self) -> bool:
        """Whether only a validation can decide."""
        return self._measure is not None and self._measure.validated

    def recall(self, logged: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Steps of the run that were logged before, in order."""
        for step, metrics in self.world.gather(list(logged) if self.settings is not None else [])[0]:
            self._count(step, metrics)

    def observe(self, step: int, metrics: Mapping[str, float], *, validated: bool) -> bool:
        """A step's metrics; whether the run ends with it. Every process calls it, and gets the same answer."""
        if self._measure is None or (self._measure.validated and not validated):
            return False
        name = self._measure.name
        told = self.world.gather({name: metrics[name]} if name in metrics else {})[0]
        self._count(step, told)
        return self.reached

    def missed(self, metrics: Mapping[str, float]) -> str | None:
        """What to say of a validation that should have measured the metric and did not: nothing was counted."""
        if self._measure is None or not self._measure.validated or self._measure.name in metrics:
            return None
        return f"run.early_stopping.metric: this validation has no {self._measure.name}, so it does not count"

    def _count(self, step: int, metrics: Mapping[str, float]) -> None:
        measure, settings = self._measure, self.settings
        if measure is None or settings is None or measure.name not in metrics or self.reached:
            return
        value = measure.value(metrics)
        # A value that is no number has improved nothing.
        if value is not None and (
            self._best is None or measure.rank(value) < measure.rank(self._best[0]) - settings.min_delta
        ):
            self._best, self._waited = (value, step), 0
        else:
            self._waited += 1

    def sentence(self, step: int) -> str:
        """Why the run ended."""
        assert self.settings is not None
        assert self._measure is not None
        name, times = self._measure.name, self.settings.patience
        if self._best is None:
            return f"stopped early after step {step}: {name} was no number {times} times"
        value, at = self._best
        least = f" by more than {self.settings.min_delta:g}" if self.settings.min_delta else ""
        return (
            f"stopped early after step {step}: {name} did not get better than {value:.6g} (step {at}){least} "
            f"in {times} measurements"
        )


@dataclass(frozen=True)
class IdleCause:
    """Why the updates of a step change nothing, and what to do."""

    cause: str
    remedy: str


class IdleUpdates:
    """Counts consecutive steps whose updates change nothing: the gradient of every update is exactly zero, or the step
    has no learning signal (`no_signal`). The learning rate does not matter, and neither does weight decay. A step with
    one useful update is not idle, whatever its other updates are.
    """

    def __init__(self, learners: Sequence[Learner], most: int | None):
        self._learners, self._most = learners, most
        self._before = self._effective()
        self.signal: IdleCause | None = None
        """What the loop found missing in the step's data."""
        self.count = 0
        self._cause = IdleCause("", "")
        self._step = self._seen = 0

    def observe(self) -> str | None:
        """A step is over. Returns a warning at the first idle step after `QUIET` others."""
        effective, signal = self._effective(), self.signal
        changed = effective != self._before and signal is None
        self._before, self.signal, self._step = effective, None, self._step + 1
        if changed:
            self.count = 0
            return None
        self.count += 1
        self._cause = signal or self._unexplained()
        last, self._seen = self._seen, self._step
        if last and self._step - last <= QUIET:
            return None
        end = f"; the run stops after {self._most} such steps in a row (run.max_idle_updates)" if self._most else ""
        return f"this step trains nothing: {self._cause.cause}{end}. To fix it: {self._cause.remedy}"

    def reached(self, count: int) -> bool:
        return bool(self._most) and count >= (self._most or 0)

    def refusal(self, step: int) -> Refusal:
        return Refusal.at(
            "run.max_idle_updates",
            f"the updates of the last {self.count} steps changed nothing: {self._cause.cause}. Stopped after step "
            f"{step}, with a checkpoint",
            f"{self._cause.remedy}; or set run.max_idle_updates=0 to train on",
            code="idle-updates",
        )

    def _effective(self) -> int:
        return sum(learner.effective for learner in self._learners)

    def _unexplained(self) -> IdleCause:
        zero = "the gradient of the loss is exactly zero"
        if any(learner.scale is not None for learner in self._learners):
            return IdleCause(f"{zero}, which can be an underflow of fp16", "use model.dtype=bf16 or fp32")
        return IdleCause(zero, "check the loss and its settings, and the rows (lockstep data show)")


def no_signal(learned: Learned, recipe: Recipe) -> IdleCause | None:
    """What the responses of a step lack for its updates to learn from them (a collective); None where there is some.

    A divergence, an entropy bonus or a router's loss may still give a gradient: it is not what the rewards ask for.
    Without rewards, as when a teacher alone is followed, the divergence is what is learned.
    """
    experience, advantages = learned.experience, learned.advantages
    metrics, whole = advantages.metrics, experience.whole
    kept_K = advantages.keep_K > 0
    if advantages.times_S is not None:
        kept_K &= advantages.times_S[experience.sequence_K] > 0
    cut = metrics.get("response/skipped_ratio", 0.0)
    if not whole.count(int(kept_K.sum())):
        return _all_masked(cut)
    rewarded = any(active_weights(recipe.reward)[0].values())
    if not rewarded or whole.greatest(advantages.advantages_K[kept_K].abs()) > 0:
        return None
    masked = f"{cut:.0%} of the responses are masked as truncated, and of the others " if cut else ""
    if estimator_row(recipe.algorithm.advantage).groups and not metrics["critic/mixed_groups"]:
        mean = metrics["critic/score/mean"]
        return IdleCause(
            f"{masked}every advantage is zero, because all responses of each group earned the same reward (mean "
            f"{mean:.4g})",
            "check that the reward can tell answers apart (samples.jsonl), and that the task is neither far too hard "
            "nor too easy for the model",
        )
    return IdleCause(f"{masked}every advantage is zero", "check the reward (samples.jsonl) and algorithm.advantage")


def _all_masked(cut: float) -> IdleCause:
    if cut == 1.0:
        return IdleCause(
            "every response is truncated (it reached rollout.max_tokens), and "
            "algorithm.overlong.mask_truncated masks it",
            "raise rollout.max_tokens, check that the model ends its responses (the template's end token), or set "
            "algorithm.overlong.mask_truncated=false",
        )
    others = "algorithm.rollout_correction rejects every token" + (" that is not masked as truncated" if cut else "")
    return IdleCause(
        f"no token is trained: {others}", "widen the bands of algorithm.rollout_correction, or lower optim.lr"
    )


# Warnings of an online run: what looks like trouble and what it usually means, said once, not at every step. Steps
# that train nothing are counted by `IdleUpdates`.

# A warning is said once; it is said again after its sign has been away for this many steps.
STEPS_BETWEEN_WARNINGS = 20
COLLAPSED_SHARE = 0.05


@dataclass(frozen=True)
class WarningSign:
    name: str
    shows: Callable[[dict[str, float]], bool]
    meaning: str


class Warnings:
    """Looks at the metrics of one step after another."""

    def __init__(self, recipe: Recipe):
        self._first_entropy: float | None = None
        self._seen: dict[str, int] = {}
        self._step = 0
        self._known = [
            WarningSign(
                "entropy",
                self._collapsed,
                "entropy has fallen below a twentieth of where it began: the policy hardly tries anything any more. "
                "Raise algorithm.clip_high or algorithm.entropy, or lower optim.lr",
            ),
            *(
                [_runs_away(recipe)]
                if recipe.rollout.max_staleness and not recipe.algorithm.rollout_correction.bypass
                else []
            ),
            *_since_the_draw(recipe),
            *COMMON,
        ]

    def read(self, metrics: dict[str, float]) -> Iterator[str]:
        self._step += 1
        if self._first_entropy is None:
            self._first_entropy = metrics.get("actor/entropy")
        for warning in self._known:
            if not warning.shows(metrics):
                continue
            last = self._seen.get(warning.name)
            self._seen[warning.name] = self._step
            if last is None or self._step - last > STEPS_BETWEEN_WARNINGS:
                yield warning.meaning

    def _collapsed(self, metrics: dict[str, float]) -> bool:
        entropy = metrics.get("actor/entropy")
        return entropy is not None and bool(self._first_entropy) and entropy < COLLAPSED_SHARE * self._first_entropy  # type: ignore[operator]


def _runs_away(recipe: Recipe) -> WarningSign:
    """Two seeds of one task: a run that learned stayed at 0.002, one that fell apart passed 0.02 on its way to 0.06."""
    held = "Remove algorithm.rollout_correction.weight and set algorithm.rollout_correction.bypass=true, or lower"
    remedy = held if loss_row(recipe.algorithm.loss).holds else "Lower"
    return WarningSign(
        "runs away",
        lambda metrics: metrics.get("rollout_corr/k3", 0.0) > 0.02,
        "the policy runs away from the one that drew the responses (rollout_corr/k3 is over 0.02), which truncated "
        f"importance sampling does not stop. {remedy} optim.lr or rollout.max_staleness",
    )


def _since_the_draw(recipe: Recipe) -> list[WarningSign]:
    """How far the policy is from the one that its ratios are to. That of stale responses is some steps away."""
    stale = bool(recipe.rollout.max_staleness)
    from_draw = stale and recipe.algorithm.rollout_correction.bypass
    fewer = "or make fewer updates of a step (algorithm.epochs, batch.prompts_per_update)"
    if stale:
        fewer = f"or rollout.max_staleness, {fewer}"
    corrected = recipe.algorithm.rollout_correction.bypass or recipe.algorithm.rollout_correction.weight != "none"
    remedy = "Try model.dtype=fp32" + ("" if corrected else ", or set algorithm.rollout_correction.weight=token")
    if stale:
        remedy = "Lower optim.lr or rollout.max_staleness"
    return [
        WarningSign(
            "clipped",
            lambda metrics: metrics.get("actor/pg_clipfrac", 0.0) > 0.3,
            f"over 30 % of the tokens hit the clip: an update moves the policy too far. Lower optim.lr, {fewer}",
        ),
        WarningSign(
            "moved",
            lambda metrics: abs(metrics.get("actor/ppo_kl", 0.0)) > 0.2,
            f"the policy moved by more than 0.2 nats a token {'since the draw' if from_draw else 'within a step'}. "
            "Usually optim.lr is too high",
        ),
        WarningSign(
            "disagreement",
            lambda metrics: metrics.get("training/rollout_probs_diff_mean", 0.0) > 0.05,
            "engine and trainer disagree on the probability of tokens by more than 0.05 on average: updates are off "
            f"policy. {remedy}",
        ),
    ]


COMMON = [
    WarningSign(
        "drifted",
        lambda metrics: max(metrics.get("actor/kl", 0.0), metrics.get("actor/reward_kl_penalty", 0.0)) > 1.0,
        "the policy is more than 1 nat a token away from its reference: it may be gaming the reward. Raise "
        "algorithm.kl.coefficient, or look at samples.jsonl",
    ),
    WarningSign(
        "cut",
        lambda metrics: metrics.get("response_length/clip_ratio", 0.0) > 0.5,
        "over half of the responses reach rollout.max_tokens and are cut off. Usually the model does not end its "
        "answers (check the template's end token), or the limit is too low",
    ),
]
