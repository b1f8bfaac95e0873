"""What stands before a training command: `torchrun`, `deepspeed`, `ray job submit ... --`, `srun ... bash -c`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.compat.shell import Script, Word, read_script

_MODULE = re.compile(r"^(verl|openrlhf|recipe)(\.[\w]+)+$")
_FILE = re.compile(r"(?:^|/)(verl|openrlhf|recipe)/(?:[\w/]+/)?(\w+)\.py$")
_OURS = re.compile(r"^lockstep\.compat\.(verl|openrlhf)$")
_DEVICES = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
_NODES = ("--nnodes", "--num_nodes")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")


@dataclass(frozen=True)
class TrainingCommand:
    """A command that trains: whose, which program, and its own words."""

    peer: str
    program: str
    words: tuple[Word, ...]
    devices: int | None = None
    nodes: int | None = None

    @property
    def line(self) -> int:
        return self.words[0].line if self.words else 0


def training_of(words: Sequence[Word]) -> TrainingCommand | None:
    """The training command in a command of a script; None where it is something else."""
    inner = _string_command(words)
    if inner is not None:
        found = [training for command in inner.commands if (training := training_of(command)) is not None]
        return found[0] if found else None
    for place, word in enumerate(words):
        before = words[place - 1].text if place else ""
        file = _FILE.search(word.text)
        if _OURS.match(word.text) and before in ("-m", "--module") and place + 1 < len(words):
            peer, program, rest = word.text.rsplit(".", 1)[1], words[place + 1].text, words[place + 2 :]
        elif _MODULE.match(word.text) and before in ("-m", "--module"):
            peer, program, rest = _peer(word.text), word.text.rsplit(".", 1)[1], words[place + 1 :]
        elif file is not None and not word.text.startswith("-") and "=" not in word.text:
            peer, program, rest = _peer(file[1]), file[2], words[place + 1 :]
        else:
            continue
        return TrainingCommand(
            peer, program, tuple(rest), _number(words[:place], _DEVICES), _number(words[:place], _NODES)
        )
    return None


def _peer(module: str) -> str:
    return "openrlhf" if module.startswith("openrlhf") else "verl"


def _string_command(words: Sequence[Word]) -> Script | None:
    """`bash -c "..."` and `eval "..."`: the string is a script itself. Its variables are filled in already."""
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
    """A command that begins as an override or a flag: the line before it lacks its backslash."""
    first = words[0].text
    return bool(re.match(r"^--?[A-Za-z]", first)) or bool(re.match(r"^[+~]{0,2}[a-z_]\w*(\.\w+)+=", first))
