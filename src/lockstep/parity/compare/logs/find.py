"""What a source is, by what is in it rather than by its name, and which file of a folder is meant."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.parity.compare.logs import deepspeed, openrlhf, table, tensorboard, trainer_state, verl, wandb
from lockstep.parity.compare.logs.curves import Points
from lockstep.parity.compare.logs.run_folder import is_run_folder, refuse_lost_metrics
from lockstep.parity.compare.logs.run_folder import points as run_points
from lockstep.parity.compare.logs.text import lines

RUN, VERL_CONSOLE, VERL_FILE = "lockstep run", "verl console", "verl file logger"
OWN_NAMES = (RUN, VERL_CONSOLE, VERL_FILE)
LOOKED_FOR = (
    "looked for: a run folder (recipe.yaml, metrics.jsonl), verl's console output or file logger, OpenRLHF's or "
    "DeepSpeed's console output, a trainer_state.json, a tensorboard event file, a .wandb file, and csv or JSON lines "
    "with a column step, global_step, train/global_step, training/global_step, Step or _step"
)
_TEXT = (".jsonl", ".json", ".csv", ".tsv", ".log", ".txt", ".out")
_EVENTS = "tfevents"
# A log of JSON lines may begin with some that are no steps, such as the settings of the run.
_HEAD = 20


@dataclass(frozen=True)
class Found:
    """A log whose format is known."""

    path: Path
    kind: str
    read: Callable[[], Points]


def find(source: str) -> Found:
    path = Path(source)
    if not path.exists():
        raise Refusal.at(source, "no such file or folder", "name a run folder, or a log file")
    try:
        found = _in_folder(path) if path.is_dir() else _file(path)
    except OSError as error:
        raise Refusal.at(source, f"cannot be read: {error.strerror}", "look at its permissions") from None
    if found is None:
        raise Refusal.at(source, "no log that is known here", LOOKED_FOR)
    return found


def _in_folder(path: Path) -> Found | None:
    if is_run_folder(path):
        return Found(path, RUN, partial(run_points, path))
    refuse_lost_metrics(path)
    candidates = _candidates(path)
    state = trainer_state.newest([found.path for found in candidates])
    if state is not None:
        candidates = [found for found in candidates if found.path == state]
    if len(candidates) > 1:
        names = ", ".join(str(found.path.relative_to(path)) for found in candidates)
        raise Refusal.at(str(path), f"holds {len(candidates)} logs: {names}", "name one of them")
    return candidates[0] if candidates else None


def _candidates(path: Path) -> list[Found]:
    """The logs in a folder and in the folders right in it. One that is linked to from elsewhere in it counts once."""
    seen: set[Path] = set()
    candidates = []
    for place in (path, *sorted(inner for inner in path.iterdir() if inner.is_dir())):
        if place.resolve() in seen:
            continue
        seen.add(place.resolve())
        if place != path and is_run_folder(place):
            candidates.append(Found(place, RUN, partial(run_points, place)))
            continue
        files = sorted(file for file in place.iterdir() if file.is_file())
        if any(_EVENTS in file.name for file in files):
            candidates.append(Found(place, "tensorboard", partial(tensorboard.points, place)))
        for file in files:
            if _EVENTS not in file.name and (file.suffix in _TEXT or file.suffix == ".wandb"):
                found = _file(file)
                if found is not None and file.resolve() not in seen:
                    seen.add(file.resolve())
                    candidates.append(found)
    return candidates


def _file(path: Path) -> Found | None:
    file = str(path)
    if path.name == "metrics.jsonl" and is_run_folder(path.parent):
        return Found(path.parent, RUN, partial(run_points, path.parent))
    if _EVENTS in path.name:
        return Found(path, "tensorboard", partial(tensorboard.points, path))
    content = path.read_bytes()
    if content.startswith(wandb.MAGIC):
        return Found(path, "wandb", lambda: table.points(file, wandb.rows(file, content)))
    if b"\0" in content[:4096]:
        return None
    text = content.decode("utf-8", errors="replace").removeprefix("\ufeff")
    return _json(path, text) or _csv(path, text) or _console(path, text)


def _json(path: Path, text: str) -> Found | None:
    file = str(path)
    if text.lstrip()[:1] not in ("{", "["):
        return None
    first = [row for line in islice(io.StringIO(text), _HEAD) if isinstance(row := _parsed(line), dict)]
    if any("step" in row and isinstance(row.get("data"), dict) for row in first):
        return Found(path, VERL_FILE, lambda: table.verl_points(file, table.json_lines(file, text)))
    if any(table.has_step(row) for row in first):
        kind = "wandb" if any(table.COUNT in row for row in first) else "jsonl"
        return Found(path, kind, lambda: table.points(file, table.json_lines(file, text)))
    whole = _parsed(text)
    if isinstance(whole, dict) and "log_history" in whole:
        return Found(path, "transformers trainer state", lambda: trainer_state.points(file, whole))
    rows = whole if isinstance(whole, list) else []
    if rows and all(isinstance(row, dict) for row in rows) and any(table.has_step(row) for row in rows):
        kind = "wandb" if any(table.COUNT in row for row in rows) else "json"
        return Found(path, kind, lambda: table.points(file, iter(enumerate(rows, start=1))))
    return None


def _csv(path: Path, text: str) -> Found | None:
    header = text.partition("\n")[0].rstrip("\r")
    try:
        cells = next(csv.reader([header], delimiter=table.delimiter(text)), [])
    except csv.Error:
        return None
    names = [cell.strip() for cell in cells]
    if len(names) < 2 or not table.has_step(names):
        return None
    kind = "wandb" if table.COUNT in names else "csv"
    return Found(path, kind, lambda: table.points(str(path), table.csv_rows(str(path), text)))


def _console(path: Path, text: str) -> Found | None:
    listed = list(lines(text))
    for kind, points in (
        (VERL_CONSOLE, verl.points),
        ("OpenRLHF console", openrlhf.points),
        ("DeepSpeed console", deepspeed.points),
    ):
        found = points(listed)
        if found:
            return Found(path, kind, partial(_same, found))
    return None


def _same(points: Points) -> Points:
    return points


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
