"""`lockstep migrate SCRIPT.sh`: converts the training commands of a script to recipes. The script is not run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.compat.conversion_output import (
    checked,
    lockstep_defaults,
    recipe_yaml,
    report,
    start_command,
    write_recipe,
)
from lockstep.compat.key_table import Conversion
from lockstep.compat.launchers import TrainingCommand, slurm_variables, training_of
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.shell import Script, Word, read_script
from lockstep.compat.unset_variables import known_words, missing_problem
from lockstep.compat.verify import table_json, table_of, table_text
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Problem, Refusal
from lockstep.run.output import write

CONVERTERS: dict[str, Callable[[str, Sequence[str], Sequence[str], str | None], Conversion]] = {
    "verl": convert_verl,
    "openrlhf": convert_openrlhf,
}
# Variables of the user's environment that scripts may use. The script or the caller must set all other variables.
_ENVIRONMENT = ("HOME", "PWD", "USER")
_VARIABLE = re.compile(r"^[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Migrated:
    """A converted training command of a script."""

    training: TrainingCommand
    done: Conversion


def migrate(
    path: Path,
    words: Sequence[str],
    out: Path | None,
    version: str | None = None,
    *,
    verify: bool = False,
    as_json: bool = False,
) -> None:
    """Writes a recipe and a report for each training command of the script. `verify` prints the table of all keys and
    defaults instead; it writes a recipe only to `out`.

    `words` of the form `NAME=VALUE` set variables of the script; other words are arguments of the script.
    `version` is the release of the other trainer that the script is written for.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal.at(path, f"cannot be read: {error}", code="unreadable") from error
    commands, problems, remarks = migrated(text, words, str(path), version)
    for remark in remarks:
        write(remark, error=True)
    cut = any(problem.code == "invalid-syntax" for problem in problems)
    tables = [table_of(command.done, lockstep_defaults(_method(command.done))) for command in commands]
    if verify and as_json:
        write(table_json(*tables), end="")
    elif verify:
        for command, table in zip(commands, tables, strict=True):
            write(table_text(table, f"to train on its devices: {start_command(command.done)}"))
    for number, (command, table) in enumerate(zip(commands, tables, strict=True), 1):
        file = out if out is None or number == 1 else out.with_name(f"{out.stem}-{number}{out.suffix}")
        if not verify:
            write(report(command.done, recipe=str(file or "RECIPE.yaml")), error=True)
        try:
            checked(command.done)
        except Refusal as refusal:
            # Keys that a command lacks may be in the lines that are cut off from it.
            problems += [p for p in refusal.problems if p.code != "not-set" or not cut]
            continue
        origin = f"{path.name} line {command.training.line}"
        if file is not None:
            write_recipe(command.done, file, origin, table)
            write(f"wrote {file}", error=True)
        elif not verify:
            write(recipe_yaml(command.done, origin), end="")
    if problems:
        raise Refusal(problems)


def _method(done: Conversion) -> str:
    return str(done.recipe["method"].value) if "method" in done.recipe else "sft"


def migrated(
    text: str, words: Sequence[str] = (), path: str = "script.sh", version: str | None = None
) -> tuple[list[Migrated], list[Problem], list[str]]:
    """Returns the converted training commands of a script, the problems, and the remarks."""
    given = (
        {"0": path} | {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | slurm_variables(text)
    )
    given |= {word.partition("=")[0]: word.partition("=")[2] for word in words if _VARIABLE.match(word)}
    script = read_script(text, given, [word for word in words if not _VARIABLE.match(word)])
    commands: list[Migrated] = []
    problems = _cut_off(script, text)
    for command in script.commands:
        training = training_of(command, script.variables)
        if training is None:
            continue
        known = known_words(training.peer, training.module, training.words, path)
        if known.missing:
            problems.append(missing_problem(known.missing, script.computed, path))
            continue
        script.remarks += known.remarks
        training = replace(training, words=tuple(known.words))
        try:
            commands.append(Migrated(training, _converted(training, version)))
        except Refusal as refusal:
            place = f"line {training.line}: "
            problems += [
                Problem(p.where if p.where.startswith("line ") else place + p.where, p.why, p.remedy, code=p.code)
                for p in refusal.problems
            ]
    if not commands and not problems:
        problems.append(
            Problem(
                "the script",
                "has no training command of verl or OpenRLHF",
                "give a script that starts a training",
                code="not-training",
            )
        )
    return commands, problems, script.remarks


def _converted(training: TrainingCommand, version: str | None) -> Conversion:
    words = [word.text for word in training.words]
    locations = [f"line {word.line}" for word in training.words]
    done = CONVERTERS[training.peer](training.module, words, locations, version)
    done.devices = training.devices or done.devices
    done.nodes = training.nodes or done.nodes
    return done


def _cut_off(script: Script, text: str) -> list[Problem]:
    problems = []
    for command in script.commands:
        if looks_cut_off(command):
            word = command[0]
            why = "is a separate command: the line before it is a comment or does not end with a backslash"
            rest = f" ({len(command) - 1} more words follow)" if len(command) > 1 else ""
            before = text.splitlines()[word.line - 2]
            remedy = f"end line {word.line - 1} with a backslash"
            if before.lstrip().startswith("#"):
                remedy = f"remove line {word.line - 1}, which is a comment, or move it above the command"
            elif re.search(r"\\[ \t]+$", before):
                remedy = f"remove the space after the backslash that ends line {word.line - 1}"
            problems.append(Problem(f"line {word.line}: {word.text}", why + rest, remedy, code="invalid-syntax"))
    return problems


def looks_cut_off(words: Sequence[Word]) -> bool:
    """Returns whether a command starts with an override or a flag. The line before it then lacks a backslash."""
    first = words[0].text
    return bool(re.match(r"^--?[A-Za-z]", first)) or bool(re.match(r"^[+~]{0,2}[a-z_]\w*(\.\w+)+=", first))
