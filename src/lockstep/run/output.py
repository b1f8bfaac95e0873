"""Functions that write to stdout and stderr, and functions that wrap text to the width of a terminal."""

from __future__ import annotations

import contextlib
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lockstep.masking import without_concealed

# Text of dataset rows, responses and files may contain escape sequences, which a terminal would execute. For this
# reason `write` prints escape sequences as visible text. No other module may print; a test checks this.
#
# The pattern matches control characters except line break and tab, separators at which some terminals break lines, and
# lone surrogates, which cannot be encoded. The pattern also matches characters that change the writing direction,
# because such characters can disguise a line.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Replaces invisible characters of `text` with escapes, such as `\x1b` or `\u202e`."""
    return _HIDDEN.sub(lambda found: _escaped(ord(found[0])), text)


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 32 else f"\\u{code:04x}"


def write(text: str = "", *, error: bool = False, end: str = "\n") -> None:
    """Prints to stdout or stderr and flushes."""
    stream = sys.stderr if error else sys.stdout
    stream.write(visible(without_concealed(text)) + end)  # a single call, so that lines of two threads do not mix
    stream.flush()


def never_fail_to_encode() -> None:
    """Makes stdout and stderr escape characters that the terminal's encoding does not have, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")


WIDTH = 80


class Column(NamedTuple):
    """A metric that the console shows at each step: its name, label and number format. If `metric` has several names,
    the console shows the first one that the step has."""

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
# `kl` is the KL divergence from the reference model if there is one. Without a reference model, `kl` is `actor/ppo_kl`,
# the KL divergence of the updated policy from the policy before the update.
ONLINE_COLUMNS = (
    Column("critic/score/mean", "reward", ".3f"),
    Column(("actor/kl", "actor/reward_kl_penalty", "actor/ppo_kl"), "kl", ".3f"),
    Column("actor/entropy", "ent", ".2f"),
    Column("response_length/mean", "len", ".0f"),
    Column("environment/turns", "turns", ".2f"),
    Column("perf/throughput", "tok/s", ",.0f"),
    Column("timing_s/gen", "gen", ".1f"),
    Column(("timing_s/update_actor",), "upd", ".1f"),
)


def fit(text: str, width: int = WIDTH) -> list[str]:
    """Wraps `text` to `width`. Words are not broken, so that a long path can be copied."""
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
    """Formats a two-column table as one (key, value) pair per line: keys are padded, values are wrapped."""
    margin = max((len(key) for key, _ in rows), default=0) + 2
    pairs: list[tuple[str, str]] = []
    for key, value in rows:
        first, *others = [line.strip() for line in fit(value, max(width - margin, 20))]
        pairs += [(key.ljust(margin), first), *((" " * margin, line) for line in others)]
    return pairs


def show(columns: Sequence[Column], metrics: dict[str, float], width: int = WIDTH) -> str:
    """Formats the metrics of a step as one line. The line has as many columns as fit in `width`. The gaps between
    columns are one space wide if this makes room for more columns, else two."""
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
    """Formats seconds as a clock, such as '2:03:04' for 7384."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


def task_summary(description: str, total: int | None, done: int, elapsed: float) -> str:
    """Returns a summary such as `Encoding rows: 400 done in 0.3 s`. The number is omitted if the task counts no
    items."""
    count = "" if total is None and not done else f"{done:,} "
    return f"{description}: {count}done in {brief_seconds(elapsed)}"


# Seconds without output after which a stage says that it still runs. The pause grows after SHORT seconds.
SILENCE, SHORT, LONGEST_SILENCE = 1.5, 9.0, 30.0


@contextlib.contextmanager
def reminders(tell: Callable[[float], None], spoke: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
    """Calls `tell` with the seconds since the beginning of the `with` block whenever there was no output for a while.
    `spoke` returns the time of the last output."""
    began, done, one_at_a_time = time.monotonic(), threading.Event(), threading.Lock()

    def watch() -> None:
        told, left = began, SILENCE
        while not done.wait(max(left, 0.1)):
            now, elapsed = time.monotonic(), told - began
            pause = SILENCE if elapsed < SHORT else min(elapsed / 2, LONGEST_SILENCE)
            left = pause - (now - max(told, spoke()))
            if left <= 0:
                with one_at_a_time, contextlib.suppress(OSError):  # the next output of the run reports a closed pipe
                    if not done.is_set():
                        tell(now - began)
                told, left = now, SILENCE

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with one_at_a_time:
            done.set()


def brief_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
