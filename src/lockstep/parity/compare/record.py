"""A comparison as a row of the support table, and its evidence as a file beside the table."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lockstep.errors import Refusal
from lockstep.parity.compare.comparison import Comparison, Metric
from lockstep.parity.compare.report import curve, strict
from lockstep.parity.compare.support_table import SupportRow, read_table
from lockstep.run.files import replace_text

MOST_STEPS = 2_000
STORED_DIGITS = 7
UNKNOWN = "unknown"

# The folders of an absolute path, up to the name that is kept. Not the slashes of metrics, fractions and addresses.
_FOLDERS = re.compile(r"(?<![\w./:~-])~?(?:/[^\s/:;,()'\"]+)*/(?=[^\s/])")
_WHOLE_PATH = re.compile(r"(?:~?/|[A-Za-z]:[\\/]).*")


def record(comparison: Comparison, support: Path, evidence: Path) -> str:
    """Writes the row to `support` and the comparison to a file in the folder `evidence`; says in a line what it did."""
    for fact in ("method", "model"):
        if _shared(comparison, fact) == UNKNOWN:
            remedy = "compare with a run folder on at least one side"
            raise Refusal.at("--record", f"neither side tells its {fact}, so the row would say nothing", remedy)
    table = read_table(support)
    file = evidence / f"{slug(comparison)}.json"
    row = row_of(comparison, quote(Path(os.path.relpath(file, support.parent)).as_posix()))
    replaced = any(each.evidence == row.evidence for each in table.rows)
    # The evidence first: a row never points to a file that is not there.
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
    """The same for the same pair: algorithm, model, and hardware and dtype of both sides."""
    trained = (_shared(comparison, "method"), _shared(comparison, "model"))
    readable = " ".join([*trained, *_pair(comparison, "dtype")]).lower()
    # What the readable part leaves out, the hardware and odd characters, still tells pairs apart.
    digest = hashlib.sha256(json.dumps([*trained, *_machines(comparison)]).encode()).hexdigest()[:8]
    return f"{'-'.join(re.findall('[a-z0-9]+', readable))[:60]}-{digest}"


def evidence_of(comparison: Comparison) -> dict[str, Any]:
    """The comparison as strict JSON, with thinned curves and without the folders of anybody's machine."""
    bare = [replace(metric, steps=[], a=[], b=[], repeats=[]) for metric in comparison.metrics]
    data: dict[str, Any] = strict(replace(comparison, metrics=bare).as_json())
    for metric, values in zip(comparison.metrics, data["metrics"], strict=True):
        values |= _thinned(metric)
    names = {source: _name(source) for source in (comparison.a, comparison.b)}
    for difference in data["differences"]:
        difference |= {letter: _name_of_path(difference[letter]) for letter in ("a", "b")}
    for part in ("reason", "throughput", "differences", "unknown", "facts"):
        data[part] = _without_folders(data[part], names)
    # What was asked and answered stays as it was; only where the row came from is a path.
    for sample in (sample for pair in data["samples"] for sample in pair if sample is not None and "origin" in sample):
        sample["origin"] = _name_of_path(sample["origin"])
    return {**data, "a": names[comparison.a], "b": names[comparison.b]}


def _thinned(metric: Metric) -> dict[str, Any]:
    """The curves at every n-th common step and the last, so that they are no more than MOST_STEPS and one."""
    every = max(1, -(-len(metric.steps) // MOST_STEPS))
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
    """Hardware and dtype of each side, as the facts give them."""
    pairs = (_pair(comparison, "hardware"), _pair(comparison, "dtype"))
    a, b = (", ".join(side) for side in zip(*pairs, strict=True))
    return a, b


def _shared(comparison: Comparison, fact: str) -> str:
    """A fact that both sides should share: what differs, or is told by one only, is said."""
    a, b = _pair(comparison, fact)
    told = [value for value in (a, b) if value != UNKNOWN]
    return " vs ".join(dict.fromkeys(told)) or UNKNOWN


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
    """A value that is nothing but a path, also one with spaces in it, by its last name."""
    if isinstance(value, list):
        return [_name_of_path(item) for item in value]
    return _name(value) if isinstance(value, str) and _WHOLE_PATH.fullmatch(value) else value


def _name(source: str) -> str:
    return re.split(r"[\\/]", source.rstrip("\\/"))[-1] or source


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
    except OSError as error:
        raise Refusal.at(path, f"cannot be written: {error.strerror}", "give another path with --support") from error
