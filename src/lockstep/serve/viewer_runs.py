"""Lists the runs of a folder with summaries, reads their recipes and environments, and compares the setups of runs."""

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
from typing import Any, cast

import yaml

from lockstep.masking import masked, masked_tree
from lockstep.run.caches import RUNS, cache_home
from lockstep.run.files import replace_text
from lockstep.run.folder import RunFolder
from lockstep.run.output import OFFLINE_COLUMNS, ONLINE_COLUMNS
from lockstep.serve.viewer_log import Missing, inside, last_line, open_inside, parsed, read_small
from lockstep.version import package_version

MAX_DEPTH = 3
MAX_RUNS = 2_000
MAX_FOLDERS = 5_000
RESCAN_SECONDS = 1.0
FileStates = tuple[tuple[int, int, int], ...]
RunCache = dict[Path, tuple[FileStates, dict[str, Any]]]
"""The summary of each run, and the state (time, size, inode) of the files that the summary was read from."""
# The index file is written when this many runs have changed. If fewer runs have changed, the index file is not written,
# and the next start reads the changed runs again.
WRITE_AFTER = 20
MAX_SHOWN = 2_000
"""The maximum number of characters of a value in a list of differences."""
MAX_BYTES = 1 << 20
MAX_KEYS = 5_000
MAX_VALUES = 1 << 22
"""The maximum number of characters of all values together. The limit is necessary, because YAML anchors can expand a
small file to a very large one."""
# Uses the C loader if the package yaml has it, because it is much faster.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class FoundRuns:
    """The runs below a root folder. The keys of `runs` are paths relative to the root. If the root itself is a run, its
    key is the folder name."""

    runs: dict[str, Path]
    left_out: tuple[str, ...]
    """Folders that are not shown, with the reason."""


def find_runs(root: Path) -> FoundRuns:
    """Finds the runs below `root`, which must be a resolved path. A run is a folder with a recipe or metrics. The
    function does not search for runs inside a run."""
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
                left_out.append(f"{path.relative_to(root)} is a link out of the viewed folder")
            elif _is_run(path):
                if len(runs) < MAX_RUNS:
                    runs[str(path.relative_to(root))] = path
                else:
                    left_out.append(f"{path.relative_to(root)} is not shown: the limit is {MAX_RUNS:,} runs")
            elif depth < MAX_DEPTH and not entry.is_symlink():
                scan(path, depth + 1)

    scan(root, 1)
    return FoundRuns(runs, tuple(left_out))


def _is_text(name: str) -> bool:
    """Returns whether the name is valid UTF-8, because a browser cannot request other names."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_run(folder: Path) -> bool:
    run = RunFolder(folder)
    # Path.is_file is not used, because it raises for a folder without read permission.
    return os.path.isfile(run.recipe) or os.path.isfile(run.metrics)


def summary(
    root: Path, name: str, path: Path, locks: frozenset[tuple[int, int]], cache: RunCache | None = None
) -> dict[str, Any]:
    """Returns the entry of a run in the list of runs: method, model, step, main metric, and whether the run is still
    running. A summary in `cache` is reused if the files of the run are unchanged."""
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
    summary: dict[str, Any] = {"problem": None}
    try:
        if folder.recipe.is_file():
            summary |= _from_recipe(loaded(read_small(root, folder.recipe, MAX_BYTES)))
        if folder.metrics.is_file():
            with open_inside(root, folder.metrics) as file:
                line = last_line(file)
            summary |= _from_metrics(parsed(line.content) if line else None)
    except Missing as error:
        summary["problem"] = str(error)
    return summary


def _file_state(file: Path) -> tuple[int, int, int]:
    """Returns time, size and inode of the file, which change when the file is written."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino


def _from_recipe(recipe: Any) -> dict[str, Any]:
    sections = recipe if isinstance(recipe, dict) else {}
    run, model = (part if isinstance(part, dict) else {} for part in (sections.get("run"), sections.get("model")))
    # Values of unexpected types are ignored, because YAML anchors can make lists and dicts very large.
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
    """Returns the names of the main metrics (console and validation metrics), most important first."""
    names = [column.metric for column in (*ONLINE_COLUMNS, *OFFLINE_COLUMNS)]
    shown = [name for each in names for name in ((each,) if isinstance(each, str) else each)]
    return list(dict.fromkeys(["critic/score/mean", "train/loss", "val/accuracy", "val/loss", *shown]))


