"""What a source is, by what is in it rather than by its name, and which file of a folder is meant."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.parity.compare.logs import (
    deepspeed,
    llamafactory,
    megatron,
    mindspeed_rl,
    msprobe,
    openrlhf,
    swanlab,
    swift,
    table,
    tensorboard,
    tensorboard_csv,
    trainer_state,
    verl,
    wandb,
)
from lockstep.parity.compare.logs.curves import Points
from lockstep.parity.compare.logs.kinds import (
    DEEPSPEED,
    LLAMA_FACTORY,
    MEGATRON,
    MINDSPEED_RL,
    MSPROBE,
    OPENRLHF,
    RECORDING,
    RUN,
    SWANLAB,
    SWIFT,
    TENSORBOARD_CSV,
    TRAINER_STATE,
    VERL_CONSOLE,
    VERL_FILE,
)
from lockstep.parity.compare.logs.run_folder import is_run_folder, ranks_of, recorded_points, refuse_lost_metrics
from lockstep.parity.compare.logs.run_folder import points as run_points
from lockstep.parity.compare.logs.text import decoded, lines

LOOKED_FOR = (
    "looked for: a run folder (recipe.yaml, metrics.jsonl), a recording (tape.json), the console output of verl (or "
    "its file logger), OpenRLHF, Megatron, MindSpeed or DeepSpeed, a trainer_state.json, LLaMA-Factory's "
    "trainer_log.jsonl, ms-swift's logging.jsonl, a tensorboard event file or its csv export, a .wandb or .swanlab "
    "file, msprobe's dump.json or csv, and csv or JSON lines with a column step, global_step, train/global_step, "
    "training/global_step, Step or _step"
)
_TEXT = (".jsonl", ".json", ".csv", ".tsv", ".log", ".txt", ".out")
_EVENTS = "tfevents"
# A log of JSON lines may begin with some that are no steps, such as the settings of the run.
_HEAD = 20


@dataclass(frozen=True)
class FoundLog:
    """A log whose format is known."""

    path: Path
    kind: str
    read: Callable[[], Points]


def find(source: str) -> FoundLog:
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


def _in_folder(path: Path) -> FoundLog | None:
    if is_run_folder(path):
        return FoundLog(path, RUN, partial(run_points, path))
    if ranks_of(path):
        return FoundLog(path, RECORDING, partial(recorded_points, path))
    refuse_lost_metrics(path)
    if probed := msprobe.files_of(path):
        return FoundLog(path, MSPROBE, partial(msprobe.points, probed))
    candidates = _of_one_run(path, _candidates(path))
    if len(candidates) > 1:
        names = ", ".join(str(found.path.relative_to(path)) for found in candidates)
        raise Refusal.at(path, f"holds {len(candidates)} logs: {names}", "name one of them")
    return candidates[0] if candidates else None


def _of_one_run(path: Path, candidates: list[FoundLog]) -> list[FoundLog]:
    """A trainer's states and the lines that it wrote beside them are one log: the state that holds the whole run, else
    the lines, which go on behind the last checkpoint, else the last checkpoint's state."""
    written = [found for found in candidates if found.kind in (LLAMA_FACTORY, SWIFT) and found.path.parent == path]
    states = [found for found in candidates if found.path.name == trainer_state.FILE]
    if len(written) > 1 or len(written) + len(states) != len(candidates):
        return candidates
    state = trainer_state.newest([found.path for found in states])
    if state is None or (written and state.parent != path):
        return written if written and (state is not None or not states) else candidates
    return [found for found in states if found.path == state]


def _candidates(path: Path) -> list[FoundLog]:
    """The logs in a folder and in the folders right in it. One that is linked to from elsewhere in it counts once."""
    seen: set[Path] = set()
    candidates = []
    for folder in (path, *sorted(inner for inner in path.iterdir() if inner.is_dir())):
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        if folder != path and is_run_folder(folder):
            candidates.append(FoundLog(folder, RUN, partial(run_points, folder)))
            continue
        files = sorted(file for file in folder.iterdir() if file.is_file())
        if any(_EVENTS in file.name for file in files):
            candidates.append(FoundLog(folder, "tensorboard", partial(tensorboard.points, folder)))
        for file in files:
            if _EVENTS not in file.name and file.suffix in (*_TEXT, ".wandb", ".swanlab"):
                found = _file(file)
                if found is not None and file.resolve() not in seen:
                    seen.add(file.resolve())
                    candidates.append(found)
    return candidates


