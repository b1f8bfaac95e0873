"""Readers of training logs, ours and other projects'. `docs/foreign-logs.md` says which. For `parity`."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import Refusal
from lockstep.parity.compare.log import Log
from lockstep.parity.compare.logs import tensorboard_csv
from lockstep.parity.compare.logs.find import find
from lockstep.parity.compare.logs.kinds import OWN_NAMES, RUN, TENSORBOARD_CSV, interval_means
from lockstep.parity.compare.logs.names import aligned, read_names
from lockstep.parity.compare.logs.run_folder import evidence

__all__ = ["read_log", "read_names"]


def read_log(source: str, names: Mapping[str, str] | None = None) -> Log:
    """The curves of a run folder or a log file, under our names; `names` (theirs -> ours) go before the known ones."""
    found = find(source)
    points = found.read()
    if not points:
        raise Refusal.at(found.path, f"read as {found.kind}, it holds no metric", "was the run cut off at once?")
    given = names or {}
    if found.kind == TENSORBOARD_CSV:
        given = tensorboard_csv.named(found.path, given)
    written = aligned(points.names, found.kind in OWN_NAMES, given)
    series = points.series()
    told = evidence(found.path) if found.kind == RUN else None
    return Log(
        source=source,
        kind=found.kind,
        metrics={ours: series[name] for ours, name in written.items()},
        written=written,
        evidence=told,
        means=interval_means(found.kind, written),
        planned=points.planned if told is None else told.planned,
        ambiguous={ours: why for ours, name in written.items() if (why := points.ambiguity(name))},
    )
