"""Programs in a sandbox: results, every limit, what they can reach, and that no process of them is left."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hang import HANG, wait_until
from lockstep.environments import sandbox, sandbox_process
from lockstep.environments.sandbox import (
    BUBBLEWRAP,
    LIMITS,
    NAMESPACES,
    SandboxLimits,
    chosen_isolation,
    execute,
    missing_isolation,
    run_bash,
    run_python,
    why_unusable,
)
from lockstep.errors import Refusal

# A time limit that no program of these tests reaches, except those that hang.
UNHURRIED = SandboxLimits(seconds=HANG)


def usable(isolation: str) -> object:
    why = why_unusable(isolation)
    return pytest.param(isolation, marks=pytest.mark.skipif(bool(why), reason=f"{isolation}: {why}"))


ISOLATED = [usable(NAMESPACES), usable(BUBBLEWRAP)]
EVERY = [*ISOLATED, usable(LIMITS)]


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A word that the processes of a test have in their command line. No process and no folder may be left."""
    word = f"token-{uuid.uuid4().hex}"
    # The tests of other workers have their sandboxes in the usual folder. Sandboxes of other users must reach this one.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield word
        assert with_word(word) == []
        assert list(Path(folder).glob("lockstep-sandbox-*")) == []


def with_word(word: str) -> list[int]:
    """The processes of this machine that have the word in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("isolation", ISOLATED)
def test_a_visible_folder_below_tmp_is_read_only(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment may be there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # the program may run as another user
        Path(folder, "word").write_text("seen")
        monkeypatch.setattr(sandbox, "_SYSTEM", [*sandbox._SYSTEM, folder])
        code = f"print(open('{folder}/word').read())\nopen('/tmp/own', 'w').close()\nopen('{folder}/other', 'w')"
        done = run_python(code, UNHURRIED, isolation=isolation)
        assert (done.stdout, "Read-only file system" in done.stderr) == ("seen\n", True)


@pytest.mark.parametrize("isolation", EVERY)
def test_a_program_gets_its_input_and_gives_output_errors_and_status(isolation: str) -> None:
    code = "import sys\nprint(sys.stdin.read()[::-1])\nprint('wrong', file=sys.stderr)\nsys.exit(3)"
    done = run_python(code, UNHURRIED, stdin="grün", isolation=isolation)
    assert (done.stdout, done.stderr, done.status, done.stopped) == ("nürg\n", "wrong\n", 3, "")
    assert done.text == "nürg\nwrong\n[exit code 3]"
    assert run_bash("exit 0", UNHURRIED, isolation=isolation).text == "[no output]"


@pytest.mark.parametrize("isolation", EVERY)
def test_a_program_ends_by_its_signal(isolation: str) -> None:
    done = run_python("import os; os.kill(os.getpid(), 11)", UNHURRIED, isolation=isolation)
    assert done.status in (-signal.SIGSEGV, 128 + signal.SIGSEGV)  # bwrap reports signals as a shell does


@pytest.mark.parametrize("isolation", EVERY)
def test_a_program_that_hangs_is_stopped_with_its_children(isolation: str, token: str) -> None:
    script = f"sleep 1000000 {token} 2>/dev/null & exec -a {token} sleep 1000000"
    done = run_bash(script, SandboxLimits(seconds=0.5), isolation=isolation)
    assert (done.status, done.stopped) == (None, "time")


@pytest.mark.parametrize("isolation", EVERY)
def test_no_daemon_outlives_its_program(isolation: str, token: str) -> None:
    code = f"""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        os.execv("/bin/bash", ["{token}", "-c", "while true; do sleep 1; done"])
    os._exit(0)
