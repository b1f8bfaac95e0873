"""`lockstep init`: a first recipe from a method, a model and rows, with what each key means beside it."""

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
    from lockstep.commands.init_rows import RowsSeen

# What people come to do, in the order in which they do it.
TASKS = {
    "sft": "learn from answers: prompts with responses, chats or plain text",
    "dpo": "learn from pairs: a better and a worse response to each prompt",
    "kto": "learn from verdicts: responses that are marked good or bad",
    "rm": "a reward model from pairs",
    "grpo": "learn by trying: prompts, and a reward for each response",
    "ppo": "the same with a critic",
    "distill": "learn from a teacher model's probabilities",
}
WIDTH = 100


@dataclass(frozen=True)
class Wishes:
    """What was chosen; `reward` is a function of the user's, `teacher` a model folder."""

    method: str
    model: str
    train: str
    val: str | None = None
    reward: str | None = None
    teacher: str | None = None
    words: tuple[str, ...] = ()
    """Other keys, as `key=value`."""


class Key(NamedTuple):
    """A line of the recipe; one that is `off` stands there as a comment. `more` is said besides its description."""

    name: str
    value: Any
    off: bool = False
    more: str = ""


def needs_teacher(method: str) -> bool:
    if method in ONLINE:
        return not rewarded(method)
    # One of its own groups of keys has a place for it.
    return any("teacher" in _group(name).model_fields for name in OFFLINE[method].sections)


def _group(name: str) -> type[BaseModel]:
    group: Any = Recipe.model_fields[name].annotation
    assert issubclass(group, BaseModel)
    return group


