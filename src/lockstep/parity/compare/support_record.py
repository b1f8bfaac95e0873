"""Records a comparison as a row of the support table (docs/support.md) and as a JSON file with its curves."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lockstep.errors import Refusal
from lockstep.parity.compare.compare_report import curve, strict
from lockstep.parity.compare.comparison import Comparison, Metric
from lockstep.run.files import replace_text

MAX_STEPS = 2_000
STORED_DIGITS = 7
UNKNOWN = "unknown"

# Matches the folders of an absolute path, without its last component. The pattern does not match slashes in metric
# names, fractions and web addresses.
_FOLDERS = re.compile(r"(?<![\w./:~-])~?(?:/[^\s/:;,()'\"]+)*/(?=[^\s/])")
_PATH = re.compile(r"(?:~?/|[A-Za-z]:[\\/]).*")

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

Each row is one `lockstep compare A B --record`: run B compared with run A, with the same algorithm on the same model.
The mean error is the mean of |A - B| over the common steps, times 100: an absolute difference, written as a percentage.
The scaled error divides the sum of |A - B| by the sum of |A|. The throughput ratio is B's tokens per second divided
by A's. The columns hardware and versions have the values of A and of B. The verdict *in step* means that the error is
within the bar (the allowed error), that no significant drift over all steps exceeds half of the bar, and that no
significant difference over a part of the run exceeds the bar. The verdict is the worse result of the bar and the
statistical test of `lockstep compare`. A pair with any other verdict also has a row with its numbers. The evidence file
of a row contains its error metrics and curves. The command writes the rows. Recording the same pair again replaces its
row.
"""


def record(comparison: Comparison, support: Path, evidence: Path) -> str:
    """Writes a row to the table `support` and the comparison to a JSON file in the folder `evidence`. Returns a message
    for the user."""
    for fact in ("method", "model"):
        if _shared(comparison, fact) == UNKNOWN:
            remedy = "at least one of A and B must be a run folder"
            raise Refusal.at(
                "--record",
                f"the {fact} of A and of B is unknown, so the row would be empty",
                remedy,
                code="missing-input",
            )
    table = read_table(support)
    file = evidence / f"{slug(comparison)}.json"
    row = row_of(comparison, quote(Path(os.path.relpath(file, support.parent)).as_posix()))
    replaced = any(each.evidence == row.evidence for each in table.rows)
    # The JSON file is written first, so that a row of the table never links to a missing file.
    _write(file, json.dumps(evidence_of(comparison), allow_nan=False, separators=(",", ":")) + "\n")
    _write(support, table.with_row(row).text())
    return f"{'replaced' if replaced else 'added'} a row of {support} ({row.verdict}), evidence in {file}"


def row_of(comparison: Comparison, evidence: str) -> SupportRow:
    judged = [metric for metric in comparison.metrics if metric.verdict is not None]
    return SupportRow(
        algorithm=_shared(comparison, "method"),
        model=_shared(comparison, "model"),
        error="; ".join(map(_error, judged)) or "not judged",
        throughput=_throughput(comparison),
        hardware=" vs ".join(_machines(comparison)),
        versions=_both(comparison, "versions"),
        verdict=comparison.verdict,
        evidence=evidence,
    )


def slug(comparison: Comparison) -> str:
    """Returns a file name made of algorithm, model and dtypes, and a digest that includes the hardware. The same pair
    always gets the same name."""
    trained = (_shared(comparison, "method"), _shared(comparison, "model"))
    readable = " ".join([*trained, *_pair(comparison, "dtype")]).lower()
    # The digest distinguishes pairs whose readable names are equal because special characters are dropped.
    digest = hashlib.sha256(json.dumps([*trained, *_machines(comparison)]).encode()).hexdigest()[:8]
    return f"{'-'.join(re.findall('[a-z0-9]+', readable))[:60]}-{digest}"


