"""`lockstep migrate SCRIPT.sh`: converts the training commands of a script to recipes. The script is not run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.compat.conversion_output import checked, recipe_yaml, report
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.shell import MARK, Script, Word, read_script
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Problem, Refusal
from lockstep.run.output import write

CONVERTERS: dict[str, Callable[[str, Sequence[str], Sequence[str], str | None], Conversion]] = {
    "verl": convert_verl,
    "openrlhf": convert_openrlhf,
}
# Variables of the user's environment that scripts may use. The script or the caller must set all other variables.
_ENVIRONMENT = ("HOME", "PWD", "USER")
# Patterns for the module, the file and the launcher flags of a command such as `torchrun --nproc-per-node 8 -m
# verl.trainer.main_ppo`.
_MODULE = re.compile(r"^(?:lockstep\.compat\.)?(verl|openrlhf|recipe)(\.[\w]+)+$")
_FILE = re.compile(r"(?:^|/)(verl|openrlhf|recipe)/(?:[\w/]+/)?(\w+)\.py$")
_PREFIX = "lockstep.compat."
_OURS = re.compile(r"^lockstep\.compat\.(verl|openrlhf)$")
_DEVICES = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
_NODES = ("--nnodes", "--num_nodes")
_VARIABLE = re.compile(r"^[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Migrated:
    """A converted training command of a script."""

    training: TrainingCommand
    done: Conversion


def migrate(path: Path, words: Sequence[str], out: Path | None, version: str | None = None) -> None:
    """Writes a recipe and a report for each training command of the script.

    `words` of the form `NAME=VALUE` set variables of the script; other words are arguments of the script.
    `version` is the release of the other trainer that the script is written for.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal.at(path, f"cannot be read: {error}", code="unreadable") from error
    commands, problems, remarks = migrated(text, words, version)
    for remark in remarks:
        write(remark, error=True)
    for number, command in enumerate(commands, 1):
        write(report(command.done), error=True)
        try:
            checked(command.done)
        except Refusal as refusal:
            problems += refusal.problems
            continue
        recipe = recipe_yaml(command.done, f"{path.name} line {command.training.line}")
        if out is None:
            write(recipe, end="")
        else:
            file = out if number == 1 else out.with_name(f"{out.stem}-{number}{out.suffix}")
            file.write_text(recipe, encoding="utf-8")
            write(f"wrote {file}", error=True)
    if problems:
        raise Refusal(problems)


