"""Sandboxes: run Python or bash code of the model in a process with limits, without network and with its own folder.

`execute` selects one of four kinds of isolation:

- `namespaces`: Linux user, mount, PID, network and IPC namespaces. No network, only system folders are visible.
- `bubblewrap`: the same, with the program `bwrap`, for machines that allow namespaces only to it.
- `docker:IMAGE`: a container per program (`docker_sandbox.py`).
- `limits`: only limits of time, memory, processes, output and disk. The program has the network and the files of the
  user. It is used only if the variable LOCKSTEP_SANDBOX requests it.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.environments.docker_sandbox import docker_command, guarded, refuse_without_docker
from lockstep.errors import Refusal
from lockstep.launch.containers import forget_container, note_container, remove_container

CHOICE = "LOCKSTEP_SANDBOX"
NAMESPACES, BUBBLEWRAP, LIMITS, DOCKER = "namespaces", "bubblewrap", "limits", "docker:"
_HELPER = str(Path(__file__).with_name("sandbox_process.py"))
# Folders of the system that a program may read. The folders of the Python installation are added.
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl")
_HOME = "/home/sandbox"
# The number of processes of the sandbox itself, which the process limit does not count.
_HELPERS = {NAMESPACES: 2, BUBBLEWRAP: 3, LIMITS: 1}
# If the helper does not report this many seconds after the time limit, it is killed.
_GRACE = 15.0


class SandboxFailed(Exception):
    """A sandbox could not start a program, or was lost while the program ran. The program is not the reason."""


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of one program. The program is killed when it exceeds one of them."""

    seconds: float = 10.0
    memory_mb: int = 1024
    """Address space of each process, and resident memory of all processes together."""
    processes: int = 32
    output_bytes: int = 64 * 1024
    """Standard output and standard error together."""
    disk_mb: int = 64
    """Size of a file, and of the program's folder."""


@dataclass(frozen=True)
class Execution:
    """The result of a program."""

    stdout: str
    stderr: str
    status: int | None
    """The exit code, or the negative signal number. None if the program was killed because of a limit."""
    stopped: str = ""
    """The limit that the program exceeded: `time`, `memory`, `processes`, `output` or `disk`. Empty otherwise."""

    @property
    def succeeded(self) -> bool:
        return self.status == 0

    @property
    def text(self) -> str:
        """The result as a text for the model: output, errors and the reason of the end."""
        parts = [self.stdout.rstrip("\n"), self.stderr.rstrip("\n")]
        if self.stopped:
            parts.append(f"[the program was stopped: {self.stopped} limit]")
        elif self.status:
            parts.append(f"[exit code {self.status}]")
        return "\n".join(part for part in parts if part) or "[no output]"


def run_python(code: str, limits: SandboxLimits | None = None, *, stdin: str = "", isolation: str = "") -> Execution:
    """Runs Python code as the file main.py of a new sandbox."""
    isolation = isolation or chosen_isolation()
    python = "python3" if isolation.startswith(DOCKER) else sys.executable
    return execute([python, "-B", "main.py"], {"main.py": code}, limits, stdin=stdin, isolation=isolation)


def run_bash(script: str, limits: SandboxLimits | None = None, *, stdin: str = "", isolation: str = "") -> Execution:
    """Runs a bash script in a new sandbox."""
    return execute(["/bin/bash", "main.sh"], {"main.sh": script}, limits, stdin=stdin, isolation=isolation)


def execute(
    command: Sequence[str],
    files: Mapping[str, str],
    limits: SandboxLimits | None = None,
    *,
    stdin: str = "",
    isolation: str = "",
) -> Execution:
    """Runs a command in a new sandbox whose folder contains `files`. When this function returns, all processes of the
    program have ended and its folder is removed. Raises `SandboxFailed` if the sandbox does not start."""
    isolation, limits = isolation or chosen_isolation(), limits or SandboxLimits()
    try:
        if not isolation.startswith((BUBBLEWRAP, DOCKER)):
            return _executed(command, files, limits, stdin, isolation)
        # These programs fail with exit codes that a program may have too. The first line of the command is the proof
        # that it has started.
        token = secrets.token_hex(8) + "\n"
        command = ["/bin/sh", "-c", f'echo {token.strip()} >&2; exec "$@"', "sh", *command]
        more = replace(limits, output_bytes=limits.output_bytes + len(token))
        done = _executed(command, files, more, stdin, isolation)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxFailed(f"the sandbox {isolation} cannot start: {error}") from error
    before, started, after = done.stderr.partition(token)
    if not started:
        raise SandboxFailed(f"the sandbox {isolation} did not start its program: {done.text}")
    return replace(done, stderr=before + after)


