"""Inspects rows for `lockstep init`: columns, number of rows, and keys that the recipe needs.

The first rows are encoded as in training. If encoding fails, two recipe keys are tried: a built-in chat template, if
the tokenizer has none, and dropping rows that are too long. If one of these keys makes the encoding succeed, it is
written to the recipe; otherwise the error is reported.
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

INSPECTED_ROWS = 64
# Maps each kind of rows, named by its most common method, to the function that finds the columns of such rows.
KINDS = {
    "sft": find_columns,
    "dpo": find_ranking_columns,
    "kto": find_judged_columns,
    "prm": find_step_columns,
    "grpo": lambda finder: find_question_columns(finder, frozenset()),
}
# Maps recipe keys for columns to the kind of rows (in `KINDS`) with this column. The most specific key is first.
_KIND_BY_KEY = {"steps_key": "prm", "label_key": "kto", "chosen_key": "dpo"}


@dataclass(frozen=True)
class RowsInfo:
    """The result of the inspection, with `notes` for the user, and with the recipe `keys` that the rows need."""

    notes: list[str] = field(default_factory=list)
    keys: dict[str, tuple[Any, str]] = field(default_factory=dict)


def inspect_rows(values: Mapping[str, Any]) -> RowsInfo:
    """Inspects the rows of a recipe. Missing files are skipped; rows that do not fit the method are an error."""
    recipe = checked_recipe(dict(values))
    paths = [source.path for source in (*recipe.data.train, *recipe.data.val)]
    if recipe.data.reader is not None or not all(map(_is_here, paths)):
        return RowsInfo()
    opened = [read_rows(path) for path in paths]
    for path, rows in zip(paths, opened, strict=True):
        _refuse_other_kind(recipe, path, rows)
    keys = _sizes(recipe, sum(len(rows) for rows in opened[: len(recipe.data.train)]))
    if not Path(recipe.model.path).exists():
        both = zip(paths, opened, strict=True)
        return RowsInfo([f"{path}: {len(rows):,} rows of {', '.join(rows.columns)}" for path, rows in both], keys)
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
    return next((kind for key, kind in _KIND_BY_KEY.items() if key in columns), "sft")


def _refuse_other_kind(recipe: Recipe, path: str, rows: RowSet) -> None:
    """Rejects rows that do not fit the method, and lists the methods that they fit."""
    source = next(source for source in (*recipe.data.train, *recipe.data.val) if source.path == path)
    finder = ColumnFinder(source, recipe.data, rows.columns)
    expected = _kind(recipe.method)
    try:
        KINDS[expected](finder)
    except Refusal as refusal:
        (problem,) = refusal.problems
        others = [kind for kind in KINDS if kind != expected and _readable(kind, finder)]
        # Any row with a prompt fits the online methods, so suggest offline methods first.
        others = [kind for kind in others if kind not in ONLINE] or others
        such = f"these rows fit --method {' or '.join(others)}; or " if others else ""
        remedy = f"{such}{problem.remedy}: lockstep init FILE ... KEY=COLUMN"
        raise Refusal.at(problem.where, problem.why, remedy, code=problem.code) from refusal


def _readable(kind: str, finder: ColumnFinder) -> bool:
    try:
        KINDS[kind](finder)
    except Refusal:
        return False
    return True


def _sizes(recipe: Recipe, rows: int) -> dict[str, tuple[Any, str]]:
    """Returns a smaller batch size if the data has fewer rows than the default batch."""
    key = "prompts" if recipe.method in ONLINE else "rows_per_update"
    if rows >= getattr(recipe.batch, key):
        return {}
    return {f"batch.{key}": (max(rows, 1), f"The data has {rows} rows.")}


def _encoded(values: Mapping[str, Any], recipe: Recipe, keys: dict[str, tuple[Any, str]]) -> RowsInfo:
    from lockstep.device.select import select
    from lockstep.preflight.run_checks import prepare_shown
    from lockstep.run.console import Console

    first: Refusal | None = None
    for more in _settings_to_try(recipe):
        changed = checked_recipe(_changed(values, {name: value for name, (value, _) in {**keys, **more}.items()}))
        data = changed.data.model_copy(update={"train": [*changed.data.train, *changed.data.val], "cache": "off"})
        try:
            train = prepare_shown(
                changed.model_copy(update={"data": data}), select("cpu"), INSPECTED_ROWS, Console.silent()
            ).train
        except Refusal as refusal:
            first = first or refusal
            continue
        notes = [f"{name}={value}: {why}" for name, (value, why) in more.items()]
        rules = _rules(changed) if recipe.method in ONLINE else {}
        return RowsInfo([*train.notes, *notes, *[why for _, why in rules.values()]], {**keys, **more, **rules})
    assert first is not None
    raise _with_reward(first) if recipe.method in ONLINE else first


def _changed(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(values))
    for name, value in keys.items():
        *groups, leaf = name.split(".")
        group = changed
        for part in groups:
            group = group.setdefault(part, {})
        group[leaf] = value
    return changed


def _settings_to_try(recipe: Recipe) -> Iterator[dict[str, tuple[Any, str]]]:
    """Yields additional recipe keys, in the order in which they are tried."""
    from lockstep.data.encode.builtin_templates import BUILTIN
    from lockstep.model.load import load_tokenizer

    drop = {"data.overlong": ("drop", "some rows are longer than a micro-batch or the model's context.")}
    yield {}
    yield drop
    if recipe.data.template == "auto" and not load_tokenizer(recipe.model.path).chat_template:
        for name in BUILTIN:
            template = {
                "data.template": (
                    name,
                    "the tokenizer has no chat template but has the special tokens of this template.",
                )
            }
            yield template
            yield {**template, **drop}


def _rules(recipe: Recipe) -> dict[str, tuple[Any, str]]:
    """Chooses a rule for each data source without a rule, by the ground truths of its rows."""
    from lockstep.reward.row_rewards import read_by_rewards
    from lockstep.reward.rules import DEFAULT_RULES, RULES, rule_name
    from lockstep.reward.scorer import recipe_weights

    if not recipe_weights(recipe)[0].get("rule"):
        return {}
    ruled = {**DEFAULT_RULES, **recipe.reward.rules}
    truths: dict[str, list[str]] = {}
    for source in recipe.data.train:
        rows = read_rows(source.path)
        columns = find_question_columns(
            ColumnFinder(source, recipe.data, rows.columns),
            read_by_rewards(recipe.reward, environment=recipe.rollout.gives_rewards),
        )
        for question in read_questions(rows, source.rows, columns):
            if rule_name(question.data_source, ruled) is None:
                truths.setdefault(question.data_source, []).append(str(question.ground_truth))
    if not truths:
        return {}
    rules = {source: _rule_of(source, values) for source, values in sorted(truths.items())}
    examples = {name: RULES[name].example("42") for name in rules.values()}
    why = "; ".join(f"rule {name} reads answers such as {example}" for name, example in examples.items())
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
        f"--reward FILE.py:NAME, or reward.rules='{{{source}: RULE}}', where RULE is one of {', '.join(RULES)}",
        code="no-rule",
    )


def _with_reward(refusal: Refusal) -> Refusal:
    option = "use your reward function: --reward FILE.py:NAME"
    return Refusal(
        [
            Problem(
                one.where,
                one.why,
                f"{one.remedy}; or {option}" if "ground truth" in one.why else one.remedy,
                code=one.code,
            )
            for one in refusal.problems
        ]
    )
