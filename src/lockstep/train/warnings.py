"""Warnings of an online run: what looks like trouble and what it usually means, said once, not at every step. Steps
that train nothing are counted in `stop_early.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.recipe import Recipe
from lockstep.recipe.registry import loss_row

# A warning is said once; it is said again after its sign has been away for this many steps.
QUIET = 20
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
            *([_runs_away(recipe)] if recipe.rollout.max_staleness and not recipe.algorithm.correction.bypass else []),
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
            if last is None or self._step - last > QUIET:
                yield warning.meaning

    def _collapsed(self, metrics: dict[str, float]) -> bool:
        entropy = metrics.get("actor/entropy")
        return entropy is not None and bool(self._first_entropy) and entropy < COLLAPSED_SHARE * self._first_entropy  # type: ignore[operator]


def _runs_away(recipe: Recipe) -> WarningSign:
    """Two seeds of one task: a run that learned stayed at 0.002, one that fell apart passed 0.02 on its way to 0.06."""
    held = "Remove algorithm.correction.weight and set algorithm.correction.bypass=true, or lower"
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
    from_draw = stale and recipe.algorithm.correction.bypass
    fewer = "or make fewer updates of a step (algorithm.epochs, batch.prompts_per_update)"
    if stale:
        fewer = f"or rollout.max_staleness, {fewer}"
    corrected = recipe.algorithm.correction.bypass or recipe.algorithm.correction.weight != "none"
    remedy = "Try model.dtype=fp32" + ("" if corrected else ", or set algorithm.correction.weight=token")
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
