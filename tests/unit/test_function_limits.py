"""Limits of functions of the user's own: one that never returns, or takes all memory, ends with name, key and limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hang import HANG
from lockstep.algorithms.advantage import Signals
from lockstep.algorithms.user_functions import user_estimator
from lockstep.data.sources.read import read_rows
from lockstep.data.sources.user_reader import UserReader
from lockstep.errors import LostProcess, Refusal
from lockstep.functions import TimeUp, register_callable, time_limit
from lockstep.preflight.user_trials import try_advantage, try_loss

SHORT = 0.3


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "own.py"
    file.write_text(text, encoding="utf-8")
    return f"{file}:mine"


def refusal(act: Any) -> str:
    with pytest.raises(Refusal) as caught:
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("while True: pass", 2),
        ("import time; time.sleep(9999)", 2),
        ("import threading; threading.Event().wait()", 2),
        ("\n    try:\n        while True: pass\n    except Exception: pass", 4),
    ],
)
def test_a_call_that_never_returns_is_ended_with_its_line(tmp_path: Path, body: str, line: int) -> None:
    before = signal.getsignal(signal.SIGALRM)
    where = written(tmp_path, f"def mine(given):\n    {body}\n")
    said = f"{where} [function-too-slow]: did not return within 0.3 s (algorithm.function_timeout) (own.py line {line})"
    assert refusal(lambda: try_advantage(where, 4, SHORT)).startswith(f"algorithm.advantage {said}")
    told = refusal(lambda: try_loss(where, SHORT))
    assert told.startswith(f"algorithm.loss {said}")
    assert "raise algorithm.function_timeout" in told
    # Nothing is left that could end something else.
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert not [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, threading.Timer) and not thread.finished.is_set()
    ]


def test_a_file_that_never_ends_its_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.functions.LOAD_SECONDS", SHORT)
    where = written(tmp_path, "def mine(signals): ...\n\nwhile True: pass\n")
    told = refusal(lambda: user_estimator(where, HANG))
    assert f"algorithm.advantage {where} [import-failed]: " in told
    assert "0.3 s (own.py line 3)" in told


def test_a_call_within_its_limit_is_left_alone(tmp_path: Path) -> None:
    where = written(tmp_path, "def mine(signals):\n    return signals.scores_S\n")
    assert "0 to 1" in try_advantage(where, 4, SHORT)
    time.sleep(2 * SHORT)  # a clock that went on would raise here


def test_a_clock_around_another_one_still_ends_what_it_is_around() -> None:
    def waits_for_ever() -> None:
        with time_limit(SHORT, "outer"):
            with time_limit(HANG, "inner"):
                pass
            threading.Event().wait()

    with pytest.raises(TimeUp):
        waits_for_ever()


def test_in_another_thread_a_call_has_only_the_second_clock() -> None:
    """Signals are the main thread's: the first clock must not end what the main thread does meanwhile."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with time_limit(SHORT, "unused"):
                time.sleep(2 * SHORT)
        except TimeUp as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(HANG)
    assert not raised


STUCK = """
import ctypes, signal
import lockstep.functions as functions
functions.GRACE_SECONDS = 0.3
# No signal reaches it: as in a library that waits for a device.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
with functions.time_limit(0.3, "algorithm.loss own.py:mine: gave nothing in 0.3 s"):
    ctypes.CDLL(None).pause()
"""


def test_what_does_not_come_back_from_a_library_ends_the_run_with_message_and_stacks() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("algorithm.loss own.py:mine: gave nothing in 0.3 s\n")
    assert 'File "<string>", line 8 in <module>' in done.stderr


# The reader, in a process of its own --------------------------------------------------------------------------------