def _executed(
    command: Sequence[str], files: Mapping[str, str], limits: SandboxLimits, stdin: str, isolation: str
) -> Execution:
    base = Path(tempfile.mkdtemp(prefix="lockstep-sandbox-"))
    try:
        (base / "root").mkdir()
        folder = base / "home"
        folder.mkdir()
        for name, text in files.items():
            # The code of the model may contain lone surrogates, which UTF-8 cannot represent.
            (folder / name).write_bytes(text.encode("utf-8", "backslashreplace"))
        with tempfile.TemporaryFile() as given:
            given.write(stdin.encode("utf-8", "backslashreplace"))
            given.seek(0)
            if isolation.startswith(DOCKER):
                return _in_docker(isolation.removeprefix(DOCKER), command, folder, limits, given)
            return _run(_specification(command, base, folder, limits, isolation), limits, given)
    finally:
        _remove(base)


def _specification(
    command: Sequence[str], base: Path, folder: Path, limits: SandboxLimits, isolation: str
) -> dict[str, Any]:
    """Returns the arguments of the helper process."""
    home = str(folder) if isolation == LIMITS else _HOME
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    visible = visible_folders()
    if isolation == BUBBLEWRAP:
        command = _bubblewrap(command, visible, str(folder))
    return {
        "command": list(command),
        "environment": environment,
        "base": str(base),
        "folder": str(folder),
        "isolation": isolation,
        "visible": visible,
        "helpers": _HELPERS[isolation],
        "parent": os.getpid(),
        **vars(limits),
    }


def visible_folders() -> list[str]:
    """Returns the system folders that a program may read, with the folders of this Python."""
    python = [sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent)]
    found: list[str] = []
    for path in [*_SYSTEM, *python]:
        if os.path.lexists(path) and not any(path == one or path.startswith(f"{one}/") for one in found):
            found.append(path)
    return found


def _bubblewrap(command: Sequence[str], visible: Sequence[str], folder: str) -> list[str]:
    shown = [word for path in visible for word in _shown(path)]
    program = shutil.which("bwrap") or "bwrap"
    isolated = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    places = [
        "--proc",
        "/proc",
        "--remount-ro",
        "/proc",
        "--dev",
        "/dev",
        "--bind",
        folder,
        _HOME,
        "--chdir",
        _HOME,
    ]
    # /tmp comes first: a virtual environment of the user may be inside it.
    return [program, *isolated, "--tmpfs", "/tmp", *shown, *places, "--", *command]


def _shown(path: str) -> list[str]:
    return ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]


