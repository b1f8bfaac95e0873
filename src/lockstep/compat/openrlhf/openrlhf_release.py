"""Finds the release of OpenRLHF that a command is written for, by the stored flags (`tables/openrlhf_flags.json`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from lockstep.compat.command_grammar import is_flag
from lockstep.compat.key_table import FOLDER
from lockstep.errors import Refusal

# The releases with flat flags in the order in which this converter tries them. 0.9 is last, because its flags mean
# something else than those of 0.8: another default precision, and another limit of lengths.
_FLAT = ("0.7.5", "0.8.11", "0.6.4", "0.5.9", "0.9.10")
# The first release with dotted flags.
_DOTTED = "0.10.4"


@cache
def stored_flags() -> dict[str, Any]:
    """Returns the content of `tables/openrlhf_flags.json`: for each program and flag, ranges of versions with the
    default and the kind of the flag."""
    found: dict[str, Any] = json.loads((FOLDER / "openrlhf_flags.json").read_text(encoding="utf-8"))
    return found


@cache
def flags_of_release(program: str, version: str) -> dict[str, tuple[Any, str]]:
    """Returns the flags of a program in one release, with default and kind."""
    order: list[str] = stored_flags()["versions"]
    return {
        flag: (default, kind)
        for flag, spans in stored_flags()["programs"].get(program, {}).items()
        for first, last, (default, kind) in spans
        if order.index(first) <= order.index(version) <= order.index(last)
    }


def find_release(program: str, words: Sequence[str], dotted: bool, version: str | None) -> tuple[str, str]:
    """Returns the release that has all flags of the command, or the most of them, and why it was chosen."""
    order: list[str] = stored_flags()["versions"]
    if version is not None:
        named = [name for name in order if name == version or name.startswith(f"{version}.")]
        if not named:
            remedy = f"use one of {', '.join(order)}"
            raise Refusal.at("--peer-version", f"OpenRLHF {version} is unknown", remedy, code="unknown-name")
        return named[-1], "as --peer-version says"
    split = order.index(_DOTTED)
    known = [name for name in (reversed(order[split:]) if dotted else _FLAT) if flags_of_release(program, name)]
    used = [word.lstrip("-").partition("=")[0] for word in words if is_flag(word)]
    lacks = {name: [flag for flag in used if not _has(flag, flags_of_release(program, name))] for name in known}
    best = min(known, key=lambda name: len(lacks[name]), default=_DOTTED if dotted else _FLAT[0])
    if not known or lacks[best]:
        unknown = ", ".join(f"--{flag}" for flag in lacks.get(best, ()))
        return best, f"no known release has {unknown or 'the program'}; this one fits best"
    if best == known[0]:
        return best, "it has all flags of the command"
    return best, f"it has all flags of the command; OpenRLHF {known[0]} does not have --{lacks[known[0]][0]}"


def _has(flag: str, flags: dict[str, tuple[Any, str]]) -> bool:
    """Returns whether argparse accepts the flag, or a prefix of one."""
    return flag in flags or sum(name.startswith(flag) for name in flags) == 1
