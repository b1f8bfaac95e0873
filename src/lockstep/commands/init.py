"""`lockstep init`: writes a first recipe from a method, a model and rows, with a description of each key."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from pydantic import BaseModel

from lockstep.errors import Problem, Refusal, refuse_all, unwritten
from lockstep.recipe.loader import checked_recipe, described_keys, override_of, value_text
from lockstep.recipe.methods import OFFLINE, ONLINE, method_defaults
from lockstep.recipe.registry import estimator_row
from lockstep.recipe.schema import Recipe
from lockstep.run.output import fit, fit_rows, write

if TYPE_CHECKING:
    from lockstep.commands.init_rows import RowsInfo

# Common methods, in the order in which they are usually applied.
TASKS = {
    "sft": "train on responses: prompts with responses, chats or plain text",
    "dpo": "train on pairs: a better and a worse response per prompt",
    "kto": "train on labels: responses labeled good or bad",
    "rm": "train a reward model on pairs",
    "grpo": "train on rewards: prompts, and a reward for each response",
    "ppo": "train on rewards as in grpo, with a critic",
    "distill": "train on the probabilities of a teacher model",
}
WIDTH = 100


@dataclass(frozen=True)
class Choices:
    """The choices of the user. `reward` is FILE.py:NAME of a reward function, `teacher` a model folder."""

    method: str
    model: str
    train: str
    val: str | None = None
    reward: str | None = None
    teacher: str | None = None
    words: tuple[str, ...] = ()
    """Other keys as `key=value`."""


class Key(NamedTuple):
    """A key of the recipe file. `off` comments the key out; `more` is appended to the key's description."""

    name: str
    value: Any
    off: bool = False
    more: str = ""


def needs_teacher(method: str) -> bool:
    if method in ONLINE:
        return not rewarded(method)
    # An offline method needs a teacher if one of its recipe groups has the key `teacher`.
    return any("teacher" in _group(name).model_fields for name in OFFLINE[method].sections)


def _group(name: str) -> type[BaseModel]:
    group: Any = Recipe.model_fields[name].annotation
    assert issubclass(group, BaseModel)
    return group


