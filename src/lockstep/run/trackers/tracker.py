"""Opens the experiment trackers of a recipe, and has the code that all trackers use.

If a tracker cannot start, the run stops before training. If a tracker fails later, the run only prints a warning,
because metrics.jsonl has all metrics.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import random
import time
import uuid
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from lockstep.errors import Problem, Refusal, missing_extra, refuse_all
from lockstep.recipe.registry import TRACKERS, imported
from lockstep.run.console import Console
from lockstep.run.files import atomic_write_text
from lockstep.run.folder import RunFolder, read_object
from lockstep.run.metrics import read_metrics
from lockstep.run.trackers.prometheus import PrometheusSink


def import_tracker(package: str) -> ModuleType:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # the package is installed but broken
        raise missing_extra(package, "track", f"the sink {package}") from error


def tracker_id(folder: RunFolder, tracker: str, resumed_at: int) -> tuple[str, bool]:
    """Returns the run id in a tracker, and whether the id was stored by an earlier start of the run."""
    stored = _stored_ids(folder).get(tracker) if resumed_at else None
    return stored or uuid.uuid4().hex[:12], stored is not None


def remember_id(folder: RunFolder, tracker: str, run_id: str) -> None:
    """Stores the tracker's run id in the run folder, so that a resumed run can use it."""
    ids = _stored_ids(folder) | {tracker: run_id}
    atomic_write_text(folder.trackers, json.dumps(ids, indent=2) + "\n", private=True)


def earlier_steps(folder: RunFolder, resumed_at: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the metrics of the steps up to `resumed_at`, so that a tracker can log steps that it lost in a kill."""
    if resumed_at and folder.metrics.exists():
        yield from ((step, metrics) for step, metrics in read_metrics(folder.metrics) if step <= resumed_at)


def _stored_ids(folder: RunFolder) -> dict[str, str]:
    if not folder.trackers.exists():
        return {}
    return read_object(folder.trackers, "restore the file, or remove it to start a new run in the trackers")


class Sink(Protocol):
    """Interface of a tracker. The constructor of a tracker takes the run folder, the project name and the console.

    `resumed_at` is the step at which the run resumes; it is 0 for a new run.
    """

    def check(self) -> None:
        """Raises a `Refusal` if a login is missing. It runs before the data is read."""

    def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self, ok: bool) -> None: ...


def open_sinks(
    names: list[str], folder: RunFolder, project: str, console: Console, prometheus: int | str | None = None
) -> list[Sink]:
    """Creates the named trackers, and the one of `log.prometheus`, without starting them. Raises one `Refusal` that
    lists all unknown names and missing packages."""
    problems: list[Problem] = []
    sinks: list[Sink] = []
    for name in names:
        try:
            if name not in TRACKERS:
                raise _unknown(name)
            sinks.append(GuardedSink(name, imported(TRACKERS[name])(folder, project, console), console))
        except Refusal as refusal:
            problems += refusal.problems
    refuse_all(problems)
    if prometheus is not None:
        sinks.append(GuardedSink("prometheus", PrometheusSink(prometheus, console), console))
    return sinks


def check_sinks(sinks: list[Sink]) -> None:
    """Raises a `Refusal` if a tracker has no login that it needs. A tracker without a method `check` needs none."""
    problems: list[Problem] = []
    for sink in sinks:
        try:
            sink.check()
        except Refusal as refusal:
            problems += refusal.problems
    refuse_all(problems)


class GuardedSink:
    """Wraps a tracker so that its failures are reported once and counted, and cannot slow down or change the run."""

    # A call to an unreachable tracker may block for minutes. After a failed call, the tracker gets no metrics for ten
    # times the duration of that call.
    REST = 10.0

    def __init__(self, name: str, sink: Sink, console: Console):
        self._name, self._sink, self._console = name, sink, console
        self._lost = 0
        self._warned = False
        self._rest_until = 0.0

    def check(self) -> None:
        check = getattr(self._sink, "check", None)  # trackers of plug-ins may not have it
        if check is not None:
            with _same_random_numbers():
                check()

    def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None:
        try:
            with _same_random_numbers():
                self._sink.start(name, recipe, resumed_at)
        except Refusal:
            raise
        except Exception as error:
            remedy = f"check its settings and the network, or remove {self._name} from log.track"
            raise Refusal.at(
                f"sink {self._name}", f"could not start: {_brief(error)}", remedy, code="tracker-failed"
            ) from error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if time.monotonic() < self._rest_until:
            self._lost += 1
            return
        with self._guard(f"step {step}") as failed:
            self._sink.log(step, metrics)
        self._lost += bool(failed)

    def note(self, text: str) -> None:
        with self._guard("a note"):
            self._sink.note(text)

    def close(self, ok: bool) -> None:
        with self._guard("closing"):
            self._sink.close(ok)
        if self._lost:
            self._console.warn(f"{self._name} missed {self._lost} steps; metrics.jsonl has all steps")

    @contextlib.contextmanager
    def _guard(self, what: str) -> Iterator[list[Exception]]:
        failed: list[Exception] = []
        began = time.monotonic()
        try:
            with _same_random_numbers():
                yield failed
        except Exception as error:  # noqa: BLE001 - training continues after any error of a tracker
            failed.append(error)
            now = time.monotonic()
            self._rest_until = now + self.REST * (now - began)
            if not self._warned:
                self._console.warn(f"{self._name} failed at {what}, training continues: {_brief(error)}")
                self._warned = True


def _unknown(name: str) -> Refusal:
    near = difflib.get_close_matches(name, TRACKERS, n=1)
    remedy = (f"did you mean {near[0]}? " if near else "") + f"the sinks are {', '.join(TRACKERS)}"
    return Refusal.at(f"sink {name}", "no such sink", remedy, code="unknown-name")


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    # swanlab uses the global random generator of Python when it starts. The state of the generator is restored, because
    # a tracker must not change the results of the run.
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
