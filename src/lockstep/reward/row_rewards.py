"""Finds the columns that rewards read, scores validation answers by rule, and applies reward clipping and penalties."""

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

from lockstep.data.encode.prompt_rows import COLUMNS
from lockstep.errors import Refusal
from lockstep.functions import local_callable, locate
from lockstep.recipe import Recipe
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.rules import any_isolated, rule_for
from lockstep.reward.scorer import Scorer, active_weights
from lockstep.reward.trl_signature import COMPLETIONS
from lockstep.trajectory import Trajectory
from lockstep.types import Failure, Question, Rollout, Score


class RuleJudge:
    """Scores answers with the built-in rules that cannot hang, for validation of offline runs and `lockstep eval`."""

    def submit(self, question: Question, text: str, trajectory: Trajectory | None = None) -> Future[Score | Failure]:
        rule = rule_for(question.data_source)
        future: Future[Score | Failure] = Future()
        value = rule(text, question.ground_truth)
        future.set_result(Score(value, {"rule": value}))
        return future

    def flush(self) -> None:
        """Does nothing: responses are scored on submit."""

    def set_progress(self, step: int, steps: int) -> None:
        """Does nothing: rules do not depend on the step."""

    def answer_of(self, question: Question, text: str) -> str | None:
        return rule_for(question.data_source).answer(text)


@contextmanager
def judged_by(rules: Mapping[str, str], sources: Iterable[str], device: torch.device) -> Iterator[RuleJudge | Scorer]:
    """Yields a scorer for these rules and data sources. A rule that may hang runs in a process that can be killed."""
    sources = list(sources)
    if not rules and not any_isolated(sources):
        yield RuleJudge()
        return
    with Scorer.open(Reward(rules=dict(rules)), sources, device) as scorer:
        yield scorer


# Columns that the rewards can read. A training row needs only the columns that the rewards of the run read.
EVERYTHING = frozenset({"ground_truth", "data_source"})
# Maps argument names of reward functions to the columns that they get.
_NAMES = {"ground_truth": "ground_truth", "labels": "ground_truth", "data_source": "data_source"}


def read_by_rewards(settings: Reward, *, environment: bool = False) -> frozenset[str]:
    """Returns which of `ground_truth` and `data_source` the rule or the function reads, and `columns` for a function
    with TRL's signature. Endpoints and reward models require no column and get the columns that exist."""
    weights, _ = active_weights(settings, environment=environment)
    by_rule = EVERYTHING if weights.get("rule") else frozenset()  # a rule with weight 0 needs no columns
    return by_rule | _read_by_function(settings)


def _read_by_function(settings: Reward) -> frozenset[str]:
    if settings.function is None:
        return frozenset()
    function = local_callable(settings.function)
    if function is not None:
        return _read_by_callable(function)
    try:
        file, name = locate(settings.function, "reward.function")
    except Refusal:
        return EVERYTHING  # an invalid path is reported when the function is loaded
    return _read_by(file, name)


def _read_by_callable(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the columns that a function reads, determined from its bytecode, because a notebook cell has no file."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return EVERYTHING
    used: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD", "STORE_FAST_LOAD", "MAKE_CELL")):
            names = instruction.argval
            used |= {names} if isinstance(names, str) else set(names) if isinstance(names, tuple) else set()
    counted = code.co_argcount + code.co_kwonlyargcount
    if COMPLETIONS in code.co_varnames[:counted]:
        return frozenset({COLUMNS})
    if "locals" in used:
        return EVERYTHING
    if code.co_flags & inspect.CO_VARKEYWORDS:
        rest = code.co_varnames[counted + bool(code.co_flags & inspect.CO_VARARGS)]
        if rest in used:
            return EVERYTHING
    return frozenset(_NAMES[name] for name in set(code.co_varnames[:counted]) & used & set(_NAMES))


def _read_by(file: Path, name: str) -> frozenset[str]:
    """Returns the columns that a function reads, determined from its source without running it. If the source does not
    show which columns the function reads, returns all columns."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return EVERYTHING
    definitions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    if len(definitions) != 1:
        return EVERYTHING | {COLUMNS}  # an imported function may have TRL's signature
    function = definitions[0]
    arguments = function.args
    taken = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    if COMPLETIONS in taken:
        return frozenset({COLUMNS})
    if function.decorator_list:
        return EVERYTHING
    used = {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    rest = arguments.kwarg
    if "locals" in used or (rest is not None and rest.arg in used):
        return EVERYTHING
    return frozenset(_NAMES[name] for name in taken & used & set(_NAMES))


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """Returns DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13), scaled by `factor`.

    The punishment is 0 up to `limit - buffer` tokens, falls linearly to `-factor` at `limit` tokens, and stays at
    `-factor` beyond. A buffer of 0 disables the punishment.
    """
    over = length - (limit - buffer)
    if buffer <= 0 or over <= 0:
        return 0.0
    return -factor * min(over / buffer, 1.0)


def shaped(rollout: Rollout, recipe: Recipe) -> Rollout:
    """Returns the rollout with its final score: applies `truncated_reward` to a truncated response, then clips the
    score, then adds the overlong penalty."""
    settings, bounds = recipe.algorithm.overlong, recipe.reward.clip
    if isinstance(rollout.score, Failure) or not (settings.buffer or bounds or settings.truncated_reward is not None):
        return rollout
    total, parts = rollout.score.total, dict(rollout.score.parts)
    if settings.truncated_reward is not None and rollout.stop == "length":
        total = total * settings.truncated_reward if settings.truncated_reward >= 0 else settings.truncated_reward
    if bounds:
        total = min(max(total, bounds[0]), bounds[1])
    if settings.buffer:
        parts["overlong"] = overlong_penalty(
            _longest_row(rollout), recipe.rollout.max_tokens, settings.buffer, settings.factor
        )
        total += parts["overlong"]
    return replace(rollout, score=Score(total, parts))


def _longest_row(rollout: Rollout) -> int:
    """Returns the number of tokens after the prompt that `rollout.max_tokens` limits: those of one row."""
    return max((len(row.ids) for row in rollout.rows), default=len(rollout.ids))


def rescored(rollouts: Sequence[Rollout], scorer: Scorer, recipe: Recipe) -> list[Score | Failure]:
    """Scores existing responses with the rewards of this run."""
    waiting = [scorer.submit(one.prompt.question, one.text, one.trajectory) for one in rollouts]
    scorer.flush()
    pairs = zip(rollouts, waiting, strict=True)
    return [shaped(replace(rollout, score=future.result()), recipe).score for rollout, future in pairs]
