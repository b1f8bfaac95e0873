"""What a person sees of a run: one interface, a live bar on a terminal, plain lines in a file or a pipe.

Output of the run goes to stdout. What ends it (`problems`) goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from lockstep.errors import Refusal
from lockstep.run.text import OFFLINE_COLUMNS, Column, fit


class TaskProgress:
    """Long work that is not training steps, such as tokenising."""

    def advance(self, n: int = 1) -> None:
        """`n` more are done."""


class Console:
    """The interface. This class itself says nothing, for ranks above 0; `Console.open` gives one that speaks."""

    @staticmethod
    def open(
        columns: Sequence[Column] = OFFLINE_COLUMNS, plain: bool | None = None, every: int = 1, lines: bool = False
    ) -> Console:
        """A live console on a terminal, otherwise a plain one that shows every `every`-th step; `plain` forces it.

        With `lines` the live one leaves a line for every step: for steps that take seconds.
        """
        if plain is None:
            plain = not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
        if plain:
            from lockstep.run.plain import PlainConsole

            return PlainConsole(columns, every)
        from lockstep.run.live import LiveConsole

        return LiveConsole(columns, lines=lines)

    @staticmethod
    def silent() -> Console:
        return Console()

    def banner(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """A title and a table of names and values under it."""

    def say(self, text: str) -> None:
        """Something worth knowing: a checkpoint saved, a file written."""

    def warn(self, text: str) -> None:
        """Something the user should look at; the run goes on."""

    @contextlib.contextmanager
    def task(self, description: str, total: int | None) -> Iterator[TaskProgress]:
        """Shows long work; the body calls `advance` on what it gets."""
        yield TaskProgress()

    def begin(self, total_steps: int, done: int = 0) -> None:
        """Training starts, with `done` steps behind it. `end` must follow, also after an error."""

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Step number `step` is finished; the last one is `total_steps`."""

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of a validation after `step`."""

    def end(self) -> None:
        """Training is over, or was cut short. May be called twice."""

    def problems(self, refusal: Refusal) -> None:
        """Tells what is wrong, why, and what to do, on stderr. A silent console does this too: no error is lost."""
        self.end()
        print_problems(refusal)


def print_problems(refusal: Refusal, colour: bool | None = None) -> None:
    """Every problem of a refusal on stderr; `colour` follows the terminal unless given."""
    from rich.text import Text

    from lockstep.run.screen import Screen

    screen = Screen(stderr=True, force_terminal=colour, no_color=colour is False or None)
    count = len(refusal.problems)
    screen.print(Text(f"{count} problems:" if count > 1 else "1 problem:", style="bold"))
    for problem in refusal.problems:
        lines = [(problem.where, "bold red"), (f"  {problem.why}", "")]
        lines += [(f"  -> {problem.remedy}", "green")] if problem.remedy else []
        screen.print()
        for text, style in lines:
            for line in fit(text, min(screen.width, 100)):
                screen.print(Text(line, style=style), soft_wrap=True)


def validation_rows(metrics: dict[str, float]) -> str:
    """`loss 1.234  accuracy 0.81`: the names without the `val/` they all share."""
    return "  ".join(f"{name.removeprefix('val/')} {value:.4g}" for name, value in metrics.items())
