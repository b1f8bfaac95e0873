"""Validation of a model: scores of its answers to questions, and its loss on validation rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from lockstep.data.batching import run_on
from lockstep.data.updates import even_groups
from lockstep.methods.base import MethodModels, Objective
from lockstep.model.policy import evaluating
from lockstep.parallel.world import World
from lockstep.types import FAILED, Failure, Item, Question, Rollout


def answer_metrics(
    answers: Sequence[Rollout], answer_of: Callable[[Question, str], str | None], n: int
) -> dict[str, float]:
    """Returns accuracy and mean reward, and pass@k and maj@k if there are several answers per question. If there are
    several data sources, also returns the metrics per data source.

    An answer is correct if the reward of its rule is 1, or without a rule if its total reward is 1. If an answer
    without a rule has a reward other than 0 or 1, there is no accuracy. Answers that could not be scored are excluded
    and counted in `val/failed`.
    """
    scored = [answer for answer in answers if not isinstance(answer.score, Failure)]
    sources = sorted({answer.prompt.question.data_source for answer in answers})
    metrics: dict[str, float] = {}
    for source in ["", *(sources if len(sources) > 1 else [])]:
        some = [a for a in scored if not source or a.prompt.question.data_source == source]
        end = f"/{source}" if source else ""
        if some:
            if _can_be_right(some):
                metrics[f"val/accuracy{end}"] = sum(_right(a) for a in some) / len(some)
                metrics |= {f"val/{name}{end}": value for name, value in _over_samples(some, answer_of, n).items()}
            if any(set(a.score.parts) != {"rule"} for a in some if not isinstance(a.score, Failure)):
                metrics[f"val/reward{end}"] = sum(_total(a) for a in some) / len(some)
    for source in sources:
        totals = [_total(a) for a in scored if a.prompt.question.data_source == source]
        if totals:
            metrics[f"val-core/{source}/reward/mean@{n}"] = sum(totals) / len(totals)
    metrics |= _conversation_metrics(answers, metrics.get("val/accuracy"))
    metrics["val/answered"] = sum(a.stop not in ("length", FAILED) for a in answers) / len(answers)
    if len(scored) < len(answers):
        metrics["val/failed"] = float(len(answers) - len(scored))
    return metrics


# The metric by which an environment reports whether a trajectory succeeded: 0 or 1.
SUCCESS = "success"


def _conversation_metrics(answers: Sequence[Rollout], accuracy: float | None) -> dict[str, float]:
    """Returns metrics of conversations with an environment: mean numbers of turns and tool calls, the share of each
    stop reason, and the share of successful trajectories. A trajectory succeeds if the environment reports the metric
    `success`, or, without this metric, if its answer is correct."""
    found = [answer.trajectory for answer in answers if answer.trajectory is not None]
    if not found:
        return {}
    metrics = {
        f"val/{name}": sum(one.metrics.get(name, 0.0) for one in found) / len(found) for name in ("turns", "tool_calls")
    }
    metrics |= {f"val/stop/{stop}": count / len(found) for stop, count in Counter(one.stop for one in found).items()}
    if any(SUCCESS in one.metrics for one in found):
        metrics["val/success"] = sum(one.metrics.get(SUCCESS, 0.0) for one in found) / len(found)
    elif accuracy is not None:
        metrics["val/success"] = accuracy
    return metrics


def _can_be_right(answers: Sequence[Rollout]) -> bool:
    scores = [answer.score for answer in answers if not isinstance(answer.score, Failure)]
    return all("rule" in score.parts or score.total in (0.0, 1.0) for score in scores)


def _right(answer: Rollout) -> bool:
    assert not isinstance(answer.score, Failure)
    return answer.score.parts.get("rule", answer.score.total) >= 1


def _total(answer: Rollout) -> float:
    assert not isinstance(answer.score, Failure)
    return answer.score.total


def _over_samples(
    answers: Sequence[Rollout], answer_of: Callable[[Question, str], str | None], n: int
) -> dict[str, float]:
    if n == 1:
        return {}
    groups: dict[int, list[Rollout]] = {}
    for answer in answers:
        groups.setdefault(answer.prompt_index, []).append(answer)
    metrics = {}
    for k in [k for k in (2**i for i in range(1, 20)) if k < n] + [n]:
        full = [group for group in groups.values() if len(group) >= k]
        if full:
            metrics[f"pass@{k}"] = sum(pass_at(len(g), sum(map(_right, g)), k) for g in full) / len(full)
            votes = [_majority(group[:k], answer_of) for group in full]
            metrics[f"maj@{k}"] = sum(votes) / len(votes)
    return metrics


def pass_at(n: int, right: int, k: int) -> float:
    """Returns the probability that k answers, drawn at random from n answers of which `right` are correct, include a
    correct answer (Chen et al. 2021, arXiv 2107.03374)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def _majority(group: Sequence[Rollout], answer_of: Callable[[Question, str], str | None]) -> bool:
    """Returns whether the most frequent final answer is correct. If several final answers are equally frequent, the
    first one counts."""
    finals = [answer_of(a.prompt.question, a.text) for a in group]
    given = [final for final in finals if final is not None]
    if not given:
        return False
    most = Counter(given).most_common(1)[0][0]
    return _right(group[finals.index(most)])


# Number of rows that are packed into micro-batches together.
GROUP = 512


class Measured(MethodModels, Protocol):
    """The models and the process group that validation needs."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def world(self) -> World: ...


@torch.no_grad()
def measure(items: Sequence[Item], objective: Objective, models: Measured) -> dict[str, float]:
    """Computes the mean loss over all rows (`loss`) and the metrics of the objective, without an optimizer step."""
    total, divisor = 0.0, 0.0
    sums: dict[str, float] = {}
    for group in even_groups(items, GROUP):
        task = objective.task(models.arrange(group), models)
        divisor += task.divisor
        with evaluating(models.module):
            for batch in task.batches:
                found = task.loss(run_on(models.module, batch, models.device), batch)
                total += found.loss.item()
                for name, value in found.metrics.items():
                    sums[name] = sums.get(name, 0.0) + value.item()
    names = sorted(sums)
    total, *values = models.world.sum([total, *(sums[name] for name in names)])
    return {"loss": total / divisor, **objective.report(dict(zip(names, values, strict=True)), divisor)}
