"""The reward function of the rule `math` for worker processes. The module loads math-verify when the worker starts, so
that loading does not count towards the time limit of a call.

No other module imports `math_judge`.
"""

from __future__ import annotations

from typing import Any

from lockstep.reward.rules import math_score

# A symbolic comparison at the start loads all modules that a later call needs.
math_score(r"\boxed{1+x}", "x+1")


def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Calls `math_score`, with the arguments of a reward function."""
    return math_score(solution_str, ground_truth)
