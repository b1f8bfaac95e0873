"""The log files of the ranks in the run folder (`logs/rank_N.log`)."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

# Time limit for reading the remaining output of an ended rank, because its child processes may keep the pipes open.
DRAIN_SECONDS = 2.0


class RankLog:
    """The file `logs/rank_N.log` of the run folder, with the output of one rank. Lines are kept in memory until rank 0
    has created the run folder, because a run that must start in a new folder would otherwise be refused."""

    def __init__(self, run_folder: Path, rank: int):
        self._run_folder, self._rank = run_folder, rank
        self._kept: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def write(self, line: bytes) -> None:
        with self._lock:
            self._kept.append(line)
            # A disk that fails must not stop the output of the rank, which the driver shows too.
            with suppress(OSError):
                if self._file is None:
                    if not self._run_folder.is_dir():
                        return
                    (self._run_folder / "logs").mkdir(exist_ok=True)
                    self._file = (self._run_folder / "logs" / f"rank_{self._rank}.log").open("ab", buffering=0)
                self._file.write(b"".join(self._kept))
                self._kept.clear()


class LoggedRanks:
    """Copies the output of ranks on this machine to the console and to the log files of the ranks. Rank 0 keeps a
    terminal, because its output there is not made of lines, and then has no log file."""

    def __init__(self, run_folder: Path, ranks: int):
        self.stdouts: dict[int, str] = {}
        self.stderrs: dict[int, str] = {}
        """For each rank the file that is its output: a pipe of this process."""
        self._logs = [RankLog(run_folder, rank) for rank in range(ranks)]
        self._ends: list[int] = []
        self._readers: list[threading.Thread] = []
        for rank, log in enumerate(self._logs):
            for stream, files in ((sys.stdout, self.stdouts), (sys.stderr, self.stderrs)):
                if rank == 0 and stream.isatty():
                    continue
                pipe, end = os.pipe()
                files[rank] = f"/dev/fd/{end}"
                self._ends.append(end)
                reader = threading.Thread(target=_copy, args=(pipe, stream, log), daemon=True, name=f"rank {rank}")
                reader.start()
                self._readers.append(reader)

    def close(self) -> None:
        """Copies the remaining output of the ranks, which have ended."""
        for end in self._ends:
            os.close(end)
        given_up = time.monotonic() + DRAIN_SECONDS
        for reader in self._readers:
            reader.join(timeout=max(0.0, given_up - time.monotonic()))
        for rank in self.stdouts:
            self._logs[rank].write(b"")  # a rank without output has a file too


def _copy(pipe: int, stream: TextIO, log: RankLog) -> None:
    with open(pipe, "rb") as lines:
        for line in lines:
            log.write(line)
            try:
                stream.buffer.write(line)
                stream.buffer.flush()
            except OSError:
                return  # the console was closed; the rank too learns this at its next output
