"""The helper process of a sandbox: isolates a program, watches its limits, and ends every process of it.

`sandbox.py` starts this file as a program, so the file imports only the standard library. The processes are

    helper (watches the limits) -> outer (enters the namespaces) -> init (PID 1 of the namespaces) -> the program

When `init` ends, the kernel kills every process of its PID namespace. Without namespaces the helper adopts the orphans
of the program and kills them.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

# Constants of the Linux headers sched.h, sys/mount.h, linux/mount.h and sys/prctl.h.
NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
SYS_MOUNT_SETATTR = 442
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38

# The user ID of the program inside its namespace. Without ID 0 the program has no capabilities. If lockstep runs as
# root, the ID stands for NOBODY outside, so that the program owns no file of root and the kernel limits its processes.
INSIDE, NOBODY = 1000, 65534
HOME = "/home/sandbox"
DEVICES = ("null", "zero", "full", "random", "urandom")
# How often the limits are checked, in seconds. The folder is measured at every `MEASURE`-th check.
PERIOD, MEASURE = 0.02, 5
MOST_FILES = 20_000
# First Linux version that counts the processes of each user namespace separately.
COUNTED_PER_NAMESPACE = (5, 14)

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Calls a function of libc. Raises OSError if it fails."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


class MountAttributes(ctypes.Structure):
    """`struct mount_attr` of linux/mount.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())


def set_mount_flags(target: str, flags: int, *, recursive: bool = True) -> None:
    attributes = MountAttributes(set=flags)
    size, where = ctypes.c_size_t(ctypes.sizeof(attributes)), AT_RECURSIVE if recursive else 0
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), where, ctypes.byref(attributes), size)


# The program's view of the file system: its own folder, temporary folders of bounded size, and read-only system
# folders. Nothing else of the machine is visible.


def enter_root(spec: dict[str, Any]) -> None:
    """Builds the file system of the program, and makes it the root of this process."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    root = os.path.join(spec["base"], "root")
    size = f"size={spec['disk_mb']}m"
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    # /tmp comes first: a virtual environment of the user may be inside it.
    os.mkdir(f"{root}/tmp")
    mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"{size},mode=1777")
    for path in spec["visible"]:
        _show(path, root)
    os.makedirs(f"{root}/proc")
    # A container may hide parts of /proc; the kernel then refuses a new /proc. An empty /proc is safe too.
    with suppress(OSError):
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    _make_devices(f"{root}/dev", size)
    os.makedirs(root + HOME)
    mount(spec["folder"], root + HOME, None, MS_BIND)
    set_mount_flags(root + HOME, MS_NOSUID | MS_NODEV)
    set_mount_flags(root, MS_RDONLY, recursive=False)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir(HOME)


def _show(path: str, root: str) -> None:
    """Makes a file or folder of the machine visible, read-only."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(target):
        return
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(path, target, None, MS_BIND | MS_REC)
    set_mount_flags(target, MS_RDONLY | MS_NOSUID | MS_NODEV)


def _make_devices(folder: str, size: str) -> None:
    os.makedirs(f"{folder}/shm")
    for name in DEVICES:
        os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY))
        mount(f"/dev/{name}", f"{folder}/{name}", None, MS_BIND)
    os.symlink("/proc/self/fd", f"{folder}/fd")
    mount("tmpfs", f"{folder}/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"{size},mode=1777")


# Each function below is one process of the chain. A function that runs in a new process never returns.


def tell(report: int, **fields: Any) -> None:
    """Writes a line to the helper: `started` before the program is executed, `failed` with a reason if the sandbox
    cannot start it, and `status` with its exit code. The pipe is closed when the program is executed."""
    os.write(report, json.dumps(fields).encode() + b"\n")


def fork(work: Callable[[], None], report: int) -> int:
    """Forks a process that calls `work`, and that the kernel kills when this process ends."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        work()
        status = 0
    except OSError as error:
        tell(report, failed=str(error))
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Waits for a child, and reaps orphans. Returns the exit code of the child, or its negative signal."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def outer(spec: dict[str, Any], report: int, ready: int, mapped: int) -> None:
    """Enters new namespaces and starts `init` in them."""
    enter_group(spec["group"])
    call("unshare", NEW_NAMESPACES)
    # The kernel clears the signal of fork() when the user namespace changes.
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if spec["uid"]:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE} {spec['uid']} 1")
        _write("/proc/self/gid_map", f"{INSIDE} {spec['gid']} 1")
    else:
        os.write(ready, b"1")
        os.read(mapped, 1)
    ended(fork(lambda: init(spec, report), report))


def map_users(pid: int) -> None:
    """Maps root and the program's user into the user namespace of a process. Only root can do this, from outside."""
    for kind in ("uid", "gid"):
        _write(f"/proc/{pid}/{kind}_map", f"0 0 1\n{INSIDE} {NOBODY} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def init(spec: dict[str, Any], report: int) -> None:
    # Memory of System V outlives the processes that use it, so the helper could not measure it.
    for name in ("shmall", "msgmni"):
        with suppress(OSError):
            _write(f"/proc/sys/kernel/{name}", "0")
    enter_root(spec)
    main = fork(lambda: program(spec, report, drop=spec["uid"] == 0), report)
    tell(report, status=ended(main))


def program(spec: dict[str, Any], report: int, *, drop: bool = False) -> NoReturn:
    """Sets the limits of the kernel and becomes the program."""
    os.setsid()
    if drop:
        os.setgroups([])
        os.setgid(INSIDE)
        os.setuid(INSIDE)
    if spec["isolation"] != "bubblewrap":  # it may be a setuid program, and it sets the flag itself
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    memory, disk, seconds = spec["memory_mb"] * 2**20, spec["disk_mb"] * 2**20, int(spec["seconds"]) + 1
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, disk), (resource.RLIMIT_CPU, seconds)]
    limits.append((resource.RLIMIT_AS, memory))
    if spec["isolation"] == "namespaces" and _linux() >= COUNTED_PER_NAMESPACE:
        # The helper processes in the namespace count too.
        limits.append((resource.RLIMIT_NPROC, spec["processes"] + (0 if drop else 2)))
    for name, value in limits:
        resource.setrlimit(name, (value, value))
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    tell(report, started=True)
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def _linux() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdigit())


