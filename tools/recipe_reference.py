"""Prints docs/recipe.md from the schema. `make docs` writes it; tests/unit/test_docs.py checks that it is current."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.errors import Refusal
from lockstep.recipe.keys_data import Source
from lockstep.recipe.loader import builtin_names, load_recipe, sections_of
from lockstep.recipe.measure import facts_of
from lockstep.recipe.renamed_keys import RENAMED
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import FUNCTION_PATH, Named
from lockstep.run.console import print_problems

WORDS = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
PLURALS = {str: "texts", int: "whole numbers", float: "numbers", Any: "values"}
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

INTRO = """\
<!-- Printed by tools/recipe_reference.py from src/lockstep/recipe. Change those, then run `make docs`. -->

# The recipe

A recipe is one YAML file that defines a run. `lockstep train` takes a file, or the name of a built-in recipe
({builtin}), and any number of overrides:

<!-- run -->
```sh
lockstep recipes
lockstep recipes sft-arithmetic > mine.yaml
```

```sh
lockstep train mine.yaml run.name=second optim.lr=3e-4 data.overlong=drop model.lora.rank=8
```

- An override is `key=value`, with dots between the parts of the key. The value is read as YAML: `3e-4` is a number,
  `[0.9, 0.99]` a list, `null` no value, `true` a boolean, anything else text. Missing groups are created. A number in
  the key is a list index (`data.train.0.weight=2`, if the file lists its sources in full).
- The file overrides the defaults, an override overrides the file, and a later override overrides an earlier one.
- The file is strict: a duplicate key, a key that does not exist and a number in quotes are errors.

## The resolved recipe

Before training, lockstep fills in defaults that depend on other keys and stores the resolved recipe as
`runs/<name>/recipe.yaml`. It contains every key below and is itself a recipe: `lockstep train runs/<name>/recipe.yaml`
resumes that run, and with `run.name=other` it repeats the run.

If a run resumes with changed keys, the old recipe is kept: `recipe.to_step_10.yaml` applies up to step 10,
`recipe.yaml` after it. A start with nothing left to train changes neither file.

## Bad input

All problems are reported at once, on stderr and with exit code 2, before a model is loaded. Each problem names the key,
its [code](errors.md), the reason and, if possible, the nearest valid name or a remedy. This recipe

```yaml
{bad}```

gives

```
{answer}```

Files, rows and the model folder are checked next, still before the weights are loaded: see [the data](data.md).

## Keys that may change when a run resumes

With `run.resume: auto` the same command resumes a run from its newest complete checkpoint. These keys may then have a
different value:

{free}

