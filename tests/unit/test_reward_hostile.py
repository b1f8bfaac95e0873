"""Functions that do what no reward should: the run goes on, later calls get their own answers, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lockstep.errors import LostProcess
from lockstep.launch.supervisor import KEPT_BYTES, OutputTail, any_stopped
from lockstep.reward.function import FunctionPart
from lockstep.reward.function_worker import Given, Raised, line_of, read_line
from lockstep.types import Failure
from reward_functions import GUARD, question, running, settings, until

HOSTILE = r"""
import json, os, pickle, resource, signal, socket, struct, subprocess, sys, time

def everywhere(data):
    '''To whatever the process has open beyond its standard streams.'''
    for descriptor in range(3, 64):
        try:
            os.set_blocking(descriptor, True)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view):]
        except OSError:
            pass

class Bomb:
    '''Runs code in whoever unpickles it.'''
    def __init__(self, file):
        self.file = file
    def __reduce__(self):
        return exec, (f"import os; open({self.file!r}, 'a').write(str(os.getpid()))",)

class Unspeakable(BaseException):
    def __str__(self):
        raise self

class Interrupt(KeyboardInterrupt):
    pass

class Shy(float):
    def __repr__(self):
        raise BaseException("no")

def daemon(command, **more):
    '''Twice forked, in a session of its own: its parents are gone at once.'''
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", command, **more)
        os._exit(0)
    os.wait()

def score(data_source, solution_str, ground_truth, extra_info):
    what, _, rest = solution_str.partition(" ")
    if what == "number":
        return float(rest)
    if what == "pid":
        return os.getpid()
    if what == "supervisor":
        return os.getppid()
    if what == "twice":
        return 7.0 if os.fork() else 8.0
    if what == "late":
        if os.fork():
            return 7.0
        while not os.path.exists(ground_truth):
            time.sleep(0.01)
        return 8.0
    if what == "bytes":
        everywhere(bytes.fromhex(rest))
        return 7.0
    if what == "flood":
        everywhere(b"x" * 5_000_000)
        return 7.0
    if what == "forge":
        everywhere(json.dumps(json.loads(rest)).encode() + b"\n")
        return 7.0
    if what == "half":
        everywhere(b'{"call": ')
        time.sleep(600)
    if what == "bomb":
        data = pickle.dumps(Bomb(ground_truth))
        everywhere(struct.pack("!i", len(data)) + data)
        return Bomb(ground_truth)
    if what == "bomb-raised":
        raise type("Odd", (Exception,), {"__reduce__": Bomb(ground_truth).__reduce__})()
    if what == "print":
        for _ in range(100):
            print("x" * 1_000_000)
        print("the last line")
        return 7.0
    if what == "daemon":
        daemon(["sleep", ground_truth], env=os.environ)
        return 7.0
    if what == "bare-daemon":
        daemon(["sleep", ground_truth], env={})
        return 7.0
    if what == "orphans":
        daemon(["sleep", ground_truth], env=os.environ)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    if what == "text":
        return "x" * 50_000_000
    if what == "many":
        return {"score": 1.0, **{f"number {i}": i for i in range(100_000)}}
    if what == "names":
        return {"x" * 1_000_000: 1.0}
    if what == "shy":
        return Shy("nan")
    if what == "unspeakable":
        raise Unspeakable
    if what == "interrupt":
        raise Interrupt("mine")
    if what == "generator":
        raise GeneratorExit
    if what == "signal":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), int(rest))
        time.sleep(600)
    if what == "close":
        os.closerange(3, 64)
        return 7.0
    if what == "group":
        os.killpg(0, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("user") / "hostile.py"
    file.write_text(HOSTILE, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def part(file):
    part = FunctionPart(f"{file}:score", settings(time_limit=GUARD))
    yield part
    part.close()


def served(part: FunctionPart) -> bool:
    """Calls get their own answers, in order."""
    futures = [part.submit(question(), f"number {value}") for value in range(5)]
    return [future.result(GUARD) for future in futures] == [{"function": float(value)} for value in range(5)]


def nap(name: str) -> str:
    """Seconds that no other process of this machine sleeps."""
    return f"600.{os.getpid()}{abs(hash(name)) % 10**6}"


# Answers -------------------------------------------------------------------------------------------------------------


def test_a_function_that_forks_and_returns_twice_answers_once(part, tmp_path) -> None:
    for _ in range(5):
        assert part.submit(question(), "twice").result(GUARD) == {"function": 7.0}
        assert served(part)
    wake = tmp_path / "wake"
    assert part.submit(question(str(wake)), "late").result(GUARD) == {"function": 7.0}
    assert part.submit(question(), "number 3").result(GUARD) == {"function": 3.0}
    wake.touch()
    for _ in range(20):
        assert served(part)


@pytest.mark.daily(r"b'garbage\\n'", r"b'\\xff\\xfe\\n'", r"b'[]\\n'", "b'999999999999999999999999'")
@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage\n",
        b"garbage",
        b"\n",
        b"\xff\xfe\n",
        b"\x80\x04N.",
        b"\0\0\0\4\x80\4N.",
        b"null\n",
        b"[]\n",
        b"[" * 100_000 + b"\n",
        b"9" * 10_000 + b"\n",
        b'{"call": 99999, "kind": "Given", "score": 5.0, "more": {}}\n',
        b'{"call": true, "kind": "Given", "score": 5.0, "more": {}}\n',
        b'{"call": 1, "kind": "Given", "score": "5", "more": {}}\n',
        b'{"call": 1, "kind": "Given", "score": 5.0, "more": [1]}\n',
    ],
    ids=lambda garbage: repr(garbage[:24]),
)
def test_garbage_on_the_connection_fails_its_call_alone(part, garbage) -> None:
    before = part.submit(question(), "pid").result(GUARD)
    outcome = part.submit(question(), f"bytes {garbage.hex()}").result(GUARD)
    assert isinstance(outcome, Failure)
    assert "connection of its process" in outcome.why
    assert served(part)
    assert part.submit(question(), "pid").result(GUARD) != before


