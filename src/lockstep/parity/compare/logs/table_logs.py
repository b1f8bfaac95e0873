"""Readers of logs that are tables with a step column, which are JSON lines, JSON, csv and msprobe's dumps.

The step number is a column such as `global_step`, or a text such as `10/93` (step 10 of 93). The first update is step
1, except in wandb's `_step` and msprobe, which count from 0.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.console_logs import damaged, parse_number
from lockstep.parity.compare.logs.log_curves import LARGEST_STEP, Points, as_step, numbers

# The first of these columns that a row contains is its step number. The column `_step` of wandb is used only if no row
# contains one of these columns, because wandb increments `_step` at each log call.
STEP_COLUMNS = ("training/global_step", "train/global_step", "eval/global_step", "global_step", "step", "Step")
WANDB_COUNT = "_step"
# Columns with the rank or process that wrote the row.
_RANK_COLUMNS = ("rank", "global_rank", "local_rank", "process_index", "process", "worker", "node", "host", "device")
_NO_METRICS = frozenset({*STEP_COLUMNS, *_RANK_COLUMNS, WANDB_COUNT, "_runtime", "_timestamp", "_wandb"})
_RANGE_COLUMNS = ("__MIN", "__MAX")

Row = Mapping[str, Any]
LogRow = tuple[int, dict[str, Any]]
"""A line number for messages, and the values of the line by column name."""


def has_step(names: Collection[str]) -> bool:
    return any(name in names for name in (*STEP_COLUMNS, WANDB_COUNT))


def json_lines(file: str, text: str) -> Iterator[LogRow]:
    """Yields the objects of a JSON lines file. An incomplete last line is skipped. Any other damaged line is
    refused."""
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield number, row
        elif number < len(lines):
            raise damaged(file, number, line, "JSON object")


def csv_rows(file: str, text: str) -> Iterator[LogRow]:
    """Yields each row of a csv file as a dictionary by column name. A last line without a line break is skipped as
    incomplete."""
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]), delimiter=delimiter(text))
    try:
        header = _without_run_name(next(reader, []))
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise damaged(file, reader.line_num, ",".join(cells), f"row of {len(header)} columns")
            pairs = zip(header, cells, strict=True)
            yield reader.line_num, {name: value for name, cell in pairs if (value := parse_number(cell)) is not None}
    except csv.Error as error:
        raise Refusal.at(
            f"{file} line {reader.line_num}", f"not a valid csv line: {error}", "remove it", code="damaged-file"
        ) from None


def delimiter(text: str) -> str:
    header = text.partition("\n")[0]
    return "\t" if "\t" in header and "," not in header else ","


def _without_run_name(header: list[str]) -> list[str]:
    """Removes the run name from the columns `run - metric` of a chart exported from wandb. Columns that end with
    `__MIN` or `__MAX` keep their names."""
    header = [name.strip() for name in header]
    runs = {name.partition(" - ")[0] for name in header if " - " in name}
    if len(runs) != 1:
        return header
    prefix = f"{runs.pop()} - "
    return [name if name.endswith(_RANGE_COLUMNS) else name.removeprefix(prefix) for name in header]


# Any table with a step column ----------------------------------------------------------------------------------------


def table_points(file: str, rows: Iterator[LogRow]) -> Points:
    """Reads the metrics of all rows. If wandb's `_step` is the only step column and counts updates from 0, its step 0
    becomes step 1."""
    rows_, found = list(rows), Points()
    counted = not any(name in row for _, row in rows_ for name in STEP_COLUMNS)
    columns = (WANDB_COUNT,) if counted else STEP_COLUMNS
    first = 1 if counted and _counts_from_zero([row for _, row in rows_]) else 0
    for line, row in rows_:
        written = next((row[name] for name in columns if row.get(name) is not None), None)
        if written is None:
            continue
        step = as_step(written)
        if step is None:
            raise Refusal.at(
                f"{file} line {line}",
                f"its step is {written!r}",
                "a step must be a whole number; remove the row",
                code="not-a-number",
            )
        found.add(step + first, numbers(row, _NO_METRICS), _rank_of(row))
    return found


def _rank_of(row: Row) -> str:
    """Returns the rank or process that wrote the row, or "" if no column names it."""
    parts = [
        f"{name} {row[name]:g}" if isinstance(row[name], float) else f"{name} {row[name]}"
        for name in _RANK_COLUMNS
        if row.get(name) is not None
    ]
    return ", ".join(parts)


def _counts_from_zero(rows: Sequence[Row]) -> bool:
    """Returns whether wandb's step 0 is an update. A step 0 with less than half of the next step's metrics is a
    validation."""
    counted = list(islice((row for row in rows if WANDB_COUNT in row), 2))
    if not counted or as_step(counted[0][WANDB_COUNT]) != 0:
        return False
    names = [set(numbers(row, _NO_METRICS)) for row in counted]
    return len(names) == 1 or 2 * len(names[0] & names[1]) >= len(names[1])


# JSON lines of specific trainers --------------------------------------------------------------------------------------

HISTORY = "log_history"
"""A row with this key repeats the metrics of all rows before it."""


@dataclass(frozen=True)
class RowFormat:
    """The format of one trainer's JSON lines."""

    is_row: Callable[[Row], bool]
    step: Callable[[Row], tuple[int | None, int | None]]
    """Returns the step of a row and the last planned step. A missing number is None."""
    metrics: Callable[[Row], Mapping[str, float]]
    expected: str
    """A description of a correct line, which error messages contain."""


