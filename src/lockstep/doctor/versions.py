"""Versions as pip, CANN and the Ascend driver write them (2.5.1rc1, 2.10.0.post4, 8.3.RC1, 25.3.rc1.2), in order."""

from __future__ import annotations

import re
from itertools import zip_longest

_RANK = {"dev": -3, "alpha": -2, "beta": -2, "b": -2, "a": -2, "t": -2, "rc": -1, "post": 1}


def release(version: str) -> str:
    """2.13.0 of 2.13.0+cpu, 2.13.0rc1 or 2.13.0.post4: the part in which packages that belong together agree."""
    found = re.match(r"\d+(\.\d+){0,2}", version)
    return found.group(0) if found else version


def order(version: str) -> tuple[int, ...]:
    """The numbers that decide. A candidate is before its release, a post-release after it; `+...` does not count."""
    key: list[int] = []
    for word, number in re.findall(r"([a-z]+)?\.?(\d+)", version.lower().partition("+")[0]):
        key += [_RANK.get(word, 0), int(number)] if word else [int(number)]
    return tuple(key)


def older(version: str, than: str) -> bool:
    for mine, other in zip_longest(order(version), order(than), fillvalue=0):
        if mine != other:
            return mine < other
    return False


def satisfies(version: str, pin: str) -> bool:
    """Whether `version` is `>=X`, or `==X` in the sense of the stacks: of X's release."""
    if pin.startswith(">="):
        return not older(version, pin[2:])
    wanted = pin.removeprefix("==")
    # A pinned candidate or post-release takes what followed it in the same release.
    return release(version) == wanted or (release(version) == release(wanted) and not older(version, wanted))
