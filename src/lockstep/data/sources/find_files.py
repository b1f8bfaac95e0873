"""Finds the data files of a path, and caches the metadata of files."""

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

FORMATS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
}
TEXT_FORMATS = ("jsonl", "json", "csv", "tsv", "txt")
SUPPORTED = ".parquet, .arrow, .jsonl, .ndjson, .json, .csv, .tsv, .txt (the text formats also with .gz)"
# Metadata and cache files of the package datasets.
_ABOUT_ROWS = re.compile(r"(dataset_infos?|dataset_dict|state)\.json|cache-.*\.arrow")
# Maps words in file names to the data set split that they name.
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
    """A data file. `name` is the path as the user wrote it, for messages."""

    name: str
    path: Path
    format: str


@dataclass(frozen=True)
class FoundFiles:
    files: list[DataFile]
    ignored: list[str]


def format_of(name: str) -> str | None:
    """Returns the file format that belongs to the suffix of a file name, or None if the suffix is unknown."""
    lower = name.lower()
    stem, packed = (lower[:-3], True) if lower.endswith(".gz") else (lower, False)
    found = FORMATS.get(os.path.splitext(stem)[1])
    return None if packed and found not in TEXT_FORMATS else found


def locate(given: str, base: Path | None) -> FoundFiles:
    """Returns the data files of `given` (file, folder or glob pattern), sorted by name. Relative paths start at
    `base`."""
    if not given.strip():
        raise Refusal.at(
            "data path", "is empty", "give a file, a folder, a glob pattern or hub:owner/name", code="empty-value"
        )
    root = base or Path()
    path = root / os.path.expanduser(given)
    if path.is_dir():
        return _sift(given, root, (os.path.join(given, entry) for entry in os.listdir(path)))
    _refuse_odd(given, path)
    if path.exists():
        format = format_of(given)
        if format is None:
            raise Refusal.at(given, "has an unsupported suffix", f"supported: {SUPPORTED}", code="unsupported-format")
        return FoundFiles([DataFile(given, path, format)], [])
    if glob.has_magic(given):
        matches = glob.glob(os.path.expanduser(given), root_dir=root, recursive=True)
        if not matches:
            raise Refusal.at(given, f"the pattern matches no file under {root.absolute()}", code="no-such-file")
        return _sift(given, root, matches)
    raise _missing(given, path)


def _refuse_pipe(given: str, path: Path) -> None:
    """Refuses pipes and devices, because reading them may never end."""
    if path.exists() and not path.is_file():
        raise Refusal.at(
            given, "is a pipe or a device, not a file", "write the rows to a file and give its path", code="not-a-file"
        )


def _refuse_odd(given: str, path: Path) -> None:
    """Refuses pipes and broken symbolic links."""
    _refuse_pipe(given, path)
    if path.is_symlink() and not path.exists():
        raise Refusal.at(given, "is a broken symbolic link", "give the path of an existing file", code="no-such-file")


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
    if any(file.format != "txt" for file in found.files):
        # Beside files of other formats, a .txt file is a note such as README.txt or requirements.txt.
        found.ignored.extend(file.name for file in found.files if file.format == "txt")
        found.files[:] = [file for file in found.files if file.format != "txt"]
    if not found.files:
        raise _no_files(given, root, found.ignored)
    _refuse_several_splits(given, found.files)
    return found


def _no_files(given: str, root: Path, ignored: Sequence[str]) -> Refusal:
    note = f"; ignored: {', '.join(ignored[:10])}" if ignored else ""
    folders = [name for name in ignored if name.endswith(os.sep)]
    inside = {name: list(filter(format_of, os.listdir(root / os.path.expanduser(name)))) for name in folders}
    filled = {name: files[0] for name, files in inside.items() if files}
    suffix = os.path.splitext(next(iter(filled.values()), "rows.parquet"))[1]
    pattern = os.path.join(given, "**", f"*{suffix}")
    remedy = f"supported: {SUPPORTED}"
    if filled:
        remedy = (
            f"give the path of the intended folder ({', '.join(list(filled)[:10])}), or a pattern such as {pattern}"
        )
    elif folders:
        remedy += f"; sub-folders are read with a pattern such as {pattern}"
    return Refusal.at(given, f"holds no data file{note}", remedy, code="no-such-file")


def _refuse_several_splits(given: str, files: Sequence[DataFile]) -> None:
    """Raises an error if the files belong to several splits, because training on the test split is hardly intended."""
    splits: dict[str, str] = {}
    shared = len(os.path.commonpath([os.path.dirname(file.name) for file in files]))
    for file in files:
        words = re.split(r"[^a-z0-9]+", file.name[shared:].lower())
        found = {_SPLITS[word] for word in words if word in _SPLITS}
        if len(found) == 1:
            splits.setdefault(found.pop(), file.name)
    if len(splits) > 1:
        listed = ", ".join(f"{split} ({name})" for split, name in splits.items())
        one = splits.get("train") or next(iter(splits.values()))
        raise Refusal.at(
            given,
            f"holds the rows of several splits: {listed}",
            f"give one split: {one}, or a pattern that matches only its files; to read all splits, give a list",
            code="several-candidates",
        )


def _missing(given: str, path: Path) -> Refusal:
    """Returns an error that names the first missing part of the path and the most similar existing name."""
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
            remedy = f"correct the path: {parent.absolute()} has no {missing.name!r}"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", given) and format_of(given) is None:
        remedy += f"; for a data set of the hub write hub:{given}"
    return Refusal.at(given, what, remedy, code="no-such-file")


class CachedFile:
    """A `RowFile` with cached metadata. The file is parsed only when a row is read."""

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


class FileCache:
    """Cache of file metadata (rows, columns, line numbers), keyed by content hash. The cache avoids parsing a valid
    file again."""

    def __init__(self, folder: Path):
        self._folder = folder / "files"

    def find(self, name: str, form: str, size: int, sha256: str, open_file: Callable[[], RowFile]) -> CachedFile | None:
        """Returns the cached metadata for this content hash and format, or None. `name` is the file name for
        messages."""
        entry = kept(self._folder / f"{sha256}.{form}", self._key(sha256, form))
        if entry is None:
            return None
        rows, shape, lines, partly = json.loads(bytes(entry))
        every = range(1, rows + 1) if lines == "all" else lines
        return CachedFile(FileInfo(name, rows, size, sha256), shape, every, partly, open_file)

    def remember(self, form: str, file: RowFile) -> None:
        """Stores the metadata of a valid file. Metadata of small files is not stored, because parsing a small file is
        as fast as reading the cache."""
        info, lines = file.info, file.lines
        if not worth_keeping(info.rows):
            return
        numbers = None if lines is None else list(lines)
        every = "all" if numbers == list(range(1, info.rows + 1)) else numbers
        entry = [info.rows, dict(file.shape), every, dict(file.partly)]
        with contextlib.suppress(OSError):  # if the write fails, the file is parsed again next time
            path = self._folder / f"{info.sha256}.{form}"
            keep(path, self._key(info.sha256, form), json.dumps(entry).encode())

    def _key(self, sha256: str, form: str) -> str:
        return f"{sha256} {form} {code_digest()}"
