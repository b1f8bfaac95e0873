"""Data files that were read before, known by content: how many rows, which columns, on which lines.

Reading a file means to parse and check all of it. One that was found whole once is parsed again only where its rows are
asked for, which is never where all of them are kept encoded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lockstep.data.cache import code_digest, keep, kept, worth_keeping
from lockstep.data.rowset import ColumnKinds, FileInfo, RowFile, origin_at
from lockstep.types import Origin, Row


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
