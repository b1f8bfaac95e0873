"""The reward of `grpo_step.py`, called by both sides."""

from __future__ import annotations

from typing import Any


def vowels(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """How many of a hundred characters are among those of the ground truth."""
    return 100.0 * sum(solution_str.count(letter) for letter in ground_truth) / max(1, len(solution_str))