# The helper: the first process of the chain.


def descendants(pid: int) -> list[int]:
    """Returns the PIDs of all processes below `pid`, also of ended ones that are not reaped yet."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = _children(waiting.pop())
        found += below
        waiting += below
    return found


def _children(pid: int) -> list[int]:
    below: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                below += [int(child) for child in file.read().split()]
    return below


def kill_descendants() -> None:
    """Stops all processes, so that none of them can fork, and then kills them until none is left."""
    deadline = time.monotonic() + 5.0
    for number in (signal.SIGSTOP, signal.SIGKILL):
        seen: set[int] = set()
        while (living := set(_alive())) - seen or (number == signal.SIGKILL and living):
            seen |= living
            for pid in living:
                with suppress(OSError):
                    os.kill(pid, number)
            _reap()
            if time.monotonic() > deadline:
                break
            if number == signal.SIGKILL:
                time.sleep(0.001)


def _alive() -> list[int]:
    _reap()
    return descendants(os.getpid())


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def exceeded(spec: dict[str, Any], started: float, check: int, alive: list[int]) -> str:
    """Returns the name of the first limit that the program exceeds, or an empty string."""
    if time.monotonic() - started > spec["seconds"]:
        return "time"
    if len(alive) - spec["helpers"] > spec["processes"]:
        return "processes"
    if check % MEASURE == 0:
        spec["nameless"] = nameless_files(alive, os.stat(spec["folder"]).st_dev)
    in_memory, on_disk = spec.get("nameless", (0, 0))
    if not spec.get("group") and used_memory(alive, in_memory, spec["memory_mb"] * 2**20) > spec["memory_mb"] * 2**20:
        return "memory"
    if check % MEASURE == 0 and _disk(spec["folder"]) + on_disk > spec["disk_mb"] * 2**20:
        return "disk"
    return ""


def used_memory(pids: list[int], in_files: int, enough: int) -> int:
    """Returns the memory of the processes in bytes: their own pages, and shared memory. `in_files` are the bytes of
    open files in memory, which a process may also have mapped. A result up to `enough` may be too high."""
    pages = [_pages(pid, "status", "RssAnon:", "RssShmem:") for pid in pids]
    if (most := sum(map(sum, pages)) + in_files) <= enough:
        return most
    # Each page counts once, also if several processes share it. This takes longer to read.
    pages = [_pages(pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:") for pid in pids]
    return sum(own for own, _ in pages) + max(sum(shared for _, shared in pages), in_files)


def _pages(pid: int, file: str, own: str, shared: str) -> tuple[int, int]:
    found = {own: 0, shared: 0}
    with suppress(OSError), open(f"/proc/{pid}/{file}") as lines:
        for line in lines:
            name, _, value = line.partition("\t" if file == "status" else " ")
            if name in found:
                found[name] = int(value.split()[0]) * 1024
    return found[own], found[shared]


def nameless_files(pids: list[int], disk: int) -> tuple[int, int]:
    """Returns the bytes of open files without a name: those in memory (memfd), and those on the device `disk`."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    file = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink:
                        sizes[file.st_dev, file.st_ino] = file.st_blocks * 512
    on_disk = sum(size for (device, _), size in sizes.items() if device == disk)
    return sum(sizes.values()) - on_disk, on_disk


# Where this process may create cgroups (version 2), the kernel limits the memory of all processes together exactly.

CGROUPS = "/sys/fs/cgroup"


def make_group(spec: dict[str, Any], root: str = CGROUPS) -> str:
    """Creates a cgroup with the limits of memory and processes, below the cgroup of this process or next to it. Returns
    its folder, or an empty string if that is not allowed."""
    with suppress(OSError), open("/proc/self/cgroup") as lines:
        own = next((line.strip()[3:] for line in lines if line.startswith("0::")), "/")
        for parent in dict.fromkeys((own, os.path.dirname(own))):
            folder = os.path.join(root, parent.strip("/"))
            group = os.path.join(folder, os.path.basename(spec["base"]))
            with suppress(OSError), open(f"{folder}/cgroup.subtree_control") as controllers:
                if "memory" in controllers.read().split():
                    os.mkdir(group)
                    if _limited(group, spec):
                        return group
                    remove_group(group)
    return ""


