"""The runs under a folder: where they are, and what can be told of each without reading its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lockstep
from lockstep.run.caches import RUNS, cache_home
from lockstep.run.files import replace_text
from lockstep.run.folder import RunFolder
from lockstep.run.output import OFFLINE_COLUMNS, ONLINE_COLUMNS
from lockstep.view.files import Missing, inside, open_inside, read_small
from lockstep.view.lines import last_line, parsed
from lockstep.view.recipes import MOST_BYTES, loaded

DEEPEST = 3
MOST_RUNS = 2_000
MOST_FOLDERS = 5_000
LOOK_AGAIN_SECONDS = 1.0


Signs = tuple[tuple[int, int, int], ...]
ReadBefore = dict[Path, tuple[Signs, dict[str, Any]]]
"""What was read of a run, and of which state of its files."""
# So many runs read anew make the index worth writing; a few that grow are read again at the next start.
WRITE_AFTER = 20


@dataclass(frozen=True)
class FoundRuns:
    """Runs by their path below the root; the root itself, where it is a run, is called by its own name."""

    runs: dict[str, Path]
    left_out: tuple[str, ...]
    """Links that lead out of the folder, and runs beyond the most that are shown."""


def find_runs(root: Path) -> FoundRuns:
    """`root` is a real path. A run is a folder with a recipe or with metrics; there are none inside of one."""
    if _is_run(root):
        return FoundRuns({root.name: root}, ())
    runs: dict[str, Path] = {}
    left_out: list[str] = []

    looked = 0

    def look(folder: Path, depth: int) -> None:
        nonlocal looked
        looked += 1
        if looked > MOST_FOLDERS:
            if looked == MOST_FOLDERS + 1:
                left_out.append(f"what is beyond the first {MOST_FOLDERS:,} folders")
            return
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            left_out.append(f"{folder.relative_to(root)} cannot be read")
            return
        for entry in entries:
            path = Path(entry.path)
            if entry.name.startswith(".") or not entry.is_dir():
                continue
            if not _is_text(entry.name):
                left_out.append(f"{os.fsencode(path.relative_to(root))!r} has a name that is no text: rename it")
            elif entry.is_symlink() and not inside(root, path):
                left_out.append(f"{path.relative_to(root)} leads out of the folder")
            elif _is_run(path):
                if len(runs) < MOST_RUNS:
                    runs[str(path.relative_to(root))] = path
                else:
                    left_out.append(f"{path.relative_to(root)} is beyond the first {MOST_RUNS:,} runs")
            elif depth < DEEPEST and not entry.is_symlink():
                look(path, depth + 1)

    look(root, 1)
    return FoundRuns(runs, tuple(left_out))


def _is_text(name: str) -> bool:
    """Whether a browser can say the name: bytes that are no characters it cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_run(folder: Path) -> bool:
    own = RunFolder(folder)
    # Not Path.is_file, which fails on a folder that may not be looked into.
    return os.path.isfile(own.recipe) or os.path.isfile(own.metrics)


def summary(
    root: Path, name: str, path: Path, locks: frozenset[tuple[int, int]], known: ReadBefore | None = None
) -> dict[str, Any]:
    """A run in the list: method, model, how far it is, whether a process works in it, and its first figure. `known` is
    what was read before of files that may not have changed."""
    folder = RunFolder(path)
    files = [folder.recipe, folder.metrics]
    signs = tuple(_sign(file) for file in files)
    known = {} if known is None else known
    if path not in known or known[path][0] != signs:
        known[path] = (signs, _read(root, folder))
    return {
        "run": name,
        "running": _held(root, folder, locks),
        "written": max(sign[0] / 1e9 for sign in signs),
        "samples": os.path.isfile(folder.samples),
        "report": os.path.isfile(path / "report.html"),
        **known[path][1],
    }


def _read(root: Path, folder: RunFolder) -> dict[str, Any]:
    told: dict[str, Any] = {"problem": None}
    try:
        if folder.recipe.is_file():
            told |= _from_recipe(loaded(read_small(root, folder.recipe, MOST_BYTES)))
        if folder.metrics.is_file():
            with open_inside(root, folder.metrics) as file:
                line = last_line(file)
            told |= _from_metrics(parsed(line.content) if line else None)
    except Missing as error:
        told["problem"] = str(error)
    return told


def _sign(file: Path) -> tuple[int, int, int]:
    """Another one whenever the file was written."""
    try:
        facts = file.stat()
    except OSError:
        return 0, 0, 0
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _from_recipe(recipe: Any) -> dict[str, Any]:
    sections = recipe if isinstance(recipe, dict) else {}
    run, model = (part if isinstance(part, dict) else {} for part in (sections.get("run"), sections.get("model")))
    # As a run writes them. Anything else, which may be endless or no number, is not shown.
    method, path, steps = sections.get("method"), model.get("path"), run.get("steps")
    return {
        "method": method if isinstance(method, str) else "",
        "model": path if isinstance(path, str) else "",
        "steps": steps if isinstance(steps, int) and abs(steps) < 2**53 else None,
    }


