"""The runs in a folder: where they are, and a summary of each from the recipe and the last line of metrics."""

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

from lockstep.run.caches import RUNS, cache_home
from lockstep.run.files import replace_text
from lockstep.run.folder import RunFolder
from lockstep.run.output import OFFLINE_COLUMNS, ONLINE_COLUMNS
from lockstep.serve.viewer_log import Missing, inside, last_line, open_inside, parsed, read_small
from lockstep.serve.viewer_recipes import MAX_BYTES, loaded
from lockstep.version import __version__

MAX_DEPTH = 3
MAX_RUNS = 2_000
MAX_FOLDERS = 5_000
RESCAN_SECONDS = 1.0


FileStates = tuple[tuple[int, int, int], ...]
RunCache = dict[Path, tuple[FileStates, dict[str, Any]]]
"""The summary of each run, and the state of the files that it was read from."""
# Changed runs after which the index is written. Fewer are read again at the next start.
WRITE_AFTER = 20


@dataclass(frozen=True)
class FoundRuns:
    """Runs by their path relative to the root. If the root is a run, it has its folder name."""

    runs: dict[str, Path]
    left_out: tuple[str, ...]
    """Folders that are not shown, with the reason."""


def find_runs(root: Path) -> FoundRuns:
    """`root` is a resolved path. A run is a folder with a recipe or metrics; runs are not nested."""
    if _is_run(root):
        return FoundRuns({root.name: root}, ())
    runs: dict[str, Path] = {}
    left_out: list[str] = []

    scanned = 0

    def scan(folder: Path, depth: int) -> None:
        nonlocal scanned
        scanned += 1
        if scanned > MAX_FOLDERS:
            if scanned == MAX_FOLDERS + 1:
                left_out.append(f"folders beyond the first {MAX_FOLDERS:,}")
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
                left_out.append(f"{os.fsencode(path.relative_to(root))!r} has a name that is not UTF-8: rename it")
            elif entry.is_symlink() and not inside(root, path):
                left_out.append(f"{path.relative_to(root)} is a link out of the folder")
            elif _is_run(path):
                if len(runs) < MAX_RUNS:
                    runs[str(path.relative_to(root))] = path
                else:
                    left_out.append(f"{path.relative_to(root)} is beyond the first {MAX_RUNS:,} runs")
            elif depth < MAX_DEPTH and not entry.is_symlink():
                scan(path, depth + 1)

    scan(root, 1)
    return FoundRuns(runs, tuple(left_out))


def _is_text(name: str) -> bool:
    """Whether the name is valid UTF-8. A browser cannot request another one."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_run(folder: Path) -> bool:
    run = RunFolder(folder)
    # Not Path.is_file: it raises for a folder without read permission.
    return os.path.isfile(run.recipe) or os.path.isfile(run.metrics)


def summary(
    root: Path, name: str, path: Path, locks: frozenset[tuple[int, int]], cache: RunCache | None = None
) -> dict[str, Any]:
    """A run in the list: method, model, step, whether a process runs it, and its main metric. `cache` has earlier
    summaries; those of unchanged files are used again."""
    folder = RunFolder(path)
    files = [folder.recipe, folder.metrics]
    states = tuple(_file_state(file) for file in files)
    cache = {} if cache is None else cache
    if path not in cache or cache[path][0] != states:
        cache[path] = (states, _read(root, folder))
    return {
        "run": name,
        "running": _is_locked(root, folder, locks),
        "written": max(state[0] / 1e9 for state in states),
        "samples": os.path.isfile(folder.samples),
        "report": os.path.isfile(path / "report.html"),
        **cache[path][1],
    }


def _read(root: Path, folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": None}
    try:
        if folder.recipe.is_file():
            found |= _from_recipe(loaded(read_small(root, folder.recipe, MAX_BYTES)))
        if folder.metrics.is_file():
            with open_inside(root, folder.metrics) as file:
                line = last_line(file)
            found |= _from_metrics(parsed(line.content) if line else None)
    except Missing as error:
        found["problem"] = str(error)
    return found


def _file_state(file: Path) -> tuple[int, int, int]:
    """Changes whenever the file is written."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino


