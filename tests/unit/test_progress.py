import io
import re
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
from rich.console import Console as Screen

from hang import HANG, wait_until
from lockstep.errors import Problem, Refusal
from lockstep.run import console as pace_module
from lockstep.run import console as plain_module
from lockstep.run import output as output_module
from lockstep.run.console import Console, LiveConsole, NotebookConsole, Pace, PlainConsole
from lockstep.run.output import OFFLINE_COLUMNS, ONLINE_COLUMNS, Column, clock, fit, reminders, show

METRICS = {"train/loss": 1.23456, "train/lr": 1e-5, "train/grad_norm": 0.5, "perf/throughput": 12345.6}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    fake = Clock()
    monkeypatch.setattr(pace_module, "time", fake)
    monkeypatch.setattr(plain_module, "time", fake)
    monkeypatch.setattr(output_module, "SILENCE", HANG)
    return fake


def run(console: Console, total: int, until: int, done: int = 0) -> None:
    console.begin(total, done)
    for step in range(done + 1, until + 1):
        console.step(step, METRICS)
    console.end()


def steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)/", output, flags=re.M)]


def test_a_pipe_gets_a_plain_console_and_a_terminal_a_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(Console.open(), PlainConsole)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(Console.open(), LiveConsole)
    assert isinstance(Console.open(plain=True), PlainConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(Console.open(), PlainConsole)
    assert isinstance(Console.open(plain=False), LiveConsole)


def test_plain_step_line(capsys: pytest.CaptureFixture[str], clock_at: Clock) -> None:
    console = PlainConsole(OFFLINE_COLUMNS)
    console.begin(120, done=5)
    clock_at.now += 2.0
    console.step(6, METRICS)
    assert capsys.readouterr().out == "step   6/120  loss 1.2346  lr 1.00e-05  grad 0.5  tok/s 12,346  eta 0:03:48\n"


def test_plain_shows_the_first_every_nth_and_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    run(PlainConsole(OFFLINE_COLUMNS, every=5), total=12, until=12)
    assert steps(capsys.readouterr().out) == [1, 5, 10, 12]
    run(PlainConsole(OFFLINE_COLUMNS, every=5), total=20, until=13, done=6)
    assert steps(capsys.readouterr().out) == [7, 10, 13]  # stopped early: the last one it did


def names(column: Column) -> tuple[str, ...]:
    return (column.metric,) if isinstance(column.metric, str) else column.metric


def test_a_whole_online_line_fits_a_terminal() -> None:
    """Set closer where it would not: reward, divergence, entropy, length, speed and the times of the phases."""
    metrics = {name: 0.5 for column in ONLINE_COLUMNS for name in names(column)} | {"perf/throughput": 12345.0}
    assert show(ONLINE_COLUMNS, metrics, 80).endswith("turns 0.50 tok/s 12,345 gen 0.5 upd 0.5")
    del metrics["environment/turns"]
    assert show(ONLINE_COLUMNS, metrics, 80).endswith("tok/s 12,345  gen 0.5  upd 0.5")
    assert show(ONLINE_COLUMNS, metrics, 66).endswith("tok/s 12,345 gen 0.5 upd 0.5")


def test_plain_output_has_no_control_characters_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(ONLINE_COLUMNS)
    console.banner("a run", [("plan", "many words " * 20), ("k", "\x1b[31mred\x07")])
    console.say("a sentence of many words " * 10)
    console.warn("\x1b[2Jbeware\r")
    console.validation(3, {f"val/metric_{i}": i / 7 for i in range(12)})
    console.begin(1_000_000, 999_998)
    console.step(999_999, {name: 123456.789 for column in ONLINE_COLUMNS for name in names(column)})
    console.end()
    with console.task("tokenising", 10) as task:
        task.advance(10)
    output = capsys.readouterr().out
    assert re.search(r"[^\n\x20-\x7e]", output) is None
    assert max(map(len, output.splitlines())) <= 80
    assert "warning: \\x1b[2Jbeware\\x0d" in output
    # Numbers that fill their line leave the time left to one of its own.
    assert re.search(r"^step  999999/1000000  reward .*\n  eta 0:00:00$", output, flags=re.M)


def test_plain_task_speaks_at_both_ends_and_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], clock_at: Clock
) -> None:
    with PlainConsole(OFFLINE_COLUMNS).task("tokenising", 1000) as task:
        for _ in range(10):
            clock_at.now += 2.5
            task.advance(100)
    assert capsys.readouterr().out.splitlines() == [
        "tokenising: 1,000 to do",
        "tokenising: 400 of 1,000, eta 0:00:15",
        "tokenising: 800 of 1,000, eta 0:00:05",
        "tokenising: 1,000 done in 25.0 s",
    ]


