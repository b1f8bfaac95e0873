"""What `lockstep init` sees of the rows: their columns, how many there are, and what that asks of the recipe.

The first rows are encoded as training will encode them. Where that is refused and a setting helps (a chat template of
ours for a tokenizer without one, dropping rows that are too long), the recipe gets it; else the refusal is the answer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.kto_rows import find_judged_columns
from lockstep.data.encode.preference_rows import find_ranking_columns
from lockstep.data.encode.prompt_rows import MATH, find_question_columns, read_questions
from lockstep.data.encode.sft_rows import find_columns
from lockstep.data.encode.step_rows import find_step_columns
from lockstep.data.sources.read import locate, read_rows
from lockstep.data.sources.rowset import RowSet
from lockstep.errors import Problem, Refusal
from lockstep.recipe import Recipe
from lockstep.recipe.loader import checked_recipe
from lockstep.recipe.methods import OFFLINE, ONLINE

LOOKED = 64
# Of each kind of rows the method that most come for, and how its columns are found.
KINDS = {
    "sft": find_columns,
    "dpo": find_ranking_columns,
    "kto": find_judged_columns,
    "prm": find_step_columns,
    "grpo": lambda finder: find_question_columns(finder, frozenset()),
}
# A key of `data` that only rows of its kind have, the most particular first.
_TELLING = {"steps_key": "prm", "label_key": "kto", "chosen_key": "dpo"}


@dataclass(frozen=True)
class RowsSeen:
    """`said` is for the user, `keys` are values that the recipe needs, each with the reason."""

    said: list[str] = field(default_factory=list)
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)


def look_at_rows(values: Mapping[str, Any]) -> RowsSeen:
    """Of the rows of a recipe with these values; nothing of rows that are not here yet. Rows that the recipe cannot
    train on are refused."""
    recipe = checked_recipe(dict(values))
    paths = [source.path for source in (*recipe.data.train, *recipe.data.val)]
    if recipe.data.reader is not None or not all(map(_is_here, paths)):
        return RowsSeen()
    opened = [read_rows(path) for path in paths]
    for path, rows in zip(paths, opened, strict=True):
        _refuse_other_kind(recipe, path, rows)
    keys = _sizes(recipe, sum(len(rows) for rows in opened[: len(recipe.data.train)]))
    if not Path(recipe.model.path).exists():
        both = zip(paths, opened, strict=True)
        return RowsSeen([f"{path}: {len(rows):,} rows of {', '.join(rows.columns)}" for path, rows in both], keys)
    return _encoded(values, recipe, keys)


def _is_here(path: str) -> bool:
    if path.startswith("hub:"):
        return False
    try:
        return bool(locate(path, None).files)
    except Refusal:
        if Path(path).exists():
            raise
        return False


def _kind(method: str) -> str:
    if method in ONLINE:
        return "grpo"
    columns = OFFLINE[method].columns
    return next((kind for key, kind in _TELLING.items() if key in columns), "sft")


def _refuse_other_kind(recipe: Recipe, path: str, rows: RowSet) -> None:
    """Say for which method the rows are, where they are not for this one."""
    source = next(source for source in (*recipe.data.train, *recipe.data.val) if source.path == path)
    finder = ColumnFinder(source, recipe.data, rows.columns)
    own = _kind(recipe.method)
    try:
        KINDS[own](finder)
    except Refusal as refusal:
        (problem,) = refusal.problems
        others = [kind for kind in KINDS if kind != own and _readable(kind, finder)]
        # Any row with a prompt is one to answer.
        others = [kind for kind in others if kind not in ONLINE] or others
        such = f"such rows are for --method {' or '.join(others)}; or " if others else ""
        remedy = f"{such}{problem.remedy}: lockstep init FILE ... KEY=COLUMN"
        raise Refusal.at(problem.where, problem.why, remedy) from refusal


def _readable(kind: str, finder: ColumnFinder) -> bool:
    try:
        KINDS[kind](finder)
    except Refusal:
        return False
    return True


def _sizes(recipe: Recipe, rows: int) -> dict[str, tuple[Any, str]]:
    """Updates of fewer rows than usual where there are fewer."""
    key = "prompts" if recipe.method in ONLINE else "rows_per_update"
    if rows >= getattr(recipe.batch, key):
        return {}
    return {f"batch.{key}": (max(rows, 1), f"There are {rows}.")}


def _encoded(values: Mapping[str, Any], recipe: Recipe, keys: dict[str, tuple[Any, str]]) -> RowsSeen:
    from lockstep.device.select import select
    from lockstep.preflight.prepare import prepare_shown
    from lockstep.run.console import Console

    first: Refusal | None = None
    for more in _ways(recipe):
        changed = checked_recipe(_changed(values, {name: value for name, (value, _) in {**keys, **more}.items()}))
        data = changed.data.model_copy(update={"train": [*changed.data.train, *changed.data.val], "cache": "off"})
        try:
            train = prepare_shown(
                changed.model_copy(update={"data": data}), select("cpu"), LOOKED, Console.silent()
            ).train
        except Refusal as refusal:
            first = first or refusal
            continue
        said = [f"{name}={value}: {why}" for name, (value, why) in more.items()]
        rules = _rules(changed) if recipe.method in ONLINE else {}
        return RowsSeen([*train.notes, *said, *[why for _, why in rules.values()]], {**keys, **more, **rules})
    assert first is not None
    raise _with_reward(first) if recipe.method in ONLINE else first


def _changed(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(dict(values))
    for name, value in keys.items():
        *groups, leaf = name.split(".")
        group = found
        for part in groups:
            group = group.setdefault(part, {})
        group[leaf] = value
    return found


def _ways(recipe: Recipe) -> Iterator[dict[str, tuple[Any, str]]]:
    """What to set besides, in the order in which it is tried."""
    from lockstep.data.encode.chat_template import TOKENS
    from lockstep.model.load import load_tokenizer

    drop = {"data.overlong": ("drop", "some rows are longer than a micro-batch or the model's context.")}
    yield {}
    yield drop
    if recipe.data.template == "auto" and not load_tokenizer(recipe.model.path).chat_template:
        for name in TOKENS:
            template = {"data.template": (name, "the tokenizer has no chat template; it has the tokens of this one.")}
            yield template
            yield {**template, **drop}


def _rules(recipe: Recipe) -> dict[str, tuple[Any, str]]:
    """A rule for data sources that have none: by all their ground truths, which cost nothing to read."""
    from lockstep.reward.row_rewards import read_by_rewards
    from lockstep.reward.rules import DEFAULT_RULES, RULES
    from lockstep.reward.scorer import active_weights

    if not active_weights(recipe.reward)[0].get("rule"):
        return {}
    known = {**DEFAULT_RULES, **recipe.reward.rules}
    truths: dict[str, list[str]] = {}
    for source in recipe.data.train:
        rows = read_rows(source.path)
        columns = find_question_columns(ColumnFinder(source, recipe.data, rows.columns), read_by_rewards(recipe.reward))
        for question in read_questions(rows, source.rows, columns):
            if question.data_source not in known:
                truths.setdefault(question.data_source, []).append(str(question.ground_truth))
    if not truths:
        return {}
    rules = {source: _rule_of(source, found) for source, found in sorted(truths.items())}
    told = {name: RULES[name].example("42") for name in rules.values()}
    why = "; ".join(f"rule {name} reads answers such as {example}" for name, example in told.items())
    return {"reward.rules": ({**recipe.reward.rules, **rules}, f"reward: {why}.")}


def _rule_of(source: str, truths: list[str]) -> str:
    from lockstep.reward.rules import RULES

    if source == MATH and find_spec("math_verify") is not None:
        return "math"
    numbers = RULES["gsm8k_flexible"]
    odd = next((truth for truth in truths if numbers.truth_problem(truth)), None)
    if odd is None:
        return numbers.name
    raise Refusal.at(
        f"data_source {source!r}",
        f"has no rule, and its ground truths are not all numbers ({odd[:40]!r})",
        f"--reward FILE.py:NAME, or reward.rules='{{{source}: RULE}}', RULE being {', '.join(RULES)}",
    )


def _with_reward(refusal: Refusal) -> Refusal:
    own = "a reward of your own: --reward FILE.py:NAME"
    return Refusal(
        [
            Problem(one.where, one.why, f"{one.remedy}; or {own}" if "ground truth" in one.why else one.remedy)
            for one in refusal.problems
        ]
    )
