"""Real processes that are stopped at a moment of their own work, however slow or busy the machine is.

Someone who looks on from outside comes late where the processor is shared, and the moment has passed. So a process to
be killed looks for itself: at each of its file operations, and sends itself SIGKILL at the first one at which the
moment has come.
"""

from __future__ import annotations

import glob
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from commands import warm_python
from hang import HANG

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}


@dataclass(frozen=True)
class Moment:
    """From when on `files` (a pattern) finds so many; with `lines`, so many lines in them."""

    files: str
    count: int = 1
    lines: bool = False

    def has_come(self) -> bool:
        found = glob.glob(self.files)
        if self.lines:
            return sum(Path(file).read_bytes().count(b"\n") for file in found) >= self.count
        return len(found) >= self.count


def lines(file: Path, count: int) -> Moment:
    return Moment(str(file), count, lines=True)


def die_at(*moments: Moment) -> None:
    """This process kills itself when all of the moments have come."""
    looking = False

    def look(event: str, _: object) -> None:
        nonlocal looking
        if event not in OPERATIONS or looking:
            return
        looking = True  # looking is a file operation too
        try:
            if all(moment.has_come() for moment in moments):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            looking = False

    sys.addaudithook(look)


def killed(words: list[object], *moments: Moment) -> None:
    """`lockstep` with these words, killed when all of the moments have come."""
    told = json.dumps([asdict(moment) for moment in moments])
    done = subprocess.run(
        [*warm_python(), __file__, told, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"it ended by itself\n{done.stdout}"


def interrupted(words: list[object], moment: Moment) -> tuple[int, str]:
    """The exit status of `lockstep` with these words, and what it said, after a Ctrl-C once the moment has come.

    It must have work for long after the moment.
    """
    process = subprocess.Popen(
        [*warm_python(), "-m", "lockstep", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell ignores Ctrl-C for what it runs in the background, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        given_up = time.monotonic() + HANG
        while process.poll() is None and not moment.has_come() and time.monotonic() < given_up:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=HANG)
    finally:
        process.kill()
    return process.returncode, told


if __name__ == "__main__":
    die_at(*(Moment(**told) for told in json.loads(sys.argv[1])))
    sys.argv[:] = ["lockstep", *sys.argv[2:]]
    sys.path.pop(0)  # the folder of this file, which `python -m lockstep` would not see
    runpy.run_module("lockstep", run_name="__main__", alter_sys=True)