def test_a_flood_on_the_connection_fails_its_call_alone(part) -> None:
    outcome = part.submit(question(), "flood").result(GUARD)
    assert isinstance(outcome, Failure)
    assert "connection of its process" in outcome.why
    assert served(part)


def test_an_answer_to_an_earlier_call_is_not_taken_for_this_one(part) -> None:
    assert served(part)
    early = json.dumps({"call": 1, "kind": "Given", "score": 5.0, "more": {}})
    assert part.submit(question(), f"forge {early}").result(GUARD) == {"function": 7.0}
    assert served(part)


def test_half_an_answer_is_waited_for_no_longer_than_a_whole_one(file) -> None:
    part = FunctionPart(f"{file}:score", settings(time_limit=1.0))
    try:
        assert part.submit(question(), "half").result(GUARD).why == "did not answer within 1 s (reward.time_limit)"
        assert served(part)
    finally:
        part.close()


@pytest.mark.slow
def test_a_row_that_nobody_reads_is_waited_for_no_longer(file) -> None:
    """A process that has stopped itself takes in nothing: the row fills the connection."""
    part = FunctionPart(f"{file}:score", settings(time_limit=1.0))
    try:
        pid = int(part.submit(question(), "pid").result(GUARD)["function"])
        os.kill(pid, signal.SIGSTOP)
        outcome = part.submit(question("x" * 50_000_000), "number 1").result(GUARD)
        # Another process is asked then, which may be as slow as the machine is busy.
        assert outcome in ({"function": 1.0}, Failure("function", "did not answer within 1 s (reward.time_limit)"))
        assert served(part)
    finally:
        part.close()


@pytest.mark.parametrize("what", ["bomb", "bomb-raised"])
def test_nothing_that_a_function_sends_runs_in_the_run(part, tmp_path, what) -> None:
    victim = tmp_path / "victim"
    assert isinstance(part.submit(question(str(victim)), what).result(GUARD), Failure)
    assert served(part)
    assert not victim.exists()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("text", "returned 'xxxx"),
        ("many", "returned more numbers"),
        ("names", 'the dict returned has no "score", only \'xxxx'),
        ("shy", "BaseException: no"),
        ("unspeakable", "Unspeakable"),
        ("interrupt", "Interrupt: mine (hostile.py line "),
        ("generator", "GeneratorExit (hostile.py line "),
        ("close", "before it gave a score"),
        ("group", "killed (SIGKILL)"),
        ("signal 11", "killed (SIGSEGV)"),
        ("signal 40", "killed (signal 40)"),
    ],
)
def test_what_a_call_may_do_to_itself(part, what, why) -> None:
    outcome = part.submit(question(), what).result(GUARD)
    assert isinstance(outcome, Failure)
    assert why in outcome.why
    assert len(outcome.why) < 600
    assert served(part)


