"""The output of a conversion to a recipe: report, commented YAML file, checked recipe; optionally trains it."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lockstep.compat.command_devices import set_devices
from lockstep.compat.key_table import Conversion, KeyOutcome, OutcomeKind, WrittenKey, load_tables
from lockstep.compat.verify import MigrationTable, table_json, table_of
from lockstep.errors import Interrupted, Problem, Refusal
from lockstep.launch.launcher import adopt_slurm, is_rank, start_ranks, starts_ranks
from lockstep.recipe.loader import checked_recipe, sections_of, value_text
from lockstep.recipe.methods import method_defaults
from lockstep.recipe.schema import Recipe
from lockstep.run.files import atomic_write_text
from lockstep.run.output import never_fail_to_encode, write

_ORDER = list(Recipe.model_fields)
_TITLES: dict[OutcomeKind, str] = {
    "mapped": "mapped",
    "changed": "mapped with another meaning",
    "ignored": "no effect here",
    "refused": "refused",
}
_WIDTH = 80


# Report --------------------------------------------------------------------------------------------------------------


def report(done: Conversion, start: str = "", recipe: str = "RECIPE.yaml") -> str:
    """Lists all keys of the command by outcome, then defaults written to the recipe, remarks, and how the training
    starts (by default: the command that starts it with the file `recipe`)."""
    settings = done.settings
    method = f", method {done.recipe['method'].value}" if "method" in done.recipe else ""
    lines = [f"{settings.peer} {settings.program}{method}: {len(settings.given)} settings"]
    for kind, title in _TITLES.items():
        some = [outcome for outcome in done.outcomes if outcome.outcome == kind]
        if some:
            lines.append(f"{title} ({len(some)}):")
            lines += [line for outcome in some for line in _outcome_lines(outcome, done)]
    unset = [key for key, written in done.recipe.items() if not done.is_set(*written.sources)]
    if unset:
        lines.append(f"other defaults of {settings.peer}, written to the recipe ({len(unset)}):")
        lines += [
            line for key in unset for line in _folded(f"{key}: {value_text(done.recipe[key].value)}", "  ", "    ")
        ]
    lines += [line for remark in done.remarks for line in _folded(remark, "")]
    return "\n".join([*lines, start or f"to train on the devices of the command:\n  {start_command(done, recipe)}"])


def start_command(done: Conversion, recipe: str = "RECIPE.yaml") -> str:
    """Returns the command that trains the recipe on the devices of the converted command."""
    devices, nodes = done.devices, done.nodes
    if devices * nodes == 1:
        return f"lockstep train {recipe}"
    more = f" --nnodes {nodes} --node-rank RANK --master-addr HOST" if nodes > 1 else ""
    return f"torchrun --nproc-per-node {devices}{more} -m lockstep train {recipe}"


def _outcome_lines(outcome: KeyOutcome, done: Conversion) -> Iterator[str]:
    place = f"{outcome.given.where}: " if outcome.given.where else ""
    to = ", ".join(f"{key}: {value_text(done.recipe[key].value)}" for key in outcome.to)
    arrow = f" -> {to}" if to and outcome.outcome in ("mapped", "changed") else ""
    given = f"  {place}{done.settings.spelling(outcome.key)} = {value_text(outcome.given.value)}"
    if len(given + arrow) <= _WIDTH:
        yield given + arrow
    else:
        yield from _folded(given.strip(), "  ", "      ")
        yield from _folded(arrow.strip(), "      ", "         ")
    if outcome.note:
        yield from _folded(outcome.note, "      ")


def _folded(text: str, indent: str, rest: str = "") -> list[str]:
    """Folds a text to the width of the report. Long paths are not cut, so that they can be copied."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=rest or indent or "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


# Recipe --------------------------------------------------------------------------------------------------------------


def lockstep_defaults(method: str) -> dict[str, Any]:
    """Returns lockstep's defaults for a method, by dotted key."""
    return _schema_defaults(Recipe, "") | _flat(method_defaults(method), "")


