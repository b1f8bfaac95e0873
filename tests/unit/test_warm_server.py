"""Commands that need not import anything are processes like any other: surroundings, streams, signals and ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import FORKS, WarmServer, cold_because, cold_lockstep, lockstep, search_path, warm_python
from hang import HANG

pytestmark = pytest.mark.skipif(not FORKS, reason="every start is a cold one here")


@pytest.fixture
def warm() -> None:
    """An optimisation of this suite that a machine cannot offer is no defect of lockstep."""
    if reason := cold_because():
        pytest.skip(reason)


def script(tmp_path: Path, code: str) -> list[str]:
    (tmp_path / "script.py").write_text(code)
    return [*warm_python(), str(tmp_path / "script.py")]


def test_the_child_has_the_surroundings_of_its_caller(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch; print(sys.argv[1:], os.getcwd(), sys.path[0], oct(os.umask(0)), os.getenv('COLUMNS'))"
    )
    command = [*script(tmp_path, code), "a b", "c"]
    given = {**os.environ, "COLUMNS": "77"}
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        command, cwd=tmp_path / "here", env=given, umask=0o27, capture_output=True, text=True, check=True, timeout=HANG
    )
    assert done.stdout == f"['a b', 'c'] {tmp_path / 'here'} {tmp_path} 0o27 77\n"
    assert done.stderr == ""


def test_the_streams_are_those_of_the_caller(tmp_path: Path) -> None:
    command = script(tmp_path, "import sys; sys.stderr.write(input() + '!'); print('out')")
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(command, input="in\n", stdout=out, stderr=subprocess.PIPE, text=True, check=True)
    assert (done.stderr, (tmp_path / "out").read_text()) == ("in!", "out\n")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("raise ValueError('no')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('no'))).start()", 0),
        ("import atexit; atexit.register(print, 'no')", 0),
    ],
)
def test_it_ends_as_its_process_does(tmp_path: Path, code: str, status: int) -> None:
    done = subprocess.run(script(tmp_path, code), capture_output=True, text=True, check=False, timeout=HANG)
    assert done.returncode == status
    assert ("no" in done.stdout + done.stderr) == ("no" in code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_it(tmp_path: Path, number: signal.Signals) -> None:
    command = script(tmp_path, "import time\nprint('in', flush=True)\nwhile True: time.sleep(1)\n")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores Ctrl-C for what it runs in the background, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(number)
        _, told = process.communicate(timeout=HANG)
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in told) == (number == signal.SIGINT)


def wait_end(process: int) -> None:
    """Of a process, by a descriptor that can be read once it has ended."""
    assert select.select([process], [], [], HANG)[0]
    os.close(process)


def test_it_ends_with_its_client_and_all_end_with_the_owner(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, time\nprint(os.getpid(), flush=True)\nwhile True: time.sleep(1)\n")
    server = WarmServer("json")  # how it ends has nothing to do with what it imports
    command = [*server.python, str(tmp_path / "script.py")]
    first, second = (subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2))
    children = []
    for process in (first, second):
        assert process.stdout is not None
        children.append(os.pidfd_open(int(process.stdout.readline())))
    first.kill()
    first.communicate(timeout=HANG)
    wait_end(children[0])
    assert second.poll() is None
    server.end()
    second.communicate(timeout=HANG)
    assert second.returncode != 0
    wait_end(children[1])
    assert server.process.returncode == 0


def test_a_thread_started_by_an_import_makes_every_start_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says which thread it was. The commands run all the same."""
    (tmp_path / "threaded.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = WarmServer("threaded")
    code = "import sys; print('threaded' in sys.modules)"
    done = subprocess.run([*server.python, "-c", code], capture_output=True, text=True, check=True, timeout=HANG)
    assert done.stdout == "False\n"
    assert "imports have started threads: " in (server.folder / "server.log").read_text()
    server.end()


@pytest.mark.usefixtures("warm")
def test_an_environment_that_imports_may_have_read_starts_cold(tmp_path: Path) -> None:
    command = script(tmp_path, "import sys; print('torch' in sys.modules)")
    for changed, warm in ({}, True), ({"COLUMNS": "9"}, True), ({"OMP_NUM_THREADS": "9"}, False), ({"X": "1"}, False):
        given = {**os.environ, **changed}
        assert subprocess.run(command, env=given, capture_output=True, text=True).stdout == f"{warm}\n", changed


def test_code_of_the_command_line_runs_as_the_main_program(tmp_path: Path) -> None:
    code = "import sys; place = 3; print(__name__, sys.modules['__main__'].place, sys.argv, repr(sys.path[0]))"
    for python in (warm_python(), [sys.executable]):
        done = subprocess.run([*python, "-c", code, "a"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "__main__ 3 ['-c', 'a'] ''\n"


def test_each_draws_numbers_of_its_own(tmp_path: Path) -> None:
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    command = script(tmp_path, code)
    drawn = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [3, 3, 3]


def test_warm_and_cold_say_the_same() -> None:
    for words in (["--help"], ["train", "none.yaml"]):
        warm, cold = lockstep(*words), cold_lockstep(*words)
        assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)


def test_programs_of_the_search_path() -> None:
    given = {**os.environ, "PATH": search_path()}
    said = "lockstep --help | head -n 1; python -c 'print(1 + 1)'; python -m lockstep trian 2> /dev/null; echo $?"
    done = subprocess.run(["sh", "-c", said], env=given, capture_output=True, text=True, check=True)
    assert done.stdout == "Usage: lockstep [OPTIONS] COMMAND [ARGS]...\n2\n2\n"


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_ranks_of_torchrun_need_not_import_either(tmp_path: Path) -> None:
    """By a program that says so before it could have imported anything, and leaves its output in a buffer."""
    code = "import os, sys; print(os.environ['RANK'], 'torch' in sys.modules); os._exit(0)"
    (tmp_path / "rank.py").write_text(code)
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(tmp_path / "rank.py")]
    given = {**os.environ, "PATH": search_path()}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True, timeout=HANG)
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 True"]
