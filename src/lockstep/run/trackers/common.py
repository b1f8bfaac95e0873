"""What the trackers share: their packages, and their ids for a run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from lockstep.errors import missing_extra
from lockstep.run.files import atomic_write_text
from lockstep.run.folder import RunFolder, read_object
from lockstep.run.metrics import read_metrics


def import_tracker(package: str) -> ModuleType:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # installed and broken: hiding what it misses would send the user the wrong way
        raise missing_extra(package, "track", f"the sink {package}") from error


def tracker_id(folder: RunFolder, tracker: str, resumed_at: int) -> tuple[str, bool]:
    """The run's id at a tracker, and whether it is an earlier one that goes on."""
    known = _known_ids(folder).get(tracker) if resumed_at else None
    return known or uuid.uuid4().hex[:12], known is not None


def remember_id(folder: RunFolder, tracker: str, run_id: str) -> None:
    """Keeps the id in the run folder, for a resume."""
    ids = _known_ids(folder) | {tracker: run_id}
    atomic_write_text(folder.trackers, json.dumps(ids, indent=2) + "\n", private=True)


def earlier_steps(folder: RunFolder, resumed_at: int) -> Iterator[tuple[int, dict[str, float]]]:
    """What a resumed run logged before. A tracker that buffers loses its latest steps when the process is killed."""
    if resumed_at and folder.metrics.exists():
        yield from ((step, metrics) for step, metrics in read_metrics(folder.metrics) if step <= resumed_at)


def _known_ids(folder: RunFolder) -> dict[str, str]:
    if not folder.trackers.exists():
        return {}
    return read_object(folder.trackers, "restore it, or remove it: trackers then begin a new run of theirs")