def _from_metrics(line: dict[str, Any] | None) -> dict[str, Any]:
    data = (line or {}).get("data")
    if not isinstance(data, dict):
        return {}
    metric = next((name for name in first_metrics() if name in data), None)
    return {"step": (line or {}).get("step"), "metric": metric, "value": data.get(metric)}


def first_metrics() -> list[str]:
    """What one looks at first, in order: the metrics that the console shows at each step, and validation's."""
    names = [column.metric for column in (*ONLINE_COLUMNS, *OFFLINE_COLUMNS)]
    told = [name for each in names for name in ((each,) if isinstance(each, str) else each)]
    return list(dict.fromkeys(["critic/score/mean", "train/loss", "val/accuracy", "val/loss", *told]))


def held_locks() -> frozenset[tuple[int, int]]:
    """(process, inode) of every file lock on this machine. Read, never tried: a try would hold the lock for a moment,
    and a run that starts in that moment would be refused. Nothing where the system has no such list."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return frozenset()
    fields = [line.split() for line in lines if " FLOCK " in line and "->" not in line]
    return frozenset((int(each[4]), int(each[5].rpartition(":")[2])) for each in fields)


def _held(root: Path, folder: RunFolder, locks: frozenset[tuple[int, int]]) -> bool:
    lock = folder.path / ".lock"
    try:
        inode = lock.stat().st_ino
        # Most runs are over: their lock files need not be read.
        return any(inode == locked for _, locked in locks) and (int(read_small(root, lock, 32)), inode) in locks
    except (Missing, OSError, ValueError):
        return False


class RunIndex:
    """What was read of the runs of a folder, kept in the cache for the next start. An entry holds as long as the files
    that it was read from have the same time, size and inode. An index that is damaged, or of another version, is made
    again."""

    def __init__(self, root: Path):
        self.known: ReadBefore = {}
        self._written: ReadBefore = {}
        self._file: Path | None = None
        with contextlib.suppress(RuntimeError):  # no home
            name = hashlib.sha256(os.fsencode(root)).hexdigest()[:24]
            self._file = cache_home() / RUNS / f"{name}.json"
        # Another version may read other things of the same files.
        self._version = hashlib.sha256(json.dumps([lockstep.__version__, first_metrics()]).encode()).hexdigest()
        if self._file is not None:
            self.known = self._read(self._file)
            self._written = dict(self.known)

    def _read(self, file: Path) -> ReadBefore:
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
            body = told["runs"]
            if told["version"] != self._version or told["sha256"] != _checksum(body):
                return {}
            return {Path(run): (tuple(map(tuple, signs)), dict(read)) for run, (signs, read) in body.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def keep(self, runs: Collection[Path]) -> None:
        """Forget all other runs, and write the index where it is worth it. One that cannot be written costs time."""
        for gone in self.known.keys() - set(runs):
            del self.known[gone]
        changed = sum(self._written.get(run) != read for run, read in self.known.items())
        new = self.known.keys() - self._written.keys()
        if self._file is None or not (new or changed >= WRITE_AFTER):
            return
        body = {str(run): [signs, read] for run, (signs, read) in self.known.items()}
        # As it comes back: tuples are lists there.
        body = json.loads(json.dumps(body))
        told = {"version": self._version, "sha256": _checksum(body), "runs": body}
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._file, json.dumps(told), private=True)
            self._written = dict(self.known)


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Shelf:
    """The runs of a folder. Its list is always that of now; a run of a list that is not old is where it was."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self._found: FoundRuns | None = None
        self._looked = 0.0
        self._index: RunIndex | None = None
        self._listing = threading.Lock()

    def found(self) -> FoundRuns:
        """As they are now."""
        self._found, self._looked = find_runs(self.root), time.monotonic()
        return self._found

    def path(self, name: str) -> Path:
        """Of a run that is in the list: a name is looked up, never joined to a path."""
        fresh = self._found is not None and time.monotonic() - self._looked < LOOK_AGAIN_SECONDS
        known = self._found if fresh and self._found is not None and name in self._found.runs else self.found()
        path = known.runs.get(name)
        if path is None:
            raise Missing(f"there is no run {name[:200]!r} here")
        return path

    def listed(self) -> dict[str, Any]:
        found, locks = self.found(), held_locks()
        with self._listing:
            index = self._index = self._index or RunIndex(self.root)
            runs = [summary(self.root, name, path, locks, index.known) for name, path in found.runs.items()]
            index.keep(found.runs.values())
        return {"folder": str(self.root), "runs": runs, "left_out": list(found.left_out), "first": first_metrics()}
