"""From what a recipe names (a file, a folder, a glob pattern) to the data files behind it."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from lockstep.errors import Refusal

FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv"}
SUPPORTED = ".parquet, .jsonl, .ndjson, .json, .csv (the text formats also with .gz)"


@dataclass(frozen=True)
class DataFile:
    """`name` is how messages call it (as given), `path` is where it is."""

    name: str
    path: Path
    format: str


@dataclass(frozen=True)
class Found:
    files: list[DataFile]
    ignored: list[str]


def format_of(name: str) -> str | None:
    """The format that a file name promises, or None."""
    lower = name.lower()
    stem, packed = (lower[:-3], True) if lower.endswith(".gz") else (lower, False)
    found = FORMATS.get(os.path.splitext(stem)[1])
    return None if packed and found == "parquet" else found


def locate(given: str, base: Path | None) -> Found:
    """The data files behind `given`, sorted by name. A relative name is looked up under `base`."""
    if not given.strip():
        raise Refusal.at("data path", "is empty", "name a file, a folder, a glob pattern or hub:owner/name")
    root = base or Path()
    path = root / os.path.expanduser(given)
    if path.is_dir():
        return _sift(given, root, (os.path.join(given, entry) for entry in os.listdir(path)))
    if path.exists():
        format = format_of(given)
        if format is None:
            raise Refusal.at(given, "has a suffix that is not read", f"supported: {SUPPORTED}")
        return Found([DataFile(given, path, format)], [])
    if glob.has_magic(given):
        matches = glob.glob(os.path.expanduser(given), root_dir=root, recursive=True)
        if not matches:
            raise Refusal.at(given, f"the pattern matches no file under {root.absolute()}")
        return _sift(given, root, matches)
    raise _missing(given, path)


def _sift(given: str, root: Path, names: Iterable[str]) -> Found:
    found = Found([], [])
    for name in sorted(names):
        path = root / os.path.expanduser(name)
        format = format_of(name)
        if path.is_dir():
            found.ignored.append(os.path.join(name, ""))
        elif format is None or path.name.startswith("."):
            found.ignored.append(name)
        else:
            found.files.append(DataFile(name, path, format))
    if not found.files:
        beside = f"; ignored: {', '.join(found.ignored[:10])}" if found.ignored else ""
        remedy = f"supported: {SUPPORTED}"
        if any(name.endswith(os.sep) for name in found.ignored):
            remedy += "; sub-folders are read with a pattern such as " + os.path.join(given, "**", "*.parquet")
        raise Refusal.at(given, f"holds no data file{beside}", remedy)
    return found


def _missing(given: str, path: Path) -> Refusal:
    """Names the first part of the path that does not exist, and what is there instead."""
    missing, parent = path, path.parent
    while not parent.exists() and parent != parent.parent:
        missing, parent = parent, parent.parent
    what = "does not exist" if missing == path else f"does not exist: there is no folder {missing.name!r}"
    remedy = ""
    if parent.is_dir():
        near = get_close_matches(missing.name, os.listdir(parent), n=1, cutoff=0.5)
        if near:
            remedy = f"nearest name in {parent.absolute()}: {near[0]}"
        else:
            remedy = f"looked in {parent.absolute()}"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", given) and format_of(given) is None:
        remedy += f"; for a data set of the hub write hub:{given}"
    return Refusal.at(given, what, remedy)
