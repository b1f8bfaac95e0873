"""`lockstep migrate SCRIPT.sh`: a script of another trainer as recipes, each with a report. Nothing of it is run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.compat.launch import TrainingCommand, looks_cut_off, training_of
from lockstep.compat.openrlhf.command import convert_openrlhf
from lockstep.compat.report import report
from lockstep.compat.shell import MARK, Script, Word, read_script
from lockstep.compat.table import Conversion
from lockstep.compat.verl.command import convert_verl
from lockstep.compat.writing import checked, recipe_yaml
from lockstep.errors import Problem, Refusal
from lockstep.run.output import write

CONVERTERS: dict[str, Callable[[str, Sequence[str], Sequence[str]], Conversion]] = {
    "verl": convert_verl,
    "openrlhf": convert_openrlhf,
}
# Variables of the user's own shell that scripts rely on; all others must be in the script or be given.
_ENVIRONMENT = ("HOME", "PWD", "USER")
_VARIABLE = re.compile(r"^[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Migrated:
    """One training command of a script, converted."""

    training: TrainingCommand
    done: Conversion


def migrate(path: Path, words: Sequence[str], out: Path | None) -> None:
    """Read the script, write a recipe for each of its training commands, and say what became of every setting.

    `words` are `NAME=VALUE` for variables of the script, all others are its arguments.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal.at(path, f"cannot be read: {error}") from error
    found, problems, remarks = migrated(text, words)
    for remark in remarks:
        write(remark, error=True)
    for number, one in enumerate(found, 1):
        write(report(one.done), error=True)
        try:
            checked(one.done)
        except Refusal as refusal:
            problems += refusal.problems
            continue
        recipe = recipe_yaml(one.done, f"{path.name} line {one.training.line}")
        if out is None:
            write(recipe, end="")
        else:
            file = out if number == 1 else out.with_name(f"{out.stem}-{number}{out.suffix}")
            file.write_text(recipe, encoding="utf-8")
            write(f"wrote {file}", error=True)
    if problems:
        raise Refusal(problems)


def migrated(text: str, words: Sequence[str] = ()) -> tuple[list[Migrated], list[Problem], list[str]]:
    """The conversions of a script's training commands, what is wrong with it, and what is to be known."""
    given = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    given |= {word.partition("=")[0]: word.partition("=")[2] for word in words if _VARIABLE.match(word)}
    script = read_script(text, given, [word for word in words if not _VARIABLE.match(word)])
    found: list[Migrated] = []
    problems = _cut_off(script, text)
    for command in script.commands:
        training = training_of(command)
        if training is None:
            continue
        unknown = _unknown(training.words)
        problems += unknown
        if unknown:
            continue
        try:
            found.append(Migrated(training, _converted(training)))
        except Refusal as refusal:
            problems += [Problem(f"line {training.line}: {p.where}", p.why, p.remedy) for p in refusal.problems]
    if not found and not problems:
        problems.append(
            Problem("the script", "has no training command of verl or OpenRLHF", "name the script that trains")
        )
    return found, problems, script.remarks


def _converted(training: TrainingCommand) -> Conversion:
    words = [word.text for word in training.words]
    done = CONVERTERS[training.peer](training.program, words, [f"line {word.line}" for word in training.words])
    done.devices = training.devices or done.devices
    done.nodes = training.nodes or done.nodes
    return done


def _unknown(words: Sequence[Word]) -> list[Problem]:
    problems = []
    for word in words:
        for name in dict.fromkeys(word.unknown):
            shown = word.text.replace(MARK, "")
            if name.startswith("$("):
                why = f"{name} is only known when it runs"
                remedy = "write the value into the script, or give the variable that holds it: NAME=VALUE"
            else:
                why = f"the variable {name} is not set in the script"
                remedy = (
                    f"give it: lockstep migrate SCRIPT {name}=VALUE"
                    if not name.isdigit()
                    else "give the script's arguments"
                )
            problems.append(Problem(f"line {word.line}: {shown}", why, remedy))
    return problems


def _cut_off(script: Script, text: str) -> list[Problem]:
    problems = []
    for command in script.commands:
        if looks_cut_off(command):
            word = command[0]
            why = "stands as a command of its own: the line before it ends without a backslash, or is a comment"
            rest = f", and with it {len(command) - 1} more words" if len(command) > 1 else ""
            remedy = f"end line {word.line - 1} with a backslash"
            if re.search(r"\\[ \t]+$", text.splitlines()[word.line - 2]):
                remedy = f"take away the space behind the backslash that ends line {word.line - 1}"
            problems.append(Problem(f"line {word.line}: {word.text}", why + rest, remedy))
    return problems
