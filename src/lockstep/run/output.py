"""Output to stdout and stderr: the only module that prints, and how text is fitted to a terminal."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.masking import without_concealed

# The one door to stdout and stderr. Text of rows, responses and files is shown there, never sent: a terminal obeys
# escape sequences, whoever wrote them. No other module of the layers above may print (a test holds this).

# Control characters but for the line break and the tab; marks, overrides and isolates of the writing direction, which
# make a line read otherwise than it is; separators that some terminals break lines at; halves of surrogate pairs,
# which no encoding can print.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    r"""`text` with its hidden characters spelt out: `\x1b`, and beyond ASCII as JSON writes them, `\u202e`."""
    return _HIDDEN.sub(lambda found: _spelt(ord(found[0])), text)


def _spelt(code: int) -> str:
    return f"\\x{code:02x}" if code < 32 else f"\\u{code:04x}"


def write(text: str = "", *, error: bool = False, end: str = "\n") -> None:
    """A line on stdout, or on stderr, at once."""
    print(visible(without_concealed(text)), file=sys.stderr if error else sys.stdout, end=end, flush=True)


def never_fail_to_encode() -> None:
    """Spell out what the terminal's encoding does not have, where Python would end the program."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


# Text that fits a terminal, and numbers the way a person reads them.

WIDTH = 80


class Column(NamedTuple):
    """A metric that is shown at each step: its name (or names, the first that is there), label and number format."""

    metric: str | tuple[str, ...]
    label: str
    format: str


OFFLINE_COLUMNS = (
    Column("train/loss", "loss", ".4f"),
    Column(("train/pair_accuracy", "train/label_accuracy", "train/step_accuracy"), "acc", ".3f"),
    Column("train/margin", "margin", ".3g"),
    Column("train/divergence", "apart", ".4f"),
    Column("train/lr", "lr", ".2e"),
    Column("train/grad_norm", "grad", ".3g"),
    Column("perf/throughput", "tok/s", ",.0f"),
)
# The divergence from the reference where there is one, otherwise how far the step moved the policy.
ONLINE_COLUMNS = (
    Column("critic/score/mean", "reward", ".3f"),
    Column(("actor/kl", "actor/reward_kl_penalty", "actor/ppo_kl"), "kl", ".3f"),
    Column("actor/entropy", "ent", ".2f"),
    Column("response_length/mean", "len", ".0f"),
    Column("perf/throughput", "tok/s", ",.0f"),
    Column("timing_s/gen", "gen", ".1f"),
    Column(("timing_s/update_actor",), "upd", ".1f"),
)


def fit(text: str, width: int = WIDTH) -> list[str]:
    """`text` as lines of at most `width`. Words stay whole, so that a long path can still be copied."""
    lines: list[str] = []
    for line in visible(text).expandtabs(4).split("\n"):
        indent = line[: len(line) - len(line.lstrip())] + "  "
        wrapped = textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines += wrapped or [""]
    return lines


def fit_rows(rows: Sequence[tuple[str, str]], width: int = WIDTH) -> list[tuple[str, str]]:
    """A table of two columns as one (key, value) pair a line: keys padded to one width, values wrapped beside them."""
    margin = max((len(key) for key, _ in rows), default=0) + 2
    pairs: list[tuple[str, str]] = []
    for key, value in rows:
        first, *others = [line.strip() for line in fit(value, max(width - margin, 20))]
        pairs += [(key.ljust(margin), first), *((" " * margin, line) for line in others)]
    return pairs


def show(columns: Sequence[Column], metrics: dict[str, float], width: int = WIDTH) -> str:
    """The columns that the metrics have, from the left as far as they fit; set closer where they do not."""
    wide = _line(columns, metrics, width, "  ")
    close = _line(columns, metrics, width, " ")
    return close if len(close.split()) > len(wide.split()) else wide


def _line(columns: Sequence[Column], metrics: dict[str, float], width: int, gap: str) -> str:
    line = ""
    for column in columns:
        names = (column.metric,) if isinstance(column.metric, str) else column.metric
        found = next((name for name in names if name in metrics), None)
        if found is not None:
            cell = f"{column.label} {metrics[found]:{column.format}}"
            longer = f"{line}{gap}{cell}" if line else cell
            if len(longer) > width:
                break
            line = longer
    return line


def clock(seconds: float) -> str:
    """7384 -> '2:03:04'."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def task_summary(description: str, total: int | None, done: int, elapsed: float) -> str:
    """`Encoding rows: 400 done in 0.3 s`; work that is not counted has only its time."""
    count = "" if total is None and not done else f"{done:,} "
    return f"{description}: {count}done in {brief_seconds(elapsed)}"


def brief_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
