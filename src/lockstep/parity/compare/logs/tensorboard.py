"""tensorboard's event files."""

from __future__ import annotations

import logging
from pathlib import Path

from lockstep.errors import Refusal, missing_extra
from lockstep.parity.compare.logs.curves import LARGEST_STEP, Points


def points(path: Path) -> Points:
    """Every scalar of an event file, or of all those in a folder: a run that was continued has several."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise missing_extra("tensorboard", "track", f"reading {path}") from None
    # 0 keeps every event; the default is a sample of them.
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    # It warns of steps that come again, which in a continued run is as it should be.
    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        events.Reload()
    except Exception as error:  # the package raises whatever its parser did, on a file that is damaged
        raise Refusal.at(path, f"tensorboard cannot read it: {error}", "restore the file") from error
    finally:
        logger.setLevel(level)
    found = Points()
    tags = events.Tags()
    for name in tags["scalars"]:
        for event in events.Scalars(name):
            if abs(event.step) <= LARGEST_STEP:
                found.add(event.step, {name: event.value})
    for name in tags["tensors"]:
        for event in events.Tensors(name):
            value = make_ndarray(event.tensor_proto)
            if value.size == 1 and value.dtype.kind in "fi" and abs(event.step) <= LARGEST_STEP:
                found.add(event.step, {name: float(value.reshape(()))})
    return found