def test_a_task_that_fails_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, width=80)
    for console in (PlainConsole(OFFLINE_COLUMNS), LiveConsole(OFFLINE_COLUMNS, screen)):
        with pytest.raises(ZeroDivisionError), console.task("tokenising", 10):
            raise ZeroDivisionError
    assert " done in" not in capsys.readouterr().out + screen.file.getvalue()  # type: ignore[attr-defined]


def test_live_console_leaves_a_line_for_every_step_where_asked() -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    console = LiveConsole(ONLINE_COLUMNS, screen, lines=True)
    console.begin(12)
    for step in range(1, 4):
        console.step(step, {"critic/score/mean": step / 10, "actor/entropy": 1.0})
    console.end()
    output = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", screen.file.getvalue())  # type: ignore[attr-defined]
    found = [line.strip() for line in output.splitlines() if line.startswith("step")]
    assert found == [f"step  {step}/12  reward {step / 10:.3f}  ent 1.00" for step in range(1, 4)]


def test_live_console_keeps_lines_and_shows_the_bar_with_the_metrics() -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    console = LiveConsole(OFFLINE_COLUMNS, screen)
    console.begin(10, done=2)
    console.step(3, METRICS)
    assert console._live is not None
    console._live.refresh()
    console.warn("look here")
    with console.task("validating", 4) as task:
        task.advance(4)
    console.end()
    console.end()
    assert console._live is None
    output = screen.file.getvalue()  # type: ignore[attr-defined]
    lines = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", output).splitlines()
    assert re.search(r"training .*━.* 3/10 \d:\d\d:\d\d eta", output)
    assert "warning: look here" in lines
    assert "validating: 4 done in" in output
    assert re.search(r"step 3/10  loss 1\.2346  lr 1\.00e-05  grad 0\.5  tok/s 12,346  \d:\d\d:\d\d", output)
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor comes back
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("kernel", [True, False])
def test_a_notebook_gets_one_bar_that_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], clock_at: Clock, kernel: bool
) -> None:
    """With a stand-in for IPython; `make test-notebooks` has a real kernel. IPython in a terminal has no kernel."""
    shown: list[str] = []

    def display(html: str, display_id: bool = False) -> SimpleNamespace:
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    shell = SimpleNamespace(kernel=object() if kernel else None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))  # type: ignore[arg-type]
    console = Console.open()
    assert isinstance(console, NotebookConsole) == kernel
    if not kernel:
        return
    console.begin(4)
    console.step(1, METRICS)  # too soon to draw again
    clock_at.now += 1.0
    console.step(2, METRICS)
    console.end()
    console.end()
    values = [re.findall(r'max="(\d+)" value="(\d+)"', html) for html in shown]
    assert values == [[("4", "0")], [("4", "2")], [("4", "2")]]
    assert "step 2/4  loss 1.2346" in shown[-1]
    assert capsys.readouterr().out == ""


def test_a_silent_console_says_nothing_but_errors(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console.silent()
    console.banner("title", [("a", "b")])
    console.say("x")
    console.warn("x")
    console.validation(1, METRICS)
    with console.task("tokenising", 10) as task:
        task.advance(3)
    run(console, total=2, until=2)
    assert capsys.readouterr() == ("", "")
    console.problems(Refusal.at("rank 1", "went wrong", code="process-lost"))
    assert "rank 1" in capsys.readouterr().err


def test_problems_read_like_advice(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = Refusal(
        [
            Problem(
                "batch.row",
                "there is no [red]such[/red] key",
                "did you mean batch.micro_batch_size?",
                code="unknown-key",
            ),
            Problem("data.jsonl row 7", "has no trained token", code="no-trained-token"),
        ]
    )
    PlainConsole(OFFLINE_COLUMNS).problems(refusal)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "2 problems:",
        "",
        "batch.row [unknown-key]",
        "  there is no [red]such[/red] key",
        "  -> did you mean batch.micro_batch_size?",
        "",
        "data.jsonl row 7 [no-trained-token]",
        "  has no trained token",
    ]


def test_columns_that_do_not_fit_are_left_out_from_the_right() -> None:
    assert show(OFFLINE_COLUMNS, METRICS, 30) == "loss 1.2346  lr 1.00e-05"
    assert show(OFFLINE_COLUMNS, {"train/lr": 0.5}) == "lr 5.00e-01"


def test_long_words_stay_whole() -> None:
    path = "/a" * 60
    assert fit(f"saved in {path} just now") == ["saved in", f"  {path}", "  just now"]


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 61.9, 7384, 100 * 3600)] == ["0:00:00", "0:01:01", "2:03:04", "100:00:00"]


