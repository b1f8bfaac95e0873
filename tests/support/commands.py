"""The commands that tests start, each a process of its own: cold ones, and warm ones that need not import anything.

A test about the start itself starts cold: what is imported when, what stands in PYTHONPATH, code that is found first.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from hang import HANG

HERE = Path(__file__).parent
FORKS = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Elsewhere every start is a cold one."""


class WarmServer:
    """`warm_server.py` as this process's own, in a folder with its socket and with commands for a PATH."""

    def __init__(self, *modules: str, **environment: str) -> None:
        """`modules`: what it imports, in the place of everything. `environment`: what it imports and runs in, besides
        what is in this one."""
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-warm-"))
        self.address = self.folder / "socket"
        with socket.socket(socket.AF_UNIX) as listener, (self.folder / "server.log").open("wb") as log:
            listener.bind(str(self.address))
            listener.listen(64)  # clients that come while it imports wait here
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "warm_server.py"), str(listener.fileno()), *modules],
                stdin=subprocess.PIPE,  # which ends when this process does, however it does
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the clients
            )
        own = Path(sys.executable).parent
        started = {"python": [], "lockstep": [str(own / "lockstep")], "torchrun": ["-m", "torch.distributed.run"]}
        for name, words in started.items():
            program = self.programs / name
            program.parent.mkdir(exist_ok=True)
            # Ranks of torchrun are warm too.
            ranks = f"export PYTHON_EXEC={shlex.quote(str(self.programs / 'python'))}\n" if name == "torchrun" else ""
            program.write_text(f'#!/bin/sh\n{ranks}exec {shlex.join([*self.python, *words])} "$@"\n')
            program.chmod(0o755)

    @property
    def python(self) -> list[str]:
        """In place of `python`."""
        return [sys.executable, "-IS", str(HERE / "warm_client.py"), str(self.address), sys.executable]

    @property
    def programs(self) -> Path:
        """A folder with `lockstep`, `python` and `torchrun`, to come first on a PATH."""
        return self.folder / "bin"

    def end(self) -> None:
        self.process.communicate()
        shutil.rmtree(self.folder)


@cache
def warm_server() -> WarmServer:
    return WarmServer()


def end_warm_server() -> None:
    if warm_server.cache_info().currsize:
        warm_server().end()
        warm_server.cache_clear()


@cache
def cold_because() -> str:
    """Why commands start cold on this machine, or nothing where they start warm. The tests pass either way; cold they
    take about twice the processor time."""
    if not FORKS:
        return "warm starts need Linux and pidfd_open"
    command = [*warm_server().python, "-c", "import sys; print('torch' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    if done.stdout == "True\n":
        return ""
    return (warm_server().folder / "server.log").read_text().strip() or f"the server does not answer: {done.stderr}"


def warm_python() -> list[str]:
    """The opening words of a command: this interpreter, with everything imported."""
    return warm_server().python if FORKS else [sys.executable]


def search_path() -> str:
    """A PATH on which `lockstep`, `python` and `torchrun` are those of this environment, warm."""
    programs = [str(warm_server().programs)] if FORKS else []
    return os.pathsep.join([*programs, str(Path(sys.executable).parent), os.environ["PATH"]])


def completed(command: list[str], timeout: float, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=given, check=False)


def lockstep(*words: object, timeout: float = HANG, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return completed([*warm_python(), "-m", "lockstep", *map(str, words)], timeout, environment)


def cold_lockstep(*words: object, timeout: float = HANG, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command from the very start of its interpreter."""
    return completed([sys.executable, "-m", "lockstep", *map(str, words)], timeout, environment)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def warm_torchrun(*words: object, program: Path | None = None, processes: int = 2) -> list[str]:
    """The command line of `lockstep`, or of another program, in several processes by the real launcher."""
    launcher = [*warm_python(), *TORCHRUN, str(processes), "--no-python"]
    started = ["-m", "lockstep"] if program is None else [str(program)]
    return [*launcher, *warm_python(), *started, *map(str, words)]


def torchrun(
    *words: object, program: Path | None = None, processes: int = 2, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The real command in several processes, started by the real launcher. From the very start of all interpreters
    e2e/test_launched_runs.py starts ranks."""
    return completed(warm_torchrun(*words, program=program, processes=processes), HANG, environment)


def changed_lockstep(folder: Path, change: str) -> Path:
    """A program that is `lockstep` after a change."""
    program = folder / "changed_lockstep.py"
    program.write_text(f"import os, signal, time\n{change}\nfrom lockstep.cli import main\nmain()\n", encoding="utf-8")
    return program