def migrated(
    text: str, words: Sequence[str] = (), version: str | None = None
) -> tuple[list[Migrated], list[Problem], list[str]]:
    """Returns the converted training commands of a script, the problems, and the remarks."""
    given = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    given |= {word.partition("=")[0]: word.partition("=")[2] for word in words if _VARIABLE.match(word)}
    script = read_script(text, given, [word for word in words if not _VARIABLE.match(word)])
    commands: list[Migrated] = []
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
            commands.append(Migrated(training, _converted(training, version)))
        except Refusal as refusal:
            problems += [
                Problem(f"line {training.line}: {p.where}", p.why, p.remedy, code=p.code) for p in refusal.problems
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


def _unknown(words: Sequence[Word]) -> list[Problem]:
    problems = []
    for word in words:
        for name in dict.fromkeys(word.unknown):
            shown = word.text.replace(MARK, "")
            if name.startswith("$("):
                why = f"the value of {name} is known only when the script runs"
                remedy = "write the value into the script, or set the variable: lockstep migrate SCRIPT NAME=VALUE"
            else:
                why = f"the variable {name} is not set in the script"
                remedy = (
                    f"set the variable: lockstep migrate SCRIPT {name}=VALUE"
                    if not name.isdigit()
                    else "append the script's arguments: lockstep migrate SCRIPT ARGUMENT"
                )
            problems.append(Problem(f"line {word.line}: {shown}", why, remedy, code="unresolved-reference"))
    return problems


def _cut_off(script: Script, text: str) -> list[Problem]:
    problems = []
    for command in script.commands:
        if looks_cut_off(command):
            word = command[0]
            why = "is a separate command: the line before it is a comment or does not end with a backslash"
            rest = f" ({len(command) - 1} more words follow)" if len(command) > 1 else ""
            remedy = f"end line {word.line - 1} with a backslash"
            if re.search(r"\\[ \t]+$", text.splitlines()[word.line - 2]):
                remedy = f"remove the space after the backslash that ends line {word.line - 1}"
            problems.append(Problem(f"line {word.line}: {word.text}", why + rest, remedy, code="invalid-syntax"))
    return problems


# Training commands --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingCommand:
    """A training command: the trainer (`peer`), its program and words, and the launcher's devices and nodes."""

    peer: str
    program: str
    words: tuple[Word, ...]
    devices: int | None = None
    nodes: int | None = None
    module: str = ""
    """The program with its folders, such as `verl.trainer.main_ppo`, if the command names them."""

    @property
    def line(self) -> int:
        return self.words[0].line if self.words else 0


def training_of(words: Sequence[Word]) -> TrainingCommand | None:
    """Returns the training command of verl or OpenRLHF that a command of a script runs, or None if it runs none."""
    inner = _string_command(words)
    if inner is not None:
        trainings = [training for command in inner.commands if (training := training_of(command)) is not None]
        return trainings[0] if trainings else None
    for place, word in enumerate(words):
        if "data_preprocess" in word.text:  # a data script, which does not train
            return None
        before = words[place - 1].text if place else ""
        file = _FILE.search(word.text)
        if _OURS.match(word.text) and before in ("-m", "--module") and place + 1 < len(words):
            peer, module, rest = word.text.rsplit(".", 1)[1], words[place + 1].text, words[place + 2 :]
        elif _MODULE.match(word.text) and before in ("-m", "--module"):
            peer, module, rest = _peer(word.text), word.text.removeprefix(_PREFIX), words[place + 1 :]
        elif file is not None and not word.text.startswith("-") and "=" not in word.text:
            peer, module, rest = _peer(file[1]), file[0].lstrip("/")[:-3].replace("/", "."), words[place + 1 :]
        else:
            continue
        devices, nodes = _number(words[:place], _DEVICES), _number(words[:place], _NODES)
        return TrainingCommand(peer, module.rsplit(".", 1)[-1], tuple(rest), devices, nodes, module)
    return None


def _peer(module: str) -> str:
    return "openrlhf" if module.removeprefix("lockstep.compat.").startswith("openrlhf") else "verl"


def _string_command(words: Sequence[Word]) -> Script | None:
    """Returns the inner script of `bash -c "..."` and `eval "..."`. The variables of the inner script are already
    expanded."""
    texts = [word.text for word in words]
    if texts[:1] == ["eval"] and len(texts) > 1:
        inner = read_script(" ".join(texts[1:]))
        inner.commands = [[Word(word.text, words[1].line) for word in command] for command in inner.commands]
        return inner
    for place in range(len(words) - 2):
        if texts[place] in ("bash", "sh", "/bin/bash", "/bin/sh") and texts[place + 1] == "-c":
            inner = read_script(texts[place + 2])
            line = words[place + 2].line
            inner.commands = [[Word(word.text, line + word.line - 1) for word in c] for c in inner.commands]
            return inner
    return None


def _number(words: Sequence[Word], names: Sequence[str]) -> int | None:
    for place, word in enumerate(words):
        name, equals, value = word.text.partition("=")
        if name in names:
            value = value if equals else words[place + 1].text if place + 1 < len(words) else ""
            return int(value) if value.isdigit() else None
    return None


def looks_cut_off(words: Sequence[Word]) -> bool:
    """Returns whether a command starts with an override or a flag. The line before it then lacks a backslash."""
    first = words[0].text
    return bool(re.match(r"^--?[A-Za-z]", first)) or bool(re.match(r"^[+~]{0,2}[a-z_]\w*(\.\w+)+=", first))