def row_points(file: str, text: str, form: RowFormat) -> Points:
    found = Points()
    for line, row in json_lines(file, text):
        if HISTORY in row:
            continue
        step, planned = form.step(row)
        if step is None:
            raise damaged(file, line, json.dumps(row), form.expected)
        found.add(step, form.metrics(row))
        found.planned = planned or found.planned
    return found


_SLASH_STEPS = ("global_step/max_steps", "iteration")
_SLASH_STEP = re.compile(r"(\d{1,18})/(\d{1,18})")


def _swift_step(row: Row) -> tuple[int | None, int | None]:
    written = next((row[name] for name in _SLASH_STEPS if name in row), None)
    parts = _SLASH_STEP.fullmatch(written) if isinstance(written, str) else None
    if parts is None or int(parts.group(1)) > LARGEST_STEP:
        return None, None
    return int(parts.group(1)), int(parts.group(2))


def _swift_metrics(row: Row) -> Mapping[str, float]:
    """Returns the metrics of a row. ms-swift may write numbers as strings."""
    plain = {
        name: parsed if isinstance(value, str) and (parsed := parse_number(value)) is not None else value
        for name, value in row.items()
        if name not in _SLASH_STEPS
    }
    return numbers(plain)


# verl's file logger: {"step": 7, "data": {...}}.
VERL_ROWS = RowFormat(
    is_row=lambda row: "step" in row and isinstance(row.get("data"), dict),
    step=lambda row: (as_step(row.get("step")) if isinstance(row.get("data"), dict) else None, None),
    metrics=lambda row: numbers(row["data"]),
    expected="line with a step and data",
)
# LLaMA-Factory's trainer_log.jsonl: {"current_steps": 5, "total_steps": 15, ...}.
LLAMA_FACTORY_ROWS = RowFormat(
    is_row=lambda row: "current_steps" in row and "total_steps" in row,
    step=lambda row: (as_step(row.get("current_steps")), as_step(row.get("total_steps"))),
    metrics=lambda row: numbers(row, frozenset({"current_steps", "total_steps", "percentage"})),
    expected="line with a whole number as current_steps",
)
# ms-swift's logging.jsonl has the step as text such as "10/93" in the column `global_step/max_steps` or `iteration`.
SWIFT_ROWS = RowFormat(
    is_row=lambda row: any(isinstance(row.get(name), str) and "/" in row[name] for name in _SLASH_STEPS),
    step=_swift_step,
    metrics=_swift_metrics,
    expected=f"line with a step like 10/93 as {_SLASH_STEPS[0]}",
)


# trainer_state.json of transformers' Trainer and TRL -----------------------------------------------------------------

STATE_FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")


def trainer_state_points(file: str, state: dict[str, Any]) -> Points:
    found = Points()
    history = state[HISTORY]
    for index, row in enumerate(history if isinstance(history, list) else []):
        step = as_step(row.get("step")) if isinstance(row, dict) else None
        if step is None:
            raise Refusal.at(f"{file}, {HISTORY}[{index}]", "has no step", "restore the file", code="damaged-file")
        found.add(step, numbers(row, frozenset({"step"})))
    found.planned = as_step(state.get("max_steps"))
    return found


def refuse_cut_state(file: str, error: ValueError) -> Points:
    """Refuses a trainer state that is not valid JSON, and gives the position of the damage."""
    where = f" line {error.lineno} column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    raise Refusal.at(
        f"{file}{where}", "a trainer state that is cut short or damaged", "restore the file", code="damaged-file"
    )


def newest_state(files: Sequence[Path]) -> Path | None:
    """Returns the path of the trainer_state.json outside the checkpoint folders. If all files are in checkpoint
    folders, returns the trainer_state.json of the last checkpoint. Returns None if the files belong to several runs."""
    if not files or any(file.name != STATE_FILE for file in files):
        return None
    numbered = {file: _CHECKPOINT.search(file.parent.name) for file in files}
    above = [file for file, match in numbered.items() if match is None]
    if len(above) == 1 and all(file.parent.parent == above[0].parent for file in files if file != above[0]):
        return above[0]
    if above or len({file.parent.parent for file in files}) != 1:
        return None
    return max(files, key=lambda file: int(match.group(1)) if (match := numbered[file]) else 0)


# The csv export of tensorboard's page: one curve, without the name of its metric -----------------------------------

VALUE = "Value"
TENSORBOARD_HEADER = ["Wall time", "Step", VALUE]


def tensorboard_csv_points(file: str, text: str) -> Points:
    found = Points()
    for line, row in csv_rows(file, text):
        step = as_step(row.get("Step"))
        if step is None or VALUE not in row:
            raise damaged(file, line, ",".join(map(str, row.values())), "row of a time, a step and a value")
        found.add(step, {VALUE: row[VALUE]})
    return found


