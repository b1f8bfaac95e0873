"""Checks and metrics of a step: failed rollouts, dynamic sampling, early stopping, idle updates, warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.algorithms.advantage import informative
from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.recipe.keys_online import Algorithm
from lockstep.recipe.measure import Measure, measure_of
from lockstep.recipe.registry import estimator_row, loss_row
from lockstep.recipe.schema import EarlyStopping
from lockstep.reward.scorer import recipe_weights
from lockstep.train.advantages import TrainBatch
from lockstep.train.experience import reward_part, turn_returns
from lockstep.train.step import Learner
from lockstep.types import FAILED, Failure, Prompt, Rollout, RolloutMeta, Score


@dataclass(frozen=True)
class Unscored:
    """The number of failed responses of a step, and the first failed responses."""

    count: int
    first: Sequence[Rollout]


def refuse_failures(failed: Unscored, total: int, most: float) -> None:
    """Raises `Refusal` if more than the fraction `most` of the responses failed."""
    if failed.count > most * total:
        raise _refusal(failed, total, f"over reward.max_failures={most:g}")


def refuse_nothing_left(failed: Unscored, total: int, left: int) -> None:
    """Raises `Refusal` if no response is left to train on."""
    if not left:
        raise _refusal(failed, total, "and none is left to train on")


def _refusal(failed: Unscored, total: int, consequence: str) -> Refusal:
    first = failed.first[0]
    assert isinstance(first.score, Failure)
    what = first.score.key.rpartition(".")[2] if first.score.of_rollout else "reward"
    return Refusal.at(
        first.score.key,
        f"{failed.count} of {total} responses {_what(first.score)}, {consequence}; the first, to "
        f"{first.prompt.question.origin}: {first.score.message}{_response(first, 200)}",
        f"fix the {what}, or raise reward.max_failures; the last checkpoint is untouched",
        code="reward-failed",
    )


def failure_warning(failed: Unscored) -> list[str]:
    """Returns a warning with the first failed response of a step and the reason, or nothing if no response failed."""
    if not failed.count:
        return []
    first = failed.first[0]
    assert isinstance(first.score, Failure)
    return [
        f"{failed.count} responses {_what(first.score)} and are excluded; the first, to "
        f"{first.prompt.question.origin}: {first.score.part}: {first.score.message}{_response(first, 80)}"
    ]


def _what(failure: Failure) -> str:
    return "could not be generated or scored" if failure.of_rollout else "could not be scored"


def _response(rollout: Rollout, most: int) -> str:
    return f"; response: {rollout.text[:most]!r}" if rollout.ids else ""


def has_signal(group: Sequence[RolloutMeta], prompts: Mapping[int, Prompt], algorithm: Algorithm) -> bool:
    """Returns whether dynamic sampling keeps the group: its mean score is within the bounds, or, if there are no
    bounds, its scores differ. Unless the recipe names a metric, the scores are those that the estimator compares: with
    a discount between turns the returns of the first turns, and for an estimator of turns also the returns of turns
    that start in the same state."""
    settings, key = algorithm.dynamic_sampling, "algorithm.dynamic_sampling.metric"
    scored = [one for one in group if isinstance(one.score, Score)]
    if settings.metric is not None:
        scores = [reward_part(one, prompts, settings.metric, key) for one in scored]
    else:
        scores = [one.score.total for one in scored if isinstance(one.score, Score)]
    if settings.between is not None:
        low, high = settings.between
        return len(scores) > 0 and low < float(torch.tensor(scores).double().mean()) < high
    if settings.metric is not None:
        return _differ(scores)
    returns = [turn_returns(one.turn_rewards, algorithm.turn_discount) for one in scored]
    if not estimator_row(algorithm.advantage).turns:
        discounted = algorithm.turn_discount != 1.0 and all(returns)
        return _differ([turns[0] for turns in returns] if discounted else scores)
    states: dict[str, list[float]] = {}
    for one, turns in zip(scored, returns, strict=True):
        for anchor, value in zip(one.anchors, turns, strict=bool(turns)):
            if anchor is not None:
                states.setdefault(anchor, []).append(value)
    return _differ(scores) or any(map(_differ, states.values()))


def _differ(scores: Sequence[float]) -> bool:
    """Returns whether scores differ in the precision of the estimators (fp32)."""
    return bool(informative(torch.tensor(scores), torch.zeros(len(scores), dtype=torch.long)).any())


def rollout_metrics(every: Sequence[RolloutMeta], rollouts: Sequence[RolloutMeta], failed: int) -> dict[str, float]:
    """Returns the metrics of a step: lengths, failures and rewards of the trained `rollouts`. The number of tokens
    includes all generated responses (`every`). Lengths exclude failed rollouts."""
    rollouts = [rollout for rollout in rollouts if rollout.stop != FAILED]
    lengths = torch.tensor([rollout.num_response_tokens for rollout in rollouts], dtype=torch.float64)
    prompts = torch.tensor([rollout.prompt_tokens for rollout in rollouts], dtype=torch.float64)
    metrics = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": sum(r.stop == "length" for r in rollouts) / len(rollouts),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "prompt_length/min": float(prompts.min()),
        "perf/total_num_tokens": float(sum(sum(r.lengths) for r in every)),
        "reward/failed": float(failed),
    }
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        if isinstance(rollout.score, Score):
            for name, value in rollout.score.parts.items():
                parts.setdefault(name, []).append(value)
    metrics |= {f"reward/{name}/mean": sum(values) / len(values) for name, values in parts.items()}
    return metrics | trajectory_metrics(every)


def trajectory_metrics(every: Sequence[RolloutMeta]) -> dict[str, float]:
    """Returns the means of the metrics of all trajectories of a step, including failed trajectories. A trajectory
    without a number of the name `environment/stop/...` or `environment/success` counts as 0, and is left out of the
    means of other metrics."""
    found: dict[str, list[float]] = {}
    trajectories = [meta.trajectory_metrics for meta in every if meta.trajectory_metrics]
    for metrics in trajectories:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {
        name: sum(values)
        / (len(trajectories) if name.startswith(("environment/stop/", "environment/success")) else len(values))
        for name, values in sorted(found.items())
    }


def engine_metrics(ranks: Sequence[tuple[float, int, int, int]]) -> dict[str, float]:
    """Returns metrics about the engines of all ranks. `ranks` has for each rank the numbers of `straggler_metrics` and
    of `prefill_metrics`."""
    return straggler_metrics([one[:2] for one in ranks]) | prefill_metrics([one[2:] for one in ranks])


def prefill_metrics(ranks: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Returns how many prompt tokens of conversations the engines computed, and the ratio of tokens that they reused
    from an earlier turn. `ranks` has both numbers for each rank."""
    computed, reused = (float(sum(numbers)) for numbers in zip(*ranks, strict=True))
    if not computed + reused:
        return {}
    return {"rollout/prefill_tokens": computed, "rollout/prefill_reused_ratio": reused / (computed + reused)}


