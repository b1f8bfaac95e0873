"""Disk cache of encoded rows, keyed by raw rows, tokenizer, chat template, settings, code and package versions.

An entry is written to a temporary file and then renamed, so several runs may write the same entry without a lock. An
entry starts with a checksum, and damaged entries are ignored. Any part of the cache folder may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.data.encode.tokenizer_cache import plain_backend
from lockstep.data.sources.rowset import RowSet
from lockstep.errors import first_line
from lockstep.recipe.keys_data import Data, Source
from lockstep.run.caches import ROWS, cache_home
from lockstep.run.files import ASIDE
from lockstep.version import PACKAGE_FOLDER
from lockstep.vision.images import PROCESSOR_FILES, file_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FORMAT = 1
# Number of rows per cache entry. Encoding this many rows takes about one second.
PART_ROWS = 1024
# Reading and resizing so many images takes about one second.
IMAGE_ROWS = 64
_MAGIC = b"lockstep rows, encoded.\n"  # magic plus checksum are a multiple of eight bytes, for alignment
_HEAD = len(_MAGIC) + hashlib.sha256().digest_size
# Settings that do not change how a row is encoded.
_UNUSED_KEYS = {
    "data": {
        "train",
        "val",
        "max_rows",
        "shuffle",
        "drop_last",
        "cache",
        "cache_gb",
        "reader_timeout",
        "reader_memory_gb",
    },
    "source": {"weight", "rows"},
}
_PACKAGES = ("transformers", "tokenizers", "jinja2", "pyarrow", "pillow", "numpy")
# Files of a model folder that affect the pixels and tokens of images.
_PROCESSOR = ("config.json", *PROCESSOR_FILES)
# Temporary files older than this number of seconds are left over from killed runs.
_LEFT_AFTER = 24 * 3600


class RowCache:
    """The cache entries of one data source. `key` is the hash of everything that its encoded rows depend on. An entry
    holds a range of rows."""

    def __init__(self, home: Path, key: str, bound: float):
        self.home, self.folder, self._bound = home, home / key, bound
        self._key = key
        self.failure = ""
        """Why the last entry could not be written."""

    @classmethod
    def of(
        cls,
        open_rows: Callable[..., Any],
        source: Source,
        data: Data,
        rows: RowSet,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
    ) -> RowCache | None:
        """Creates the cache of a source. Returns None if the cache is off, or if the reader or the tokenizer has no
        content hash."""
        home, reader, content = cache_folder(data), _named(open_rows), tokenizer_content(tokenizer)
        if home is None or reader is None or content is None:
            return None
        key = {
            "format": FORMAT,
            "code": code_digest(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "reader": reader,
            "rows": [(file.sha256, file.rows) for file in rows.files],
            "columns": rows.columns,
            "data": data.model_dump(mode="json", exclude=_UNUSED_KEYS["data"]),
            "source": source.model_dump(mode="json", exclude=_UNUSED_KEYS["source"]),
            "limit": limit,
            "tokenizer": content,
            "images": _processor_content(_images_of(open_rows)),
        }
        text = json.dumps(key, sort_keys=True)
        return cls(home, hashlib.sha256(text.encode()).hexdigest(), data.cache_gb * 2**30)

    def get(self, span: tuple[int, int]) -> memoryview | None:
        """Returns the bytes of a cache entry, or None if the entry is missing or damaged."""
        return kept(self._path(span), self._name(span))

    def put(self, span: tuple[int, int], data: bytes) -> memoryview | bytes:
        """Writes a cache entry. Returns the entry memory-mapped, or `data` if the entry could not be written."""
        try:
            keep(self._path(span), self._name(span), data)
        except OSError as error:
            # A failed write is not fatal: the rows are encoded again at the next start.
            self.failure = f"{self.home}: encoded rows could not be cached: {first_line(error)}"
            return data
        found = self.get(span)
        return data if found is None else found

    def prune(self) -> None:
        """Deletes the least recently used entries while the cache exceeds its size limit. Also deletes temporary files
        that killed runs left behind."""
        with contextlib.suppress(OSError):
            entries = sorted(_entries(self.home), key=lambda entry: entry[1].st_mtime)
            size = sum(facts.st_size for _, facts in entries)
            for path, facts in entries:
                left = path.name.startswith(ASIDE)
                if (size > self._bound and not left) or (left and time.time() - facts.st_mtime > _LEFT_AFTER):
                    size -= facts.st_size
                    _delete(path)

    def _path(self, span: tuple[int, int]) -> Path:
        return self.folder / f"{span[0]}-{span[1]}.rows"

    def _name(self, span: tuple[int, int]) -> str:
        return f"{self._key} {span}"


def worth_keeping(rows: int, open_rows: Callable[..., Any] | None = None) -> bool:
    """Returns whether a source has enough rows for caching. Encoding a few rows is as fast as reading them from the
    cache. Rows with images take longer."""
    return rows >= (PART_ROWS if _images_of(open_rows) is None else IMAGE_ROWS)


def keep(path: Path, name: str, data: bytes) -> None:
    """Write an entry atomically. Raises OSError on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=ASIDE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + _checksum(name, data))
            file.write(data)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def kept(path: Path, name: str) -> memoryview | None:
    """Returns the memory-mapped entry of this name, or None if the entry is missing or damaged."""
    try:
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    head, body = bytes(mapped[:_HEAD]), mapped[_HEAD:]
    if head != _MAGIC + _checksum(name, body):
        return None
    with contextlib.suppress(OSError):  # a read-only folder
        os.utime(path)  # marks the entry as used, because `prune` deletes the least recently used first
    return body


