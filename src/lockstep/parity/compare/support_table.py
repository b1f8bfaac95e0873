"""Reads and writes the table of docs/support.md: replaces or adds one row and keeps the surrounding text."""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from pathlib import Path

from lockstep.errors import Refusal

COLUMNS = (
    "algorithm",
    "model",
    "loss or reward mean error",
    "throughput ratio",
    "hardware",
    "versions",
    "verdict",
    "evidence",
)
HEADER = f"| {' | '.join(COLUMNS)} |"
RULE = "|" + "---|" * len(COLUMNS)

INTRODUCTION = """# Support: which pairs train in step

Each row is one `lockstep compare A B --record`: two runs of the same algorithm on the same model. The mean error is the
mean of |A - B| over the common steps, times 100: an absolute difference, written as a percentage. The scaled error is
the sum of |A - B| divided by the sum of |A|. The throughput ratio is B's tokens per second divided by A's. Hardware and
versions are those of A and B. *In step* means that the bar is met and that no difference beyond noise is large relative
to it. The verdict is the worse result of the bar and the statistical test. Pairs that are out of step or undecided keep
their rows. The evidence file contains the figures and curves of a row. The command writes the rows; recording the same
pair again replaces its row.
"""


@dataclass(frozen=True)
class SupportRow:
    """The cells as text. `evidence` is the file's path relative to the table's folder, and the key of the row."""

    algorithm: str
    model: str
    error: str
    throughput: str
    hardware: str
    versions: str
    verdict: str
    evidence: str

    def line(self) -> str:
        *cells, evidence = map(_escaped, astuple(self))
        return f"| {' | '.join([*cells, f'[json]({evidence})'])} |"


@dataclass(frozen=True)
class SupportTable:
    before: str
    rows: list[SupportRow]
    after: str

    def with_row(self, row: SupportRow) -> SupportTable:
        others = [each for each in self.rows if each.evidence != row.evidence]
        return SupportTable(self.before, sorted([*others, row], key=_order), self.after)

    def text(self) -> str:
        table = "\n".join([HEADER, RULE, *(row.line() for row in self.rows)])
        return f"{self.before}{table}\n{self.after}"


def read_table(path: Path) -> SupportTable:
    """The table of the file, or an empty table with the introduction if there is no file."""
    if not path.exists():
        return SupportTable(f"{INTRODUCTION}\n", [], "")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise Refusal.at(path, "is not UTF-8 text", "name another file with --support") from error
    if HEADER not in lines:
        remedy = f"put back the heading `{HEADER}`, or name another file with --support"
        raise Refusal.at(path, "holds no support table", remedy)
    top = lines.index(HEADER)
    if lines[top + 1 : top + 2] != [RULE]:
        raise _damaged(path, top + 2, f"below the heading, expected `{RULE}`")
    end = next((at for at in range(top + 2, len(lines)) if not lines[at].strip()), len(lines))
    for at in range(end, len(lines)):
        if lines[at].startswith("|"):
            raise _damaged(path, at + 1, "a row after the end of the table: the table ends at the first empty line")
    rows = [_row(path, at + 1, lines[at]) for at in range(top + 2, end)]
    _refuse_twins(path, top + 3, rows)
    return SupportTable(_joined(lines[:top]), rows, _joined(lines[end:]))


def _row(path: Path, number: int, line: str) -> SupportRow:
    if not (line.startswith("| ") and line.endswith(" |")):
        raise _damaged(path, number, "not a row of the table")
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    if len(cells) != len(COLUMNS):
        raise _damaged(path, number, f"has {len(cells)} cells, and the table has {len(COLUMNS)} columns")
    link = re.fullmatch(r"\[json\]\(([^)\s]+\.json)\)", cells[-1])
    if link is None:
        raise _damaged(path, number, f"its evidence is `{cells[-1]}`, and not a link `[json](....json)`")
    return SupportRow(*(cell.replace("\\|", "|") for cell in [*cells[:-1], link[1]]))


def _refuse_twins(path: Path, first: int, rows: list[SupportRow]) -> None:
    seen: dict[str, int] = {}
    for number, row in enumerate(rows, start=first):
        if row.evidence in seen:
            raise _damaged(path, number, f"has the evidence of line {seen[row.evidence]}")
        seen[row.evidence] = number


def _damaged(path: Path, line: int, why: str) -> Refusal:
    return Refusal.at(f"{path}, line {line}", why, "repair or remove the line, and record again")


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _order(row: SupportRow) -> tuple[str, ...]:
    return tuple(cell.casefold() for cell in (row.algorithm, row.model, row.hardware, row.evidence))
