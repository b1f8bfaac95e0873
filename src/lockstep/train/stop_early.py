"""When a run ends before its last step: a metric has stopped to improve, or the updates change nothing.

What was measured before a resume is read from the metrics of the run, so the decision is that of an undisturbed run
also where the settings changed in between. The number is that of the first process, and all processes decide by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.recipe.measure import Measure, measure_of
from lockstep.recipe.registry import estimator_row
from lockstep.recipe.schema import StopEarly
from lockstep.reward.scorer import active_weights
from lockstep.train.advantages import Learned
from lockstep.train.step import Learner

# A warning of idle updates is repeated after this many steps without one.
QUIET = 20


class EarlyStop:
    """Without settings it never stops."""

    def __init__(self, settings: StopEarly | None, world: World):
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
        return f"run.stop_early.metric: this validation has no {self._measure.name}, so it does not count"

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
            "every response is truncated (it reached rollout.max_tokens) and algorithm.overlong.skip masks it",
            "raise rollout.max_tokens, check that the model ends its responses (the template's end token), or set "
            "algorithm.overlong.skip=false",
        )
    others = "algorithm.correction rejects every token" + (" that is not masked as truncated" if cut else "")
    return IdleCause(f"no token is trained: {others}", "widen the bands of algorithm.correction, or lower optim.lr")