def file_locks() -> frozenset[tuple[int, int]]:
    """Returns (process id, inode) of every file lock on this machine, or an empty set on systems without /proc/locks.
    The viewer does not try to lock the file itself, because a run that starts at that moment would fail."""
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
        # The lock file is read only if its inode is locked, because most runs have ended.
        return any(inode == locked for _, locked in locks) and (int(read_small(root, lock, 32)), inode) in locks
    except (Missing, OSError, ValueError):
        return False


class RunIndex:
    """Summaries of the runs of a folder, which are stored in the cache folder for the next start. A summary is valid
    while the files of the run have the same time, size and inode. An index that is damaged or has another version is
    rebuilt."""

    def __init__(self, root: Path):
        self.cache: RunCache = {}
        self._written: RunCache = {}
        self._file: Path | None = None
        with contextlib.suppress(RuntimeError):  # the user has no home directory
            name = hashlib.sha256(os.fsencode(root)).hexdigest()[:24]
            self._file = cache_home() / RUNS / f"{name}.json"
        # An index of another lockstep version is not used, because that version may summarize the same files
        # differently.
        self._version = hashlib.sha256(json.dumps([package_version(), first_metrics()]).encode()).hexdigest()
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
        """Drops the runs that are not in `runs`, and writes the index file if enough runs have changed. Errors of the
        write are ignored, because they only make the next start slower."""
        for gone in self.cache.keys() - set(runs):
            del self.cache[gone]
        changed = sum(self._written.get(run) != read for run, read in self.cache.items())
        new = self.cache.keys() - self._written.keys()
        if self._file is None or not (new or changed >= WRITE_AFTER):
            return
        body = {str(run): [states, read] for run, (states, read) in self.cache.items()}
        # The checksum must match the data as it is read back. JSON converts tuples to lists.
        body = json.loads(json.dumps(body))
        stored = {"version": self._version, "sha256": _checksum(body), "runs": body}
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._file, json.dumps(stored), private=True)
            self._written = dict(self.cache)


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class RunList:
    """The runs of a folder. `listed` always scans the folder again. `path` may use a scan that is up to a second
    old."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self._scan: FoundRuns | None = None
        self._scanned_at = 0.0
        self._index: RunIndex | None = None
        self._listing = threading.Lock()

    def scan(self) -> FoundRuns:
        """Scans the folder."""
        self._scan, self._scanned_at = find_runs(self.root), time.monotonic()
        return self._scan

    def path(self, name: str) -> Path:
        """Returns the path of a run in the list. For safety, the name is only looked up in the list and never joined to
        a path."""
        fresh = self._scan is not None and time.monotonic() - self._scanned_at < RESCAN_SECONDS
        current = self._scan if fresh and self._scan is not None and name in self._scan.runs else self.scan()
        path = current.runs.get(name)
        if path is None:
            raise Missing(f"the viewed folder has no run {name[:200]!r}")
        return path

    def listed(self) -> dict[str, Any]:
        scan, locks = self.scan(), file_locks()
        with self._listing:
            index = self._index = self._index or RunIndex(self.root)
            runs = [summary(self.root, name, path, locks, index.cache) for name, path in scan.runs.items()]
            index.keep(scan.runs.values())
        return {"folder": str(self.root), "runs": runs, "left_out": list(scan.left_out), "first": first_metrics()}


# Recipes -------------------------------------------------------------------------------------------------------------


def recipe_of(root: Path, run: Path) -> dict[str, Any]:
    """Returns the values of recipe.yaml and env.json by key, the text of the recipe, and the recipes of earlier
    steps."""
    folder = RunFolder(run)
    earlier = [
        {"last_step": last, "text": _shown_text(read_small(root, path, MAX_BYTES))}
        for last, path in folder.earlier_recipes().items()
    ]
    shown: dict[str, Any] = {"text": None, "recipe": {}, "env": {}, "earlier": earlier, "problems": []}
    if folder.recipe.is_file():
        try:
            text = read_small(root, folder.recipe, MAX_BYTES)
            shown["text"], shown["recipe"] = _shown_text(text), _without_secrets(flat(loaded(text)))
        except Missing as error:
            shown["problems"].append(str(error))
    if folder.env.is_file():
        try:
            shown["env"] = _without_secrets(flat(json.loads(read_small(root, folder.env, MAX_BYTES))))
        except (Missing, ValueError, RecursionError) as error:
            shown["problems"].append(f"env.json: {error}")
    return shown


def _shown_text(text: str) -> str:
    """Returns the text of a recipe with masked secrets."""
    try:
        values = loaded(text)
        flat(values)  # raises if YAML anchors expand the recipe without limit
    except Missing:
        return masked(text)
    clean = masked_tree(values)
    return masked(text) if clean == values else yaml.safe_dump(clean, sort_keys=False, allow_unicode=True)


def _without_secrets(values: dict[str, str]) -> dict[str, str]:
    """Masks secrets in the result of `flat`."""
    clean = {key: masked_tree(json.loads(value), key.rpartition(".")[2]) for key, value in values.items()}
    return {key: json.dumps(value, ensure_ascii=False) for key, value in clean.items()}


def loaded(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Missing(f"recipe.yaml is damaged: {' '.join(str(error).split())}") from error


def flat(value: Any) -> dict[str, str]:
    """Flattens nested dicts and lists. Returns every value as JSON text under its dotted key, such as `model.path`."""
    values: dict[str, str] = {}
    left = MAX_VALUES

    def walk(part: Any, key: str) -> None:
        nonlocal left
        if isinstance(part, dict) and part:
            for name, item in part.items():
                walk(item, f"{key}.{name}" if key else str(name))
        elif isinstance(part, list) and any(isinstance(item, (dict, list)) for item in part):
            for number, item in enumerate(part):
                walk(item, f"{key}.{number}")
        elif len(values) < MAX_KEYS:
            values[key] = json.dumps(part, ensure_ascii=False, default=str)
            left -= len(values[key])
            if left < 0:
                raise Missing(f"the file has too many characters to show: the limit is {MAX_VALUES:,}")
        else:
            raise Missing(f"the file has too many keys to show: the limit is {MAX_KEYS:,}")

    try:
        walk(value, "")
    except RecursionError:
        raise Missing("the file is nested too deeply to show") from None
    except ValueError as error:  # raised for example by a number with thousands of digits
        raise Missing(f"cannot be shown: {error}") from None
    return values


def setup_difference(root: Path, run: Path, other: Path) -> dict[str, Any]:
    """Compares the recipes and environments of two runs. `differences` has the values as JSON; differences that make
    the comparison invalid come first. `unknown` lists facts that the files of a run do not contain, so that they cannot
    be compared. If the files cannot be compared, the result has only the key `problem`."""
    try:
        return _compared(root, run, other)
    except Missing as problem:
        return {"problem": str(problem)}


def _compared(root: Path, run: Path, other: Path) -> dict[str, Any]:
    # The import is here, so that the list of runs does not wait for the import of the recipe schema.
    from lockstep.parity.compare.logs.log_curves import Evidence
    from lockstep.parity.compare.run_setup import setup_differences

    a, b = (Evidence(*_setup(root, path)) for path in (run, other))
    try:
        differences, unknown = setup_differences(a, b)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        # `setup_differences` fails in this way only if a user has changed the files.
        raise Missing(
            f"recipe.yaml or env.json differs from the format that a run writes: {type(error).__name__}: {error}"
        ) from error
    rows = [
        {
            "part": each.part,
            "key": each.key,
            "a": _shown(each.a),
            "b": _shown(each.b),
            "weight": each.weight,
            "effect": each.effect,
        }
        for each in differences
    ]
    return {"differences": rows, "unknown": unknown}


def _setup(root: Path, run: Path) -> tuple[dict[str, Any], dict[str, Any], list[Any], dict[int, dict[str, Any]]]:
    """Returns the arguments of `Evidence`: recipe, environment, an empty list of samples, and earlier recipes."""
    folder = RunFolder(run)
    if not folder.recipe.is_file():
        raise Missing(f"{run.name} has no recipe.yaml")
    recipe = _keys(read_small(root, folder.recipe, MAX_BYTES), run)
    earlier = {last: _keys(read_small(root, path, MAX_BYTES), run) for last, path in folder.earlier_recipes().items()}
    if not folder.env.is_file():
        return recipe, {}, [], earlier
    try:
        env = json.loads(read_small(root, folder.env, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise Missing(f"env.json of {run.name}: {error}") from error
    if not isinstance(env, dict):
        raise Missing(f"env.json of {run.name} is not a JSON object")
    return recipe, masked_tree(env), [], earlier


def _keys(text: str, run: Path) -> dict[str, Any]:
    recipe = loaded(text)
    if not isinstance(recipe, dict):
        raise Missing(f"recipe.yaml of {run.name} does not contain a mapping of keys to values")
    flat(recipe)  # raises if YAML anchors expand the recipe without limit
    # The import is here to make the list of runs faster.
    from lockstep.recipe.renamed_keys import stored_recipe

    return cast(dict[str, Any], stored_recipe(masked_tree(recipe)))


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " …"