def straggler_metrics(ranks: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Returns metrics about slow ranks in generation. `ranks` has for each rank the generation time in seconds, and the
    number of prompts that the rank took over from other ranks."""
    seconds = [seconds for seconds, _ in ranks]
    if len(ranks) == 1 or not sum(seconds):
        return {}
    return {
        "perf/gen_straggler": max(seconds) * len(seconds) / sum(seconds),
        "perf/gen_taken_prompts": float(sum(taken for _, taken in ranks)),
    }


# A warning about idle updates is printed again only if the last idle step is more than this many steps ago.
QUIET = 20


class EarlyStop:
    """Early stopping. Without settings, early stopping never ends the run. Rank 0 decides.

    A resumed run reads earlier values from metrics.jsonl, so it stops at the same step as an uninterrupted run.
    """

    def __init__(self, settings: EarlyStopping | None, world: World):
        self.settings, self.world = settings, world
        self._measure: Measure | None = None if settings is None else measure_of(settings.metric)
        self._best: tuple[float, int] | None = None
        """The best value of the metric so far, and its step."""
        self._waited = 0
        """The number of measurements since the best value."""

    @property
    def reached(self) -> bool:
        return self.settings is not None and self._waited >= self.settings.patience

    @property
    def validated(self) -> bool:
        """Whether the metric of early stopping is a validation metric."""
        return self._measure is not None and self._measure.validated

    def recall(self, logged: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Processes the logged metrics of earlier steps in order, when a run resumes."""
        for step, metrics in self.world.gather(list(logged) if self.settings is not None else [])[0]:
            self._count(step, metrics)

    def observe(self, step: int, metrics: Mapping[str, float], *, validated: bool) -> bool:
        """Processes the metrics of a step. Returns whether the run must stop. All ranks must call this function."""
        if self._measure is None or (self._measure.validated and not validated):
            return False
        name = self._measure.name
        self._count(step, self.world.gather({name: metrics[name]} if name in metrics else {})[0])
        return self.reached

    def missed(self, metrics: Mapping[str, float]) -> str | None:
        """Returns a warning if the metrics of a validation do not contain the metric of early stopping."""
        if self._measure is None or not self._measure.validated or self._measure.name in metrics:
            return None
        return f"run.early_stopping.metric: this validation has no {self._measure.name}, so it is ignored"

    def _count(self, step: int, metrics: Mapping[str, float]) -> None:
        measure, settings = self._measure, self.settings
        if measure is None or settings is None or measure.name not in metrics or self.reached:
            return
        value = measure.value(metrics)
        # `measure.value` returns None for NaN, which is not an improvement.
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
            return f"stopped early after step {step}: {name} was NaN or infinite {times} times"
        value, at = self._best
        least = f" by more than {self.settings.min_delta:g}" if self.settings.min_delta else ""
        return (
            f"stopped early after step {step}: {name} did not get better than {value:.6g} (step {at}){least} "
            f"in {times} measurements"
        )


@dataclass(frozen=True)
class IdleCause:
    """The reason why the updates of a step do not change the model, and the remedy."""

    cause: str
    remedy: str


class IdleUpdates:
    """Counts consecutive idle steps. A step is idle if the gradient of every update is exactly zero, or if the step has
    no learning signal (`find_idle_cause`)."""

    def __init__(self, learners: Sequence[Learner], most: int | None):
        self._learners, self._most = learners, most
        self._before = self._effective()
        self.signal: IdleCause | None = None
        """The reason why the data of the step has no learning signal, or None."""
        self.count = 0
        self._cause = IdleCause("", "")
        self._step = self._seen = 0

    def observe(self) -> str | None:
        """Processes a finished step. Returns a warning if the step is idle and no step of the last `QUIET` steps was
        idle."""
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
            f"{self._cause.remedy}; or set run.max_idle_updates=0 to continue",
            code="idle-updates",
        )

    def _effective(self) -> int:
        return sum(learner.num_effective_updates for learner in self._learners)

    def _unexplained(self) -> IdleCause:
        zero = "the gradient of the loss is exactly zero"
        if any(learner.scale is not None for learner in self._learners):
            return IdleCause(f"{zero}, possibly because of an fp16 underflow", "use model.dtype=bf16 or fp32")
        return IdleCause(zero, "check the loss and its settings, and the dataset rows (run `lockstep data show`)")


