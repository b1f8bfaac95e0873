"""The samples of samples.jsonl from a byte offset on: those of a step, or those that match a filter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from lockstep.serve.viewer_log import (
    Missing,
    complete_end,
    edge_steps,
    first_of_step,
    line_at,
    line_before,
    lines_from,
    parsed,
    step_of,
)

SCAN_SECONDS = 0.3
"""Time limit of a search in one request."""
PAGE_SIZE = 40
"""Samples in one reply."""
SHOWN_CHARACTERS = 6_000
"""Limit of a text in a list of samples. The reply for a single sample has the full text."""
SHOWN_TOKENS = 1_500


@dataclass(frozen=True)
class SampleFilter:
    """Selects samples. `ended` is the key `stop` of a sample, or `failed`."""

    kind: str = ""
    ended: str = ""
    least: float | None = None
    most: float | None = None
    text: str = ""

    def may_match(self, line: bytes | None) -> bool:
        """Whether the line may contain the text. Most lines need not be parsed; escaped characters must be."""
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
    """The searched texts: prompt, response, ground truth, failure and origin."""
    prompt = sample.get("prompt")
    turns = prompt if isinstance(prompt, list) else [prompt]
    messages = [message.get("content") if isinstance(message, dict) else message for message in turns]
    others = [sample.get(name) for name in ("response", "ground_truth", "failure", "origin")]
    return [str(text).lower() for text in messages + others if text is not None]


def samples_of_step(file: BinaryIO, wanted: SampleFilter, step: int | None, start: int | None) -> dict[str, Any]:
    """Samples of `step` (None: the last one), and the previous and next step with samples."""
    at = step if step is not None else edge_steps(file)[1]
    if at is None:
        return {**samples_of_all_steps(file, wanted, 0), "step": None, "before": None, "after": None}
    first, end = first_of_step(file, at), first_of_step(file, at + 1)
    before, after = line_before(file, first), line_at(file, end)
    return {
        **_found(file, wanted, first if start is None else start, end),
        "step": at,
        "before": step_of(before.content) if before else None,
        "after": step_of(after.content) if after else None,
    }


def samples_of_all_steps(file: BinaryIO, wanted: SampleFilter, start: int) -> dict[str, Any]:
    return _found(file, wanted, start, complete_end(file))


def _found(file: BinaryIO, wanted: SampleFilter, at: int, end: int) -> dict[str, Any]:
    """Samples from the byte `at` on. `next` is the offset to continue from, null at the end."""
    first, last = edge_steps(file)
    deadline = time.monotonic() + SCAN_SECONDS
    samples: list[dict[str, Any]] = []
    more = False
    for line in lines_from(file, at):
        if line.start >= end:
            break
        possible = wanted.may_match(line.content)
        sample = parsed(line.content) if possible else None
        if possible and (sample is None or step_of(line.content) is None):
            samples.append({"offset": line.start, "damaged": line.end - line.start})
        elif sample is not None and wanted.matches(sample):
            samples.append({"offset": line.start, **shortened(sample, line.end - line.start)})
        at = line.end
        if len(samples) >= PAGE_SIZE or time.monotonic() > deadline:
            more = at < end
            break
    return {"first": first, "last": last, "samples": samples, "next": at if more else None, "at": at, "size": end}


def single_sample(file: BinaryIO, start: int) -> dict[str, Any]:
    """One sample with its full text. `start` must be the offset of a line."""
    file.seek(max(0, start - 1))
    line = line_at(file, start) if start == 0 or file.read(1) == b"\n" else None
    sample = parsed(line.content) if line else None
    if sample is None:
        raise Missing("no sample begins at this offset: the file may be a new one")
    return {"offset": start, **sample}


def shortened(sample: dict[str, Any], size: int) -> dict[str, Any]:
    """The sample with long texts cut; then `bytes` is its full size."""
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