def check_method(method: str) -> str:
    """The method, or a refusal that names what there is."""
    known = [*OFFLINE, *ONLINE]
    if method not in known:
        near = get_close_matches(method, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise Refusal.at("--method", f"no such method: {method}", f"{hint}known: {', '.join(known)}")
    return method


def asked(
    file: Path,
    method: str | None,
    model: str | None,
    train: str | None,
    val: str | None,
    reward: str | None,
    teacher: str | None,
    words: Sequence[str] = (),
) -> Wishes:
    """What was given, and on a terminal what the user answers to the rest."""
    _refuse_taken(file)
    if not sys.stdin.isatty():
        given = {"--method": method, "--model": model, "--data": train}
        refuse_all(
            [Problem(name, "must be set where nobody can be asked") for name, one in given.items() if one is None]
        )
    if method is None:
        write("What should the model do? (any method of `lockstep recipes`)")
        for key, value in fit_rows([(f"  {name}", meaning) for name, meaning in TASKS.items()]):
            write(f"{key}{value}")
        method = _ask("method", "sft")
    check_method(method)
    questions = model is None or train is None
    model = model or _ask("model: a Hugging Face folder, or a run folder")
    train = train or _ask("data: a jsonl, parquet, json or csv file, or a folder of them")
    if questions and val is None:
        val = _ask("validation data (nothing: none)", "") or None
    if questions and reward is None and rewarded(method):
        reward = _ask("your reward function, as file.py:name (nothing: a rule)", "") or None
    if teacher is None and needs_teacher(method) and sys.stdin.isatty():
        teacher = _ask("teacher: the folder of a model")
    return Wishes(method, model, train, val, reward, teacher, tuple(words))


def _ask(question: str, usual: str | None = None) -> str:
    answer: str = typer.prompt(question, default=usual, show_default=bool(usual))
    return answer.strip()


def rewarded(method: str) -> bool:
    """Whether rewards are what it learns from."""
    return method in ONLINE and method_defaults(method).get("reward", {}).get("weights", {}).get("rule") != 0


def _refuse_taken(file: Path) -> None:
    if file.exists():
        raise Refusal.at(file, "exists, and is not overwritten", "name another file: lockstep init FILE.yaml")


def write_recipe(file: Path, wishes: Wishes) -> list[str]:
    """Write the recipe, which is checked first, to a new file; returns lines that say what comes next."""
    check_method(wishes.method)
    if wishes.teacher is None and needs_teacher(wishes.method):
        raise Refusal.at("--teacher", f"method {wishes.method} needs a teacher", "the folder of a model")
    if wishes.reward is not None and not rewarded(wishes.method):
        raise Refusal.at("--reward", f"method {wishes.method} reads no reward", "leave it out")
    keys = _keys(wishes, _run_name(file))
    for name, value in map(override_of, wishes.words):
        keys = _with(keys, Key(name, value))
    checked_recipe(_values(keys))
    seen = _look(_values(keys))
    for name, (value, why) in seen.keys.items():
        keys = _with(keys, Key(name, value, more=f"{why[:1].upper()}{why[1:]}"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:
            opened.write(_text(wishes, keys))
    except FileExistsError:
        _refuse_taken(file)
        raise
    except OSError as error:
        raise unwritten(file, error) from error
    return _next(file, wishes, seen.said)


def _look(values: dict[str, Any]) -> RowsSeen:
    """Imported here: what needs no look at rows, as the list of methods and a refusal of one, comes at once."""
    from lockstep.commands.init_rows import look_at_rows

    return look_at_rows(values)


def _with(keys: list[Key], key: Key) -> list[Key]:
    """The key in the place of one of its name, or after the last of its group."""
    if any(one.name == key.name for one in keys):
        return [key if one.name == key.name else one for one in keys]
    for group in reversed(list(accumulate(key.name.split(".")[:-1], "{}.{}".format))):
        places = [number for number, one in enumerate(keys) if one.name.startswith(f"{group}.")]
        if places:
            return [*keys[: places[-1] + 1], key, *keys[places[-1] + 1 :]]
    return [*keys, key]


def _run_name(file: Path) -> str:
    """The file's name as a run may be called."""
    kept = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in file.stem
    )
    return kept.lstrip("._-") or "run"


def _keys(wishes: Wishes, name: str) -> list[Key]:
    online = wishes.method in ONLINE
    # The method's own values, so that the recipe says what would hold without it.
    own = Recipe.model_validate({**method_defaults(wishes.method), "model": {"path": "x"}, "data": {"train": "x"}})
    keys = [
        Key("method", wishes.method),
        Key("run.name", name),
        Key("run.steps", 200) if online else Key("run.epochs", 1, more="Or `steps: N`."),
        Key("model.path", wishes.model),
        Key("model.dtype", "fp32", more="`bf16` on most accelerators."),
        Key("model.lora", {"rank": 16}, off=True, more="With a learning rate ten times as high or more."),
        Key("data.train", wishes.train),
    ]
    if not online:
        keys += [
            Key("data.val", wishes.val or "val.jsonl", off=wishes.val is None),
            Key("data.max_tokens", 1024, off=True, more="With `overlong: drop` or `truncate_right`."),
            Key("batch.rows_per_update", own.batch.rows_per_update),
        ]
    else:
        keys.append(Key("batch.prompts", own.batch.prompts))
    keys += [
        Key("batch.tokens", 4096, more="Less where memory is short: the results stay the same."),
        Key("optim.lr", own.optim.lr),
        Key("optim.schedule", own.optim.schedule),
        Key("optim.warmup", 0.03),
    ]
    keys += _of_method(wishes, own)
    keys.append(Key("val.every", 50, off=wishes.val is None))
    if online:
        keys += [
            Key("val.questions", wishes.val or "val.parquet", off=wishes.val is None),
            Key("val.max_new_tokens", own.rollout.max_tokens, off=wishes.val is None),
        ]
    keys += [
        Key("checkpoint.every", 50),
        Key("tape", True, off=True, more="Then `lockstep replay` repeats the run on another device."),
    ]
    return keys


def _of_method(wishes: Wishes, own: Recipe) -> list[Key]:
    """Keys of the groups that only some methods read."""
    if wishes.method in OFFLINE:
        sections = OFFLINE[wishes.method].sections
        found = [Key("preference.beta", own.preference.beta)] if "preference" in sections else []
        if needs_teacher(wishes.method):
            found += [
                Key("distill.teacher", wishes.teacher),
                Key("distill.temperature", own.distill.temperature),
                Key("distill.coefficient", own.distill.coefficient),
            ]
        return found
    found = [Key(f"rollout.{name}", getattr(own.rollout, name)) for name in ("n", "max_tokens", "temperature")]
    if rewarded(wishes.method):
        found += [
            Key("reward.function", wishes.reward or "reward.py:score", off=wishes.reward is None),
            Key("reward.rules", {"my/source": "math"}, off=True),
        ]
    if needs_teacher(wishes.method):
        found.append(Key("algorithm.kl.reference", wishes.teacher))
    elif own.algorithm.kl.where != "none":
        found.append(Key("algorithm.kl.coefficient", own.algorithm.kl.coefficient))
    if estimator_row(own.algorithm.advantage).critic:
        found.append(Key("critic.lr", own.critic.lr))
    return found


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


def _text(wishes: Wishes, keys: Sequence[Key]) -> str:
    meanings = described_keys()
    lines = [
        f"# {wishes.method}: {TASKS[wishes.method]}." if wishes.method in TASKS else f"# {wishes.method}.",
        f"# `lockstep recipes {wishes.method}` prints what the method sets; keys here replace it.",
        "# Lines with `#` before a key are off: take the mark away to use them.",
    ]
    # A group without a value would be no group.
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
        said = " ".join(part for part in (meanings.get(key.name), key.more) if part)
        lines += textwrap.wrap(said, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines.append(f"{indent}{'#' if key.off else ''}{leaf}: {value_text(key.value)}")
    return "\n".join(lines) + "\n"


def _next(file: Path, wishes: Wishes, seen: Sequence[str]) -> list[str]:
    named = [("model.path", wishes.model), ("data.train", wishes.train), ("validation rows", wishes.val)]
    named += [("teacher", wishes.teacher), ("reward", (wishes.reward or "").rpartition(":")[0] or None)]
    absent = [f"{what} {path}" for what, path in named if path and _looks_local(path) and not Path(path).exists()]
    lines = [*[line for one in seen for line in fit(one)], f"wrote {file}"]
    lines += [f"not there yet: {one}" for one in absent]
    name = quote(str(file))
    return [
        *lines,
        "next:",
        f"  lockstep data show {name}       rows as the model will see them",
        f"  lockstep train {name} --smoke   two tiny steps, everything on",
        f"  lockstep plan {name}            batches and memory",
        f"  lockstep train {name}",
    ]


def _looks_local(path: str) -> bool:
    """Hub names and patterns are no files that must be there."""
    return not path.startswith("hub:") and not any(sign in path for sign in "*?[")
