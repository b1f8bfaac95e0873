"""Per-step rollout checks: dynamic sampling, failed responses, and rollout metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.algorithms.advantage import informative
from lockstep.errors import Refusal
from lockstep.recipe.keys_online import DynamicSampling
from lockstep.train.experience import part_of
from lockstep.types import FAILED, ROLLOUT_FUNCTION, Failure, Prompt, Rollout, Score, Summary

# Responses of a step that could not be generated or scored: how many are too many, and what is said of the first.


@dataclass(frozen=True)
class Unscored:
    """How many there were, and the first of them."""

    count: int
    first: Sequence[Rollout]


def refuse_failures(failed: Unscored, total: int, most: float) -> None:
    """Stop where more than the share `most` of all responses failed."""
    if failed.count > most * total:
        raise _refusal(failed, total, f"over reward.max_failures={most:g}")


def refuse_nothing_left(failed: Unscored, total: int, left: int) -> None:
    """Stop where no response is left to learn from, however many may fail."""
    if not left:
        raise _refusal(failed, total, "and none is left to learn from")


def _refusal(failed: Unscored, total: int, consequence: str) -> Refusal:
    first = failed.first[0]
    assert isinstance(first.score, Failure)
    what = "function" if _of_rollout(first.score) else "reward"
    return Refusal.at(
        first.score.key,
        f"{failed.count} of {total} responses {_what(first.score)}, {consequence}; the first, to "
        f"{first.prompt.question.origin}: {first.score.told}{_response(first, 200)}",
        f"mend the {what}, or raise reward.max_failures; the last checkpoint is untouched",
        code="reward-failed",
    )


def failure_warning(failed: Unscored) -> list[str]:
    """The first response of a step that failed, with the reason."""
    if not failed.count:
        return []
    first = failed.first[0]
    assert isinstance(first.score, Failure)
    return [
        f"{failed.count} responses {_what(first.score)} and are left out; the first, to "
        f"{first.prompt.question.origin}: {first.score.part}: {first.score.told}{_response(first, 80)}"
    ]


def _of_rollout(failure: Failure) -> bool:
    """Whether it was the rollout function that failed, and no reward."""
    return failure.part == ROLLOUT_FUNCTION


def _what(failure: Failure) -> str:
    return "could not be generated or scored" if _of_rollout(failure) else "could not be scored"


def _response(rollout: Rollout, most: int) -> str:
    return f"; response: {rollout.text[:most]!r}" if rollout.ids else ""


# Dynamic sampling: which groups of responses are worth a place in the step, and which are replaced by others.


def teaches(group: Sequence[Summary], prompts: Mapping[int, Prompt], settings: DynamicSampling) -> bool:
    """Scores that are not all equal, or whose mean is between two bounds."""
    metric, key = settings.metric, "algorithm.dynamic_sampling.metric"
    scores = torch.tensor(
        [
            one.score.total if metric is None else part_of(one, prompts, metric, key)
            for one in group
            if isinstance(one.score, Score)
        ]
    )
    if settings.between is not None:
        low, high = settings.between
        return len(scores) > 0 and low < float(scores.double().mean()) < high
    return bool(informative(scores, torch.zeros(len(scores), dtype=torch.long)).any())


# The metrics of a step's rollouts: lengths, tokens, failures and the parts of the reward.


def rollout_metrics(every: Sequence[Summary], rollouts: Sequence[Summary], failed: int) -> dict[str, float]:
    """Of the `rollouts` that are learned from; tokens are counted over `every` one that was generated. A response that
    its rollout function failed to make has no length."""
    rollouts = [rollout for rollout in rollouts if rollout.stop != FAILED]
    lengths = torch.tensor([rollout.written for rollout in rollouts], dtype=torch.float64)
    prompts = torch.tensor([rollout.prompt_tokens for rollout in rollouts], dtype=torch.float64)
    metrics = {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": sum(r.stop == "length" for r in rollouts) / len(rollouts),
        "prompt_length/mean": float(prompts.mean()),
        "prompt_length/max": float(prompts.max()),
        "prompt_length/min": float(prompts.min()),
        "perf/total_num_tokens": float(sum(r.length for r in every)),
        "reward/failed": float(failed),
    }
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        if isinstance(rollout.score, Score):
            for name, value in rollout.score.parts.items():
                parts.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}/mean": sum(values) / len(values) for name, values in parts.items()}


def straggler_metrics(ranks: Sequence[tuple[float, int]]) -> dict[str, float]:
    """From every rank's seconds of generation, and the prompts that it took from another's share."""
    seconds = [seconds for seconds, _ in ranks]
    if len(ranks) == 1 or not sum(seconds):
        return {}
    return {
        "perf/gen_straggler": max(seconds) * len(seconds) / sum(seconds),
        "perf/gen_taken_prompts": float(sum(taken for _, taken in ranks)),
    }