def _limited(group: str, spec: dict[str, Any]) -> bool:
    """Sets the limits of a cgroup. Returns whether they are set and a process may enter the cgroup."""
    try:
        _write(f"{group}/memory.max", str(spec["memory_mb"] * 2**20))
        _write(f"{group}/memory.oom.group", "1")
        if os.path.exists(f"{group}/memory.swap.max"):
            _write(f"{group}/memory.swap.max", "0")
    except OSError:
        return False
    child = os.fork()
    if not child:
        try:
            enter_group(group)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def enter_group(group: str) -> None:
    """Moves this process, and so all processes that it starts, into the cgroup."""
    if group:
        _write(f"{group}/cgroup.procs", "0")


def out_of_memory(group: str) -> bool:
    """Returns whether the kernel has killed a process of the cgroup because of its memory limit."""
    with suppress(OSError), open(f"{group}/memory.events") as events:
        return any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in events)
    return False


def remove_group(group: str) -> None:
    for _ in range(100):  # the kernel counts processes that were just killed for a moment
        try:
            os.rmdir(group)
            return
        except OSError:
            time.sleep(0.01)


def _disk(folder: str) -> float:
    total, files = 0, 0
    for place, _, names in os.walk(folder):
        files += len(names) + 1
        if files > MOST_FILES:
            return float("inf")
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def watch(spec: dict[str, Any], lifeline: int, reports: int) -> dict[str, Any]:
    """Waits until the program ends or exceeds a limit, or until the process that started the sandbox ends."""
    started, check, held, begun = time.monotonic(), 0, b"", False
    while True:
        ready, _, _ = select.select([lifeline, reports], [], [], PERIOD)
        if lifeline in ready:
            # A byte means that the output is too long. End-of-file means that the starting process has ended.
            return {"stopped": "output"} if os.read(lifeline, 1) else {"stopped": "parent"}
        if reports in ready:
            piece = os.read(reports, 4096)
            *lines, held = (held + piece).split(b"\n")
            told: list[dict[str, Any]] = [json.loads(line) for line in lines]
            begun |= any("started" in line for line in told)
            for line in told:
                if "started" not in line:
                    return line
            if not piece:
                # A program without namespaces can kill its helpers.
                return {"status": 125} if begun else {"failed": "its helper processes ended"}
            continue
        if os.getppid() != spec["parent"]:
            return {"stopped": "parent"}
        check += 1
        if stopped := exceeded(spec, started, check, descendants(os.getpid())):
            return {"stopped": stopped} if begun else {"failed": f"did not start: {stopped} limit"}


def start(spec: dict[str, Any], report: int) -> None:
    """Starts the chain of processes that ends with the program."""
    if spec["isolation"] == "namespaces":
        was_ready, ready = os.pipe()
        was_mapped, mapped = os.pipe()
        child = fork(lambda: outer(spec, report, ready, was_mapped), report)
        os.close(ready)
        if spec["uid"] == 0 and os.read(was_ready, 1):
            map_users(child)
            os.write(mapped, b"1")
        for descriptor in (was_ready, was_mapped, mapped):
            os.close(descriptor)
        return

    def inner() -> None:
        enter_group(spec["group"])
        os.chdir(spec["folder"])
        main = fork(lambda: program(spec, report), report)
        tell(report, status=ended(main))

    fork(inner, report)


def run(spec: dict[str, Any], lifeline: int) -> dict[str, Any]:
    """Starts the program and waits for its end. Returns the report."""
    if spec["uid"] == 0 and spec["isolation"] == "namespaces":
        os.chown(spec["folder"], NOBODY, NOBODY)
        for place, folders, names in os.walk(spec["folder"]):
            for name in folders + names:
                os.chown(os.path.join(place, name), NOBODY, NOBODY, follow_symlinks=False)
    spec["group"] = make_group(spec)
    reports, report = os.pipe()
    start(spec, report)
    os.close(report)
    # Only the program writes to the output pipes; the reader waits until all of its processes have closed them.
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    return watch(spec, lifeline, reports)


def main() -> None:
    spec, lifeline = json.loads(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(lifeline, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    spec["uid"], spec["gid"] = os.getuid(), os.getgid()
    try:
        result = run(spec, lifeline)
    except OSError as error:
        result = {"failed": str(error)}
    kill_descendants()
    if spec.get("group"):
        result = {"stopped": "memory"} if out_of_memory(spec["group"]) and "stopped" not in result else result
        remove_group(spec["group"])
    if result.get("stopped") == "parent":
        import shutil

        shutil.rmtree(spec["base"], ignore_errors=True)
        return
    with suppress(OSError):
        os.write(lifeline, json.dumps(result).encode())


if __name__ == "__main__":
    main()
