"""The report: a table of 80 columns on a terminal, plain lines elsewhere, or JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from lockstep.doctor.finding import Verdict
from lockstep.doctor.rows import Row

WIDTH = 80
MARKS: dict[Verdict, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "absent": ("–", "dim"),
    "warning": ("!", "yellow"),
    "broken": ("✗", "red"),
}


@dataclass(frozen=True)
class Report:
    device: str
    why: str
    rows: Sequence[Row]

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def healthy(self) -> bool:
        return self.count("broken") == 0

    def verdict(self) -> str:
        broken, warnings = self.count("broken"), self.count("warning")
        state = "nothing broken" if self.healthy else f"{broken} broken"
        return f"device {self.device} ({self.why}): {state}, {warnings} warning{'s' if warnings != 1 else ''}"


def as_json(report: Report) -> str:
    rows = [
        {
            "group": row.group,
            "name": row.name,
            "value": row.value,
            "verdict": row.verdict,
            "findings": [
                {"verdict": finding.verdict, "why": finding.why, "remedy": finding.remedy} for finding in row.findings
            ],
        }
        for row in report.rows
    ]
    broken, warnings = report.count("broken"), report.count("warning")
    head = {"device": report.device, "why": report.why, "broken": broken, "warnings": warnings}
    return json.dumps({**head, "rows": rows}, indent=2, ensure_ascii=False)


def show(report: Report) -> None:
    if sys.stdout.isatty():
        _show_table(report)
    else:
        print("\n".join(plain_lines(report)))


def plain_lines(report: Report) -> Iterator[str]:
    """One line a fact and one a finding, never wrapped, so that they can be searched."""
    width = max(len(row.name) for row in report.rows)
    for row in report.rows:
        yield f"{row.verdict:8} {row.name:{width}}  {row.value or 'absent'}"
        for finding in row.findings:
            yield f"{finding.verdict:8} {row.name}: {finding.why} -> {finding.remedy}"
    yield report.verdict()


def _show_table(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for line in table_lines(report, min(console.width, WIDTH)):
        # Soft: a word too long for the line (a path) must stay one word to whoever copies it.
        console.print(line, soft_wrap=True)


def table_lines(report: Report, width: int) -> Iterator[Text]:
    names = min(max(len(row.name) for row in report.rows), 20)
    for place, row in enumerate(report.rows):
        if place == 0 or report.rows[place - 1].group != row.group:
            yield Text(row.group, style="bold")
        yield from _row_lines(row, names, width)
    for row in report.rows:
        for finding in row.findings:
            yield Text()
            yield from _marked(*MARKS[finding.verdict], f"{row.name}: {finding.why}", width)
            yield from _marked("  ->", "cyan", finding.remedy, width)
    yield Text()
    for line in _wrapped(report.verdict(), width):
        yield Text(line, style="bold green" if report.healthy else "bold red")


def _row_lines(row: Row, names: int, width: int) -> Iterator[Text]:
    mark, style = MARKS[row.verdict]
    name = row.name
    if len(name) > names:  # a name too long for its column has a line for itself
        yield Text.assemble((f"  {mark} ", style), name)
        mark, name = " ", ""
    for line in _wrapped(row.value or "absent", width - names - 6):
        yield Text.assemble((f"  {mark} ", style), f"{name:{names}}  ", (line, "" if row.value else "dim"))
        mark, name = " ", ""


def _marked(mark: str, style: str, text: str, width: int) -> Iterator[Text]:
    for place, line in enumerate(_wrapped(text, width - len(mark) - 1)):
        yield Text.assemble((mark if place == 0 else " " * len(mark), style), f" {line}")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