def _from_recipe(recipe: Any) -> dict[str, Any]:
    sections = recipe if isinstance(recipe, dict) else {}
    run, model = (part if isinstance(part, dict) else {} for part in (sections.get("run"), sections.get("model")))
    # Only values of the types that a run writes: others may be endless.
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
    """The main metrics in order of importance: those of the console and of validation."""
    names = [column.metric for column in (*ONLINE_COLUMNS, *OFFLINE_COLUMNS)]
    shown = [name for each in names for name in ((each,) if isinstance(each, str) else each)]
    return list(dict.fromkeys(["critic/score/mean", "train/loss", "val/accuracy", "val/loss", *shown]))


def file_locks() -> frozenset[tuple[int, int]]:
    """(process, inode) of every file lock on this machine; empty if the system has no list of them. Trying a lock would
    hold it for a moment, and a run that starts in that moment would fail."""
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return frozenset()
    fields = [line.split() for line in lines if " FLOCK " in line and "->" not in line]
    return frozenset((int(each[4]), int(each[5].rpartition(":")[2])) for each in fields)


def _is_locked(root: Path, folder: RunFolder, locks: frozenset[tuple[int, int]]) -> bool:
    lock = folder.path / ".lock"
    try:
        inode = lock.stat().st_ino
        # Most runs have ended: their lock files are not read.
        return any(inode == locked for _, locked in locks) and (int(read_small(root, lock, 32)), inode) in locks
    except (Missing, OSError, ValueError):
        return False


class RunIndex:
    """Summaries of the runs of a folder, stored in the cache folder for the next start. An entry is valid while its
    files have the same time, size and inode. An index that is damaged or of another version is built again."""

    def __init__(self, root: Path):
        self.cache: RunCache = {}
        self._written: RunCache = {}
        self._file: Path | None = None
        with contextlib.suppress(RuntimeError):  # no home
            name = hashlib.sha256(os.fsencode(root)).hexdigest()[:24]
            self._file = cache_home() / RUNS / f"{name}.json"
        # Another version may read other keys of the same files.
        self._version = hashlib.sha256(json.dumps([__version__, first_metrics()]).encode()).hexdigest()
        if self._file is not None:
            self.cache = self._read(self._file)
            self._written = dict(self.cache)

    def _read(self, file: Path) -> RunCache:
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            body = stored["runs"]
            if stored["version"] != self._version or stored["sha256"] != _checksum(body):
                return {}
            return {Path(run): (tuple(map(tuple, states)), dict(read)) for run, (states, read) in body.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def keep(self, runs: Collection[Path]) -> None:
        """Drop all other runs, and write the index if enough has changed. A failed write only costs time later."""
        for gone in self.cache.keys() - set(runs):
            del self.cache[gone]
        changed = sum(self._written.get(run) != read for run, read in self.cache.items())
        new = self.cache.keys() - self._written.keys()
        if self._file is None or not (new or changed >= WRITE_AFTER):
            return
        body = {str(run): [states, read] for run, (states, read) in self.cache.items()}
        # As it will be read: JSON has no tuples.
        body = json.loads(json.dumps(body))
        stored = {"version": self._version, "sha256": _checksum(body), "runs": body}
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._file, json.dumps(stored), private=True)
            self._written = dict(self.cache)


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class RunList:
    """The runs of a folder. The list is always scanned again; the path of a run may come from a recent scan."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self._found: FoundRuns | None = None
        self._scanned_at = 0.0
        self._index: RunIndex | None = None
        self._listing = threading.Lock()

    def found(self) -> FoundRuns:
        """Scan the folder."""
        self._found, self._scanned_at = find_runs(self.root), time.monotonic()
        return self._found

    def path(self, name: str) -> Path:
        """The path of a listed run. The name is looked up, never joined to a path."""
        fresh = self._found is not None and time.monotonic() - self._scanned_at < RESCAN_SECONDS
        current = self._found if fresh and self._found is not None and name in self._found.runs else self.found()
        path = current.runs.get(name)
        if path is None:
            raise Missing(f"there is no run {name[:200]!r} here")
        return path

    def listed(self) -> dict[str, Any]:
        found, locks = self.found(), file_locks()
        with self._listing:
            index = self._index = self._index or RunIndex(self.root)
            runs = [summary(self.root, name, path, locks, index.cache) for name, path in found.runs.items()]
            index.keep(found.runs.values())
        return {"folder": str(self.root), "runs": runs, "left_out": list(found.left_out), "first": first_metrics()}
