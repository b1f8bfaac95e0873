"""The reward functions of verl's slow rules for worker processes: `verl_prime_math_0_9` calls the rule
`verl/prime_math@0.9`.

No other module imports `verl_judge`. A rule that runs code refuses to load on a machine that cannot isolate programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lockstep.environments.sandbox import chosen_isolation
from lockstep.reward.verl_versions import verl_score


def __getattr__(name: str) -> Callable[..., float]:
    found = re.fullmatch(r"verl_(\w+?)_(\d+(?:_\d+)+)", name)
    if found is None:
        raise AttributeError(name)
    rule = verl_score(f"verl/{found[1]}@{found[2].replace('_', '.')}")
    if rule.sandboxed:
        chosen_isolation()
    else:
        rule.score("\\boxed{x+1}", "1+x")  # loads sympy, so that loading does not count towards the time limit

    def judge(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return rule.score(solution_str, ground_truth)

    return judge