def _run(specification: dict[str, Any], limits: SandboxLimits, stdin: Any) -> Execution:
    """Starts the helper, reads the output of the program, and waits until all of its processes have ended."""
    ours, theirs = socket.socketpair()
    too_long: list[bool] = []

    def stop() -> None:
        too_long.append(True)
        with suppress(OSError):  # the program has ended already
            ours.sendall(b"o")

    with ours:
        helper = subprocess.Popen(
            [sys.executable, "-I", "-S", _HELPER, json.dumps(specification), str(theirs.fileno())],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        try:
            stdout, stderr = _read(helper, limits, stop)
            ours.settimeout(_GRACE)
            report = ours.recv(4096)
        except TimeoutError:
            report = b""
        finally:
            # Closing the connection makes a living helper kill all processes of the program.
            ours.close()
            with suppress(subprocess.TimeoutExpired):
                helper.wait(_GRACE)
            helper.kill()
            helper.wait()
    # Only without namespaces, a program can kill its helper.
    lost = {"stopped": "time"} if specification["isolation"] == LIMITS else {"failed": "its helper process was lost"}
    result: dict[str, Any] = json.loads(report) if report else lost
    if "failed" in result:
        raise SandboxFailed(f"the sandbox {specification['isolation']} cannot start: {result['failed']}")
    if too_long:
        result = {"stopped": "output"}
    return Execution(stdout, stderr, result.get("status"), result.get("stopped", ""))


def _read(process: subprocess.Popen[bytes], limits: SandboxLimits, stop: Callable[[], None]) -> tuple[str, str]:
    """Reads the output of a process until its end. Calls `stop` once when the output is longer than the limit."""
    kept = {process.stdout: bytearray(), process.stderr: bytearray()}
    total, deadline = 0, time.monotonic() + limits.seconds + _GRACE
    with selectors.DefaultSelector() as selector:
        for pipe in kept:
            assert pipe is not None
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(1.0):
                piece = os.read(key.fd, 2**16)
                if not piece:
                    selector.unregister(key.fileobj)
                    continue
                room = max(0, limits.output_bytes - total)
                kept[key.fileobj] += piece[:room]  # type: ignore[index]
                if total <= limits.output_bytes < total + len(piece):
                    stop()
                total += len(piece)
    for pipe in kept:
        assert pipe is not None
        pipe.close()
    stdout, stderr = (bytes(part).decode("utf-8", "replace") for part in kept.values())
    return stdout, stderr


def _in_docker(image: str, command: Sequence[str], folder: Path, limits: SandboxLimits, stdin: Any) -> Execution:
    name = folder.parent.name
    os.chmod(folder.parent, 0o755)
    os.chmod(folder, 0o777)
    container = docker_command(
        image, name, command, folder, limits.memory_mb, limits.processes, limits.disk_mb, limits.seconds
    )
    ours, theirs = socket.socketpair()
    note_container(name)
    process = subprocess.Popen(
        guarded(theirs.fileno(), name, container),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )
    theirs.close()
    stopped: list[str] = []

    def stop(why: str) -> None:
        stopped.append(why)
        remove_container(name)

    timer = threading.Timer(limits.seconds, stop, ("time",))
    timer.start()
    try:
        stdout, stderr = _read(process, limits, lambda: stop("output"))
        process.wait(_GRACE)
    finally:
        timer.cancel()
        ours.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        process.kill()
        process.wait()
        forget_container(name)
    return Execution(stdout, stderr, None if stopped else process.returncode, stopped[0] if stopped else "")


def _remove(base: Path) -> None:
    """Removes the folder of a sandbox, also if the program took away permissions."""

    def again(function: Callable[[str], Any], path: str, _: Any) -> None:
        with suppress(OSError):
            os.chmod(os.path.dirname(path), stat.S_IRWXU)
            os.chmod(path, stat.S_IRWXU)
            function(path) if function in (os.unlink, os.rmdir) else shutil.rmtree(path, ignore_errors=True)

    shutil.rmtree(base, onerror=again)


# Detection of what this machine allows. A probe runs once per process and kind of isolation.


def chosen_isolation() -> str:
    """Returns the isolation for this machine: the value of LOCKSTEP_SANDBOX, or the first of `namespaces` and
    `bubblewrap` that works. Raises `Refusal` if there is none."""
    choice = os.environ.get(CHOICE, "").strip()
    if choice.startswith(DOCKER):
        refuse_without_docker(choice.removeprefix(DOCKER), CHOICE)
        return choice
    if choice == LIMITS:
        return LIMITS
    if choice not in ("", NAMESPACES, BUBBLEWRAP):
        raise Refusal.at(
            CHOICE,
            f"there is no sandbox {choice!r}",
            f"choose one of {NAMESPACES}, {BUBBLEWRAP}, {DOCKER}IMAGE and {LIMITS}, or unset the variable",
            code="unknown-name",
        )
    tried = [choice] if choice else [NAMESPACES, BUBBLEWRAP]
    failures = {name: why_unusable(name) for name in tried}
    for name, why in failures.items():
        if not why:
            return name
    raise Refusal.at(
        "sandbox",
        "this machine cannot isolate programs: " + "; ".join(f"{name}: {why}" for name, why in failures.items()),
        "allow unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_"
        f"unprivileged_userns) or install bubblewrap; or set {CHOICE}=docker:IMAGE; in a container that you can "
        f"lose, set {CHOICE}={LIMITS}: programs then have the network and all files of the user",
        code="no-sandbox",
    )


@cache
def why_unusable(isolation: str) -> str:
    """Returns why a kind of isolation does not work on this machine, or an empty text if it works."""
    if sys.platform != "linux":
        return "needs Linux"
    if isolation == BUBBLEWRAP and shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    try:
        done = execute([sys.executable, "-c", "print(6 * 7)"], {}, SandboxLimits(seconds=30), isolation=isolation)
    except SandboxFailed as error:
        return str(error)
    return "" if done.stdout == "42\n" else done.text.splitlines()[-1 if not done.stderr else 0]


def missing_isolation(isolation: str) -> list[str]:
    """Returns what this kind of isolation does not prevent, as sentences for the user."""
    shared = ["the kernel is shared with the machine, and system calls are not filtered"]
    if isolation != LIMITS:
        return shared
    return [
        "programs can use the network",
        "programs can read and write all files of the user",
        "programs can signal other processes of the user, also the run itself",
        "a program that kills its helper process can leave processes behind",
        *shared,
    ]
