"""The console for files and pipes: whole lines, no control characters, nothing rewritten."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from lockstep.errors import Refusal
from lockstep.run.output import write
from lockstep.run.pace import Pace
from lockstep.run.progress import Console, TaskProgress, print_problems, validation_rows
from lockstep.run.text import WIDTH, Column, clock, fit, fit_rows, show, task_summary


class PlainConsole(Console):
    """A line for the first step, for every `every`-th and for the last."""

    def __init__(self, columns: Sequence[Column], every: int = 1):
        self._columns, self._every = columns, every
        self._pace: Pace | None = None
        self._unsaid = ""
        self._told = float("-inf")

    def banner(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        _print(title)
        for key, value in fit_rows(rows, WIDTH - 2):
            write(f"  {key}{value}".rstrip())

    def say(self, text: str) -> None:
        _print(text)

    def warn(self, text: str) -> None:
        _print(f"warning: {text}")

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[TaskProgress]:
        _print(f"{description} ..." if total is None else f"{description}: {total:,} to do")
        task = _PlainTask(description, total)
        yield task
        _print(task_summary(description, total, task.pace.done, task.pace.elapsed))

    def begin(self, total_steps: int, done: int = 0) -> None:
        self._pace = Pace(total_steps, done)
        self._first = done + 1

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self._pace is None:
            raise RuntimeError("step before begin")
        self._pace.reach(step)
        total = self._pace.total
        head = f"step {step:>{len(str(total))}}/{total}  "
        line = head + show(self._columns, metrics, WIDTH - len(head))
        if step in (self._first, total) or step % self._every == 0:
            _print(line + self._eta(line, step))
            self._unsaid = ""
        else:
            self._unsaid = line

    def _eta(self, line: str, step: int) -> str:
        """The time left behind the numbers, or now and then on a line of its own where they fill theirs."""
        assert self._pace is not None
        left = self._pace.left()
        if left is None or step == self._pace.total:
            return ""
        tail = f"eta {clock(left)}"
        if len(line) + 2 + len(tail) <= WIDTH:
            return f"  {tail}"
        if time.monotonic() - self._told < _PlainTask.INTERVAL:
            return ""
        self._told = time.monotonic()
        return f"\n  {tail}"

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        _print(f"validation after step {step}: {validation_rows(metrics)}")

    def end(self) -> None:
        # A run that stops early still shows the step it stopped at.
        if self._unsaid:
            _print(self._unsaid)
        self._unsaid = ""
        self._pace = None

    def problems(self, refusal: Refusal) -> None:
        self.end()
        print_problems(refusal, colour=False)


class _PlainTask(TaskProgress):
    # Often enough to see that it lives, seldom enough for a log file.
    INTERVAL = 10.0

    def __init__(self, description: str, total: int | None):
        self.pace = Pace(total)
        self._description = description
        self._said = time.monotonic()

    def advance(self, n: int = 1) -> None:
        self.pace.reach(self.pace.done + n)
        if time.monotonic() - self._said < self.INTERVAL:
            return
        self._said = time.monotonic()
        left = self.pace.left()
        of = "" if self.pace.total is None else f" of {self.pace.total:,}"
        _print(f"{self._description}: {self.pace.done:,}{of}" + ("" if left is None else f", eta {clock(left)}"))


def _print(text: str) -> None:
    for line in fit(text):
        write(line)
