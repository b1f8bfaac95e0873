"""The metrics log `metrics.jsonl`, with one line per step, and the timer of the phases of a step.

A line is `{"step": 7, "data": {"train/loss": 1.25}}`. Numbers that are read back are bitwise identical to the written
ones. JSON has no NaN or infinity, so these are written as the strings "NaN", "Infinity" and "-Infinity", and read back
as floats.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal, unwritten
from lockstep.run.files import atomic_write_text, sync_path


class MetricsLog:
    """Appends to metrics.jsonl. After `append` returns, the line is on disk."""

    def __init__(self, path: Path):
        self.path = path
        self._last: int | None = None

    def append(self, step: int, metrics: dict[str, float]) -> None:
        """Appends the line of one step. Steps must increase, so a resumed run calls `rewind` first."""
        if self._last is None:
            self._last = _last_step(self.path)
        if step <= self._last:
            raise ValueError(
                f"{self.path} already has step {self._last}, so step {step} cannot follow; rewind it first"
            )
        data = {name: _to_json(float(value)) for name, value in metrics.items()}
        line = json.dumps({"step": step, "data": data}, allow_nan=False) + "\n"
        append_text(self.path, line)
        self._last = step

    def rewind(self, step: int) -> None:
        """Removes the lines after `step` and an incomplete last line. `rewind(-1)` removes everything."""
        rewind_lines(self.path, step)
        self._last = None


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Returns the metrics of all steps in order. An incomplete last line is skipped; other damage raises `Refusal`."""
    steps = []
    for number, line in enumerate(_parse(path, _complete_lines(path)), start=1):
        try:
            steps.append((line["step"], {name: float(value) for name, value in line["data"].items()}))
        except (KeyError, AttributeError, TypeError, ValueError):
            raise _damaged(path, number, json.dumps(line)) from None
    return steps


def append_text(path: Path, text: str) -> None:
    """Appends complete lines and flushes them to disk. If the write fails, the file is truncated to its old size."""
    new = not path.exists()
    content = memoryview(text.encode())
    try:
        # The file is unbuffered, because a buffered file would retry a failed write on close.
        with path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                while content:
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):  # if this fails too, a later `rewind_lines` removes the line
                    os.ftruncate(file.fileno(), before)
                raise
        if new:
            sync_path(path.parent)
    except OSError as error:
        raise unwritten(path, error, "run the same command to resume from the last checkpoint") from error


def missing_steps(steps: Iterable[int], last: int) -> str:
    """Returns the missing steps from 1 to `last` as text, such as '3, 5 to 7'. Returns '' if no step is missing."""
    present = set(steps)
    ranges = []
    first = None
    for step in range(1, last + 2):
        lost = step <= last and step not in present
        if lost and first is None:
            first = step
        if not lost and first is not None:
            ranges.append(str(first) if first == step - 1 else f"{first} to {step - 1}")
            first = None
    return ", ".join(ranges)


def rewind_lines(path: Path, step: int) -> None:
    """Removes the lines after `step` and an incomplete last line from a file whose JSON lines have a `step`."""
    if not path.exists():
        return
    lines = _complete_lines(path)
    kept = [text for text, line in zip(lines, _parse(path, lines), strict=True) if line["step"] <= step]
    content = b"".join(line + b"\n" for line in kept)
    if content != path.read_bytes():
        atomic_write_text(path, content.decode())


PhaseTimer = Callable[[str], AbstractContextManager[None]]
"""Measures a phase of a step, as in `with timer("update_actor"): ...`."""


class Phases:
    """Times the phases of a step with `with phases("update_actor"): ...`, then `take()`.

    `synchronise` waits for the device. Without `synchronise`, the time of asynchronous device work would be added to a
    later phase. `stage` gets the name of a phase and returns a context manager, which is entered during the phase.
    """

    def __init__(
        self,
        synchronise: Callable[[], None] = lambda: None,
        stage: Callable[[str], AbstractContextManager[None]] = lambda name: contextlib.nullcontext(),
    ):
        self._synchronise, self._stage = synchronise, stage
        self._seconds: dict[str, float] = {}
        self._aside = 0.0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._synchronise()
        start, aside = time.perf_counter(), self._aside
        try:
            with self._stage(name):
                yield
                self._synchronise()
        finally:
            seconds = time.perf_counter() - start - (self._aside - aside)
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Times a phase, such as recording a tape, whose time is subtracted from the enclosing phases."""
        before = self._seconds.get(name, 0.0)
        with self(name):
            yield
        self._aside += self._seconds[name] - before

    def take(self) -> dict[str, float]:
        """Returns the metrics `timing_s/<phase>` of all phases since the last call. The times of repeated phases are
        summed."""
        taken = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _complete_lines(path: Path) -> list[bytes]:
    # A line is complete if it ends with a newline, because the newline is written last.
    return path.read_bytes().split(b"\n")[:-1]


def _parse(path: Path, lines: list[bytes]) -> list[dict[str, Any]]:
    parsed = []
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise _damaged(path, number, text.decode(errors="replace"))
        parsed.append(line)
    return parsed


def _damaged(path: Path, number: int, text: str) -> Refusal:
    return Refusal.at(
        f"{path} line {number}",
        f"cannot parse this line of the log: {text[:60]!r}",
        "the file was changed by another program; restore it, or remove the line",
        code="damaged-file",
    )


def _last_step(path: Path) -> int:
    """Returns the highest step in the log, or -1 if the log has no step."""
    if not path.exists():
        return -1
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        raise ValueError(f"the last line of {path} is incomplete; rewind before appending")
    return max((line["step"] for line in _parse(path, _complete_lines(path))), default=-1)