def check_method(method: str) -> str:
    """Returns the method if it exists, or raises a `Refusal` that lists the methods."""
    methods = [*OFFLINE, *ONLINE]
    if method not in methods:
        near = get_close_matches(method, methods, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Refusal.at(
            "--method", f"no such method: {method}", f"{hint}methods: {', '.join(methods)}", code="unknown-name"
        )
    return method


def choose(
    file: Path,
    method: str | None,
    model: str | None,
    train: str | None,
    val: str | None,
    reward: str | None,
    teacher: str | None,
    words: Sequence[str] = (),
) -> Choices:
    """Returns the options of the command; on a terminal, asks the user for missing ones."""
    _refuse_existing(file)
    if not sys.stdin.isatty():
        given = {"--method": method, "--model": model, "--data": train}
        refuse_all(
            [
                Problem(name, "must be set if stdin is not a terminal", code="not-set")
                for name, value in given.items()
                if value is None
            ]
        )
    if method is None:
        write("Which method? (any method of `lockstep recipes`)")
        for key, value in fit_rows([(f"  {name}", meaning) for name, meaning in TASKS.items()]):
            write(f"{key}{value}")
        method = _ask("method", "sft")
    check_method(method)
    questions = model is None or train is None
    model = model or _ask("model: a Hugging Face folder, or a run folder")
    train = train or _ask("data: a jsonl, parquet, json or csv file, or a folder of them")
    if questions and val is None:
        val = _ask("validation data (empty: none)", "") or None
    if questions and reward is None and rewarded(method):
        reward = _ask("your reward function, as file.py:name (empty: use a rule)", "") or None
    if teacher is None and needs_teacher(method) and sys.stdin.isatty():
        teacher = _ask("teacher: the folder of a model")
    return Choices(method, model, train, val, reward, teacher, tuple(words))


def _ask(question: str, default: str | None = None) -> str:
    answer: str = typer.prompt(question, default=default, show_default=bool(default))
    return answer.strip()


def rewarded(method: str) -> bool:
    """Returns whether the method trains on rewards."""
    return method in ONLINE and method_defaults(method).get("reward", {}).get("weights", {}).get("rule") != 0


def _refuse_existing(file: Path) -> None:
    if file.exists():
        raise Refusal.at(file, "already exists", "give another file: lockstep init FILE.yaml", code="already-exists")


def write_recipe(file: Path, choices: Choices) -> list[str]:
    """Checks the recipe and writes it to a new file; returns lines with the next steps."""
    check_method(choices.method)
    if choices.teacher is None and needs_teacher(choices.method):
        raise Refusal.at(
            "--teacher", f"method {choices.method} needs a teacher", "give the folder of a model", code="not-set"
        )
    if choices.reward is not None and not rewarded(choices.method):
        raise Refusal.at("--reward", f"method {choices.method} uses no reward", "remove it", code="unused-key")
    keys = _keys(choices, _run_name(file))
    for name, value in map(override_of, choices.words):
        keys = _with(keys, Key(name, value))
    checked_recipe(_values(keys))
    seen = _inspect(_values(keys))
    for name, (value, why) in seen.keys.items():
        keys = _with(keys, Key(name, value, more=f"{why[:1].upper()}{why[1:]}"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(_text(choices, keys))
    except FileExistsError:
        _refuse_existing(file)
        raise
    except OSError as error:
        raise unwritten(file, error) from error
    return _next(file, choices, seen.notes)


def _inspect(values: dict[str, Any]) -> RowsInfo:
    """Inspects the rows; imports the module late, so that the prompts and early errors are fast."""
    from lockstep.commands.init_rows import inspect_rows

    return inspect_rows(values)


def _with(keys: list[Key], key: Key) -> list[Key]:
    """Replaces the key of the same name, or inserts `key` after the last key of its group."""
    if any(one.name == key.name for one in keys):
        return [key if one.name == key.name else one for one in keys]
    for group in reversed(list(accumulate(key.name.split(".")[:-1], "{}.{}".format))):
        places = [number for number, one in enumerate(keys) if one.name.startswith(f"{group}.")]
        if places:
            return [*keys[: places[-1] + 1], key, *keys[places[-1] + 1 :]]
    return [*keys, key]


def _run_name(file: Path) -> str:
    """Returns the name of the file as a valid run name."""
    kept = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in file.stem
    )
    return kept.lstrip("._-") or "run"


def _keys(choices: Choices, name: str) -> list[Key]:
    online = choices.method in ONLINE
    # The defaults of the method; the recipe file states them explicitly.
    defaults = Recipe.model_validate(
        {**method_defaults(choices.method), "model": {"path": "x"}, "data": {"train": "x"}}
    )
    keys = [
        Key("method", choices.method),
        Key("run.name", name),
        Key("run.steps", 200) if online else Key("run.epochs", 1, more="Or `steps: N`."),
        Key("model.path", choices.model),
        Key("model.dtype", "fp32", more="`bf16` on most accelerators."),
        Key("model.lora", {"rank": 16}, off=True, more="With LoRA, use at least ten times the usual learning rate."),
        Key("data.train", choices.train),
    ]
    if not online:
        keys += [
            Key("data.val", choices.val or "val.jsonl", off=choices.val is None),
            Key("data.max_tokens", 1024, off=True, more="With `overlong: drop` or `truncate_right`."),
            Key("batch.rows_per_update", defaults.batch.rows_per_update),
        ]
    else:
        keys.append(Key("batch.prompts", defaults.batch.prompts))
    keys += [
        Key("batch.tokens", 4096, more="Lower this value if memory is short; the results stay the same."),
        Key("optim.lr", defaults.optim.lr),
        Key("optim.schedule", defaults.optim.schedule),
        Key("optim.warmup", 0.03),
    ]
    keys += _method_keys(choices, defaults)
    keys.append(Key("val.every", 50, off=choices.val is None))
    if online:
        keys += [
            Key("val.questions", choices.val or "val.parquet", off=choices.val is None),
            Key("val.max_new_tokens", defaults.rollout.max_tokens, off=choices.val is None),
        ]
    keys += [
        Key("checkpoint.every", 50),
        Key("tape", True, off=True, more="Needed for `lockstep replay`."),
    ]
    return keys


def _method_keys(choices: Choices, defaults: Recipe) -> list[Key]:
    """Returns the keys of the recipe groups that only some methods use."""
    if choices.method in OFFLINE:
        sections = OFFLINE[choices.method].sections
        keys = [Key("preference.beta", defaults.preference.beta)] if "preference" in sections else []
        if needs_teacher(choices.method):
            keys += [
                Key("distill.teacher", choices.teacher),
                Key("distill.temperature", defaults.distill.temperature),
                Key("distill.coefficient", defaults.distill.coefficient),
            ]
        return keys
    keys = [Key(f"rollout.{name}", getattr(defaults.rollout, name)) for name in ("n", "max_tokens", "temperature")]
    if rewarded(choices.method):
        keys += [
            Key("reward.function", choices.reward or "reward.py:score", off=choices.reward is None),
            Key("reward.rules", {"my/source": "math"}, off=True),
        ]
    if needs_teacher(choices.method):
        keys.append(Key("algorithm.kl.reference", choices.teacher))
    elif defaults.algorithm.kl.where != "none":
        keys.append(Key("algorithm.kl.coefficient", defaults.algorithm.kl.coefficient))
    if estimator_row(defaults.algorithm.advantage).critic:
        keys.append(Key("critic.lr", defaults.critic.lr))
    return keys


def _values(keys: Sequence[Key]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in keys:
        if not key.off:
            group = values
            *parents, leaf = key.name.split(".")
            for parent in parents:
                group = group.setdefault(parent, {})
            group[leaf] = key.value
    return values


def _text(choices: Choices, keys: Sequence[Key]) -> str:
    meanings = described_keys()
    lines = [
        f"# {choices.method}: {TASKS[choices.method]}." if choices.method in TASKS else f"# {choices.method}.",
        f"# `lockstep recipes {choices.method}` prints the defaults; keys here override them.",
        "# A `#` before a key disables it: remove the `#` to use it.",
    ]
    # The header of a recipe group is commented out if all its keys are.
    used = {group for key in keys if not key.off for group in key.name.split(".")[:-1]}
    open_groups: list[str] = []
    for key in keys:
        *groups, leaf = key.name.split(".")
        kept = 0
        while kept < min(len(groups), len(open_groups)) and groups[kept] == open_groups[kept]:
            kept += 1
        if not kept and key.name != "method":
            lines.append("")
        for depth in range(kept, len(groups)):
            lines.append("  " * depth + f"{'' if groups[depth] in used else '#'}{groups[depth]}:")
        open_groups = groups
        indent = "  " * len(groups)
        comment = " ".join(part for part in (meanings.get(key.name), key.more) if part)
        lines += textwrap.wrap(comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines.append(f"{indent}{'#' if key.off else ''}{leaf}: {value_text(key.value)}")
    return "\n".join(lines) + "\n"


def _next(file: Path, choices: Choices, notes: Sequence[str]) -> list[str]:
    named = [("model.path", choices.model), ("data.train", choices.train), ("validation rows", choices.val)]
    named += [("teacher", choices.teacher), ("reward", (choices.reward or "").rpartition(":")[0] or None)]
    absent = [f"{what} {path}" for what, path in named if path and _looks_local(path) and not Path(path).exists()]
    lines = [*[line for note in notes for line in fit(note)], f"wrote {file}"]
    lines += [f"missing: {item}" for item in absent]
    name = quote(str(file))
    return [
        *lines,
        "next:",
        f"  lockstep data show {name}       rows as tokens, the model's input",
        f"  lockstep train {name} --smoke   two small steps as a test",
        f"  lockstep plan {name}            batches and memory",
        f"  lockstep train {name}",
    ]


def _looks_local(path: str) -> bool:
    """Returns whether the path is a local file, not a hub name or a pattern."""
    return not path.startswith("hub:") and not any(sign in path for sign in "*?[")
