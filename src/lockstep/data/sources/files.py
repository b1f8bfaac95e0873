"""The data files that a path names, and the cache of files that were read before."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from lockstep.data.row_cache import code_digest, keep, kept, worth_keeping
from lockstep.data.sources.rowset import ColumnKinds, FileInfo, RowFile, origin_at
from lockstep.errors import Refusal
from lockstep.types import Origin, Row

# The data files that a path of the recipe names: a file, or those of a folder or of a pattern, in order of name.

FORMATS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
}
TEXT_FORMATS = ("jsonl", "json", "csv")
SUPPORTED = ".parquet, .arrow, .jsonl, .ndjson, .json, .csv (the text formats also with .gz)"
# What the package datasets writes beside its rows, and what it keeps there of earlier work.
_ABOUT_ROWS = re.compile(r"(dataset_infos?|dataset_dict|state)\.json|cache-.*\.arrow")
# Words in the names of files that say which rows they hold.
_SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}


@dataclass(frozen=True)
class DataFile:
    """`name` is how messages call it (as given), `path` is where it is."""

    name: str
    path: Path
    format: str


@dataclass(frozen=True)
class FoundFiles:
    files: list[DataFile]
    ignored: list[str]


def format_of(name: str) -> str | None:
    """The format that a file name promises, or None."""
    lower = name.lower()
    stem, packed = (lower[:-3], True) if lower.endswith(".gz") else (lower, False)
    found = FORMATS.get(os.path.splitext(stem)[1])
    return None if packed and found not in TEXT_FORMATS else found


def locate(given: str, base: Path | None) -> FoundFiles:
    """The data files behind `given`, sorted by name. A relative name is looked up under `base`."""
    if not given.strip():
        raise Refusal.at("data path", "is empty", "name a file, a folder, a glob pattern or hub:owner/name")
    root = base or Path()
    path = root / os.path.expanduser(given)
    if path.is_dir():
        return _sift(given, root, (os.path.join(given, entry) for entry in os.listdir(path)))
    _refuse_odd(given, path)
    if path.exists():
        format = format_of(given)
        if format is None:
            raise Refusal.at(given, "has a suffix that is not read", f"supported: {SUPPORTED}")
        return FoundFiles([DataFile(given, path, format)], [])
    if glob.has_magic(given):
        matches = glob.glob(os.path.expanduser(given), root_dir=root, recursive=True)
        if not matches:
            raise Refusal.at(given, f"the pattern matches no file under {root.absolute()}")
        return _sift(given, root, matches)
    raise _missing(given, path)


def _refuse_pipe(given: str, path: Path) -> None:
    """Reading a pipe or a device may never end."""
    if path.exists() and not path.is_file():
        raise Refusal.at(given, "is a pipe or a device, not a file", "write the rows into a file and name that")


def _refuse_odd(given: str, path: Path) -> None:
    """A pipe, or a link to itself, which looks like nothing at all."""
    _refuse_pipe(given, path)
    if path.is_symlink() and not path.exists():
        raise Refusal.at(given, "is a symbolic link that leads nowhere, or to itself", "name the file itself")


def _sift(given: str, root: Path, names: Iterable[str]) -> FoundFiles:
    found = FoundFiles([], [])
    for name in sorted(names):
        path = root / os.path.expanduser(name)
        format = format_of(name)
        if path.is_dir():
            found.ignored.append(os.path.join(name, ""))
        elif format is None or path.name.startswith(".") or _ABOUT_ROWS.fullmatch(path.name):
            found.ignored.append(name)
        else:
            _refuse_pipe(name, path)
            found.files.append(DataFile(name, path, format))
    if not found.files:
        raise _no_files(given, root, found.ignored)
    _refuse_several_splits(given, found.files)
    return found


def _no_files(given: str, root: Path, ignored: Sequence[str]) -> Refusal:
    beside = f"; ignored: {', '.join(ignored[:10])}" if ignored else ""
    folders = [name for name in ignored if name.endswith(os.sep)]
    inside = {name: list(filter(format_of, os.listdir(root / os.path.expanduser(name)))) for name in folders}
    filled = {name: files[0] for name, files in inside.items() if files}
    suffix = os.path.splitext(next(iter(filled.values()), "rows.parquet"))[1]
    pattern = os.path.join(given, "**", f"*{suffix}")
    remedy = f"supported: {SUPPORTED}"
    if filled:
        remedy = f"name the folder that is meant ({', '.join(list(filled)[:10])}), or a pattern such as {pattern}"
    elif folders:
        remedy += f"; sub-folders are read with a pattern such as {pattern}"
    return Refusal.at(given, f"holds no data file{beside}", remedy)


def _refuse_several_splits(given: str, files: Sequence[DataFile]) -> None:
    """Whoever names the folder of a published data set means one split of it, hardly the test rows too."""
    splits: dict[str, str] = {}
    shared = len(os.path.commonpath([os.path.dirname(file.name) for file in files]))
    for file in files:
        words = re.split(r"[^a-z0-9]+", file.name[shared:].lower())
        found = {_SPLITS[word] for word in words if word in _SPLITS}
        if len(found) == 1:
            splits.setdefault(found.pop(), file.name)
    if len(splits) > 1:
        held = ", ".join(f"{split} ({name})" for split, name in splits.items())
        one = splits.get("train") or next(iter(splits.values()))
        raise Refusal.at(
            given,
            f"holds the rows of several splits: {held}",
            f"name one: {one}, or a pattern that fits its files alone; all of them can be given as a list",
        )


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


# Data files that were read before, known by content: how many rows, which columns, on which lines.
#
# Reading a file means to parse and check all of it. One that was found whole once is parsed again only where its rows
# are asked for, which is never where all of them are kept encoded.


class KnownFile:
    """A `RowFile` that is opened when a row is asked for."""

    def __init__(
        self,
        info: FileInfo,
        shape: ColumnKinds,
        lines: Sequence[int] | None,
        partly: Mapping[str, int],
        open_file: Callable[[], RowFile],
    ):
        self.info, self.shape, self.lines, self.partly = info, shape, lines, partly
        self._open = open_file
        self._file: RowFile | None = None

    @property
    def opened(self) -> RowFile:
        if self._file is None:
            self._file = self._open()
        return self._file

    def row(self, number: int) -> Row:
        return self.opened.row(number)

    def origin(self, number: int) -> Origin:
        return origin_at(self.info.name, self.lines, number)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.opened)


class KnownFiles:
    """What is known of files, in a folder of the cache."""

    def __init__(self, folder: Path):
        self._folder = folder / "files"

    def find(self, name: str, form: str, size: int, sha256: str, open_file: Callable[[], RowFile]) -> KnownFile | None:
        """The file of this content in this form, if it was read before; `name` is what messages call it now."""
        said = kept(self._folder / f"{sha256}.{form}", self._key(sha256, form))
        if said is None:
            return None
        rows, shape, lines, partly = json.loads(bytes(said))
        every = range(1, rows + 1) if lines == "all" else lines
        return KnownFile(FileInfo(name, rows, size, sha256), shape, every, partly, open_file)

    def remember(self, form: str, file: RowFile) -> None:
        """Of a file that was found whole; small ones are read as fast as what is known of them."""
        info, lines = file.info, file.lines
        if not worth_keeping(info.rows):
            return
        numbers = None if lines is None else list(lines)
        every = "all" if numbers == list(range(1, info.rows + 1)) else numbers
        said = [info.rows, dict(file.shape), every, dict(file.partly)]
        with contextlib.suppress(OSError):  # it is read again next time
            path = self._folder / f"{info.sha256}.{form}"
            keep(path, self._key(info.sha256, form), json.dumps(said).encode())

    def _key(self, sha256: str, form: str) -> str:
        return f"{sha256} {form} {code_digest()}"
