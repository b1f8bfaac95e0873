"""Runs a command, or the pytest of `make test`, on a machine made busy or slow: no test may hang on a clock.

    .venv/bin/python tools/loaded_test.py                                  # with four busy loops in parallel
    .venv/bin/python tools/loaded_test.py --quota 0.5                      # half a core for all of it
    .venv/bin/python tools/loaded_test.py --loops 8 .venv/bin/python -m pytest tests/e2e/test_resume.py

The quota is a control group's where one can be made, else systemd's, else one core shared with as many busy loops as
give that share to a command of one process. What was started is ended, also by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
PERIOD = 100_000  # microseconds
# It ends with the one who started it, whatever ended that, and not before.
LOOP = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
SUITE = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-m", "not slow"]


@contextmanager
def busy(loops: int, core: int | None = None) -> Iterator[None]:
    """So many processes that do nothing but take time, on any core or on this one."""
    pinned = None if core is None else lambda: os.sched_setaffinity(0, {core})
    started = [subprocess.Popen([sys.executable, "-c", LOOP], preexec_fn=pinned) for _ in range(loops)]
    try:
        yield
    finally:
        for loop in started:
            loop.kill()
            loop.wait()


@contextmanager
def control_group(share: float) -> Iterator[Path | None]:
    """A control group with this share of a core, version 2 or 1; None where none can be made."""
    quota = round(share * PERIOD)
    folder, limit, first = None, None, None
    with suppress(OSError):
        if (GROUPS / "cgroup.controllers").exists():
            folder = Path(tempfile.mkdtemp(prefix="loaded-", dir=GROUPS))
            limit, first = folder / "cpu.max", f"{quota} {PERIOD}"
        elif (GROUPS / "cpu").is_dir():
            folder = Path(tempfile.mkdtemp(prefix="loaded-", dir=GROUPS / "cpu"))
            limit, first = folder / "cpu.cfs_quota_us", str(quota)
    made = False
    if limit is not None and first is not None and limit.exists():
        with suppress(OSError):
            limit.write_text(first)
            made = True
    try:
        yield folder if made else None
        if made and folder is not None:
            print(f"quota: {' '.join((folder / 'cpu.stat').read_text().split())}", file=sys.stderr)
    finally:
        if folder is not None:
            _remove(folder)


def _remove(group: Path) -> None:
    """End what the command left running in its group. A killed process leaves the group a moment later."""
    while group.exists():
        for left in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(left), signal.SIGKILL)
        with suppress(OSError):
            group.rmdir()


def by_systemd(share: float) -> list[str] | None:
    """The words before a command that give it this share; None where systemd cannot."""
    words = ["systemd-run", "--scope", "--quiet", *([] if os.getuid() == 0 else ["--user"])]
    words += ["-p", f"CPUQuota={share:.0%}", "--"]
    if shutil.which(words[0]) is None:
        return None
    tried = subprocess.run([*words, "true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return words if tried.returncode == 0 else None


def run(command: Sequence[str], group: Path | None = None, core: int | None = None) -> int:
    def settle() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        if core is not None:
            os.sched_setaffinity(0, {core})

    process = subprocess.Popen(command, preexec_fn=settle)
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # it gets the signal too
                continue
    finally:
        process.terminate()
        process.wait()


def slowed(command: Sequence[str], share: float) -> int:
    with control_group(share) as group:
        if group is not None:
            print(f"quota: {share:g} of a core by {group}", file=sys.stderr)
            return run(command, group=group)
    before = by_systemd(share)
    if before is not None:
        print(f"quota: {share:g} of a core by systemd-run", file=sys.stderr)
        return run([*before, *command])
    core = min(os.sched_getaffinity(0))
    loops = max(1, round(1 / share) - 1)
    print(f"quota: core {core} alone, with {loops} busy loops on it", file=sys.stderr)
    with busy(loops, core):
        return run(command, core=core)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, help="busy loops in parallel to the command (4, or none with a quota)")
    parser.add_argument("--quota", type=float, help="how much of a core the command has, such as 0.5")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    words = parser.parse_args()
    loops = words.loops if words.loops is not None else 0 if words.quota else 4
    command = words.command[1:] if words.command[:1] == ["--"] else words.command
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        stack.enter_context(busy(loops))
        status = slowed(command or SUITE, words.quota) if words.quota else run(command or SUITE)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
