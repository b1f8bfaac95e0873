"""The reward function of the rule `math` for worker processes. It loads math-verify once, outside the time limit of
calls.

No other file imports this one.
"""

from __future__ import annotations

from typing import Any

from lockstep.reward.rules import math_score

# A symbolic comparison loads all modules that a call needs.
math_score(r"\boxed{1+x}", "x+1")


def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Calls `math_score`, with the arguments of a reward function."""
    return math_score(solution_str, ground_truth)