def alive(marker: str) -> list[str]:
    """Processes whose command line holds the marker."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return [pid for pid in found if pid != str(os.getpid())]


@pytest.mark.parametrize("body", ["while True: pass", "yield {'a': 1}\n    while True: pass"])
def test_a_reader_that_never_ends_is_ended_with_its_process(tmp_path: Path, body: str) -> None:
    where = written(tmp_path, f"def mine(path):\n    {body}\n")
    told = refusal(lambda: read_rows("rows.db", reader=UserReader(where, seconds=1.0)))
    assert told.startswith(f"data.reader {where} [function-too-slow]: ")
    assert "rows.db in 1 s (data.reader_timeout)\n" in told
    assert not alive(str(tmp_path))


@pytest.mark.slow
def test_a_reader_that_yields_for_ever_is_ended_too(tmp_path: Path) -> None:
    where = written(
        tmp_path, "import time\ndef mine(path):\n    while True:\n        time.sleep(0.05)\n        yield {'a': 1}\n"
    )
    assert "data.reader_timeout" in refusal(lambda: read_rows("rows.db", reader=UserReader(where, seconds=1.0)))


def test_a_reader_that_takes_all_memory_is_refused_by_its_limit(tmp_path: Path) -> None:
    where = written(
        tmp_path, "def mine(path):\n    kept = []\n    while True:\n        kept.append(bytearray(2**24))\n"
    )
    told = refusal(lambda: read_rows("rows.db", reader=UserReader(where, memory_gb=0.25)))
    assert told.startswith(f"data.reader {where} [function-raised]: raised MemoryError (own.py line 4)")
    assert "used more than 0.25 GiB (data.reader_memory_gb)" in told


def test_a_reader_whose_process_dies_is_told_with_what_it_printed_last(tmp_path: Path) -> None:
    where = written(
        tmp_path, "import os\ndef mine(path):\n    yield {'a': 1}\n    print('opening')\n    os.kill(os.getpid(), 9)\n"
    )
    with pytest.raises(LostProcess) as caught:  # a restart may mend it
        read_rows("rows.db", reader=UserReader(where))
    assert "its process was killed (SIGKILL) (it printed last: opening)" in str(caught.value)


HALF_A_ROW = """
import os, pathlib
def mine(path):
    yield {'a': 1}
    once = pathlib.Path(path + '.struck')
    if not once.exists():
        once.touch()
        folder = pathlib.Path('/proc/self/fd')
        opened = {os.readlink(one): int(one.name) for one in folder.iterdir() if os.path.lexists(one)}
        os.write(next(n for name, n in opened.items() if name.startswith('socket:')), b'r{"a": 1')
        os.kill(os.getpid(), HOW)
    yield {'a': 2}
"""


@pytest.mark.daily("9")
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="finds the reader's connection in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_was_killed_or_stopped_is_started_once_more(
    tmp_path: Path, how: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a row, of which nothing is kept."""
    where = written(tmp_path, HALF_A_ROW.replace("HOW", str(int(how))))
    assert list(read_rows(str(tmp_path / "rows.db"), reader=UserReader(where, seconds=3.0))) == [{"a": 1}, {"a": 2}]
    told = capfd.readouterr().err
    assert told.startswith(f"data.reader {where}: ")
    assert ("was killed (SIGKILL)" if how == signal.SIGKILL else "in 3 s (data.reader_timeout)") in told
    assert told.endswith("; restarting the process once\n")


def test_what_a_reader_has_started_ends_with_it(tmp_path: Path) -> None:
    text = "import subprocess, sys\ndef mine(path):\n"
    text += f"    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(9999)', '{tmp_path}'])\n"
    where = written(tmp_path, text + "    return [{'a': 1}]\n")
    assert list(read_rows("rows.db", reader=UserReader(where))) == [{"a": 1}]
    assert not alive(str(tmp_path))


def test_a_reader_from_python_runs_here_with_the_limit_of_time(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": 2}]

    def mine(path: str) -> Any:
        yield from rows

    def stalls(path: str) -> Any:
        yield rows[0]
        threading.Event().wait()

    assert list(read_rows("rows.db", reader=UserReader(register_callable("data.reader", mine)))) == rows
    told = refusal(
        lambda: read_rows("rows.db", reader=UserReader(register_callable("data.reader", stalls), seconds=SHORT))
    )
    assert told.startswith(f"data.reader {__file__}:stalls [function-too-slow]: ")
    assert "0.3 s (data.reader_timeout)" in told


def test_a_step_goes_on_after_many_calls(tmp_path: Path) -> None:
    """A clock a call must not pile up threads."""
    where = written(tmp_path, "def mine(signals):\n    return signals.scores_S\n")
    estimate = user_estimator(where, HANG)
    signals = Signals(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), torch.tensor([0, 0]))
    before = threading.active_count()
    for _ in range(200):
        estimate(signals, gamma=1.0, lam=1.0)
    assert threading.active_count() <= before + 5