def find_idle_cause(batch: TrainBatch, recipe: Recipe) -> IdleCause | None:
    """Returns the reason why the responses of a step have no learning signal, or None if they have one. All ranks must
    call this function. The KL loss, the entropy bonus and the router loss may still have a gradient, but it does not
    depend on the rewards. In a run without rewards (only a teacher), the KL divergence is the learning signal."""
    experience, advantages = batch.experience, batch.advantages
    metrics, reduce = advantages.metrics, experience.reduce
    kept_K = advantages.keep_K > 0
    if advantages.repeats_S is not None:
        kept_K &= advantages.repeats_S[experience.sequence_K] > 0
    cut = metrics.get("response/skipped_ratio", 0.0)
    if not reduce.count(int(kept_K.sum())):
        return _all_masked(cut)
    rewarded = any(recipe_weights(recipe)[0].values())
    if not rewarded or reduce.max(advantages.advantages_K[kept_K].abs()) > 0:
        return None
    masked = f"{cut:.0%} of the responses are masked as truncated, and of the others " if cut else ""
    if estimator_row(recipe.algorithm.advantage).groups and not metrics["critic/mixed_groups"]:
        mean = metrics["critic/score/mean"]
        form = "" if mean else "; a worked example in the prompts shows the form of answers that the reward reads"
        return IdleCause(
            f"{masked}every advantage is zero, because all responses of each group earned the same reward (mean "
            f"{mean:.4g})",
            "check that the reward distinguishes answers (samples.jsonl), and that the task is neither too hard nor "
            f"too easy for the model{form}",
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
        f"no token is trained: {others}",
        "widen the bounds of algorithm.rollout_correction, or lower optim.lr",
    )


