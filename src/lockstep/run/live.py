"""The console for a terminal: bars at the bottom that stay, lines that scroll by above them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import Task as Bar
from rich.text import Text

from lockstep.run.output import visible
from lockstep.run.pace import Pace
from lockstep.run.progress import Console, TaskProgress, validation_rows
from lockstep.run.screen import Screen
from lockstep.run.text import Column, clock, fit, fit_rows, show, task_summary


class LiveConsole(Console):
    """Bars for training and for tasks, the step's metrics under them; with `lines` a line stays for every step."""

    def __init__(self, columns: Sequence[Column], screen: RichConsole | None = None, *, lines: bool = False):
        self._columns = columns
        self._lines = lines
        self._screen = screen or Screen()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _TimeColumn(),
            console=self._screen,
            expand=True,
        )
        self._metrics = ""
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
        # The bar is gone now; where the run got to stays on the screen.
        if self._last:
            self._print(f"{self._last}  {clock(self._pace.elapsed)}")
        self._last = ""

    @property
    def _width(self) -> int:
        return min(self._screen.width, 100)

    def _print(self, text: str, style: str = "") -> None:
        for line in fit(text, self._width):
            self._screen.print(Text(line, style=style), soft_wrap=True)

    def _board(self) -> Group:
        return Group(self._progress, Text(self._metrics, style="cyan")) if self._metrics else Group(self._progress)

    def _show(self) -> None:
        if self._live is None:
            self._live = Live(get_renderable=self._board, console=self._screen, refresh_per_second=4, transient=True)
            self._live.start()

    def _hide_when_idle(self) -> None:
        if self._live is not None and not self._progress.tasks:
            self._live.stop()
            self._live = None


class _LiveTask(TaskProgress):
    def __init__(self, progress: Progress, bar: TaskID, pace: Pace):
        self._progress, self._bar, self._pace = progress, bar, pace

    def advance(self, n: int = 1) -> None:
        self._pace.reach(self._pace.done + n)
        self._progress.update(self._bar, completed=self._pace.done)


class _TimeColumn(ProgressColumn):
    # rich's own guess forgets everything after 30 seconds, and a step of reinforcement learning takes longer.
    def render(self, task: Bar) -> Text:
        pace: Pace = task.fields["pace"]
        left = pace.left()
        return Text(f"{clock(pace.elapsed)} eta {'-:--:--' if left is None else clock(left)}", style="dim")
