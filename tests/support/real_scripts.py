"""Settings of training scripts of public projects that use verl or OpenRLHF, and what becomes of them.

The files data/migration/real_*.json hold facts: the keys that a script sets and their values. Values that name files,
hosts, runs or accounts are replaced. `group` is `released` if a release of the peer has the program and all keys,
`own keys` or `own program` if the project patched its copy of the peer. `unset` names variables that the script takes
from its caller; their values are stand-ins. A script with `changes` differs by them from the script before it with the
same program (null: the key is not set).

    python tests/support/real_scripts.py      converts all scripts and writes data/migration/real_outcomes.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.compat.conversion_output import checked
from lockstep.compat.key_table import Conversion
from lockstep.compat.migrate import CONVERTERS
from lockstep.errors import Problem, Refusal

FOLDER = Path(__file__).parents[1] / "data" / "migration"
OUTCOMES = FOLDER / "real_outcomes.json"


@dataclass(frozen=True)
class RealScript:
    """A script of a project: the peer, its program, and the words of the command."""

    name: str
    peer: str
    repository: str
    group: str
    version: str
    program: str
    words: tuple[str, ...]

    def convert(self) -> Conversion:
        return CONVERTERS[self.peer](self.program, self.words, ())


def real_scripts() -> dict[str, RealScript]:
    return {script.name: script for peer in ("verl", "openrlhf") for script in _scripts(peer)}


def _scripts(peer: str) -> Iterator[RealScript]:
    for project in json.loads((FOLDER / f"real_{peer}.json").read_text(encoding="utf-8")):
        settings: dict[str, dict[str, Any]] = {}
        for entry in project["scripts"]:
            own = entry.get("settings")
            if own is None:
                own = {**settings[entry["program"]], **entry["changes"]}
                own = {key: value for key, value in own.items() if value is not None}
            settings[entry["program"]] = own
            words = _overrides(own) if peer == "verl" else _flags(own)
            number = f" command {entry['command']}" if "command" in entry else ""
            yield RealScript(
                name=f"{project['repository']} {entry['path']}{number}",
                peer=peer,
                repository=project["repository"],
                group=entry["group"],
                version=project["version"],
                program=entry["program"],
                words=(*words, *entry.get("words", ())),
            )


def _overrides(settings: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def _flags(settings: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for flag, value in settings.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [flag, *values]
    return words


def problems_of(script: RealScript) -> list[Problem]:
    """Returns the problems for which the script is refused; none if it converts."""
    try:
        checked(script.convert())
    except Refusal as refusal:
        return list(refusal.problems)
    return []


def outcome_of(script: RealScript) -> str:
    """Returns `converted`, or the main reason of the refusal."""
    problems = problems_of(script)
    if not problems:
        return "converted"
    texts = [f"{problem.where} {problem.why}".lower() for problem in problems]
    if script.group == "own program":
        return "own program"
    if any("image" in text for text in texts):
        return "images"
    if any(problem.code == "unknown-key" for problem in problems):
        return "own keys" if script.group == "own keys" else "unknown keys"
    if any("megatron" in text for text in texts):
        return "Megatron"
    return "other settings"


def recorded() -> dict[str, str]:
    outcomes: dict[str, str] = json.loads(OUTCOMES.read_text(encoding="utf-8"))
    return outcomes


if __name__ == "__main__":
    found = {name: outcome_of(script) for name, script in real_scripts().items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(outcome)}" for name, outcome in found.items())
    OUTCOMES.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
