"""What the page asks for, as JSON: runs, curves, responses, recipes. A function a question, told its query."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from lockstep.run.folder import RunFolder
from lockstep.view.curves import Curves
from lockstep.view.difference import difference_of
from lockstep.view.files import Missing, open_inside
from lockstep.view.recipes import recipe_of
from lockstep.view.runs import Shelf, held_locks, summary
from lockstep.view.samples import Filter, in_all_steps, of_step, whole

Query = dict[str, list[str]]
MOST_CURVES = 12
"""Runs whose curves are kept in memory, those asked for last."""
MOST_RUNS_AT_ONCE = 8
MOST_METRICS_AT_ONCE = 64
MOST_BUCKETS = 2_000
FARTHEST_STEP = 2**53


class PageAnswers:
    def __init__(self, folder: Path):
        self.shelf = Shelf(folder)
        self._curves: OrderedDict[Path, Curves] = OrderedDict()
        self._lock = Lock()
        self.questions: dict[str, Callable[[Query], dict[str, Any]]] = {
            "runs": lambda query: self.shelf.listed(),
            "run": self.run,
            "curves": self.curves,
            "samples": self.samples,
            "sample": self.sample,
            "recipe": self.recipe,
            "difference": self.difference,
        }

    def run(self, query: Query) -> dict[str, Any]:
        """A run of the list, the names of its metrics and how much of them has been read."""
        name = _one(query, "run")
        path = self.shelf.path(name)
        told = summary(self.shelf.root, name, path, held_locks())
        if not RunFolder(path).metrics.is_file():
            return {**told, "metrics": [], "read": 1.0, "version": "", "range": None, "damaged": 0}
        curves = self._curves_of(path)
        curves.read_on()
        return {
            **told,
            "metrics": curves.names(),
            "read": curves.read_share,
            "version": curves.version,
            "range": curves.range(),
            "damaged": curves.damaged,
        }

    def curves(self, query: Query) -> dict[str, Any]:
        """Metrics of runs between two steps; without them, over all steps that any of the runs has."""
        names = query.get("run", [])[:MOST_RUNS_AT_ONCE]
        metrics = query.get("metric", [])[:MOST_METRICS_AT_ONCE]
        buckets = _whole(query, "buckets", 300, 1, MOST_BUCKETS)
        half = _whole(query, "half", 0, 0, 10**6)
        known = {name: self._curves_of(self.shelf.path(name)) for name in names}
        ranges = [each for curves in known.values() if (each := curves.range()) is not None]
        if not ranges:
            return {"domain": None, "curves": {}}
        first = _whole(query, "first", min(low for low, _ in ranges), -FARTHEST_STEP, FARTHEST_STEP)
        last = _whole(query, "last", max(high for _, high in ranges), -FARTHEST_STEP, FARTHEST_STEP)
        if last < first:
            raise Missing(f"the step {last} is before the step {first}")
        shown = {
            metric: {
                name: told
                for name, curves in known.items()
                if (told := curves.shown(metric, (first, last), buckets, half)) is not None
            }
            for metric in metrics
        }
        return {"domain": [first, last], "curves": shown}

    def samples(self, query: Query) -> dict[str, Any]:
        """The responses of a step (its number, or `last`), or those of all steps that a filter finds."""
        wanted = Filter(
            kind=_one(query, "kind", ""),
            ended=_one(query, "ended", ""),
            least=_number(query, "least"),
            most=_number(query, "most"),
            text=_one(query, "text", ""),
        )
        step = _one(query, "step", "all")
        start = _whole(query, "from", 0, 0, FARTHEST_STEP) if "from" in query else None
        with self._samples_of(query) as file:
            if step == "all":
                return in_all_steps(file, wanted, start or 0)
            at = None if step == "last" else _whole(query, "step", 0, -FARTHEST_STEP, FARTHEST_STEP)
            return of_step(file, wanted, at, start)

    def sample(self, query: Query) -> dict[str, Any]:
        with self._samples_of(query) as file:
            return whole(file, _whole(query, "offset", 0, 0, FARTHEST_STEP))

    def recipe(self, query: Query) -> dict[str, Any]:
        return recipe_of(self.shelf.root, self.shelf.path(_one(query, "run")))

    def difference(self, query: Query) -> dict[str, Any]:
        """What is different in the set-up of a run and of another one."""
        run, other = (self.shelf.path(_one(query, name)) for name in ("run", "against"))
        return difference_of(self.shelf.root, run, other)

    def report(self, query: Query) -> BinaryIO:
        """The page of a comparison, as a file."""
        return open_inside(self.shelf.root, self.shelf.path(_one(query, "run")) / "report.html")

    def _samples_of(self, query: Query) -> BinaryIO:
        return open_inside(self.shelf.root, RunFolder(self.shelf.path(_one(query, "run"))).samples)

    def _curves_of(self, path: Path) -> Curves:
        with self._lock:
            curves = self._curves.pop(path, None) or Curves(
                lambda: open_inside(self.shelf.root, RunFolder(path).metrics)
            )
            self._curves[path] = curves
            while len(self._curves) > MOST_CURVES:
                self._curves.popitem(last=False)
            return curves


def _one(query: Query, name: str, default: str | None = None) -> str:
    if name in query:
        return query[name][0]
    if default is None:
        raise Missing(f"the question lacks {name}")
    return default


def _whole(query: Query, name: str, default: int, low: int, high: int) -> int:
    told = _one(query, name, str(default))
    # Digits alone, and few: int() takes more than that, and takes its time for a million of them.
    if len(told) > 20 or not told.removeprefix("-").isdecimal():
        raise Missing(f"{name}={told[:40]} is no whole number")
    return min(high, max(low, int(told)))


def _number(query: Query, name: str) -> float | None:
    told = _one(query, name, "")
    if not told:
        return None
    try:
        value = float(told)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise Missing(f"{name}={told[:40]} is no number")
    return value