def evidence_of(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison as strict JSON values. Long curves are reduced to every n-th step, and paths to their last
    component."""
    bare = [replace(metric, steps=[], a=[], b=[], repeats=[]) for metric in comparison.metrics]
    data: dict[str, Any] = strict(replace(comparison, metrics=bare).as_json())
    for metric, values in zip(comparison.metrics, data["metrics"], strict=True):
        values |= _thinned(metric)
    names = {source: _name(source) for source in (comparison.a, comparison.b)}
    for difference in data["differences"]:
        difference |= {letter: _name_of_path(difference[letter]) for letter in ("a", "b")}
    for part in ("reason", "throughput", "differences", "unknown", "facts"):
        data[part] = _without_folders(data[part], names)
    # Prompts and responses stay unchanged. In a sample, only `origin` is a path.
    for sample in (sample for pair in data["samples"] for sample in pair if sample is not None and "origin" in sample):
        sample["origin"] = _name_of_path(sample["origin"])
    return {**data, "a": names[comparison.a], "b": names[comparison.b]}


def _thinned(metric: Metric) -> dict[str, Any]:
    """Returns the curves at every n-th common step and the last step: at most MAX_STEPS + 1 points."""
    every = max(1, -(-len(metric.steps) // MAX_STEPS))
    kept = list(range(0, len(metric.steps), every))
    if kept and kept[-1] != len(metric.steps) - 1:
        kept.append(len(metric.steps) - 1)
    a, b, *repeats = (
        curve([values[index] for index in kept], STORED_DIGITS) for values in (metric.a, metric.b, *metric.repeats)
    )
    return {"every": every, "steps": [metric.steps[index] for index in kept], "a": a, "b": b, "repeats": repeats}


def _error(metric: Metric) -> str:
    figures = metric.figures
    scaled = "" if figures.scaled_error_percent is None else f", scaled {figures.scaled_error_percent:.3g} %"
    met = f" {metric.bar_result}" if metric.bar_result else ""
    bar = "" if metric.bar_percent is None else f", bar {metric.bar_percent:g} %{met}"
    return f"{metric.name} {figures.mean_error_percent:.3g} %{scaled}{bar}"


def _throughput(comparison: Comparison) -> str:
    ratio, matched = comparison.throughput.ratio, comparison.throughput.matched_ratio
    if ratio is None and matched is None:
        return UNKNOWN
    at_equal_lengths = "" if matched is None else f"{matched:.3g} at equal lengths"
    return ", ".join(part for part in ("" if ratio is None else f"{ratio:.3g}", at_equal_lengths) if part)


def _machines(comparison: Comparison) -> tuple[str, str]:
    """Returns two texts: the hardware and dtype of A, and those of B."""
    pairs = (_pair(comparison, "hardware"), _pair(comparison, "dtype"))
    a, b = (", ".join(side) for side in zip(*pairs, strict=True))
    return a, b


def _shared(comparison: Comparison, fact: str) -> str:
    """Returns a property that A and B should share, or `A vs B` if it differs. If the property is unknown for one run,
    the value of the other run is returned."""
    a, b = _pair(comparison, fact)
    values = [value for value in (a, b) if value != UNKNOWN]
    return " vs ".join(dict.fromkeys(values)) or UNKNOWN


def _both(comparison: Comparison, fact: str) -> str:
    a, b = _pair(comparison, fact)
    return a if a == b else f"A: {a}; B: {b}"


def _pair(comparison: Comparison, fact: str) -> tuple[str, str]:
    a, b = comparison.facts.get(fact, (None, None))
    return _words(a), _words(b)


def _words(value: Any) -> str:
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value))
    return _FOLDERS.sub("", str(value))


def _without_folders(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item, names) for item in value]
    if not isinstance(value, str):
        return value
    for source, name in names.items():
        value = value.replace(source, name)
    return _FOLDERS.sub("", value)


def _name_of_path(value: Any) -> Any:
    """Returns the last component of a path. A value that is not a path is returned unchanged."""
    if isinstance(value, list):
        return [_name_of_path(item) for item in value]
    return _name(value) if isinstance(value, str) and _PATH.fullmatch(value) else value


def _name(source: str) -> str:
    return re.split(r"[\\/]", source.rstrip("\\/"))[-1] or source


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise Refusal.at(
            path, f"cannot be written: {error.strerror}", "give another path with --support", code="unwritable"
        ) from error


# The table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SupportRow:
    """One row of the support table with its cells as text. `evidence` is the path of the JSON file relative to the
    table, and identifies the row."""

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
    """Reads the support table of the file. If there is no file, returns an empty table with the standard
    introduction."""
    if not path.exists():
        return SupportTable(f"{INTRODUCTION}\n", [], "")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise Refusal.at(path, "is not UTF-8 text", "give another file with --support", code="unreadable") from error
    if HEADER not in lines:
        remedy = f"put back the heading `{HEADER}`, or give another file with --support"
        raise Refusal.at(path, "contains no support table", remedy, code="unsupported-format")
    top = lines.index(HEADER)
    if lines[top + 1 : top + 2] != [RULE]:
        raise _damaged(path, top + 2, f"the line below the heading must be `{RULE}`")
    end = next((at for at in range(top + 2, len(lines)) if not lines[at].strip()), len(lines))
    for at in range(end, len(lines)):
        if lines[at].startswith("|"):
            raise _damaged(path, at + 1, "a row after the end of the table: remove the empty line before it")
    rows = [_row(path, at + 1, lines[at]) for at in range(top + 2, end)]
    _refuse_duplicates(path, top + 3, rows)
    return SupportTable(_text(lines[:top]), rows, _text(lines[end:]))


def _row(path: Path, number: int, line: str) -> SupportRow:
    if not (line.startswith("| ") and line.endswith(" |")):
        raise _damaged(path, number, "a row must begin with `| ` and end with ` |`")
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    if len(cells) != len(COLUMNS):
        raise _damaged(path, number, f"has {len(cells)} cells, and the table has {len(COLUMNS)} columns")
    link = re.fullmatch(r"\[json\]\(([^)\s]+\.json)\)", cells[-1])
    if link is None:
        raise _damaged(path, number, f"its last cell (evidence) is `{cells[-1]}` instead of a link `[json](FILE.json)`")
    return SupportRow(*(cell.replace("\\|", "|") for cell in [*cells[:-1], link[1]]))


def _refuse_duplicates(path: Path, first: int, rows: list[SupportRow]) -> None:
    seen: dict[str, int] = {}
    for number, row in enumerate(rows, start=first):
        if row.evidence in seen:
            raise _damaged(path, number, f"links to the same JSON file as line {seen[row.evidence]}")
        seen[row.evidence] = number


def _damaged(path: Path, line: int, why: str) -> Refusal:
    return Refusal.at(f"{path}, line {line}", why, "repair or remove the line, and record again", code="damaged-file")


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _order(row: SupportRow) -> tuple[str, ...]:
    return tuple(cell.casefold() for cell in (row.algorithm, row.model, row.hardware, row.evidence))