@pytest.mark.parametrize(
    "reply", [Given(0.1 + 0.2, {"a": -1e300, "\ud800 é": 0.0}), Raised("why"), Raised("why \ud800", spent=True)]
)
def test_an_answer_is_read_as_it_was_written(reply) -> None:
    assert read_line(line_of(12, reply).removesuffix(b"\n")) == (12, reply)


def test_no_beginning_of_an_answer_is_an_answer() -> None:
    line = line_of(3, Given(0.5, {"length": 4.0})).removesuffix(b"\n")
    for end in range(len(line)):
        with pytest.raises(ValueError, match="no answer"):
            read_line(line[:end])


# Processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["daemon", "bare-daemon"])
def test_what_started_a_session_of_its_own_ends_with_the_pool(file, what) -> None:
    """Also where the child has dropped the environment that it was marked by."""
    part = FunctionPart(f"{file}:score", settings())
    try:
        seconds = nap(what)
        assert part.submit(question(seconds), what).result(GUARD) == {"function": 7.0}
        until(lambda: bool(running(f"sleep {seconds}")))
    finally:
        part.close()
    assert not running(f"sleep {seconds}")


def test_what_started_a_session_of_its_own_ends_with_a_worker_that_is_replaced(file) -> None:
    part = FunctionPart(f"{file}:score", settings())
    try:
        seconds = nap("replaced")
        assert part.submit(question(seconds), "daemon").result(GUARD) == {"function": 7.0}
        until(lambda: bool(running(f"sleep {seconds}")))
        assert isinstance(part.submit(question(), "signal 9").result(GUARD), Failure)
        assert not running(f"sleep {seconds}")
        assert served(part)
    finally:
        part.close()


def test_a_function_that_kills_the_process_above_it_leaves_nothing_either(file) -> None:
    part = FunctionPart(f"{file}:score", settings(time_limit=GUARD))
    try:
        seconds = nap("orphans")
        outcome = part.submit(question(seconds), "orphans").result(GUARD)
        assert isinstance(outcome, Failure)
        assert "killed (SIGKILL)" in outcome.why
        assert not running(f"sleep {seconds}")
        assert served(part)
    finally:
        part.close()


@pytest.mark.parametrize("struck", ["worker", "supervisor"])
def test_a_score_is_not_lost_to_a_kill_from_outside(tmp_path, struck) -> None:
    """The first call tells who it is and waits; the second one, in another process, answers."""
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    try:\n"
        "        told = os.open(ground_truth, os.O_CREAT | os.O_EXCL | os.O_WRONLY)\n"
        "    except FileExistsError:\n"
        "        return 1.0\n"
        "    os.write(told, b'%d %d.' % (os.getpid(), os.getppid()))\n"
        "    time.sleep(1e6)\n"
    )
    part, told = FunctionPart(f"{tmp_path / 'slow.py'}:score", settings(time_limit=GUARD)), tmp_path / "told"
    try:
        asked = part.submit(question(str(told)), "")
        until(lambda: told.exists() and told.read_text().endswith("."))
        worker, supervisor = map(int, told.read_text().rstrip(".").split())
        os.kill(worker if struck == "worker" else supervisor, signal.SIGKILL)
        assert asked.result(GUARD) == {"function": 1.0}
    finally:
        part.close()


def killed_at_load(folder: Path, times: int) -> str:
    """A function whose process is killed so many times while it is imported."""
    (folder / "loads.py").write_text(
        "import os, pathlib, signal\n"
        f"loads = pathlib.Path({str(folder / 'loads')!r})\n"
        "loads.open('a').write('.')\n"
        f"if loads.stat().st_size <= {times}:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0\n"
    )
    return f"{folder / 'loads.py'}:score"


def test_a_process_that_is_killed_while_it_loads_is_started_again(tmp_path) -> None:
    part = FunctionPart(killed_at_load(tmp_path, 1), settings())
    try:
        assert part.submit(question(), "").result(GUARD) == {"function": 1.0}
    finally:
        part.close()


def test_processes_that_are_killed_while_they_load_may_be_tried_again_later(tmp_path) -> None:
    """Not a fault of the function, which would be refused at every restart."""
    with pytest.raises(LostProcess, match=r"\[import-failed\]: .* killed \(SIGKILL\)"):
        FunctionPart(killed_at_load(tmp_path, 2), settings())


