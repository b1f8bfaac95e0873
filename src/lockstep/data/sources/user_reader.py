"""Reads rows with a user function: `reader(path)` yields a dict for each row.

The function runs in a separate process with time and memory limits. A callable that was passed from Python cannot be
loaded in another process, so it runs in this process, with a time limit but without a memory limit.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.sources.reader_process import (
    BAD_ROW,
    CALL,
    END,
    NO_ROWS,
    OUT_OF_MEMORY,
    RAISED,
    ROW,
    UNLOADABLE,
    encoded,
    is_rows,
)
from lockstep.data.sources.rowset import FileInfo, Problems, RowSet, ShapeGroups, TextFile, disagreements, merged
from lockstep.errors import LostProcess, Refusal
from lockstep.functions import is_registered, load_user_function, locate
from lockstep.launch.process_pool import LineWorker, ReplyTimeout, WorkerEnded
from lockstep.recipe.keys_data import Data
from lockstep.run.output import write
from lockstep.types import Origin, Row

KEY, TIME, MEMORY = "data.reader", "data.reader_timeout", "data.reader_memory_gb"
REMEDY = "yield a dict of plain values (text, numbers, true and false, lists, dicts) for each row"


@dataclass(frozen=True)
class UserReader:
    """A user function that reads rows. `function_path` is `path/to/file.py:name`. `seconds` is the time limit for
    reading all rows of a path."""

    function_path: str
    seconds: float = Data.model_fields["reader_timeout"].default
    memory_gb: float = Data.model_fields["reader_memory_gb"].default

    @classmethod
    def of(cls, data: Data) -> UserReader | None:
        return None if data.reader is None else cls(data.reader, data.reader_timeout, data.reader_memory_gb)

    def refuse(self, why: str, remedy: str, *, code: str) -> Refusal:
        return Refusal.at(f"{KEY} {self.function_path}", why, remedy, code=code)


def read_user_rows(path: str, reader: UserReader) -> RowSet:
    """Reads all rows of `path` with the user's function. The rows are identified by their hash.

    If something other than the user's function kills or stops the reader's process, the process is restarted once. If
    the process is lost a second time, raises `LostProcess`. The cause of `LostProcess` is not the user's function (the
    host may lack memory), so restarting the run may help.
    """
    if is_registered(reader.function_path):
        return _row_set(path, reader, _here(path, reader))
    try:
        return _row_set(path, reader, _in_process(path, reader))
    except LostProcess as first:
        (problem,) = first.problems
        write(f"{problem.where}: {problem.why}; restarting the process once", error=True)
    return _row_set(path, reader, _in_process(path, reader))


def _row_set(path: str, reader: UserReader, messages: Iterable[tuple[bytes, bytes]]) -> RowSet:
    problems = Problems(path)
    rows: list[Row] = []
    digest, size = hashlib.sha256(), 0
    for number, (kind, text) in enumerate(messages):
        if kind == BAD_ROW:
            where = f"{KEY} {reader.function_path}: {Origin(path, number)}"
            problems.add(where, text.decode(errors="replace"), REMEDY, code="invalid-row")
            continue
        line = text + b"\n"
        digest.update(line)
        size += len(line)
        rows.append(json.loads(text))
    problems.refuse()
    if not rows:
        raise reader.refuse(f"yielded no rows for {path}", REMEDY, code="no-rows")
    groups = ShapeGroups(rows).all()
    for number, why in disagreements(groups, lambda number: f"row {number}"):
        where = f"{KEY} {reader.function_path}: {Origin(path, number)}"
        problems.add(where, why, "every row needs the same columns, each with values of one kind", code="mixed-rows")
    problems.refuse()
    return RowSet([TextFile(FileInfo(path, len(rows), size, digest.hexdigest()), merged(groups), rows, None)])


def _here(path: str, reader: UserReader) -> list[tuple[bytes, bytes]]:
    """Runs a callable in this process. Returns the encoded rows that the callable yields, both valid and invalid
    ones."""
    function = load_user_function(reader.function_path, KEY, CALL, reader.seconds, TIME)

    def read(path: str) -> list[tuple[bytes, bytes]]:
        found = function.function(path)
        if not is_rows(found):
            raise reader.refuse(
                f"returned a {type(found).__name__} for {path}, not rows", REMEDY, code="invalid-return"
            )
        return [encoded(row) for row in found]

    return function.with_function(read)(path)


def _in_process(path: str, reader: UserReader) -> Iterator[tuple[bytes, bytes]]:
    """Yields the encoded rows, both valid and invalid ones, from the reader's process. Raises an error when the process
    fails."""
    file, name = locate(reader.function_path, KEY)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "printed.log"
        arguments = (str(file), name, int(reader.memory_gb * 2**30), path)
        worker = LineWorker("lockstep.data.sources.reader_process:serve", arguments, log)
        deadline = time.monotonic() + reader.seconds
        how, payload, late = b"", None, False
        try:
            while (line := worker.read_line(deadline))[:1] in (ROW, BAD_ROW):
                yield line[:1], line[1:]
            how = line[:1]
        except ReplyTimeout:
            late = True
        except WorkerEnded:
            pass  # reported below, with the last output of the process
        finally:
            status = worker.ended()
            worker.disconnect()
        if how == END:
            return
        if how in (UNLOADABLE, NO_ROWS, OUT_OF_MEMORY, RAISED):
            payload = json.loads(line[1:])
        why = _failure(path, reader, how, payload, late, f"its process {status}{_last_line(log)}")
        raise LostProcess(why.problems) if payload is None and worker.lost else why


def _failure(
    path: str, reader: UserReader, how: bytes, payload: str | list[str] | None, late: bool, status: str
) -> Refusal:
    if how == UNLOADABLE:
        assert isinstance(payload, list)
        why, remedy, code = payload
        return reader.refuse(why, remedy, code=code)
    if how == NO_ROWS:
        return reader.refuse(f"returned a {payload} for {path}, not rows", REMEDY, code="invalid-return")
    if how == OUT_OF_MEMORY:
        remedy = f"yield the rows one by one, or raise {MEMORY}"
        return reader.refuse(
            f"raised {payload}: it used more than {reader.memory_gb:g} GiB ({MEMORY}), for {path}",
            remedy,
            code="function-raised",
        )
    if how == RAISED:
        return reader.refuse(f"raised {payload}, for {path}", "fix the function", code="function-raised")
    if late:
        why = f"did not yield all rows of {path} in {reader.seconds:g} s ({TIME})"
        return reader.refuse(why, f"make the function faster, or raise {TIME}", code="function-too-slow")
    remedy = "fix the function, or check what ended the process, for example a lack of memory"
    return reader.refuse(f"{status}, before it yielded all rows of {path}", remedy, code="process-lost")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    printed = [line for line in lines if line.strip() and not line.startswith("[process ")]
    return f" (it printed last: {printed[-1][:200]})" if printed else ""
