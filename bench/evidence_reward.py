"""The reward of the online rows of `bench/evidence.py`: dense, so that a small model has a curve that can differ."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"\d+(?:\.\d+)?")
ANNOTATION = re.compile(r"<<[^>]*>>")


def numbers_of(text: str) -> list[str]:
    """The numbers of a worked answer, without thousands separators and GSM8K's calculator annotations."""
    return NUMBER.findall(ANNOTATION.sub("", text).replace(",", ""))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Half for the right result as the last number, half for the share of the worked answer's numbers that occur."""
    found = numbers_of(solution_str)
    wanted = set(numbers_of(extra_info["answer"]))
    right = bool(found) and float(found[-1]) == float(ground_truth.replace(",", ""))
    return 0.5 * right + 0.5 * len(wanted & set(found)) / len(wanted)
