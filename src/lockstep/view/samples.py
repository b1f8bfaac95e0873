"""The responses of samples.jsonl: those of a step, or those that a filter finds, from a byte offset on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from lockstep.view.files import Missing
from lockstep.view.lines import edge_steps, first_of_step, line_at, line_before, lines_from, parsed, step_of, whole_end

SCAN_SECONDS = 0.3
"""How long one request searches before it answers with what it found."""
PAGE = 40
"""Responses in one answer."""
SHOWN_CHARACTERS = 6_000
"""Of one text in a list of responses; a single response is told whole."""
SHOWN_TOKENS = 1_500


@dataclass(frozen=True)
class Filter:
    """Which responses are wanted. `ended` is how a response ended (`stop` of its line), or `failed`."""

    kind: str = ""
    ended: str = ""
    least: float | None = None
    most: float | None = None
    text: str = ""

    def may_take(self, line: bytes | None) -> bool:
        """Whether the line can hold the text: most need not be parsed. Known where characters stand for themselves."""
        if not self.text or line is None or not self.text.isascii() or not self.text.isprintable():
            return True
        if '"' in self.text or "\\" in self.text or not line.isascii() or b"\\u" in line or b"\\/" in line:
            return True
        return self.text.lower().encode() in line.lower()

    def takes(self, sample: dict[str, Any]) -> bool:
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
    """What a search looks into: prompt, response, truth, origin and what went wrong."""
    prompt = sample.get("prompt")
    turns = prompt if isinstance(prompt, list) else [prompt]
    messages = [message.get("content") if isinstance(message, dict) else message for message in turns]
    told = [sample.get(name) for name in ("response", "ground_truth", "failure", "origin")]
    return [str(text).lower() for text in messages + told if text is not None]


def of_step(file: BinaryIO, wanted: Filter, step: int | None, start: int | None) -> dict[str, Any]:
    """Responses of `step`, or of the last one where it is None, and the steps before and after it that have any."""
    at = step if step is not None else edge_steps(file)[1]
    if at is None:
        return {**in_all_steps(file, wanted, 0), "step": None, "before": None, "after": None}
    first, behind = first_of_step(file, at), first_of_step(file, at + 1)
    before, after = line_before(file, first), line_at(file, behind)
    return {
        **_found(file, wanted, first if start is None else start, behind),
        "step": at,
        "before": step_of(before.content) if before else None,
        "after": step_of(after.content) if after else None,
    }


def in_all_steps(file: BinaryIO, wanted: Filter, start: int) -> dict[str, Any]:
    return _found(file, wanted, start, whole_end(file))


def _found(file: BinaryIO, wanted: Filter, at: int, end: int) -> dict[str, Any]:
    """Responses from the byte `at` on. `next` is where the search goes on, null at the end."""
    first, last = edge_steps(file)
    deadline = time.monotonic() + SCAN_SECONDS
    samples: list[dict[str, Any]] = []
    more = False
    for line in lines_from(file, at):
        if line.start >= end:
            break
        possible = wanted.may_take(line.content)
        sample = parsed(line.content) if possible else None
        if possible and (sample is None or step_of(line.content) is None):
            samples.append({"offset": line.start, "damaged": line.end - line.start})
        elif sample is not None and wanted.takes(sample):
            samples.append({"offset": line.start, **shortened(sample, line.end - line.start)})
        at = line.end
        if len(samples) >= PAGE or time.monotonic() > deadline:
            more = at < end
            break
    return {"first": first, "last": last, "samples": samples, "next": at if more else None, "at": at, "size": end}


def whole(file: BinaryIO, start: int) -> dict[str, Any]:
    """One response with all of its text. `start` must be where a line begins."""
    file.seek(max(0, start - 1))
    line = line_at(file, start) if start == 0 or file.read(1) == b"\n" else None
    sample = parsed(line.content) if line else None
    if sample is None:
        raise Missing("no response begins there: the file may have been written anew")
    return {"offset": start, **sample}


def shortened(sample: dict[str, Any], size: int) -> dict[str, Any]:
    """The same with long texts cut, and `bytes`, its size, where that was needed."""
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

    told: dict[str, Any] = short(sample)
    return {**told, "bytes": size} if cut else told