def test_pace_forgets_the_warm_up_and_counts_down(clock_at: Clock) -> None:
    pace = Pace(total=10)
    assert pace.left() is None
    clock_at.now += 60.0
    pace.reach(1)
    assert pace.left() == pytest.approx(540.0)
    for step in (2, 3):
        clock_at.now += 4.0
        pace.reach(step)
    assert pace.left() == pytest.approx(28.0)
    clock_at.now += 3.0
    assert pace.left() == pytest.approx(25.0)


def test_pace_of_many_quick_ticks_is_their_mean(clock_at: Clock) -> None:
    pace = Pace(total=10_000)
    for done in range(1, 5001):
        clock_at.now += 0.003 if done % 2 else 0.001
        pace.reach(done)
    assert pace.left() == pytest.approx(10.0, rel=0.01)


def test_a_silent_stage_is_named_and_says_how_long_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    said, told = [], threading.Semaphore(0)
    console = PlainConsole(OFFLINE_COLUMNS)
    monkeypatch.setattr(console, "say", lambda text: (said.append(text), told.release()))
    monkeypatch.setattr(output_module, "SILENCE", 0.01)
    with console.waiting("Planning"):
        for _ in range(3):
            assert told.acquire(timeout=HANG)
    assert said[0] == "Planning ..."
    assert re.fullmatch(r"Planning: \d+\.\d s", said[1])
    assert re.fullmatch(r"Planning: \d+\.\d s", said[2])
    assert said[-1].startswith("Planning: done in ")
    said.clear()
    monkeypatch.setattr(output_module, "SILENCE", HANG)
    with console.waiting("Planning"):
        pass
    assert said == []


def test_a_silent_stage_has_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    console = LiveConsole(OFFLINE_COLUMNS, screen)
    monkeypatch.setattr(output_module, "SILENCE", 0.01)
    with console.waiting("Planning"):
        wait_until(lambda: console.shows_task)
        assert console._live is not None
        console._live.refresh()
    assert not console.shows_task
    assert console._live is None
    output = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", screen.file.getvalue())  # type: ignore[attr-defined]
    # Neither a count nor a time left is known.
    assert re.search(r"Planning ━+ +\d:\d\d:\d\d\r", output)
    assert "Planning: done in " in output


@pytest.mark.parametrize(("total", "line"), [(None, r"Loading: \d+\.\d s"), (40, "Loading: 7 of 40, eta 0:00:00")])
def test_a_silent_task_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, total: int | None, line: str) -> None:
    said: list[str] = []
    console = PlainConsole(OFFLINE_COLUMNS)
    monkeypatch.setattr(console, "_print", said.append)
    monkeypatch.setattr(output_module, "SILENCE", 0.01)
    with console.task("Loading", total) as task:
        if total is not None:
            task.advance(7)
        seen = len(said)
        wait_until(lambda: len(said) >= seen + 2)
        assert re.fullmatch(line, said[-1])
    assert said[-1].startswith("Loading: 7 done in" if total else "Loading: done in")


def test_reminders_come_after_silence_only_and_become_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that the waiting itself moves: each wait lasts as long as it is asked to."""
    clock, told, ended = Clock(), [], threading.Event()

    class Done:
        def __init__(self) -> None:
            self.ended = False

        def wait(self, seconds: float) -> bool:
            clock.now += seconds
            if clock.now >= 1200:
                ended.set()
            return self.ended or ended.is_set()

        def is_set(self) -> bool:
            return self.ended

        def set(self) -> None:
            self.ended = True

    monkeypatch.setattr(output_module, "time", clock)
    monkeypatch.setattr(output_module, "threading", SimpleNamespace(**vars(threading) | {"Event": Done}))
    # Something else is printed 1,001 s after the clock's start.
    with reminders(lambda elapsed: told.append(round(elapsed, 2)), lambda: 1001.0):
        assert ended.wait(HANG)
    assert told[:8] == [2.5, 4.0, 5.5, 7.0, 8.5, 10.0, 15.0, 22.5]
    assert {round(b - a, 2) for a, b in pairwise(told[12:])} == {output_module.LONGEST_SILENCE}


def test_a_closed_pipe_is_reported_by_the_next_output_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reminder that cannot be written raises nothing in its thread: pytest would report it."""
    tried: list[float] = []
    raised: list[object] = []

    def closed(elapsed: float) -> None:
        tried.append(elapsed)
        raise BrokenPipeError

    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(output_module, "SILENCE", 0.01)
    with reminders(closed):
        wait_until(lambda: len(tried) > 1 or bool(raised))
    assert raised == []


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_a_task_that_is_shown_is_no_silence(kind: str) -> None:
    plain = PlainConsole(OFFLINE_COLUMNS)
    console = plain if kind == "plain" else LiveConsole(OFFLINE_COLUMNS, Screen(file=io.StringIO()))
    with console.task("Loading", None):
        assert console.shows_task
    assert not console.shows_task
