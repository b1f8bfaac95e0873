"""msprobe, the accuracy tool of Ascend's mstt: statistics of tensors, gradients and activations by step.

    step0/rank0/dump.json        what every module or operator got and gave: Max, Min, Mean, Norm
    grad_reduced_0-4.csv         its monitor: vpp_stage, name, step, micro_step of activations, then the statistics
    rank0/grad_summary_0.csv     its gradient probe: Param_name, Max, Min, Norm ...

A metric is `<tensor>/<statistic>`, with `rank3/` before it where there are several ranks. msprobe counts from 0, so its
first step is step 1 here.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.parity.compare.logs.curves import Points
from lockstep.parity.compare.logs.table import damaged
from lockstep.parity.compare.logs.text import number

DUMP = "dump.json"
STATISTICS = ("Max", "Min", "Mean", "Norm")
_MONITOR = ("vpp_stage", "name", "step")
_MICRO = "micro_step"
_PROBE = "Param_name"
_STEP, _RANK = re.compile(r"step(\d{1,9})"), re.compile(r"rank_?(\d{1,6})?")
_SUMMARY = re.compile(r"grad_summary_(\d{1,9})$")
_OF_STEPS = re.compile(r"_\d+-\d+$")


def is_dump(whole: Any) -> bool:
    return isinstance(whole, dict) and isinstance(whole.get("data"), dict) and "task" in whole and "level" in whole


def is_header(names: Sequence[str]) -> bool:
    return tuple(names[:3]) == _MONITOR or (bool(names) and names[0] == _PROBE and "Norm" in names)


def files_of(folder: Path) -> list[Path]:
    """The files of one dump, monitor or gradient probe; none where the folder is something else."""
    dumps = [*folder.glob(f"step*/rank*/{DUMP}"), *folder.glob(f"rank*/{DUMP}"), *folder.glob(DUMP)]
    tables = [*folder.glob("rank*/grad_summary_*.csv"), *folder.glob("*.csv"), *folder.glob("rank*/*.csv")]
    found = sorted(set(dumps)) or sorted({path for path in tables if _has_header(path)})
    return [path for path in found if path.is_file()]


def _has_header(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return is_header([cell.strip() for cell in file.readline().rstrip("\r\n").split(",")])


def points(files: Sequence[Path]) -> Points:
    """All files together, in the order of their steps."""
    several = len({_rank(path) for path in files}) > 1
    rows = [
        (step, f"rank{_rank(path)}/{name}" if several else name, value)
        for path in files
        for step, name, value in (_dumped(path) if path.suffix == ".json" else _tabled(path))
    ]
    found = Points()
    for step, name, value in sorted(rows, key=lambda row: row[0]):
        found.add(step + 1, {name: value})
    return found


def _rank(path: Path) -> int:
    parts = [_RANK.fullmatch(part) for part in path.parts]
    return next((int(part[1] or 0) for part in reversed(parts) if part), 0)


def _dumped(path: Path) -> Iterator[tuple[int, str, float]]:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Refusal.at(path, f"is cut short: {error}", "msprobe writes it at debugger.stop(); dump again") from None
    parts = [_STEP.fullmatch(part) for part in path.parts]
    step = next((int(part[1]) for part in reversed(parts) if part), 0)
    for name, inside in whole["data"].items():
        for place, tensor in _tensors(inside, name):
            for statistic in STATISTICS:
                value = tensor.get(statistic)
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield step, f"{place}/{statistic}", float(value)


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every tensor with statistics: of arguments, outputs and parameters, also in lists."""
    if isinstance(value, dict) and "Norm" in value:
        yield place, value
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(inner, f"{place}.{key}")


def _tabled(path: Path) -> Iterator[tuple[int, str, float]]:
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
            counted = number(row["step"])
            if counted is None or counted != int(counted):
                raise damaged(str(path), reader.line_num, ",".join(cells), "row with a whole number as step")
            stage = f"{row['vpp_stage']}:" if row["vpp_stage"] not in ("", "0") else ""
            micro = f":{row[_MICRO]}" if row.get(_MICRO) not in (None, "", "0") else ""
            step, place = int(counted), f"{_OF_STEPS.sub('', path.stem)}/{stage}{row['name']}{micro}"
            left = {*_MONITOR, _MICRO}
        for name in header:
            value = number(row[name]) if name not in left else None
            if value is not None:
                yield step, f"{place}/{name}", value
