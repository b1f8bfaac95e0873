"""Reads files of run folders: opens them safely, reads JSON lines by byte offset, and reads samples.jsonl.

Only regular files inside the viewed folder are opened. If the last line has no newline, the run is still writing it, so
the line is ignored.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

BLOCK = 1 << 16
LONGEST_LINE = 1 << 25
"""The maximum length of a line in bytes (32 MiB). The viewer reports a longer line, but does not parse or show it."""
MOST_DAMAGED = 50
"""The maximum number of damaged lines that are skipped at the beginning or at the end of a file."""
SCAN_SECONDS = 0.3
"""The maximum number of seconds that one request searches for samples."""
PAGE_SIZE = 40
"""The maximum number of samples in one reply."""
SHOWN_CHARACTERS = 6_000
"""The maximum number of characters of a text in a list of samples. The reply for a single sample has the full text."""
SHOWN_TOKENS = 1_500

_STEP = re.compile(rb'\{"step": (-?\d{1,18})[,}]')


class Missing(Exception):
    """Raised if the requested data does not exist or may not be shown. The viewer page shows the error message."""


def inside(root: Path, path: Path) -> bool:
    """Returns whether `path`, after resolving links, is in the folder `root`. `root` must be a resolved path."""
    return Path(os.path.realpath(path)).is_relative_to(root)


def open_inside(root: Path, path: Path) -> BinaryIO:
    """Opens a regular file inside `root`. Links that lead out of `root` are not followed."""
    if not inside(root, path):
        raise Missing(f"{path.name} is a link out of the viewed folder")
    try:
        # With O_NONBLOCK, opening a named pipe does not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Missing(f"{path.name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Missing(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_small(root: Path, path: Path, most: int) -> str:
    """Returns the text of a file. Raises `Missing` if the file has more than `most` bytes."""
    with open_inside(root, path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Missing(f"{path.name} has more than {most:,} bytes and is too large to show")
    return content.decode("utf-8", errors="replace")


class LogLine(NamedTuple):
    """A line of a file. `start` and `end` are the byte offsets of this line and of the next line. `content` is None if
    the line exceeds the size limit."""

    start: int
    end: int
    content: bytes | None


def complete_end(file: BinaryIO) -> int:
    """Returns the byte offset after the last complete line of the file."""
    return _after_newline_before(file, os.fstat(file.fileno()).st_size)


def line_at(file: BinaryIO, start: int) -> LogLine | None:
    """Returns the line that begins at the byte offset `start`. Returns None if the line is incomplete."""
    file.seek(start)
    content = file.readline(LONGEST_LINE)
    if content.endswith(b"\n"):
        return LogLine(start, start + len(content), content)
    end = start + len(content)
    if len(content) < LONGEST_LINE:
        return None
    while block := file.read(BLOCK):
        if (newline := block.find(b"\n")) >= 0:
            return LogLine(start, end + newline + 1, None)
        end += len(block)
    return None


def lines_from(file: BinaryIO, start: int) -> Iterator[LogLine]:
    while (line := line_at(file, start)) is not None:
        yield line
        start = line.end


def last_line(file: BinaryIO) -> LogLine | None:
    return line_before(file, complete_end(file))


def line_before(file: BinaryIO, offset: int) -> LogLine | None:
    """Returns the line that ends at the byte offset `offset`. Returns None if `offset` is 0."""
    return line_at(file, _after_newline_before(file, offset - 1)) if offset > 0 else None


def parsed(content: bytes | None) -> dict[str, Any] | None:
    """Returns the JSON object of a line. Returns None if the line is not a JSON object. NaN and infinities become
    strings."""
    if content is None:
        return None
    try:
        value = json.loads(content, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def step_of(content: bytes | None) -> int | None:
    """Returns the step of a JSON line. If `step` is the first key, the rest of the line is not parsed."""
    if content is None:
        return None
    if match := _STEP.match(content):
        return int(match[1])
    step = (parsed(content) or {}).get("step")
    return step if isinstance(step, int) else None


def edge_steps(file: BinaryIO) -> tuple[int | None, int | None]:
    """Returns the first and the last step of a file. A few damaged lines at the beginning and at the end are
    skipped."""
    first = (step_of(line.content) for line in islice(lines_from(file, 0), MOST_DAMAGED))
    return next((step for step in first if step is not None), None), _last_step(file)


def _last_step(file: BinaryIO) -> int | None:
    line = last_line(file)
    for _ in range(MOST_DAMAGED):
        if line is None or (step := step_of(line.content)) is not None:
            return None if line is None else step
        line = line_before(file, line.start)
    return None


def first_of_step(file: BinaryIO, step: int) -> int:
    """Returns the byte offset of the first line whose step is at least `step`. Returns the end of the file if all steps
    are smaller. The function uses a binary search, because the lines of a file are in the order of their steps."""
    low, high = 0, complete_end(file)
    while low < high:
        start = max(low, _after_newline_before(file, (low + high) // 2))
        begin, line = start, line_at(file, start)
        while line is not None and line.end < high and step_of(line.content) is None:
            line = line_at(file, line.end)  # skips damaged lines, which have no step
        if line is None:
            return begin
        line_step = step_of(line.content)
        if line_step is not None and line_step < step:
            low = line.end
        else:
            high = begin
    return low


def _after_newline_before(file: BinaryIO, offset: int) -> int:
    """Returns the start offset of the line that contains the byte before `offset`. If the byte before `offset` is a
    newline, returns `offset`."""
    while offset > 0:
        start = max(0, offset - BLOCK)
        file.seek(start)
        newline = file.read(offset - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        offset = start
    return 0


# Samples -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleFilter:
    """Selects samples. `ended` selects samples with this value of the key `stop`. `failed` selects samples whose reward
    or rollout function failed."""

    kind: str = ""
    ended: str = ""
    least: float | None = None
    most: float | None = None
    text: str = ""

    def may_match(self, line: bytes | None) -> bool:
        """Returns False if the unparsed line surely does not contain the searched text. Returns True for lines with
        escaped characters, because they must be parsed first."""
        if not self.text or line is None or not self.text.isascii() or not self.text.isprintable():
            return True
        if '"' in self.text or "\\" in self.text or not line.isascii() or b"\\u" in line or b"\\/" in line:
            return True
        return self.text.lower().encode() in line.lower()

    def matches(self, sample: dict[str, Any]) -> bool:
        if self.kind and sample.get("kind") != self.kind:
            return False
        if self.ended == "failed" and "failure" not in sample:
            return False
        if self.ended not in ("", "failed") and sample.get("stop") != self.ended:
            return False
        if self.least is not None or self.most is not None:
            score = sample.get("score")
            if isinstance(score, bool) or not isinstance(score, (int, float)):
                return False
            if (self.least is not None and score < self.least) or (self.most is not None and score > self.most):
                return False
        return not self.text or any(self.text.lower() in text for text in _texts(sample))


def _texts(sample: dict[str, Any]) -> list[str]:
    """Returns the texts of a sample that the text filter searches: prompt, response, ground truth, failure and
    origin."""
    prompt = sample.get("prompt")
    turns = prompt if isinstance(prompt, list) else [prompt]
    messages = [message.get("content") if isinstance(message, dict) else message for message in turns]
    others = [sample.get(name) for name in ("response", "ground_truth", "failure", "origin")]
    return [str(text).lower() for text in messages + others if text is not None]


def samples_of_step(file: BinaryIO, selection: SampleFilter, step: int | None, start: int | None) -> dict[str, Any]:
    """Returns the samples of `step`, and the previous and the next step that have samples. If `step` is None, uses the
    last step."""
    at = step if step is not None else edge_steps(file)[1]
    if at is None:
        return {**samples_of_all_steps(file, selection, 0), "step": None, "before": None, "after": None}
    first, end = first_of_step(file, at), first_of_step(file, at + 1)
    before, after = line_before(file, first), line_at(file, end)
    return {
        **_page(file, selection, first if start is None else start, end),
        "step": at,
        "before": step_of(before.content) if before else None,
        "after": step_of(after.content) if after else None,
    }


def samples_of_all_steps(file: BinaryIO, selection: SampleFilter, start: int) -> dict[str, Any]:
    return _page(file, selection, start, complete_end(file))


def _page(file: BinaryIO, selection: SampleFilter, at: int, end: int) -> dict[str, Any]:
    """Returns a page of samples that begins at the byte offset `at`. The result key `next` is the offset of the next
    page, or null if there are no more samples."""
    first, last = edge_steps(file)
    deadline = time.monotonic() + SCAN_SECONDS
    samples: list[dict[str, Any]] = []
    more = False
    for line in lines_from(file, at):
        if line.start >= end:
            break
        possible = selection.may_match(line.content)
        sample = parsed(line.content) if possible else None
        if possible and (sample is None or step_of(line.content) is None):
            samples.append({"offset": line.start, "damaged": line.end - line.start})
        elif sample is not None and selection.matches(sample):
            samples.append({"offset": line.start, **shortened(sample, line.end - line.start)})
        at = line.end
        if len(samples) >= PAGE_SIZE or time.monotonic() > deadline:
            more = at < end
            break
    return {"first": first, "last": last, "samples": samples, "next": at if more else None, "at": at, "size": end}


def single_sample(file: BinaryIO, start: int) -> dict[str, Any]:
    """Returns one sample with its full text. `start` must be the byte offset of a line."""
    file.seek(max(0, start - 1))
    line = line_at(file, start) if start == 0 or file.read(1) == b"\n" else None
    sample = parsed(line.content) if line else None
    if sample is None:
        raise Missing("no sample begins at this offset: the file may have been replaced")
    return {"offset": start, **sample}


def shortened(sample: dict[str, Any], size: int) -> dict[str, Any]:
    """Returns the sample with long texts truncated. If a text was truncated, the key `bytes` has the full size of the
    sample."""
    cut = False

    def short(value: Any) -> Any:
        nonlocal cut
        if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
            cut = True
            return value[:SHOWN_CHARACTERS]
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items()}
        if isinstance(value, list):
            cut = cut or len(value) > SHOWN_TOKENS
            return [short(item) for item in value[:SHOWN_TOKENS]]
        return value

    result: dict[str, Any] = short(sample)
    return {**result, "bytes": size} if cut else result