os.wait()
print("started")
"""
    done = run_python(code, UNHURRIED, isolation=isolation)
    assert (done.stdout, done.status) == ("started\n", 0)


@pytest.mark.parametrize("isolation", EVERY)
def test_a_fork_bomb_is_stopped(isolation: str, token: str) -> None:
    # Each process forks at its own pace, so that a failure of this test does not stop the machine.
    code = f"import os, time\nword = '{token}'\nfor _ in range(9):\n    try: os.fork()\n    except OSError: pass\n"
    code += "    time.sleep(0.05)\ntime.sleep(1000)"
    done = execute(
        [sys.executable, "-c", code],
        {},
        SandboxLimits(seconds=3 if isolation == NAMESPACES else HANG, processes=8),
        isolation=isolation,
    )
    assert done.status is None
    # The kernel refuses further processes if it can count them, and the program then runs into its time limit.
    assert done.stopped == ("time" if isolation == NAMESPACES else "processes")


def test_the_kernel_limits_the_processes_in_a_namespace() -> None:
    if why_unusable(NAMESPACES):
        pytest.skip(why_unusable(NAMESPACES))
    code = "import os, time\nfor n in range(99):\n    try:\n        if not os.fork(): time.sleep(99)\n"
    code += "    except BlockingIOError:\n        break\nprint(n)"
    done = run_python(code, SandboxLimits(seconds=HANG, processes=8), isolation=NAMESPACES)
    assert done.stdout == "7\n"


@pytest.mark.parametrize("isolation", EVERY)
def test_huge_output_is_cut_and_stops_the_program(isolation: str, token: str) -> None:
    code = f"word = '{token}'\nwhile True: print('y' * 1000)"
    limits = SandboxLimits(seconds=HANG, output_bytes=5000)
    done = execute([sys.executable, "-c", code], {}, limits, isolation=isolation)
    assert (len(done.stdout), done.status, done.stopped) == (5000, None, "output")
    assert done.text.endswith("[the program was stopped: output limit]")
    # A program that has ended before its output was read.
    done = run_python("print('y' * 20_000)", limits, isolation=isolation)
    assert (done.stdout, done.status, done.stopped) == ("y" * 5000, None, "output")


@pytest.mark.parametrize("isolation", EVERY)
def test_one_process_cannot_take_more_memory(isolation: str) -> None:
    done = run_python("x = bytearray(400 << 20)", SandboxLimits(seconds=HANG, memory_mb=200), isolation=isolation)
    assert done.status == 1
    assert "MemoryError" in done.stderr


@pytest.mark.parametrize("isolation", EVERY)
def test_several_processes_cannot_take_more_memory_together(isolation: str, token: str) -> None:
    code = f"word = '{token}'\nimport os, time\nfor _ in range(3):\n    if not os.fork(): break\n"
    code += "x = b'x' * (100 << 20)\ntime.sleep(1000)"
    limits = SandboxLimits(seconds=HANG, memory_mb=250)
    done = execute([sys.executable, "-c", code], {}, limits, isolation=isolation)
    assert (done.status, done.stopped) == (None, "memory")


HIDDEN = {
    "open files in memory": "files = [os.memfd_create(str(n)) for n in range(5)]\n"
    "for file in files: os.write(file, bytes(50 << 20))\n",
    "shared pages": "for _ in range(2):\n"
    "    if not os.fork(): break\n"
    "own = mmap.mmap(-1, 100 << 20)\n"
    "for _ in range(100): own.write(bytes(1 << 20))\n",
}


@pytest.mark.parametrize("isolation", EVERY)
@pytest.mark.parametrize("what", HIDDEN)
def test_memory_outside_of_private_pages_counts(isolation: str, what: str, token: str) -> None:
    code = f"word = '{token}'\nimport mmap, os, time\n{HIDDEN[what]}time.sleep(1000)"
    limits = SandboxLimits(seconds=HANG, memory_mb=220)
    done = execute([sys.executable, "-c", code], {}, limits, isolation=isolation)
    assert (done.status, done.stopped) == (None, "memory")


@pytest.mark.slow
@pytest.mark.parametrize("isolation", EVERY)
def test_pages_that_processes_share_count_once(isolation: str, token: str) -> None:
    """Four processes read 100 MB of shared pages and 20 MB of private pages that they inherit, for several checks."""
    code = (
        f"word = '{token}'\nimport mmap, os, time\nshared = mmap.mmap(-1, 100 << 20)\nprivate = bytearray(20 << 20)\n"
    )
    code += "shared.write(bytes(100 << 20))\nfirst = os.getpid()\nfor _ in range(2): os.fork()\n"
    code += "seen = [sum(part[:: 1 << 12]) for part in (shared[:], private)]\ntime.sleep(0.5)\n"
    code += "while os.getpid() == first:\n    try: os.wait()\n    except ChildProcessError: break\nprint('done')"
    done = execute([sys.executable, "-c", code], {}, SandboxLimits(seconds=HANG, memory_mb=600), isolation=isolation)
    assert (done.stdout.split("\n")[0], done.stopped) == ("done", "")


def test_memory_is_counted_once_over_processes_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"status": (100, 80), "smaps_rollup": (60, 20)}
    monkeypatch.setattr(sandbox_process, "_pages", lambda pid, file, *names: pages[file])
    assert sandbox_process.used_memory([1, 2], 50, 410) == 2 * 180 + 50
    assert sandbox_process.used_memory([1, 2], 50, 409) == 2 * 60 + 50
    assert sandbox_process.used_memory([1, 2], 30, 0) == 2 * 60 + 2 * 20


def test_deleted_files_count() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(3 << 20))
        file.flush()
        disk = os.fstat(file.fileno()).st_dev
        before = sandbox_process.nameless_files([os.getpid()], -1)[0]
        in_memory, on_disk = sandbox_process.nameless_files([os.getpid()], disk)
    assert on_disk >= 3 << 20
    assert in_memory + on_disk == before


@pytest.mark.parametrize("isolation", EVERY)
def test_a_program_cannot_fill_the_disk_with_deleted_files(isolation: str) -> None:
    many = "import os, time\nfiles = []\nfor n in range(9):\n    files.append(open('a', 'wb', 0))\n"
    many += "    files[-1].write(bytes(1 << 20))\n    os.unlink('a')\ntime.sleep(1000)"
    done = run_python(many, SandboxLimits(seconds=HANG, disk_mb=4), isolation=isolation)
    assert (done.status, done.stopped) == (None, "disk")


@pytest.mark.skipif(bool(why_unusable(NAMESPACES)), reason="no namespaces")
def test_memory_of_system_v_is_not_available() -> None:
    code = "import ctypes\nlibc = ctypes.CDLL(None)\n"
    code += "print(libc.shmget(0, 1 << 20, 0o1600), libc.msgget(0, 0o1600))"
    assert run_python(code, UNHURRIED, isolation=NAMESPACES).stdout == "-1 -1\n"


def test_a_group_of_processes_gets_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of cgroups are usual folders here; this machine may not allow cgroups."""
    own = Path("/proc/self/cgroup").read_text().partition("0::/")[2].split("\n")[0]
    parent = tmp_path / own
    parent.mkdir(parents=True, exist_ok=True)
    spec = {"memory_mb": 3, "base": "/tmp/lockstep-sandbox-x"}
    assert sandbox_process.make_group(spec, str(tmp_path)) == ""
    (parent / "cgroup.subtree_control").write_text("cpu pids\n")
    assert sandbox_process.make_group(spec, str(tmp_path)) == ""
    (parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    group = Path(sandbox_process.make_group(spec, str(tmp_path)))
    assert group == parent / "lockstep-sandbox-x"
    assert (group / "memory.max").read_text() == str(3 << 20)
    assert (group / "memory.oom.group").read_text() == "1"
    assert (group / "cgroup.procs").read_text() == "0"
    for count, killed in (("0", False), ("2", True)):
        (group / "memory.events").write_text(f"low 0\noom {count}\noom_kill {count}\n")
        assert sandbox_process.out_of_memory(str(group)) == killed


@pytest.mark.parametrize("isolation", EVERY)
def test_a_program_cannot_fill_the_disk(isolation: str) -> None:
    one = "open('a', 'wb').write(bytes(9 << 20))"
    assert not run_python(one, SandboxLimits(seconds=HANG, disk_mb=4), isolation=isolation).succeeded
    many = "import time\nfor n in range(9):\n    open(f'{n}', 'wb').write(bytes(1 << 20))\ntime.sleep(1000)"
    done = run_python(many, SandboxLimits(seconds=HANG, disk_mb=4), isolation=isolation)
    assert (done.status, done.stopped) == (None, "disk")


@pytest.mark.parametrize("isolation", EVERY)
def test_a_program_has_an_empty_folder_of_its_own(isolation: str) -> None:
    write = "open('mine', 'w').write('x'); import os; os.mkdir('locked'); os.chmod('locked', 0); print(os.listdir('.'))"
    for _ in range(2):
        done = run_python(write, UNHURRIED, isolation=isolation)
        assert sorted(done.stdout.strip("[]\n").split(", ")) == ["'locked'", "'main.py'", "'mine'"]


@pytest.mark.parametrize("isolation", ISOLATED)
def test_a_program_can_neither_write_nor_read_files_of_the_machine(isolation: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    own = Path(sys.prefix) / "written-by-a-sandbox"
    script = f"cat {secret}; echo x > {secret}; echo x > {own}; echo x > /usr/written; echo x > /etc/written; ls /home"
    done = run_bash(script, UNHURRIED, isolation=isolation)
    assert done.stdout == "sandbox\n"
    assert done.stderr.count("No such file") >= 2
    assert done.stderr.count("Read-only") + done.stderr.count("Permission denied") >= 2
    assert secret.read_text() == "hidden"
    assert not own.exists()


@pytest.mark.parametrize("isolation", ISOLATED)
def test_a_program_has_no_capabilities_devices_or_other_processes(isolation: str) -> None:
    script = "grep CapEff /proc/self/status; ls /dev | grep -c -e vd -e sd -e kmsg; kill -0 %d; echo x > /proc/sys/a"
    done = run_bash(script % os.getpid(), UNHURRIED, isolation=isolation)
    assert done.stdout == "CapEff:\t0000000000000000\n0\n"
    assert "No such process" in done.stderr
    mount = run_bash("mount -o remount,rw /usr; umount /proc; unshare -m true", UNHURRIED, isolation=isolation)
    assert mount.status
    assert not mount.stdout


@pytest.mark.parametrize("isolation", EVERY)
def test_network_access_fails_where_namespaces_exist(isolation: str) -> None:
    """The server runs on this machine, so the test needs no network, and the kind `limits` reaches the server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"reached")

        def log_message(self, *arguments: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        code = f"from urllib.request import urlopen\nprint(urlopen('{address}').read())"
        done = run_python(code, UNHURRIED, isolation=isolation)
        server.shutdown()
    if isolation == LIMITS:
        assert done.stdout == "b'reached'\n"
        assert "programs can use the network" in missing_isolation(isolation)
    else:
        assert done.status == 1
        assert "Network is unreachable" in done.stderr or "refused" in done.stderr
        assert "programs can use the network" not in missing_isolation(isolation)


def test_a_program_sees_no_environment_variables_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    done = run_bash("env; cat /proc/*/environ", UNHURRIED, isolation=LIMITS if why_unusable(NAMESPACES) else NAMESPACES)
    assert "HOME=" in done.stdout
    assert "hidden" not in done.stdout or why_unusable(NAMESPACES)


@pytest.mark.parametrize("isolation", EVERY)
def test_no_process_is_left_when_the_run_is_killed(isolation: str, token: str, tmp_path: Path) -> None:
    code = (
        "from lockstep.environments.sandbox import *\n"
        f"run_bash('(exec -a {token} sleep 100000) & exec -a {token} sleep 100000',"
        f" SandboxLimits(seconds=100000), isolation={isolation!r})"
    )
    run = subprocess.Popen([sys.executable, "-c", code])
    # The programs have renamed themselves. Bash and the run have the token in their command line too.
    wait_until(lambda: len([pid for pid in with_word(token) if first_word(pid) == token]) == 2)
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not with_word(token))
    wait_until(lambda: not any(token in path.read_text() for path in scripts()))


def first_word(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


def scripts() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("lockstep-sandbox-*/home/main.sh"))


def test_a_sandbox_is_refused_if_the_machine_cannot_isolate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_SANDBOX", raising=False)
    monkeypatch.setattr("lockstep.environments.sandbox.why_unusable", lambda isolation: "not permitted")
    with pytest.raises(Refusal) as refusal:
        chosen_isolation()
    assert refusal.value.problems[0].code == "no-sandbox"
    assert "LOCKSTEP_SANDBOX=limits" in refusal.value.problems[0].remedy
    monkeypatch.setenv("LOCKSTEP_SANDBOX", "limits")
    assert chosen_isolation() == LIMITS


@pytest.mark.parametrize(
    ("choice", "code"),
    [("chroot", "unknown-name"), ("docker:python:3.12-slim", "no-sandbox"), ("bubblewrap", "no-sandbox")],
)
def test_an_unusable_choice_is_refused(choice: str, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_SANDBOX", choice)
    why_unusable.cache_clear()
    with pytest.raises(Refusal) as refusal:
        chosen_isolation()
    why_unusable.cache_clear()
    assert refusal.value.problems[0].code == code