# msprobe, the accuracy tool of Ascend's mstt ------------------------------------------------------------------------
#
#     step0/rank0/dump.json        inputs and outputs of every module or operator: Max, Min, Mean, Norm
#     grad_reduced_0-4.csv         the monitor: vpp_stage, name, step, micro_step of activations, then the statistics
#     rank0/grad_summary_0.csv     the gradient probe: Param_name, Max, Min, Norm ...
#
# The metric name is `<tensor>/<statistic>`, with a prefix such as `rank3/` if there are several ranks.

_DUMP = "dump.json"
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_MONITOR = ("vpp_stage", "name", "step")
_MICRO = "micro_step"
_PROBE = "Param_name"
_STEP_FOLDER, _RANK_FOLDER = re.compile(r"step(\d{1,9})"), re.compile(r"rank_?(\d{1,6})?")
_SUMMARY = re.compile(r"grad_summary_(\d{1,9})$")
_STEP_RANGE = re.compile(r"_\d+-\d+$")


def is_msprobe_dump(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("data"), dict) and "task" in value and "level" in value


def is_msprobe_header(names: Sequence[str]) -> bool:
    return tuple(names[:3]) == _MONITOR or (bool(names) and names[0] == _PROBE and "Norm" in names)


def msprobe_files(folder: Path) -> list[Path]:
    """Returns the files that msprobe's dump, monitor or gradient probe wrote to this folder, or an empty list if there
    are none."""
    dumps = [*folder.glob(f"step*/rank*/{_DUMP}"), *folder.glob(f"rank*/{_DUMP}"), *folder.glob(_DUMP)]
    tables = [*folder.glob("rank*/grad_summary_*.csv"), *folder.glob("*.csv"), *folder.glob("rank*/*.csv")]
    found = sorted(set(dumps)) or sorted({path for path in tables if _has_msprobe_header(path)})
    return [path for path in found if path.is_file()]


def _has_msprobe_header(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return is_msprobe_header([cell.strip() for cell in file.readline().rstrip("\r\n").split(",")])


def msprobe_points(files: Sequence[Path]) -> Points:
    """Reads all msprobe files and sorts their values by step."""
    several = len({_rank_folder(path) for path in files}) > 1
    rows = [
        (step, f"rank{_rank_folder(path)}/{name}" if several else name, value)
        for path in files
        for step, name, value in (_dump_rows(path) if path.suffix == ".json" else _monitor_rows(path))
    ]
    found = Points()
    for step, name, value in sorted(rows, key=lambda row: row[0]):
        found.add(step + 1, {name: value})
    return found


def _rank_folder(path: Path) -> int:
    parts = [_RANK_FOLDER.fullmatch(part) for part in path.parts]
    return next((int(part[1] or 0) for part in reversed(parts) if part), 0)


def _dump_rows(path: Path) -> Iterator[tuple[int, str, float]]:
    try:
        dump = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refusal.at(
            path,
            f"is cut short: {error}",
            "msprobe writes this file when the program calls debugger.stop(); dump again",
            code="damaged-file",
        ) from None
    parts = [_STEP_FOLDER.fullmatch(part) for part in path.parts]
    step = next((int(part[1]) for part in reversed(parts) if part), 0)
    for name, inside in dump["data"].items():
        for place, tensor in _tensors(inside, name):
            for statistic in _STATISTICS:
                value = tensor.get(statistic)
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield step, f"{place}/{statistic}", float(value)


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Row]]:
    """Yields the name and the statistics of every tensor in a dump: arguments, outputs and parameters, also inside
    lists."""
    if isinstance(value, dict) and "Norm" in value:
        yield place, value
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(inner, f"{place}.{key}")


def _monitor_rows(path: Path) -> Iterator[tuple[int, str, float]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))
    header = [cell.strip() for cell in next(reader, [])]
    summary = _SUMMARY.search(path.stem)
    for cells in reader:
        if len(cells) != len(header):
            raise damaged(str(path), reader.line_num, ",".join(cells), f"row of {len(header)} columns")
        row = dict(zip(header, (cell.strip() for cell in cells), strict=True))
        if header[0] == _PROBE:
            step, place, left = (int(summary[1]) if summary else 0), f"gradient/{row[_PROBE]}", {_PROBE, "MD5", "Shape"}
        else:
            counted = as_step(parse_number(row["step"]))
            if counted is None:
                raise damaged(str(path), reader.line_num, ",".join(cells), "row with a whole number as step")
            stage = f"{row['vpp_stage']}:" if row["vpp_stage"] not in ("", "0") else ""
            micro = f":{row[_MICRO]}" if row.get(_MICRO) not in (None, "", "0") else ""
            step, place = counted, f"{_STEP_RANGE.sub('', path.stem)}/{stage}{row['name']}{micro}"
            left = {*_MONITOR, _MICRO}
        for name in header:
            value = parse_number(row[name]) if name not in left else None
            if value is not None:
                yield step, f"{place}/{name}", value
