"""The table of log formats: how each is recognised, its reader, and which values are means over several steps."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from lockstep.errors import Refusal
from lockstep.parity.compare.logs import binary_logs, console_logs, run_logs, table_logs
from lockstep.parity.compare.logs.log_curves import Points

RUN, RECORDING = "lockstep run", "lockstep recording"
VERL_CONSOLE, VERL_FILE = "verl console", "verl file logger"
OPENRLHF, DEEPSPEED = "OpenRLHF console", "DeepSpeed console"
MEGATRON, MINDSPEED_RL = "Megatron console", "MindSpeed-RL console"
TRAINER_STATE, LLAMA_FACTORY, SWIFT = "transformers trainer state", "LLaMA-Factory log", "ms-swift log"
TENSORBOARD, TENSORBOARD_CSV = "tensorboard", "tensorboard csv"
WANDB, SWANLAB, MSPROBE = "wandb", "SwanLab", "msprobe"

Averaging = Literal["none", "trainer", "megatron"]
"""Which logged values are means over the steps since the previous logged value: none, those of transformers' Trainer,
or those of Megatron."""


@dataclass(frozen=True)
class LogFormat:
    """The properties of a log format. Formats without an entry in FORMATS do not use verl's metric names, and it is
    unknown which of their values are means."""

    averaging: Averaging
    verl_names: bool = False


FORMATS: dict[str, LogFormat] = {
    RUN: LogFormat("none", verl_names=True),
    RECORDING: LogFormat("none"),
    VERL_CONSOLE: LogFormat("none", verl_names=True),
    VERL_FILE: LogFormat("none", verl_names=True),
    OPENRLHF: LogFormat("none"),
    DEEPSPEED: LogFormat("none"),
    MINDSPEED_RL: LogFormat("none"),
    MSPROBE: LogFormat("none"),
    TRAINER_STATE: LogFormat("trainer"),
    LLAMA_FACTORY: LogFormat("trainer"),
    SWIFT: LogFormat("trainer"),
    MEGATRON: LogFormat("megatron"),
}

# Formats with one JSON object per line, which are recognised by the keys of the objects.
ROW_FORMATS: dict[str, table_logs.RowFormat] = {
    VERL_FILE: table_logs.VERL_ROWS,
    LLAMA_FACTORY: table_logs.LLAMA_FACTORY_ROWS,
    SWIFT: table_logs.SWIFT_ROWS,
}
# Binary formats, which are recognised by the first bytes of the file.
BINARY_FORMATS: dict[bytes, tuple[str, Callable[[str, bytes], Points]]] = {
    binary_logs.WANDB_MAGIC: (
        WANDB,
        lambda file, content: table_logs.table_points(file, binary_logs.wandb_rows(file, content)),
    ),
    binary_logs.SWANLAB_MAGIC: (SWANLAB, binary_logs.swanlab_points),
}
# Console formats. A format is recognised if its reader finds metric values. Megatron is tried before DeepSpeed, because
# a log may contain both, and DeepSpeed's lines contain no loss.
CONSOLE_FORMATS: dict[str, Callable[[str, str], Points]] = {
    VERL_CONSOLE: lambda file, text: console_logs.pair_line_points(file, text, console_logs.VERL_LINE),
    OPENRLHF: lambda file, text: console_logs.openrlhf_points(text),
    MEGATRON: console_logs.megatron_points,
    MINDSPEED_RL: lambda file, text: console_logs.pair_line_points(file, text, console_logs.MINDSPEED_RL_LINE),
    DEEPSPEED: lambda file, text: console_logs.deepspeed_points(text),
}

SUPPORTED = (
    "supported: a run folder (recipe.yaml, metrics.jsonl), a recording (tape.json), the console output of verl (or "
    "its file logger), OpenRLHF, Megatron, MindSpeed or DeepSpeed, a trainer_state.json, LLaMA-Factory's "
    "trainer_log.jsonl, ms-swift's logging.jsonl, a tensorboard event file or its csv export, a .wandb or .swanlab "
    "file, msprobe's dump.json or csv, and csv or JSON lines with a column step, global_step, train/global_step, "
    "training/global_step, Step or _step"
)
_TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".log", ".txt", ".out")
_EVENTS = "tfevents"
# The format of JSON lines is determined from this many lines, because the first lines may be the settings of the run.
_HEAD_LINES = 20

# transformers' Trainer logs each metric as the mean since its previous logged value, except for these metrics.
_TRAINER_OF_STEP = {"grad_norm", "learning_rate", "lr", "epoch", "num_tokens", "num_input_tokens_seen", "total_flos"}
_TRAINER_OF_STEP |= {"throughput", "total_tokens", "vram_allocated", "vram_reserved", "memory(GiB)", "MFU"}
_TRAINER_OTHER_GROUPS = ("eval_", "predict_", "train_")
# Megatron logs losses and these metrics as means since the previous logged value.
_MEGATRON_TIMES = ("elapsed time per iteration", "throughput per GPU")


def interval_means(kind: str, written: Mapping[str, str]) -> frozenset[str] | None:
    """Returns lockstep's names of the metrics whose values are means since the previous logged value. Returns None if
    the log format does not specify which values are means."""
    if kind not in FORMATS:
        return None
    averaging = FORMATS[kind].averaging

    def is_mean(name: str) -> bool:
        if averaging == "trainer":
            return name not in _TRAINER_OF_STEP and not name.startswith(_TRAINER_OTHER_GROUPS)
        if averaging == "megatron":
            return name.startswith(_MEGATRON_TIMES) or (
                name.endswith("loss") and not name.startswith(("eval/", "test/"))
            )
        return False

    return frozenset(target for target, name in written.items() if is_mean(name))


@dataclass(frozen=True)
class FoundLog:
    """A log file or folder, its recognised format, and the function that reads it."""

    path: Path
    kind: str
    read: Callable[[], Points]


def find_log(source: str) -> FoundLog:
    path = Path(source)
    if not path.exists():
        raise Refusal.at(
            source, "no such file or folder", "give the path of a run folder or log file", code="no-such-file"
        )
    try:
        found = _in_folder(path) if path.is_dir() else _file(path)
    except OSError as error:
        raise Refusal.at(
            source, f"cannot be read: {error.strerror}", "check its permissions", code="unreadable"
        ) from None
    if found is None:
        raise Refusal.at(source, "not a log of a supported format", SUPPORTED, code="unsupported-format")
    return found


def _in_folder(path: Path) -> FoundLog | None:
    if run_logs.is_run_folder(path):
        return FoundLog(path, RUN, partial(run_logs.run_points, path))
    if run_logs.recording_ranks(path):
        return FoundLog(path, RECORDING, partial(run_logs.recording_points, path))
    run_logs.refuse_lost_metrics(path)
    if probed := table_logs.msprobe_files(path):
        return FoundLog(path, MSPROBE, partial(table_logs.msprobe_points, probed))
    candidates = _one_run(path, _candidates(path))
    if len(candidates) > 1:
        names = ", ".join(str(found.path.relative_to(path)) for found in candidates)
        raise Refusal.at(
            path,
            f"contains {len(candidates)} logs: {names}",
            "give the path of one of these logs",
            code="several-candidates",
        )
    return candidates[0] if candidates else None


def _one_run(path: Path, candidates: list[FoundLog]) -> list[FoundLog]:
    """Selects one log if all candidates (trainer_state.json files and JSON lines) belong to one run. The first choice
    is the trainer_state.json outside the checkpoint folders, because it contains the complete run. The second choice is
    the JSON lines, which continue after the last checkpoint. The last choice is the trainer_state.json of the last
    checkpoint."""
    lines = [found for found in candidates if found.kind in (LLAMA_FACTORY, SWIFT) and found.path.parent == path]
    states = [found for found in candidates if found.path.name == table_logs.STATE_FILE]
    if len(lines) > 1 or len(lines) + len(states) != len(candidates):
        return candidates
    state = table_logs.newest_state([found.path for found in states])
    if state is None or (lines and state.parent != path):
        return lines if lines and (state is not None or not states) else candidates
    return [found for found in states if found.path == state]


def _candidates(path: Path) -> list[FoundLog]:
    """Returns the logs in a folder and in its direct subfolders. A symbolic link to a log that was already found is
    skipped."""
    seen: set[Path] = set()
    candidates = []
    for folder in (path, *sorted(inner for inner in path.iterdir() if inner.is_dir())):
        if folder.resolve() in seen:
            continue
        seen.add(folder.resolve())
        if folder != path and run_logs.is_run_folder(folder):
            candidates.append(FoundLog(folder, RUN, partial(run_logs.run_points, folder)))
            continue
        files = sorted(file for file in folder.iterdir() if file.is_file())
        if any(_EVENTS in file.name for file in files):
            candidates.append(FoundLog(folder, TENSORBOARD, partial(binary_logs.tensorboard_points, folder)))
        for file in files:
            if _EVENTS not in file.name and file.suffix in (*_TEXT_SUFFIXES, ".wandb", ".swanlab"):
                found = _file(file)
                if found is not None and file.resolve() not in seen:
                    seen.add(file.resolve())
                    candidates.append(found)
    return candidates


def _file(path: Path) -> FoundLog | None:
    if path.name == "metrics.jsonl" and run_logs.is_run_folder(path.parent):
        return FoundLog(path.parent, RUN, partial(run_logs.run_points, path.parent))
    if _EVENTS in path.name:
        return FoundLog(path, TENSORBOARD, partial(binary_logs.tensorboard_points, path))
    content = path.read_bytes()
    for magic, (kind, read) in BINARY_FORMATS.items():
        if content.startswith(magic):
            return FoundLog(path, kind, partial(read, str(path), content))
    text = console_logs.decoded(content)
    return None if text is None else next(matching_formats(path, text), None)


def matching_formats(path: Path, text: str) -> Iterator[FoundLog]:
    """Yields every text format that matches the file. The caller uses only the first match, so later formats are not
    tried."""
    yield from _json_formats(path, text)
    yield from _csv_formats(path, text)
    for kind, read in CONSOLE_FORMATS.items():
        if found := read(str(path), text):
            yield FoundLog(path, kind, partial(_read_already, found))


def _read_already(points: Points) -> Points:
    return points


def _json_formats(path: Path, text: str) -> Iterator[FoundLog]:
    file = str(path)
    if text.lstrip()[:1] not in ("{", "["):
        return
    first = [row for line in islice(io.StringIO(text), _HEAD_LINES) if isinstance(row := _parsed(line), dict)]
    # An object with the key `log_history` is a trainer state, or the last line of a log whose earlier lines already
    # contain this history.
    rows = [row for row in first if table_logs.HISTORY not in row]
    found = [
        FoundLog(path, kind, partial(table_logs.row_points, file, text, form))
        for kind, form in ROW_FORMATS.items()
        if any(form.is_row(row) for row in rows)
    ]
    if not found and any(table_logs.has_step(row) for row in rows):
        kind = WANDB if any(table_logs.WANDB_COUNT in row for row in rows) else "jsonl"
        found.append(FoundLog(path, kind, lambda: table_logs.table_points(file, table_logs.json_lines(file, text))))
    yield from found or _json_values(path, text)


def _json_values(path: Path, text: str) -> Iterator[FoundLog]:
    """Yields the matching formats of a file that contains one JSON value, on one line or on many lines."""
    file = str(path)
    try:
        value = json.loads(text)
    except RecursionError:
        return
    except ValueError as error:
        if f'"{table_logs.HISTORY}"' in text:
            yield FoundLog(path, TRAINER_STATE, partial(table_logs.refuse_cut_state, file, error))
        return
    if isinstance(value, dict) and table_logs.HISTORY in value:
        yield FoundLog(path, TRAINER_STATE, lambda: table_logs.trainer_state_points(file, value))
    if table_logs.is_msprobe_dump(value):
        yield FoundLog(path, MSPROBE, lambda: table_logs.msprobe_points([path]))
    rows: Sequence[Any] = value if isinstance(value, list) else []
    if rows and all(isinstance(row, dict) for row in rows) and any(table_logs.has_step(row) for row in rows):
        kind = WANDB if any(table_logs.WANDB_COUNT in row for row in rows) else "json"
        yield FoundLog(path, kind, lambda: table_logs.table_points(file, iter(enumerate(rows, start=1))))


def _csv_formats(path: Path, text: str) -> Iterator[FoundLog]:
    file, header = str(path), text.partition("\n")[0].rstrip("\r")
    try:
        cells = next(csv.reader([header], delimiter=table_logs.delimiter(text)), [])
    except csv.Error:
        return
    names = [cell.strip() for cell in cells]
    if table_logs.is_msprobe_header(names):
        yield FoundLog(path, MSPROBE, lambda: table_logs.msprobe_points([path]))
    elif names == table_logs.TENSORBOARD_HEADER:
        yield FoundLog(path, TENSORBOARD_CSV, lambda: table_logs.tensorboard_csv_points(file, text))
    elif len(names) > 1 and table_logs.has_step(names):
        kind = WANDB if table_logs.WANDB_COUNT in names else "csv"
        yield FoundLog(path, kind, lambda: table_logs.table_points(file, table_logs.csv_rows(file, text)))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
