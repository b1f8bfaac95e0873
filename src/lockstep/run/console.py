"""The console output of a run: a live progress bar on a terminal, or plain lines in a file or pipe."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import Task as Bar
from rich.table import Column as TableColumn
from rich.text import Text

from lockstep.errors import Refusal
from lockstep.run.output import (
    OFFLINE_COLUMNS,
    WIDTH,
    Column,
    brief_seconds,
    clock,
    fit,
    fit_rows,
    reminders,
    show,
    task_summary,
    visible,
    write,
)
from lockstep.run.screen import Screen


class Pace:
    """Estimates the remaining time from recent steps."""

    def __init__(self, total: int | None, done: int = 0):
        self.total, self.done = total, done
        self.began = time.monotonic()
        self._ticks: deque[tuple[float, int]] = deque([(self.began, done)], maxlen=50)

    def reach(self, done: int) -> None:
        # The first step includes warm-up, so its time is dropped when a second step is finished.
        if len(self._ticks) == 2 and self._ticks[0][0] == self.began:
            self._ticks.popleft()
        now = time.monotonic()
        # Steps that are faster than half a second are merged into one tick, so that the estimate covers up to 50 ticks.
        if len(self._ticks) > 1 and now - self._ticks[-2][0] < 0.5:
            self._ticks.pop()
        self._ticks.append((now, done))
        self.done = done

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> float | None:
        """Returns the estimated remaining seconds, which count down between steps. Returns None if there is no estimate
        yet."""
        (first_time, first), (last_time, last) = self._ticks[0], self._ticks[-1]
        if self.total is None or last == first:
            return None
        estimate = (last_time - first_time) / (last - first) * (self.total - last)
        return max(estimate - (time.monotonic() - last_time), 0.0)


class TaskProgress:
    """Progress of a long task other than training, such as tokenising."""

    def advance(self, n: int = 1) -> None:
        """Reports `n` more finished items."""


class Console:
    """The console interface. This base class prints nothing; ranks above 0 use it. `Console.open` returns a console
    that prints.

    Output goes to stdout, except the errors that the method `problems` prints to stderr. `spoke` is the time of the
    last output.
    """

    spoke = 0.0

    @staticmethod
    def open(
        columns: Sequence[Column] = OFFLINE_COLUMNS, plain: bool | None = None, every: int = 1, lines: bool = False
    ) -> Console:
        """Returns a live console on a terminal, a console with a progress bar in a notebook, otherwise a plain console
        that prints every `every`-th step. `plain` selects the plain (True) or the live console (False) explicitly. With
        `lines`, the live console also prints a line for every step."""
        if plain is None and in_notebook():
            return NotebookConsole(columns, every)
        if plain is None:
            plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
        if plain:
            return PlainConsole(columns, every)

        return LiveConsole(columns, lines=lines)

    @staticmethod
    def silent() -> Console:
        return Console()

    def banner(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Prints a title and a table of names and values."""

    def say(self, text: str) -> None:
        """Prints information, such as "saved a checkpoint"."""

    def warn(self, text: str) -> None:
        """Prints a warning; the run continues."""

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[TaskProgress]:
        """Shows the progress of a task. The body of the `with` block calls `advance` on the yielded object."""
        yield TaskProgress()

    @contextlib.contextmanager
    def waiting(self, description: str) -> Iterator[None]:
        """Names a stage of the run. If nothing was printed for `SILENCE` seconds, the console shows the name, and from
        then on how long the stage has run, so that the user always knows what the run is doing."""
        pace, named = Pace(None), False

        def tell(elapsed: float) -> None:
            nonlocal named
            if not self.shows_task:
                self.say(f"{description}: {brief_seconds(elapsed)}" if named else f"{description} ...")
                named = True

        with reminders(tell, lambda: self.spoke):
            yield
        if named:
            self.say(task_summary(description, None, 0, pace.elapsed))

    @property
    def shows_task(self) -> bool:
        """Whether a bar or a line shows a task that is not finished."""
        return False

    def begin(self, total_steps: int, done: int = 0) -> None:
        """Reports that training starts after `done` finished steps. The caller must call `end` later, also after an
        error."""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Reports that step `step` of `total_steps` is finished."""

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """Reports the validation metrics after `step`."""

    def end(self) -> None:
        """Reports that training ended or was interrupted. May be called twice."""

    def problems(self, refusal: Refusal) -> None:
        """Prints the problems with remedies to stderr. A silent console prints the problems too."""
        self.end()
        print_problems(refusal)


def print_problems(refusal: Refusal, colour: bool | None = None) -> None:
    """Prints every problem of a refusal to stderr. If `colour` is None, colours are printed if the terminal supports
    them."""
    from rich.text import Text

    from lockstep.run.screen import Screen

    screen = Screen(stderr=True, force_terminal=colour, no_color=colour is False or None)
    count = len(refusal.problems)
    screen.print(Text(f"{count} problems:" if count > 1 else "1 problem:", style="bold"))
    for problem in refusal.problems:
        code = f"[{problem.code}]"
        lines = [(f"{problem.where} {code}", "bold red"), (f"  {problem.why}", "")]
        lines += [(f"  -> {problem.remedy}", "green")] if problem.remedy else []
        screen.print()
        for text, style in lines:
            for line in fit(text, min(screen.width, 100)):
                styled = Text(line, style=style)
                if style == "bold red" and line.endswith(code):
                    styled.stylize("not bold dim default", len(line) - len(code))
                screen.print(styled, soft_wrap=True)


def validation_rows(metrics: dict[str, float]) -> str:
    """Formats validation metrics without the prefix `val/`, as in `loss 1.234 accuracy 0.81`."""
    return "  ".join(f"{name.removeprefix('val/')} {value:.4g}" for name, value in metrics.items())


class LiveConsole(Console):
    """Console for a terminal: shows progress bars and metrics at the bottom. With `lines`, this console also prints one
    line per step."""

    def __init__(self, columns: Sequence[Column], screen: RichConsole | None = None, *, lines: bool = False):
        self._columns = columns
        self._lines = lines
        self._screen = screen or Screen()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            _CountColumn(),
            _TimeColumn(table_column=TableColumn(no_wrap=True)),
            console=self._screen,
            expand=True,
        )
        self._metrics = ""
        # A stage's bar is added by another thread.
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._training: TaskID | None = None
        self._last = ""

    def banner(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self._print(title, "bold")
        for key, value in fit_rows(rows, self._width - 2):
            self._screen.print(Text.assemble("  ", (visible(key), "cyan"), value), soft_wrap=True)

    def say(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", "yellow")

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[TaskProgress]:
        pace = Pace(total)
        bar = self._progress.add_task(visible(description), total=total, pace=pace)
        self._show()
        try:
            yield _LiveTask(self._progress, bar, pace)
        finally:
            self._progress.remove_task(bar)
            self._hide_when_idle()
        self._print(task_summary(description, total, pace.done, pace.elapsed))

    @contextlib.contextmanager
    def waiting(self, description: str) -> Iterator[None]:
        pace, bars = Pace(None), []

        def tell(elapsed: float) -> None:
            with self._lock:
                if not self.shows_task:
                    bars.append(self._progress.add_task(visible(description), total=None, pace=pace))
                    self._show()

        try:
            with reminders(tell, lambda: self.spoke):
                yield
        finally:
            for bar in bars:
                self._progress.remove_task(bar)
            self._hide_when_idle()
        if bars:
            self._print(task_summary(description, None, 0, pace.elapsed))

    def begin(self, total_steps: int, done: int = 0) -> None:
        self._pace = Pace(total_steps, done)
        self._training = self._progress.add_task("training", total=total_steps, completed=done, pace=self._pace)
        self._show()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self._training is None:
            raise RuntimeError("step before begin")
        self._pace.reach(step)
        self._progress.update(self._training, completed=step)
        if self._lines:
            head = f"step {step:>{len(str(self._pace.total))}}/{self._pace.total}  "
            self._print(head + show(self._columns, metrics, self._width - len(head)))
            return
        self._metrics = show(self._columns, metrics, self._screen.width)
        self._last = f"step {step}/{self._pace.total}  {self._metrics}"

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self._print(f"validation after step {step}: {validation_rows(metrics)}", "green")

    def end(self) -> None:
        if self._training is None:
            return
        self._progress.remove_task(self._training)
        self._training = None
        self._metrics = ""
        self._hide_when_idle()
        # The progress bar is removed now. The line of the last step is printed, so that it stays on the screen.
        if self._last:
            self._print(f"{self._last}  {clock(self._pace.elapsed)}")
        self._last = ""

    @property
    def _width(self) -> int:
        return min(self._screen.width, 100)

    @property
    def shows_task(self) -> bool:
        return bool(self._progress.tasks)

    def _print(self, text: str, style: str = "") -> None:
        self.spoke = time.monotonic()
        for line in fit(text, self._width):
            self._screen.print(Text(line, style=style), soft_wrap=True)

    def _board(self) -> Group:
        return Group(self._progress, Text(self._metrics, style="cyan")) if self._metrics else Group(self._progress)

    def _show(self) -> None:
        with self._lock:
            if self._live is None:
                board, screen = self._board, self._screen
                self._live = Live(get_renderable=board, console=screen, refresh_per_second=4, transient=True)
                self._live.start()

    def _hide_when_idle(self) -> None:
        with self._lock:
            if self._live is not None and not self._progress.tasks:
                self._live.stop()
                self._live = None


class _LiveTask(TaskProgress):
    def __init__(self, progress: Progress, bar: TaskID, pace: Pace):
        self._progress, self._bar, self._pace = progress, bar, pace

    def advance(self, n: int = 1) -> None:
        self._pace.reach(self._pace.done + n)
        self._progress.update(self._bar, completed=self._pace.done)


class _CountColumn(MofNCompleteColumn):
    def render(self, task: Bar) -> Text:
        return super().render(task) if task.total is not None or task.completed else Text()


class _TimeColumn(ProgressColumn):
    # The time estimate of the package rich covers only the last 30 seconds, but one step of reinforcement learning may
    # take longer.
    def render(self, task: Bar) -> Text:
        pace: Pace = task.fields["pace"]
        if task.total is None:
            return Text(clock(pace.elapsed), style="dim")
        left = pace.left()
        return Text(f"{clock(pace.elapsed)} eta {'-:--:--' if left is None else clock(left)}", style="dim")


class PlainConsole(Console):
    """Console for files and pipes: prints a line for the first step, every `every`-th step and the last step."""

    def __init__(self, columns: Sequence[Column], every: int = 1):
        self._columns, self._every = columns, every
        self._pace: Pace | None = None
        self._pending = ""
        self._eta_printed = float("-inf")
        self._tasks = 0

    def banner(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self._print(title)
        for key, value in fit_rows(rows, WIDTH - 2):
            write(f"  {key}{value}".rstrip())

    def say(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[TaskProgress]:
        self._print(f"{description} ..." if total is None else f"{description}: {total:,} to do")
        task = _PlainTask(description, total, self._print)
        self._tasks += 1
        try:
            with reminders(task.show, lambda: self.spoke):
                yield task
        finally:
            self._tasks -= 1
        self._print(task_summary(description, total, task.pace.done, task.pace.elapsed))

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
            self._print(line + self._eta(line, step))
            self._pending = ""
        else:
            self._pending = line

    def _eta(self, line: str, step: int) -> str:
        """Returns the text with the remaining time, which follows the metrics on the same line. If the line is too
        long, the text is on a new line, and it is omitted if the last such line is less than 10 seconds old."""
        assert self._pace is not None
        left = self._pace.left()
        if left is None or step == self._pace.total:
            return ""
        tail = f"eta {clock(left)}"
        if len(line) + 2 + len(tail) <= WIDTH:
            return f"  {tail}"
        if time.monotonic() - self._eta_printed < _PlainTask.INTERVAL:
            return ""
        self._eta_printed = time.monotonic()
        return f"\n  {tail}"

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self._print(f"validation after step {step}: {validation_rows(metrics)}")

    def end(self) -> None:
        # If a run stops early, the line of its last step is still printed.
        if self._pending:
            self._print(self._pending)
        self._pending = ""
        self._pace = None

    def problems(self, refusal: Refusal) -> None:
        self.end()
        print_problems(refusal, colour=False)

    @property
    def shows_task(self) -> bool:
        return self._tasks > 0

    def _print(self, text: str) -> None:
        self.spoke = time.monotonic()
        _print(text)


class _PlainTask(TaskProgress):
    # Seconds between progress lines.
    INTERVAL = 10.0

    def __init__(self, description: str, total: int | None, write_line: Callable[[str], None]):
        self.pace = Pace(total)
        self._description, self._write_line = description, write_line
        self._printed = time.monotonic()

    def advance(self, n: int = 1) -> None:
        self.pace.reach(self.pace.done + n)
        if time.monotonic() - self._printed >= self.INTERVAL:
            self.show(self.pace.elapsed)

    def show(self, elapsed: float) -> None:
        """Prints how far the task is."""
        self._printed = time.monotonic()
        if self.pace.total is None and not self.pace.done:
            self._write_line(f"{self._description}: {brief_seconds(elapsed)}")
            return
        left = self.pace.left()
        of = "" if self.pace.total is None else f" of {self.pace.total:,}"
        eta = "" if left is None else f", eta {clock(left)}"
        self._write_line(f"{self._description}: {self.pace.done:,}{of}{eta}")


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookConsole(PlainConsole):
    """Console for a notebook: a progress bar below the cell instead of a line per step. The bar is plain HTML, so the
    notebook needs no widgets."""

    # Seconds between updates of the bar.
    INTERVAL = 0.2

    def begin(self, total_steps: int, done: int = 0) -> None:
        super().begin(total_steps, done)
        self._drawn = float("-inf")
        self._last = ""
        self._bar = self._draw("", new=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self._pace is None:
            raise RuntimeError("step before begin")
        self._pace.reach(step)
        left = self._pace.left()
        self._last = f"step {step}/{self._pace.total}  {show(self._columns, metrics)}"
        if step == self._pace.total or time.monotonic() - self._drawn >= self.INTERVAL:
            self._draw(self._last + ("" if left is None else f"  eta {clock(left)}"))

    def end(self) -> None:
        if self._pace is not None and self._last:
            self._draw(f"{self._last}  {clock(self._pace.elapsed)}")
        self._pace = None

    def _draw(self, text: str, *, new: bool = False) -> Any:
        from IPython.display import HTML, display

        assert self._pace is not None
        self._drawn = time.monotonic()
        bar = f'<progress max="{self._pace.total}" value="{self._pace.done}" style="width: 24em"></progress>'
        shown = HTML(f"{bar} <code>{html.escape(visible(text))}</code>")
        return display(shown, display_id=True) if new else self._bar.update(shown)


def _print(text: str) -> None:
    for line in fit(text):
        write(line)