def _schema_defaults(model: Any, prefix: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        inner = sections_of(info.annotation)
        default = None if info.is_required() else info.get_default(call_default_factory=True)
        if inner == [info.annotation] or isinstance(default, BaseModel):
            defaults |= _schema_defaults(inner[0], f"{prefix}{name}.")
        elif not info.is_required():
            defaults[prefix + name] = default
    return defaults


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def recipe_values(done: Conversion) -> dict[str, Any]:
    """Returns the recipe as nested mappings, with sections in the order of the schema."""
    values: dict[str, Any] = {}
    for key in sorted(done.recipe, key=lambda key: _ORDER.index(key.split(".")[0])):
        *parents, leaf = key.split(".")
        group = values
        for parent in parents:
            group = group.setdefault(parent, {})
        group[leaf] = done.recipe[key].value
    return values


# Problems of a single value. Their remedies name the key of the recipe, but the value comes from the other trainer.
_VALUE_PROBLEMS = ("invalid-value", "no-steps-left", "out-of-range")


def checked(done: Conversion) -> Recipe:
    """Returns the validated recipe. The problems of a `Refusal` also name the keys of the other trainer."""
    problems = list(done.problems)
    try:
        if not problems:
            return checked_recipe(recipe_values(done))
    except Refusal as refusal:
        problems = [_with_sources(problem, done) for problem in refusal.problems]
    raise Refusal(problems)


def _with_sources(problem: Problem, done: Conversion) -> Problem:
    near = [key for key in done.recipe if key == problem.where or problem.where.startswith(key + ".")]
    sources = [done.named(name) for key in near[:1] for name in done.recipe[key].sources if done.is_set(name)]
    origin = f" (from {', '.join(sources)})" if sources else ""
    remedy = problem.remedy
    if sources and (not remedy or problem.code in _VALUE_PROBLEMS):
        remedy = f"change {sources[0].split(': ')[-1]}"
    return Problem(problem.where + origin, problem.why, remedy, code=problem.code)


def recipe_yaml(done: Conversion, origin: str) -> str:
    """Returns the recipe as text. The comment of each key names its origin and differences from the other trainer."""
    head = [f"# Converted from {origin}, {done.settings.peer} {done.settings.program}."]
    head += [f"# {line}" for remark in done.remarks for line in remark.splitlines()]
    return "\n".join([*head, *_lines(recipe_values(done), done, "", 0)]) + "\n"


def write_recipe(done: Conversion, file: Path, origin: str, table: MigrationTable) -> None:
    """Writes the recipe, and the table of the conversion next to it. The recipe names the file of the table, so that
    the run stores it."""
    beside = file.with_suffix(".migration.json")
    done.write("run.migration", str(beside))
    atomic_write_text(beside, table_json(table))
    atomic_write_text(file, recipe_yaml(done, origin))


def _lines(values: Mapping[str, Any], done: Conversion, prefix: str, depth: int) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        key, indent = prefix + name, "  " * depth
        written = done.recipe.get(key)
        if written is None:
            lines.append(f"{indent}{name}:")
            lines += _lines(value, done, f"{key}.", depth + 1)
        else:
            lines.append(f"{indent}{name}: {value_text(value)}  # {_comment(key, written, done)}")
    return lines


def _comment(key: str, written: WrittenKey, done: Conversion) -> str:
    if key == "run.migration":
        return "what became of every key; the run stores it for `lockstep compare`"
    origins = [_place(key, done) for key in written.sources if done.is_set(key)]
    peer = done.settings.peer.split()[0]
    names = ", ".join(done.settings.spelling(key) for key in written.sources) or done.settings.program
    origin = ", ".join(origins) if origins else f"default of {peer}: {names}"
    return f"{origin}; {written.note}" if written.note else origin


def _place(key: str, done: Conversion) -> str:
    where, shown = done.settings.given[key].where, done.settings.spelling(key)
    return f"{shown} ({where})" if where else shown


# `python -m lockstep.compat.PEER` ------------------------------------------------------------------------------------


def program_name(peer: str, program: str, tables: Mapping[str, Any]) -> str:
    """Returns the name of a supported training program, or raises a `Refusal`. `program` may be the full module."""
    *folders, name = program.split(".")
    longer = f"{folders[-1]}.{name}" if folders else name
    others = load_tables("programs")[peer]
    if known := next((key for key in (longer, name) if key in others and longer not in tables["programs"]), None):
        raise Refusal.at(f"{peer} {known}", others[known]["because"], others[known]["do"], code="unknown-name")
    if name in tables["not_training"]:
        raise Refusal.at(
            f"{peer} {name}", "does not train", f"use: {tables['not_training'][name]}", code="not-training"
        )
    if longer in tables["programs"]:
        return longer
    if name in tables["programs"] and not _of_a_recipe(peer, folders, name):
        return name
    programs = [*tables["programs"], *tables.get("inference", ())]
    why = "is not a program of verl or OpenRLHF that lockstep knows, and may train in another way"
    remedy = f"use one of {', '.join(programs)}; if the program only reads other data or rewards, convert with its name"
    raise Refusal.at(f"{peer} {program if folders else name}", why, remedy, code="unknown-name")


def _of_a_recipe(peer: str, folders: Sequence[str], name: str) -> bool:
    """Returns whether the program belongs to a recipe with its own trainer, such as `recipe.NAME.main_ppo`."""
    return peer == "verl" and name == "main_ppo" and bool({"recipe", "experimental"} & set(folders))


def main(
    peer: str,
    convert: Callable[[str, Sequence[str]], Conversion],
    inference: Callable[[str, Sequence[str]], None] | None = None,
) -> None:
    """Runs a command line of another trainer (`peer`). `inference` is called for the programs of
    the other trainer that do not train."""
    never_fail_to_encode()
    tables = load_tables(peer)
    words = sys.argv[1:]
    if words and words[0].startswith("--local_rank"):
        words = words[1:]  # DeepSpeed's launcher puts --local_rank first; the environment has the rank, too
    if not words or words[0] in ("-h", "--help"):
        write(f"python -m lockstep.compat.{peer} PROGRAM SETTINGS: converts and trains; PROGRAM is one of")
        write(f"  {', '.join([*tables['programs'], *tables.get('inference', ())])}")
        write("`lockstep migrate SCRIPT.sh -o RECIPE.yaml` converts a script and does not train.")
        sys.exit(0 if words else 2)
    try:
        adopt_slurm()
        if inference is not None and words[0] in tables["inference"]:
            inference(words[0], words[1:])
        else:
            run(convert, words)
    except Refusal as refusal:
        from lockstep.run.console import print_problems

        if (rank := os.environ.get("RANK", "0")) != "0":
            write(f"rank {rank}:", error=True)
        print_problems(refusal)
        sys.exit(2)
    except Interrupted as stop:
        write(f"{stop}")
        sys.exit(130)


def run(convert: Callable[[str, Sequence[str]], Conversion], words: Sequence[str]) -> None:
    """Converts the command, reports on rank 0, and trains on the devices of the command."""
    done = convert(words[0], words[1:])
    try:
        start = set_devices(done, words[0])
    except Refusal:
        write(report(done))
        raise
    if os.environ.get("RANK", "0") == "0":
        write(report(done, start))
    recipe = checked(done)
    file = Path(recipe.run.folder) / f"{recipe.run.name}.yaml"
    if os.environ.get("RANK", "0") == "0":
        # Next to the run folder, where all processes can read them.
        file.parent.mkdir(parents=True, exist_ok=True)
        write_recipe(done, file, "a command", table_of(done, lockstep_defaults(recipe.method)))
        write(f"wrote {file}")
    recipe = checked(done)
    if not is_rank() and starts_ranks(recipe.parallel):
        sys.exit(start_ranks(recipe, ["train", str(file)]))

    from lockstep.train.start import run_recipe

    run_recipe(recipe)