# A warning is printed again only if its condition was last true more than this many steps ago.
STEPS_BETWEEN_WARNINGS = 20
COLLAPSED_SHARE = 0.05
# Importance weights with a smaller effective share, or with more weights at the cap, are reported.
LEAST_EFFECTIVE_SHARE, MOST_CAPPED_SHARE = 0.5, 0.05


@dataclass(frozen=True)
class WarningSign:
    """A condition on the metrics that indicates a problem, and the text of the warning."""

    name: str
    shows: Callable[[dict[str, float]], bool]
    meaning: str


class Warnings:
    """Yields warnings about problems that the metrics of an online run indicate."""

    def __init__(self, recipe: Recipe):
        self._first_entropy: float | None = None
        self._seen: dict[str, int] = {}
        self._step = 0
        self._signs = [
            WarningSign(
                "entropy",
                self._collapsed,
                "entropy is below a twentieth of its initial value: the policy hardly explores any more. "
                "Raise algorithm.clip_high or algorithm.entropy, or lower optim.lr",
            ),
            *(
                [_runs_away(recipe)]
                if recipe.rollout.max_staleness and not recipe.algorithm.rollout_correction.bypass
                else []
            ),
            *_since_the_draw(recipe),
            *([] if recipe.rollout.low_precision is None else [_too_coarse(recipe.rollout.low_precision)]),
            *COMMON,
        ]

    def read(self, metrics: dict[str, float]) -> Iterator[str]:
        self._step += 1
        if self._first_entropy is None:
            self._first_entropy = metrics.get("actor/entropy")
        for warning in self._signs:
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
    """Returns the warning for a policy that diverges. The threshold of `rollout_corr/k3` was measured on one task: a
    good run stayed at 0.002, and a diverged run rose from 0.02 to 0.06."""
    bypass = "Remove algorithm.rollout_correction.weight and set algorithm.rollout_correction.bypass=true, or lower"
    remedy = bypass if loss_row(recipe.algorithm.loss).trust_region else "Lower"
    return WarningSign(
        "runs away",
        lambda metrics: metrics.get("rollout_corr/k3", 0.0) > 0.02,
        "the policy diverges from the one that generated the responses (rollout_corr/k3 is over 0.02); truncated "
        f"importance sampling does not prevent this. {remedy} optim.lr or rollout.max_staleness",
    )


