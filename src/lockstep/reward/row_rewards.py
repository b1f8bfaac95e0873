"""What the rewards of a run read from a row, scoring by rules alone, and length penalties."""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import Refusal
from lockstep.functions import located, only_here
from lockstep.recipe import Recipe
from lockstep.recipe.keys_online import Reward
from lockstep.reward.rules import any_isolated, rule_for
from lockstep.reward.scorer import Scorer, active_weights
from lockstep.types import Failure, Question, Rollout, Score

# Judging by the rules of data sources alone: for validation of offline runs and `lockstep eval`.


class RuleJudge:
    """By the built-in rules, at once: for those that always end."""

    def submit(self, question: Question, text: str) -> Future[Score | Failure]:
        rule = rule_for(question.data_source)
        future: Future[Score | Failure] = Future()
        value = rule(text, question.ground_truth)
        future.set_result(Score(value, {"rule": value}))
        return future

    def flush(self) -> None:
        """Nothing waits."""

    def answer_of(self, question: Question, text: str) -> str | None:
        return rule_for(question.data_source).answer(text)


@contextmanager
def judged_by(rules: Mapping[str, str], sources: Iterable[str], device: torch.device) -> Iterator[RuleJudge | Scorer]:
    """By these rules too, where some are named: one that may never end is checked in a process that can be killed."""
    sources = list(sources)
    if not rules and not any_isolated(sources):
        yield RuleJudge()
        return
    with Scorer.open(Reward(rules=dict(rules)), sources, device) as scorer:
        yield scorer


# What of a question the rewards of a run read: rows are asked for that, and for nothing else.

EVERYTHING = frozenset({"ground_truth", "data_source"})
# The names under which a function may take them.
_NAMES = {"ground_truth": "ground_truth", "labels": "ground_truth", "data_source": "data_source"}


def read_by_rewards(settings: Reward) -> frozenset[str]:
    """Those of `ground_truth` and `data_source` that the rule or the function reads. An endpoint and a reward model
    are sent what there is."""
    weights, _ = active_weights(settings)
    if weights.get("rule"):  # with a weight of 0 it measures what it can, and is left out elsewhere
        return EVERYTHING
    if settings.function is None:
        return frozenset()
    function = only_here(settings.function)
    if function is not None:
        return _read_by_callable(function)
    try:
        file, name = located(settings.function, "reward.function")
    except Refusal:
        return EVERYTHING  # told by whoever opens the function
    return _read_by(file, name)


def _read_by_callable(function: Callable[..., Any]) -> frozenset[str]:
    """By the names that its code loads: a notebook cell has no file."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return EVERYTHING
    used: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD", "STORE_FAST_LOAD", "MAKE_CELL")):
            found = instruction.argval
            used |= {found} if isinstance(found, str) else set(found) if isinstance(found, tuple) else set()
    counted = code.co_argcount + code.co_kwonlyargcount
    if "locals" in used:
        return EVERYTHING
    if code.co_flags & inspect.CO_VARKEYWORDS:
        rest = code.co_varnames[counted + bool(code.co_flags & inspect.CO_VARARGS)]
        if rest in used:
            return EVERYTHING
    return frozenset(_NAMES[name] for name in set(code.co_varnames[:counted]) & used & set(_NAMES))


def _read_by(file: Path, name: str) -> frozenset[str]:
    """By the function's text, which is not run here. What cannot be told is taken as read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return EVERYTHING
    found = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if len(found) != 1 or found[0].decorator_list:
        return EVERYTHING
    function = found[0]
    used = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    arguments = function.args
    rest = arguments.kwarg
    if "locals" in used or (rest is not None and rest.arg in used):
        return EVERYTHING
    taken = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return frozenset(_NAMES[name] for name in taken & used & set(_NAMES))


# What is added to a reward for the shape of a response.


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13), scaled by `factor`.

    0 up to `limit - buffer` tokens, then a straight line down to `-factor` at the limit and beyond.
    A buffer of 0 is off.
    """
    over = length - (limit - buffer)
    if buffer <= 0 or over <= 0:
        return 0.0
    return -factor * min(over / buffer, 1.0)


def shaped(rollout: Rollout, recipe: Recipe) -> Rollout:
    """Its score within the recipe's bounds, less what the recipe takes off for length."""
    settings, bounds = recipe.algorithm.overlong, recipe.reward.clip
    if isinstance(rollout.score, Failure) or not (settings.buffer or bounds or settings.cut is not None):
        return rollout
    total, parts = rollout.score.total, dict(rollout.score.parts)
    if settings.cut is not None and rollout.stop == "length":
        total = total * settings.cut if settings.cut >= 0 else settings.cut
    if bounds:
        total = min(max(total, bounds[0]), bounds[1])
    if settings.buffer:
        parts["overlong"] = overlong_penalty(
            len(rollout.ids), recipe.rollout.max_tokens, settings.buffer, settings.factor
        )
        total += parts["overlong"]
    return replace(rollout, score=Score(total, parts))


def rescored(rollouts: Sequence[Rollout], scorer: Scorer, recipe: Recipe) -> list[Score | Failure]:
    """What responses are worth by this run's rewards, however they came about."""
    waiting = [scorer.submit(rollout.prompt.question, rollout.text) for rollout in rollouts]
    scorer.flush()
    pairs = zip(rollouts, waiting, strict=True)
    return [shaped(replace(rollout, score=future.result()), recipe).score for rollout, future in pairs]
