"""Makes a picture of a recorded terminal of 80 columns.

tmux capture-pane -e -p | python tools/console_picture.py "make quickstart" > docs/quickstart.svg
"""

from __future__ import annotations

import io
import re
import sys

from rich.console import Console
from rich.text import Text

COLUMNS = 80


def picture(recorded: str, title: str) -> str:
    """The recorded screen as SVG, colours and all; it fetches no font, so that it looks the same offline."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(recorded.strip("\n")), soft_wrap=True)
    svg = console.export_svg(title=title, unique_id="console")
    svg = re.sub(r"\s*(@font-face \{.*?\}|<!--.*?-->)", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    print(picture(sys.stdin.read(), sys.argv[1]), end="")
