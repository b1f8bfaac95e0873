"""Megatron's console, which MindSpeed-LLM and -MM print too: ` iteration  10/ 100 | lm loss: 1.234000E+00 | ... |`.

Losses are means over the iterations since the line before, all else is of the iteration itself. The first update is 1.

Launchers put the rank before each line (`[default7]:`, `[rank7]:`, `7: `, `[1,7]<stdout>:`), and lines of several ranks
may stand on one. Ranks that print the same are one log; ranks that do not are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.curves import LARGEST_STEP, Points
from lockstep.parity.compare.logs.table import damaged
from lockstep.parity.compare.logs.text import lines, number

# torchrun's --tee, torch's own prefix, srun --label, mpirun --tag-output.
_LABEL = r"(?:\[(?:default|rank) ?(\d{1,6})\]:?|\[\d+,(\d{1,6})\]<std\w+>:?|(?<!\S)(\d{1,6}):(?= ))"
_RANK = re.compile(_LABEL, re.I)
# Where the line of a process begins, also behind another's.
_BEGINS = re.compile(
    rf"(?:{_LABEL}\s*)?\b(?:iteration +\d{{1,18}}/ *\d{{1,18}} *\||validation loss at iteration \d)", re.I
)
# Megatron's last field. What another process printed behind it is not this one's.
_LAST = "number of nan iterations"
_TRAINED = re.compile(r"(?:^|[\s|\]])iteration +(\d{1,18})/ *(\d{1,18}) *\|(.*)$")
_VALIDATED = re.compile(r"(?:^|\s)validation loss at iteration (\d{1,18})( on (validation|test) set)? *\|(.*)$")
# What no iteration is without, in the words of all who print such lines: a value that is no number is damage there.
_MUST = ("loss", "norm", "learning rate")


def points(file: str, text: str) -> Points:
    """Every field with a number; the other output between the lines is passed over."""
    found, ranks = Points(), _Ranks(file)
    for row, line in _apart(text):
        if "iteration" not in line:
            continue
        rank = _RANK.search(line.partition("iteration")[0])
        if trained := _TRAINED.search(line):
            step, fields = int(trained.group(1)), _fields(file, row, line, trained.group(3))
            found.planned = int(trained.group(2))
        elif validated := _VALIDATED.search(line):
            group = "test" if validated.group(3) == "test" else "eval"
            step, told = int(validated.group(1)), _fields(file, row, line, validated.group(4))
            fields = {f"{group}/{name.removesuffix(' value')}": value for name, value in told.items()}
        else:
            continue
        if step <= LARGEST_STEP and ranks.are_new(row, step, fields, rank):
            found.add(step, fields)
    return found


class _Ranks:
    """What each rank said of an iteration: the same once, anything else is refused."""

    def __init__(self, file: str):
        self.file = file
        self.by_step: dict[tuple[int, frozenset[str]], tuple[str, dict[str, float]]] = {}

    def are_new(self, row: int, step: int, fields: dict[str, float], label: re.Match[str] | None) -> bool:
        if label is None:
            return True
        rank = next(number for number in label.groups() if number is not None)
        # Times are every rank's own.
        said = {name: value for name, value in fields.items() if "time" not in name and "throughput" not in name}
        first, before = self.by_step.setdefault((step, frozenset(fields)), (rank, said))
        if rank == first:
            self.by_step[step, frozenset(fields)] = rank, said  # a continued run says a step again
            return True
        for name, value in said.items():
            if before[name] != value and not (before[name] != before[name] and value != value):
                raise Refusal.at(
                    f"{self.file} line {row}",
                    f"ranks {first} and {rank} differ at iteration {step}: {name} {before[name]:g} and {value:g}",
                    f"give the lines of one rank: grep '{label.group().strip()}' {self.file}",
                )
        return False


def _apart(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; where several processes share one, each has its own."""
    for row, line in numbered(text):
        starts = [match.start() for match in _BEGINS.finditer(line)] if line.count("iteration") > 1 else []
        if len(starts) < 2:
            yield row, line
            continue
        for start, end in zip(starts, [*starts[1:], len(line)], strict=True):
            yield row, line[start:end]


def numbered(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a console with their numbers, as an editor counts them; a half one at the end is left out."""
    for row, raw in enumerate(text.split("\n")[:-1], start=1):
        for _, line in lines(raw + "\n"):
            yield row, line


def _fields(file: str, row: int, line: str, text: str) -> dict[str, float]:
    *fields, rest = text.split("|")
    if fields and fields[-1].strip().startswith(_LAST):
        rest = ""
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
