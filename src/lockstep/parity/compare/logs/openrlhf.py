"""OpenRLHF's console: `Global step 3: {...}` of its PPO trainers, and the figures behind its progress bars.

A bar shows three digits of a number, and it counts micro-batches where gradients are accumulated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.parity.compare.logs.curves import LARGEST_STEP, Points
from lockstep.parity.compare.logs.text import NUMBER, number

_GLOBAL_STEP = re.compile(r"Global step (\d{1,18})\b[^:{]*:\s*(\{.*\})")
_STATUS = re.compile(r"^[^{]*(\{.*['\"]policy_loss['\"].*\})\s*$")
_ITEM = re.compile(rf"['\"]([^'\"]+)['\"]:\s*((?:[\w.]*\()?{NUMBER})", re.IGNORECASE)
_BAR = re.compile(
    r"(Train step of epoch|Episode|Train epoch)\s*(?:\[(\d+)/\d+\]|(\d+))?:"
    r"\s*\d+%\|[^|]*\|\s*(\d+)/(\d+)\s*\[([^\]]*)\]"
)
_FIGURE = re.compile(rf"([A-Za-z_][\w ./-]*)=({NUMBER})\s*(?:,|$)", re.IGNORECASE)


def points(lines: Iterable[tuple[str, str]]) -> Points:
    """The most exact account that the log has: statuses with a step, statuses in order, bars of steps, of epochs."""
    stated, statuses, bars = Points(), Points(), _Bars()
    count = 0
    for _, line in lines:
        if "Global step" in line and (found := _GLOBAL_STEP.search(line)):
            if int(found.group(1)) <= LARGEST_STEP:
                stated.add(int(found.group(1)), _items(found.group(2)))
        elif "policy_loss" in line and (found := _STATUS.match(line)):
            count += 1
            statuses.add(count, _items(found.group(1)))
        elif "%|" in line:
            for bar in _BAR.finditer(line):
                bars.read(bar)
    return stated or statuses or bars.points()


def _items(text: str) -> dict[str, float]:
    found = {}
    for name, value in _ITEM.findall(text):
        parsed = number(value.partition("(")[2] or value)
        if parsed is not None:
            found[name] = parsed
    return found


@dataclass
class _Shown:
    """Figures that a bar showed for the first time, where it stood, and how often it had started again before."""

    round: int
    at: int
    total: int
    figures: dict[str, float]


@dataclass
class _Title:
    shown: list[_Shown] = field(default_factory=list)
    round: int = 0
    last: tuple[str, int] = ("", 0)
    before: str = ""


class _Bars:
    """The bars of one log. Figures appear first while the bar still stands at the step before, then move on with it."""

    def __init__(self) -> None:
        self._titles: dict[str, _Title] = {}

    def read(self, bar: re.Match[str]) -> None:
        title, bracket, epoch, at, total, tail = bar.groups()
        state = self._titles.setdefault(title, _Title())
        name, position = bracket or epoch or "", int(at)
        # A bar of a later epoch, or one that stands further back than it did, is a new one.
        if state.last != ("", 0) and (name != state.last[0] or position < state.last[1]):
            if title != "Train epoch" or name in ("", "1"):
                state.round += 1
            state.before = ""
        state.last = (name, position)
        figures = {key.strip(): value for key, text in _FIGURE.findall(tail) if (value := number(text)) is not None}
        written = ", ".join(f"{key}={value}" for key, value in figures.items())
        if figures and written != state.before:
            state.shown.append(_Shown(state.round, position, int(total), figures))
            state.before = written

    def points(self) -> Points:
        found = Points()
        for title in ("Train step of epoch", "Episode"):
            if title in self._titles and (shown := self._titles[title].shown):
                early = 1 if any(one.at == 0 for one in shown) else 0
                for one in shown:
                    position = min(one.at + early, max(one.total, 1))
                    found.add(one.round * one.total + position, one.figures)
                return found
        rounds: dict[int, list[dict[str, float]]] = {}
        for one in self._titles.get("Train epoch", _Title()).shown:
            rounds.setdefault(one.round, []).append(one.figures)
        for step, parts in enumerate(rounds.values(), start=1):
            names = dict.fromkeys(name for part in parts for name in part)
            found.add(step, {name: _mean([part[name] for part in parts if name in part]) for name in names})
        return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
