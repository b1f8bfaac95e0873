"""What a process that judges mathematics loads: math-verify is imported here once, outside of any call's time limit.

Nothing else imports this file.
"""

from __future__ import annotations

from typing import Any

from lockstep.reward.rules import math_score

# Two spellings of one term: only comparing them as mathematics loads everything that a call needs.
math_score(r"\boxed{1+x}", "x+1")


def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """`math_score` in the form of a reward function."""
    return math_score(solution_str, ground_truth)