def test_a_stopped_process_is_told_from_one_that_is_slow() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            assert not any_stopped(process.pid, "no mark")
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: any_stopped(process.pid, "no mark"))
        finally:
            process.kill()


@pytest.mark.parametrize("stopped", ["worker", "supervisor"])
def test_stopped_processes_are_ended_too(file, stopped, monkeypatch) -> None:
    monkeypatch.setattr("lockstep.launch.process_pool.ENDING_SECONDS", 0.5)
    part = FunctionPart(f"{file}:score", settings())
    pids = {name: int(part.submit(question(), name).result(GUARD)["function"]) for name in ("pid", "supervisor")}
    os.kill(pids["pid" if stopped == "worker" else "supervisor"], signal.SIGSTOP)
    part.close()
    assert not Path(f"/proc/{pids['supervisor']}").exists()
    # What the supervisor did not live to reap is left for the system to reap, without a command line.
    worker = Path(f"/proc/{pids['pid']}/cmdline")
    until(lambda: not worker.exists() or not worker.read_bytes())


@pytest.mark.parametrize("stopped", ["worker", "supervisor"])
def test_stopped_processes_end_with_a_run_that_is_killed(file, stopped) -> None:
    """Who is stopped cannot see that the run is gone."""
    code = f"""
        import time
        from lockstep.reward.function import FunctionPart
        from lockstep.recipe.keys_reward import Reward
        from lockstep.types import Origin, Question
        part = FunctionPart({str(file) + ":score"!r}, Reward(workers=1))
        for name in ("pid", "supervisor"):
            told = part.submit(Question("sums", [], "", Origin("rows", 1)), name).result({GUARD})
            print(int(told["function"]), flush=True)
        time.sleep({GUARD})
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    worker, supervisor = int(run.stdout.readline()), int(run.stdout.readline())
    os.kill(worker if stopped == "worker" else supervisor, signal.SIGSTOP)
    run.kill()
    run.wait()
    run.stdout.close()
    for pid in (worker, supervisor):
        # What nobody reaps here has no command line any more.
        words = Path(f"/proc/{pid}/cmdline")
        until(lambda words=words: not words.exists() or not words.read_bytes())


def test_a_daemon_ends_with_a_run_that_is_killed(file) -> None:
    seconds = nap("killed run")
    code = f"""
        import time
        from lockstep.reward.function import FunctionPart
        from lockstep.recipe.keys_reward import Reward
        from lockstep.types import Origin, Question
        part = FunctionPart({str(file) + ":score"!r}, Reward(workers=1))
        part.submit(Question("sums", [], {seconds!r}, Origin("rows", 1)), "bare-daemon").result({GUARD})
        print("started", flush=True)
        time.sleep({GUARD})
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "started\n"
    until(lambda: bool(running(f"sleep {seconds}")))
    run.kill()
    run.wait()
    run.stdout.close()
    until(lambda: not running(f"sleep {seconds}"))


# Output --------------------------------------------------------------------------------------------------------------


def test_a_hundred_megabytes_printed_leave_the_last_lines(file, tmp_path) -> None:
    part = FunctionPart(f"{file}:score", settings(time_limit=GUARD), output=tmp_path / "rewards" / "worker")
    try:
        assert part.submit(question(), "print").result(GUARD) == {"function": 7.0}
    finally:
        part.close()
    log = tmp_path / "rewards" / "worker-0.log"
    assert log.stat().st_size <= KEPT_BYTES
    assert log.read_text().splitlines()[-1] == "the last line"


def test_the_tail_of_an_output(tmp_path) -> None:
    """Lines are kept whole, a line without an end is cut, and a second process goes on where the first stopped."""
    log = tmp_path / "rewards" / "worker-0.log"
    tail = OutputTail(log)
    for number in range(20_000):
        tail.add(b"line %05d\n" % number)
    tail.write()
    lines = log.read_text().splitlines()
    # 11 bytes a line, and the line that says that something is missing.
    assert lines[0] == "[earlier lines were dropped]"
    assert lines[1:] == [f"line {number:05d}" for number in range(20_000 - (KEPT_BYTES - 29) // 11, 20_000)]
    after = OutputTail(log)
    after.add(b"more\n")
    after.write()
    assert log.read_text().splitlines()[-2:] == ["line 19999", "more"]
    after.add(b"z" * 10**6)
    after.write()
    assert log.read_bytes() == b"[earlier lines were dropped]\n" + b"z" * (KEPT_BYTES - 29)
