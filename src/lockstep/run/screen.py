"""A console of the package rich that does not interpret markup in the printed text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from lockstep.run.output import visible

WIDTH = 80


class Screen(Console):
    """Prints square brackets and colons literally and makes escape sequences visible."""

    def __init__(self, *, stderr: bool = False, **settings: Any):
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, **settings)

    @classmethod
    def on_stdout(cls) -> Screen:
        """Creates a screen on stdout, as wide as the terminal, or 80 columns wide in a file or a pipe."""
        return cls(width=None if sys.stdout.isatty() else WIDTH)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def shown(text: str, style: str = "") -> Text:
    """Returns a `rich.text.Text` with visible escapes for control characters. The package rich would drop some of these
    characters silently."""
    return Text(visible(text), style=style)
