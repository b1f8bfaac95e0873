"""Megatron's console, which MindSpeed-LLM and -MM print too: ` iteration  10/ 100 | lm loss: 1.234000E+00 | ... |`.

Losses are means over the iterations since the line before, all else is of the iteration itself. The first update is 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.curves import LARGEST_STEP, Points
from lockstep.parity.compare.logs.table import damaged
from lockstep.parity.compare.logs.text import lines, number

_TRAINED = re.compile(r"(?:^|[\s|\]])iteration +(\d{1,18})/ *(\d{1,18}) *\|(.*)$")
_VALIDATED = re.compile(r"(?:^|\s)validation loss at iteration (\d{1,18})( on (validation|test) set)? *\|(.*)$")
# What no iteration is without, in the words of all who print such lines: a value that is no number is damage there.
_MUST = ("loss", "norm", "learning rate")


def points(file: str, text: str) -> Points:
    """Every field with a number; the other output between the lines is passed over."""
    found = Points()
    for row, line in numbered(text):
        if "iteration" not in line:
            continue
        if trained := _TRAINED.search(line):
            step, fields = int(trained.group(1)), _fields(file, row, line, trained.group(3))
            found.planned = int(trained.group(2))
        elif validated := _VALIDATED.search(line):
            group = "test" if validated.group(3) == "test" else "eval"
            step, told = int(validated.group(1)), _fields(file, row, line, validated.group(4))
            fields = {f"{group}/{name.removesuffix(' value')}": value for name, value in told.items()}
        else:
            continue
        if step <= LARGEST_STEP:
            found.add(step, fields)
    return found


def numbered(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a console with their numbers, as an editor counts them; a half one at the end is left out."""
    for row, raw in enumerate(text.split("\n")[:-1], start=1):
        for _, line in lines(raw + "\n"):
            yield row, line


def _fields(file: str, row: int, line: str, text: str) -> dict[str, float]:
    *fields, rest = text.split("|")
    if rest.strip() or not fields:
        raise _damaged(file, row, line, "line whose last field ends with |")
    found = {}
    for field in fields:
        name, colon, written = (part.strip() for part in field.rpartition(":"))
        # Some print the mean of the last iterations beside the value: 7137.9/7200.1.
        value = number(written.partition("/")[0]) if colon else None
        if value is not None:
            found[name] = value
        elif not colon or name.endswith(_MUST):
            raise _damaged(file, row, line, f"line of numbers, at {field.strip()!r}")
    return found


def _damaged(file: str, row: int, line: str, wanted: str) -> Refusal:
    return damaged(file, row, line.strip(), wanted)
