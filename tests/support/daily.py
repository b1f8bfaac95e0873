"""`@pytest.mark.daily` on a parametrised test: a few cases run every day, the others are slow.

`daily("grpo", "ppo")` names the cases by their ids, and `daily(every=6)` takes every sixth case. `daily` without
arguments keeps a few combinations in which every value of every parameter occurs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest


def mark_slow_cases(items: Sequence[pytest.Item], config: pytest.Config) -> None:
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("daily") is not None and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    # One case, or the last failures: the other cases are not here.
    some = config.getoption("lf", False) or any("[" in word for word in config.args)
    for test, cases in tests.items():
        marker = cases[0].get_closest_marker("daily")
        named = marker.args
        unknown = set(named) - {case.callspec.id for case in cases}
        if unknown and not some:
            raise pytest.UsageError(f"{test}: `daily` names cases that do not exist: {', '.join(sorted(unknown))}")
        if every := marker.kwargs.get("every"):
            named = [case.callspec.id for case in cases[::every]]
        daily = set(named) or _every_value_once(cases)
        for case in cases:
            if case.callspec.id not in daily:
                case.add_marker(pytest.mark.slow)


def _every_value_once(cases: Sequence[Any]) -> set[str]:
    """The ids of cases in which every value occurs: again and again the case with the most values that are new."""
    # The combinations share the objects of the lists that they are made of; some objects cannot be hashed.
    values = {case.callspec.id: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    missing = set().union(*values.values())
    chosen: set[str] = set()
    while missing:
        best = max(values, key=lambda case: len(values[case] & missing))
        chosen.add(best)
        missing -= values[best]
    return chosen