def _checksum(name: str, body: bytes | memoryview) -> bytes:
    """Returns a checksum of an entry's body and name, so that an entry copied to another path is invalid."""
    digest = hashlib.sha256(name.encode())
    digest.update(body)
    return digest.digest()


def cache_folder(data: Data) -> Path | None:
    """Returns the folder of the row cache, or None if the cache is off."""
    if data.cache == "off":
        return None
    if data.cache != "on":
        return Path(data.cache).expanduser()
    try:
        return cache_home() / ROWS
    except RuntimeError:  # no home directory
        return None


def _entries(home: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in home.glob("*/*"):
        with contextlib.suppress(OSError):  # another run deleted it
            yield path, path.stat()


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()  # succeeds only if the deleted entry was the last one of the folder


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """Returns a description of everything in the tokenizer that affects tokenisation. Returns None for a tokenizer with
    custom code."""
    backend = plain_backend(tokenizer)
    if backend is None:
        return None
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if not name.endswith(("_path", "_file"))}
    return {
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "vocabulary": hashlib.sha256(backend.to_str().encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "settings": json.dumps(settings, sort_keys=True, default=str),
    }


def _named(open_rows: Callable[..., Any]) -> str | None:
    """Returns the class of a row reader and its bound arguments as JSON. Returns None if an argument is not a plain
    value."""
    given: list[Any] = []
    while isinstance(open_rows, partial):
        given.append([list(open_rows.args), open_rows.keywords])
        open_rows = open_rows.func
    if "<" in open_rows.__qualname__:
        return None  # a class inside a function has no unique name
    try:
        return json.dumps([open_rows.__module__, open_rows.__qualname__, given], sort_keys=True, default=_listed)
    except TypeError:
        return None


def _images_of(open_rows: Callable[..., Any] | None) -> str | None:
    """Returns the model folder whose image processor a row reader uses (its argument `images`), or None."""
    while isinstance(open_rows, partial):
        if (folder := open_rows.keywords.get("images")) is not None:
            return str(folder)
        open_rows = open_rows.func
    return None


def _processor_content(folder: str | None) -> dict[str, str | None]:
    """Returns the hashes of the files of a model folder that affect the pixels and tokens of images."""
    return {} if folder is None else {name: file_digest(Path(folder) / name) for name in _PROCESSOR}


def _listed(value: Any) -> list[Any]:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not a plain value")


@cache
def code_digest() -> str:
    """Returns a hash of all code and built-in templates that affect encoding."""
    digest, data, vision = hashlib.sha256(), PACKAGE_FOLDER / "data", PACKAGE_FOLDER / "vision"
    code = [*sorted(data.rglob("*.py")), *sorted(data.rglob("*.jinja")), *sorted(vision.rglob("*.py"))]
    for path in [*code, PACKAGE_FOLDER / "types.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _version(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None
