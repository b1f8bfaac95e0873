"""The last lines that a process printed, kept in a file that does not grow."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from lockstep.run.files import write_private, written_aside

# In the file. As much again may wait in memory before it is cut.
KEPT_BYTES = 64 * 2**10
_DROPPED = b"[earlier lines were dropped]\n"


class OutputTail:
    """Goes on with what the file holds. Nothing is written before the folder above the file's own is there: it is the
    run's to make."""

    def __init__(self, file: Path):
        self._file = file
        self._kept = bytearray()
        with suppress(OSError):
            self._kept += file.read_bytes()
        self.waiting = False
        self.written_at = 0.0

    def add(self, piece: bytes) -> None:
        self._kept += piece
        self.waiting = True
        if len(self._kept) > 2 * KEPT_BYTES:
            self._cut()

    def write(self) -> None:
        """Bring the file up to date. A disk that takes nothing now is tried again at the next time."""
        self.written_at = time.monotonic()
        if not self._file.parent.parent.is_dir():
            return
        if len(self._kept) > KEPT_BYTES:
            self._cut()
        with suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            with written_aside(self._file, durable=False) as aside:
                write_private(aside, self._kept)
            self.waiting = False

    def _cut(self) -> None:
        """Keep the end, from the beginning of a line where there is one."""
        kept = self._kept[len(_DROPPED) - KEPT_BYTES :]
        line = kept.find(b"\n") + 1
        self._kept = bytearray(_DROPPED) + (kept[line:] if line < len(kept) else kept)