def _too_coarse(precision: str) -> WarningSign:
    """Returns the warning for importance weights of low-precision responses that are far from equal."""

    def shows(metrics: dict[str, float]) -> bool:
        few = metrics.get("rollout_corr/effective_share", 1.0) < LEAST_EFFECTIVE_SHARE
        return few or metrics.get("rollout_corr/capped_share", 0.0) > MOST_CAPPED_SHARE

    return WarningSign(
        "low precision",
        shows,
        f"the importance weights of responses in {precision} are far from equal (rollout_corr/effective_share is below "
        f"{LEAST_EFFECTIVE_SHARE:g}, or rollout_corr/capped_share above {MOST_CAPPED_SHARE:g}): little of the step "
        "counts. Remove rollout.precision and rollout.kv_cache, or lower optim.lr",
    )


def _since_the_draw(recipe: Recipe) -> list[WarningSign]:
    """Returns the warnings for a policy that moved too far from the old policy of the importance ratio."""
    stale = bool(recipe.rollout.max_staleness)
    from_draw = stale and recipe.algorithm.rollout_correction.bypass
    fewer = "or make fewer updates per step (algorithm.epochs, batch.prompts_per_update)"
    if stale:
        fewer = f"or rollout.max_staleness, {fewer}"
    corrected = recipe.algorithm.rollout_correction.bypass or recipe.algorithm.rollout_correction.weight != "none"
    remedy = "Try model.dtype=fp32" + ("" if corrected else ", or set algorithm.rollout_correction.weight=token")
    if recipe.rollout.low_precision is not None:
        remedy = "Remove rollout.precision and rollout.kv_cache"
    if stale:
        remedy = "Lower optim.lr or rollout.max_staleness"
    return [
        WarningSign(
            "clipped",
            lambda metrics: metrics.get("actor/pg_clipfrac", 0.0) > 0.3,
            f"over 30 % of the ratios are clipped: an update moves the policy too far. Lower optim.lr, {fewer}",
        ),
        WarningSign(
            "moved",
            lambda metrics: abs(metrics.get("actor/ppo_kl", 0.0)) > 0.2,
            f"the policy moved by more than 0.2 nats per token {'since generation' if from_draw else 'within a step'}. "
            "Usually optim.lr is too high",
        ),
        WarningSign(
            "disagreement",
            lambda metrics: metrics.get("training/rollout_probs_diff_mean", 0.0) > 0.05,
            "the token probabilities of engine and trainer differ by more than 0.05 on average: updates are off "
            f"policy. {remedy}",
        ),
    ]


COMMON = [
    WarningSign(
        "drifted",
        lambda metrics: max(metrics.get("actor/kl", 0.0), metrics.get("actor/reward_kl_penalty", 0.0)) > 1.0,
        "the KL divergence from the reference is over 1 nat per token: the policy may exploit the reward. Raise "
        "algorithm.kl.coefficient, or look at samples.jsonl",
    ),
    WarningSign(
        "cut",
        lambda metrics: metrics.get("response_length/clip_ratio", 0.0) > 0.5 and "environment/turns" not in metrics,
        "over half of the responses reach rollout.max_tokens and are cut off. Usually the model does not end its "
        "answers (check the template's end token), or the limit is too low",
    ),
    WarningSign(
        "limited",
        lambda metrics: metrics.get("response_length/clip_ratio", 0.0) > 0.5 and "environment/turns" in metrics,
        "a limit ends over half of the trajectories: the metrics environment/stop/* say which (max_turns: "
        "rollout.max_turns; max_tokens: rollout.turn_tokens or rollout.max_tokens). Raise this limit, or let the "
        "environment end earlier",
    ),
    WarningSign(
        "tool errors",
        lambda metrics: metrics.get("environment/tool_errors", 0.0) > 0.5 * metrics.get("environment/tool_calls", 0.0),
        "over half of the tool calls fail. Their messages in samples.jsonl say why: a mistake in the tool, or in the "
        "arguments that the model writes",
    ),
]