def _file(path: Path) -> FoundLog | None:
    file = str(path)
    if path.name == "metrics.jsonl" and is_run_folder(path.parent):
        return FoundLog(path.parent, RUN, partial(run_points, path.parent))
    if _EVENTS in path.name:
        return FoundLog(path, "tensorboard", partial(tensorboard.points, path))
    content = path.read_bytes()
    if content.startswith(wandb.MAGIC):
        return FoundLog(path, "wandb", lambda: table.points(file, wandb.rows(file, content)))
    if content.startswith(swanlab.MAGIC):
        return FoundLog(path, SWANLAB, partial(swanlab.points, file, content))
    text = decoded(content)
    return None if text is None else next(claims(path, text), None)


def claims(path: Path, text: str) -> Iterator[FoundLog]:
    """Every reader that knows the text for its own, one at a time: to ask for the first is enough."""
    yield from _json(path, text)
    yield from _csv(path, text)
    yield from _console(path, text)


def _json(path: Path, text: str) -> Iterator[FoundLog]:
    file = str(path)
    if text.lstrip()[:1] not in ("{", "["):
        return
    first = [row for line in islice(io.StringIO(text), _HEAD) if isinstance(row := _parsed(line), dict)]
    # A line that holds a whole history is the state of a trainer, or stands at the end of a log that has it already.
    rows = [row for row in first if trainer_state.HISTORY not in row]
    found = []
    if any("step" in row and isinstance(row.get("data"), dict) for row in rows):
        found.append(FoundLog(path, VERL_FILE, lambda: table.verl_points(file, table.json_lines(file, text))))
    if any(llamafactory.is_row(row) for row in rows):
        found.append(FoundLog(path, LLAMA_FACTORY, lambda: llamafactory.points(file, table.json_lines(file, text))))
    if any(swift.is_row(row) for row in rows):
        found.append(FoundLog(path, SWIFT, lambda: swift.points(file, table.json_lines(file, text))))
    if not found and any(table.has_step(row) for row in rows):
        kind = "wandb" if any(table.COUNT in row for row in rows) else "jsonl"
        found.append(FoundLog(path, kind, lambda: table.points(file, table.json_lines(file, text))))
    yield from found or _whole_json(path, text)


def _whole_json(path: Path, text: str) -> Iterator[FoundLog]:
    """One value, on one line or on many."""
    file = str(path)
    try:
        whole = json.loads(text)
    except RecursionError:
        return
    except ValueError as error:
        if f'"{trainer_state.HISTORY}"' in text:
            yield FoundLog(path, TRAINER_STATE, partial(trainer_state.cut_short, file, error))
        return
    if isinstance(whole, dict) and trainer_state.HISTORY in whole:
        yield FoundLog(path, TRAINER_STATE, lambda: trainer_state.points(file, whole))
    if msprobe.is_dump(whole):
        yield FoundLog(path, MSPROBE, lambda: msprobe.points([path]))
    listed: Sequence[Any] = whole if isinstance(whole, list) else []
    if listed and all(isinstance(row, dict) for row in listed) and any(table.has_step(row) for row in listed):
        kind = "wandb" if any(table.COUNT in row for row in listed) else "json"
        yield FoundLog(path, kind, lambda: table.points(file, iter(enumerate(listed, start=1))))


def _csv(path: Path, text: str) -> Iterator[FoundLog]:
    file, header = str(path), text.partition("\n")[0].rstrip("\r")
    try:
        cells = next(csv.reader([header], delimiter=table.delimiter(text)), [])
    except csv.Error:
        return
    names = [cell.strip() for cell in cells]
    if msprobe.is_header(names):
        yield FoundLog(path, MSPROBE, lambda: msprobe.points([path]))
    elif tensorboard_csv.is_header(names):
        yield FoundLog(path, TENSORBOARD_CSV, lambda: tensorboard_csv.points(file, text))
    elif len(names) > 1 and table.has_step(names):
        kind = "wandb" if table.COUNT in names else "csv"
        yield FoundLog(path, kind, lambda: table.points(file, table.csv_rows(file, text)))


def _console(path: Path, text: str) -> Iterator[FoundLog]:
    file, listed = str(path), list(lines(text))
    for kind, points in (
        (VERL_CONSOLE, lambda: verl.points(listed)),
        (OPENRLHF, lambda: openrlhf.points(listed)),
        (MEGATRON, lambda: megatron.points(file, text)),
        (MINDSPEED_RL, lambda: mindspeed_rl.points(file, text)),
        # Last: Megatron prints its own lines between those of DeepSpeed, which have no loss.
        (DEEPSPEED, lambda: deepspeed.points(listed)),
    ):
        found = points()
        if found:
            yield FoundLog(path, kind, partial(_same, found))


def _same(points: Points) -> Points:
    return points


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
