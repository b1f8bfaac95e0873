"""The reward function of the rule `sandbox` for worker processes: runs the tests of a row against the model's code.

No other module imports `sandbox_judge`. It refuses to start on a machine that cannot isolate programs.
"""

from __future__ import annotations

from typing import Any

from lockstep.environments.grading import grade
from lockstep.environments.sandbox import chosen_isolation

chosen_isolation()


def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Calls `grade`, with the arguments of a reward function."""
    return grade(solution_str, ground_truth)
