"""Readers of training logs of lockstep and other frameworks (listed in docs/foreign-logs.md). Used by `parity`."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.log_curves import Log
from lockstep.parity.compare.logs.log_formats import FORMATS, RUN, TENSORBOARD_CSV, find_log, interval_means
from lockstep.parity.compare.logs.metric_names import map_names, read_names, tensorboard_csv_names
from lockstep.parity.compare.logs.run_logs import read_evidence

__all__ = ["read_log", "read_names"]


def read_log(source: str, names: Mapping[str, str] | None = None) -> Log:
    """Reads the curves of a run folder or log file. `names` maps names in the log to lockstep's metric names and
    overrides the built-in tables."""
    found = find_log(source)
    points = found.read()
    if not points:
        why = f"was read as {found.kind} and contains no metric"
        raise Refusal.at(found.path, why, "did the run stop before its first step?", code="no-steps")
    given = names or {}
    if found.kind == TENSORBOARD_CSV:
        given = tensorboard_csv_names(found.path, given)
    verl_names = found.kind in FORMATS and FORMATS[found.kind].verl_names
    written = map_names(points.names, verl_names, given)
    series = points.series()
    evidence = read_evidence(found.path) if found.kind == RUN else None
    return Log(
        source=source,
        kind=found.kind,
        metrics={target: series[name] for target, name in written.items()},
        written=written,
        evidence=evidence,
        means=interval_means(found.kind, written),
        planned=points.planned if evidence is None else evidence.planned,
        ambiguous={target: why for target, name in written.items() if (why := points.ambiguity(name))},
    )