Most of these keys do not change what an update computes. The exceptions are the learning rate, its schedule and the
number of steps. If one of these changes, the run prints the old and the new learning rate of the next step and stores
the change in `env.json`, and `lockstep compare` shows the change. A change of any key that is not in this list, or of
the training rows, is an error that shows both values. Data files and models may move: their content is compared, not
their path. [Resuming](runs.md#resuming) explains what happens if a model has changed.

## Old names of keys

These keys were renamed. The old name works until the next release, with a warning, in recipes, on the command line and
in Python. Runs, checkpoints and tapes that were written with old names are read as before. A recipe with both names of
a key is an error.

| old name | new name |
|---|---|
{renamed}

## The keys

"Must be set" marks the keys that have no default.
"""

NOTES = {
    "": "`device` is `auto`, `cpu`, `cuda` or `npu` (Huawei Ascend). Not yet run on Ascend hardware.",
    "data": "`train` and `val` take a path, a list of paths, or a list of sources with the keys of the next table.",
}

BAD = """\
model: {path: quickstart/model, dtype: fp8}
data: {trian: rows.jsonl, train: rows.jsonl}
run: {epochs: 2, steps: 100}
optim: {lr: "1e-5", weight_decay: -0.1}
"""


def reference() -> str:
    """The complete page."""
    free = textwrap.fill(", ".join(f"`{key}`" for key in _resumable()), 120, break_on_hyphens=False)
    renamed = "\n".join(f"| `{old}` | `{new}` |" for old, new in RENAMED.items())
    builtin = ", ".join(f"`{name}`" for name in builtin_names())
    intro = INTRO.format(builtin=builtin, bad=BAD, answer=_answer(BAD), free=free, renamed=renamed)
    return intro + "".join(f"\n{table}" for table in _tables(Recipe, ""))


def _resumable() -> Iterator[str]:
    """Keys that may change when a run is resumed, complete groups first."""
    groups = {name: field.annotation for name, field in Recipe.model_fields.items()}
    yield from (name if name == "device" else f"{name}.*" for name in groups if facts_of(name).resumable)
    for group, section in groups.items():
        if not facts_of(group).resumable:
            keys = getattr(section, "model_fields", {})
            yield from (f"{group}.{key}" for key in keys if facts_of(f"{group}.{key}").resumable)


def _answer(text: str) -> str:
    """The actual output of the command for an invalid recipe."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as stderr:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_recipe(str(file))
        except Refusal as refusal:
            print_problems(refusal, colour=False)
    return stderr.getvalue()


def _tables(model: type[BaseModel], key: str) -> Iterator[str]:
    """The table of a section, then those of the sections inside it."""
    keys = {name: info for name, info in model.model_fields.items() if not _is_section(info)}
    lines = [f"### {f'`{key}`' if key else 'Top-level keys'}", ""]
    if key in NOTES:
        lines += [NOTES[key], ""]
    lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
    dot = f"{key}." if key else ""
    for name, info in keys.items():
        cells = (f"`{dot}{name}`", _values(info), _default(info), info.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    yield "\n".join(lines) + "\n"
    for name, info in model.model_fields.items():
        for section in sections_of(info.annotation):
            if section is not Source:
                yield from _tables(section, dot + name)
            elif name == "train":
                yield from _tables(section, f"{dot}{name}.N")


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


def _values(info: FieldInfo) -> str:
    parts = [_type(info.annotation)]
    for limit in info.metadata:
        if isinstance(limit, Named):
            parts = [_names(limit)]
        parts += [f"`{sign} {_number(getattr(limit, name))}`" for name, sign in SIGNS.items() if hasattr(limit, name)]
        if pattern := getattr(limit, "pattern", None):
            parts.append(f"matching `{pattern}`")
    shortest, longest = (
        next((getattr(limit, name) for limit in info.metadata if hasattr(limit, name)), None)
        for name in ("min_length", "max_length")
    )
    if shortest is not None:
        parts.append(f"{shortest} of them" if shortest == longest else f"at least {shortest}")
    return ", ".join(parts)


def _names(choice: Named) -> str:
    names = ", ".join(f"`{name}`" for name in choice.names)
    return " or ".join(filter(None, [names, f"`{FUNCTION_PATH}`" if choice.allow_function else ""]))


def _plain(kind: Any) -> Any:
    """The type without a validator (`Annotated[str, AfterValidator(...)]`); a registry of names stays."""
    checked = get_origin(kind) is Annotated and not any(isinstance(note, Named) for note in kind.__metadata__)
    return get_args(kind)[0] if checked else kind


def _type(kind: Any) -> str:
    if kind in WORDS:
        return WORDS[kind]
    if kind is type(None):
        return "`null`"
    if get_origin(kind) is Annotated:
        return _names(next(note for note in kind.__metadata__ if isinstance(note, Named)))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is dict:
        key, value = get_args(kind)
        named = "names" if key is str else _type(key)
        return f"mapping of {named} to {PLURALS.get(value) or _type(value)}"
    if get_origin(kind) is list:
        inner = _plain(get_args(kind)[0])
        return "path, paths or sources" if inner is Source else f"list of {PLURALS.get(inner) or _type(inner)}"
    if get_origin(kind) in (Union, types.UnionType):
        # An integer is a number too.
        parts = [part for part in get_args(kind) if not (part is int and float in get_args(kind))]
        return " or ".join(_type(part) for part in parts)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "the keys below"
    raise TypeError(f"no words for {kind}")


def _number(value: float) -> str:
    return "2^63" if value == 2**63 else f"{value:g}"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "must be set"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, float):
        return f"`{value:g}`" if value else "`0`"
    return f"`{yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}`"


if __name__ == "__main__":
    # The sample output follows the width of the terminal; the page needs a fixed width.
    os.environ["COLUMNS"] = "80"
    print(re.sub(r"`lockstep help ([\w-]+)`", r"[\1](\1.md)", reference()), end="")
