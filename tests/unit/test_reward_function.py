"""A user's function in real processes: what it gives, and every way it can go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import Refusal
from lockstep.functions import register_callable
from lockstep.launch.supervisor import KEPT_BYTES
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.function import FunctionPart
from lockstep.reward.row_rewards import read_by_rewards
from lockstep.types import Failure, Origin, Question
from refusals import refuses
from reward_functions import GUARD, question, running, settings, until

# Every case is a branch on the text, so that one pool serves them all.
REWARDS = """
import asyncio, os, subprocess, sys, time

seen = []

class Number:
    def __float__(self):
        return 0.25

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "right":
        return 1.0
    if solution_str == "bool":
        return True
    if solution_str == "whole":
        return 3
    if solution_str == "like a number":
        return Number()
    if solution_str == "dict":
        return {"score": 0.5, "length": 4, "ok": False, "note": "text", "odd": float("nan")}
    if solution_str == "arguments":
        return {"score": 1, "all": (data_source, ground_truth, extra_info) == ("sums", "18", {"index": 7})}
    if solution_str == "raise":
        raise ValueError("first line\\nlast line")
    if solution_str == "deep":
        return int("seven")
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "os exit":
        os._exit(5)
    if solution_str == "sleep":
        time.sleep(60)
    if solution_str == "nap":
        open(ground_truth + ".begun", "w").close()
        while not os.path.exists(ground_truth):
            time.sleep(0.01)
        return 1.0
    if solution_str == "spin":
        while True:
            pass
    if solution_str == "child":
        subprocess.Popen(["sleep", ground_truth])
        time.sleep(60)
    if solution_str == "hog":
        hoard = []
        while True:
            hoard.append(bytearray(2 ** 20))
    if solution_str == "big":
        return float(len(bytearray(2 ** 20 * int(ground_truth))))
    if solution_str == "print":
        for _ in range(2000):
            print("x" * 1000)
            print("y" * 1000, file=sys.stderr)
        os.write(1, b"raw\\n" * 1000)
        return 1.0
    if solution_str == "modules":
        return float("torch" in sys.modules)
    if solution_str == "pid":
        return os.getpid()
    if solution_str == "order":
        return list({"a", "b", "c", "d", "e"}).index("a")
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1", "huge": 10 ** 400,
            "no score": {"reward": 1}, "bad score": {"score": None}, "list": [1.0]}[solution_str]

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    if solution_str == "raise":
        raise RuntimeError("in a coroutine")
    return 0.75

def by_keywords(*, ground_truth, **rest):
    return 1.0

def three(data_source, solution_str, ground_truth):
    return 1.0

def _hidden(x):
    return 1.0

number = 5
"""
RAISE_LINE = next(i for i, line in enumerate(REWARDS.splitlines(), 1) if "raise ValueError" in line)
HOG_LINE = next(i for i, line in enumerate(REWARDS.splitlines(), 1) if "hoard.append" in line)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("user") / "rewards.py"
    file.write_text(REWARDS, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def part(rewards):
    part = FunctionPart(f"{rewards}:score", settings())
    yield part
    part.close()


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("right", {"function": 1.0}),
        ("bool", {"function": 1.0}),
        ("whole", {"function": 3.0}),
        ("like a number", {"function": 0.25}),
        ("dict", {"function": 0.5, "function/length": 4.0, "function/ok": 0.0}),
        ("arguments", {"function": 1.0, "function/all": 1.0}),
        ("print", {"function": 1.0}),
        ("modules", {"function": 0.0}),
    ],
)
def test_what_a_call_gives(part, text, outcome) -> None:
    assert part.submit(question(), text).result(GUARD) == outcome


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise", f"ValueError: first line last line (rewards.py line {RAISE_LINE})"),
        ("deep", "ValueError: invalid literal for int() with base 10: 'seven' (rewards.py line "),
        ("exit", "SystemExit: 3 (rewards.py line "),
        ("os exit", "ended with status 5"),
        ("nan", "returned nan, "),
        ("inf", "returned inf, "),
        ("none", "returned None, "),
        ("text", "returned '1', "),
        ("huge", "not a finite number"),
        ("list", "returned [1.0], "),
        ("no score", "the dict returned has no \"score\", only 'reward'"),
        ("bad score", "returned None, "),
        ("hog", f"MemoryError (rewards.py line {HOG_LINE}): over reward.memory_limit_gb"),
    ],
)
def test_a_call_that_goes_wrong_is_a_failure_and_the_next_one_is_served(part, text, why) -> None:
    outcome = part.submit(question(), text).result(GUARD)
    assert isinstance(outcome, Failure)
    assert outcome.part == "function"
    assert why in outcome.why
    assert part.submit(question(), "right").result(GUARD) == {"function": 1.0}


def test_a_row_that_cannot_be_handed_over_is_a_failure(part) -> None:
    odd = Question("sums", [], "18", Origin("rows", 1), {"lock": threading.Lock()})
    assert "cannot pickle" in part.submit(odd, "right").result(GUARD).why
    assert part.submit(question(), "right").result(GUARD) == {"function": 1.0}


def test_memory_under_the_limit_is_there(part) -> None:
    assert part.submit(question("600"), "big").result(GUARD) == {"function": 600.0 * 2**20}
    assert isinstance(part.submit(question("1100"), "big").result(GUARD), Failure)


def test_calls_over_the_time_limit_are_killed_with_their_children_and_the_worker_is_replaced(rewards) -> None:
    part = FunctionPart(f"{rewards}:score", settings(time_limit=1.0))
    # Seconds that no other process of this machine sleeps.
    nap = f"61.{os.getpid()}"
    try:
        before = part.submit(question(), "pid").result(GUARD)
        for text in ("sleep", "spin", "child"):
            outcome = part.submit(question(nap), text).result(GUARD)
            assert outcome == Failure("function", "did not answer within 1 s (reward.time_limit)")
        assert not running(f"sleep {nap}")
        after = part.submit(question(), "pid").result(GUARD)
        assert isinstance(before, dict)
        assert isinstance(after, dict)
        assert before != after
        assert not Path(f"/proc/{int(before['function'])}").exists()
    finally:
        part.close()


def test_an_interrupt_does_not_reach_a_call(rewards, tmp_path) -> None:
    part = FunctionPart(f"{rewards}:score", settings(time_limit=GUARD))
    try:
        pid = int(part.submit(question(), "pid").result(GUARD)["function"])
        wake = tmp_path / "wake"
        future = part.submit(question(str(wake)), "nap")
        until(tmp_path.joinpath("wake.begun").exists)
        os.kill(pid, signal.SIGINT)
        wake.touch()
        assert future.result(GUARD) == {"function": 1.0}
    finally:
        part.close()


def test_a_process_that_cannot_be_started_again_is_a_failure_until_it_can(tmp_path) -> None:
    file = tmp_path / "once.py"
    good = "import os\ndef f(solution_str, **call):\n    return 1.0 if solution_str else os._exit(4)\n"
    file.write_text(good)
    part = FunctionPart(f"{file}:f", settings())
    try:
        assert "ended with status 4" in part.submit(question(), "").result(GUARD).why
        file.write_text("raise ValueError('edited')\n")
        assert "ValueError: edited (once.py line 1)" in part.submit(question(), "x").result(GUARD).why
        file.write_text(good)
        assert part.submit(question(), "x").result(GUARD) == {"function": 1.0}
    finally:
        part.close()


def test_a_slow_call_does_not_hold_up_the_other_workers(rewards, tmp_path) -> None:
    part = FunctionPart(f"{rewards}:score", settings(workers=2, time_limit=GUARD))
    try:
        slow = part.submit(question(str(tmp_path / "wake")), "nap")
        quick = [part.submit(question(), "right") for _ in range(20)]
        assert [future.result(GUARD) for future in quick] == [{"function": 1.0}] * 20
        assert not slow.done()
        (tmp_path / "wake").touch()
        assert slow.result(GUARD) == {"function": 1.0}
    finally:
        part.close()


def test_results_do_not_depend_on_the_number_of_workers(rewards) -> None:
    texts = ["right", "raise", "dict", "nan", "order", "whole", "deep", "bool"] * 5
    found = []
    for workers in (1, 3):
        part = FunctionPart(f"{rewards}:score", settings(workers=workers))
        futures = [part.submit(question(), text) for text in texts]
        found.append([future.result(GUARD) for future in futures])
        part.close()
    assert found[0] == found[1]


def test_an_async_function(rewards) -> None:
    part = FunctionPart(f"{rewards}:later", settings())
    try:
        assert part.submit(question(), "x").result(GUARD) == {"function": 0.75}
        assert "RuntimeError: in a coroutine (rewards.py line " in part.submit(question(), "raise").result(GUARD).why
    finally:
        part.close()


def test_a_function_may_take_keywords(rewards) -> None:
    part = FunctionPart(f"{rewards}:by_keywords", settings())
    assert part.submit(question(), "x").result(GUARD) == {"function": 1.0}
    part.close()


def test_the_last_lines_printed_are_kept_and_named_with_a_failure(rewards, tmp_path) -> None:
    part = FunctionPart(f"{rewards}:score", settings(), output=tmp_path / "run" / "rewards" / "worker")
    log = tmp_path / "run" / "rewards" / "worker-0.log"
    try:
        part.submit(question(), "print").result(GUARD)
        # The run has not made its folder yet: nothing can be written, so no file is named.
        assert part.submit(question(), "raise").result(GUARD).log is None
        assert not (tmp_path / "run").exists()
        (tmp_path / "run").mkdir()
        failure = part.submit(question(), "raise").result(GUARD)
        assert failure.log == str(log)
        assert failure.message == failure.why + f" (its last output is in {log})"
        until(log.exists)
        # Which process it was must not tell two runs apart.
        assert failure == Failure("function", failure.why)
        part.submit(question(), "os exit").result(GUARD)
        assert part.submit(question(), "right").result(GUARD) == {"function": 1.0}
    finally:
        part.close()
    lines = log.read_text().splitlines()
    assert lines[0] == "[earlier lines were dropped]"
    assert lines.count("raw") == 1000
    assert log.stat().st_size <= KEPT_BYTES
    # The process that ended and the one that took its place.
    assert lines[-1].startswith("[process ")
    assert sorted(path.name for path in log.parent.iterdir()) == ["worker-0.log"]


def test_modules_beside_the_file_can_be_imported(tmp_path) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("VALUE = 0.125\n")
    (tmp_path / "mine.py").write_text("from neighbour_of_rewards import VALUE\ndef f(**call):\n    return VALUE\n")
    part = FunctionPart(f"{tmp_path / 'mine.py'}:f", settings())
    assert part.submit(question(), "x").result(GUARD) == {"function": 0.125}
    part.close()


@pytest.mark.parametrize(
    ("content", "place", "code", "value"),
    [
        (None, "missing.py:f", "no-such-file", "missing.py"),
        (None, "score", "invalid-function", "score"),
        (None, "a.py:", "invalid-function", "a.py:"),
        ("def g(**call): ...\n", "a.py:f", "invalid-function", "f"),
        ("f = 5\n", "a.py:f", "invalid-function", "int"),
        ("def f(text): ...\n", "a.py:f", "invalid-function", "data_source, solution_str, ground_truth, extra_info"),
        ("\nimport no_such_package\n", "a.py:f", "import-failed", "'no_such_package' (a.py line 2)"),
        ("x = 1\ndef f(:\n", "a.py:f", "import-failed", "SyntaxError: invalid syntax (a.py line 2)"),
        ("import sys\nsys.exit(1)\n", "a.py:f", "import-failed", "SystemExit: 1 (a.py line 2)"),
        ("import os\nos._exit(7)\n", "a.py:f", "import-failed", "status 7"),
    ],
)
def test_what_cannot_be_called_is_refused(tmp_path, content, place, code, value) -> None:
    if content is not None:
        (tmp_path / "a.py").write_text(content)
    with refuses("reward.function", code, value):
        FunctionPart(str(tmp_path / place) if ".py" in place else place, settings())


def test_a_missing_name_lists_what_is_there(rewards) -> None:
    with refuses(":scores", "invalid-function", remedy="score, later, by_keywords, three"):
        FunctionPart(f"{rewards}:scores", settings())


def test_close_answers_what_waits_and_leaves_no_process(tmp_path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    part = FunctionPart(f"{file}:score", settings(workers=2))
    pid = int(part.submit(question(), "pid").result(GUARD)["function"])
    assert running(str(file))
    futures = [part.submit(question(), "sleep") for _ in range(4)]
    part.close()
    assert all("the run ended" in future.result(0).why for future in futures)
    assert not Path(f"/proc/{pid}").exists()
    assert not running(str(file))
    assert isinstance(part.submit(question(), "right").result(0), Failure)


def test_workers_end_with_their_parent_and_stay_quiet_on_ctrl_c(rewards) -> None:
    """The parent is killed in the middle of a call; before that, its whole group gets the terminal's SIGINT."""
    code = f"""
        import signal, time
        from lockstep.reward.function import FunctionPart
        from lockstep.recipe.keys_reward import Reward
        from lockstep.types import Origin, Question
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        question = Question("sums", [], "18", Origin("rows", 1))
        part = FunctionPart({str(rewards) + ":score"!r}, Reward(workers=1, time_limit=60.0))
        print(int(part.submit(question, "pid").result(30)["function"]), flush=True)
        input()
        part.submit(question, "right").result(30)
        print("still there", flush=True)
        part.submit(question, "spin")
        time.sleep({GUARD})
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    worker = Path(f"/proc/{int(parent.stdout.readline())}")
    os.killpg(parent.pid, signal.SIGINT)
    os.kill(int(worker.name), signal.SIGINT)
    assert parent.stdin is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    # A second call is answered, so the signals have come and gone.
    assert parent.stdout.readline() == "still there\n"
    assert worker.exists()
    parent.kill()
    _, errors = parent.communicate()
    assert errors == ""
    until(lambda: not worker.exists())


# Functions that only this process has ---------------------------------------------------------------------------


def here(function: Callable[..., Any], **settings: Any) -> FunctionPart:
    return FunctionPart(register_callable("reward.function", function), Reward(**settings))


def notebook_cell(text: str) -> Callable[..., Any]:
    """What a cell of a notebook defines: no file, and the main module."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "<ipython-input-7>", "exec"), names)
    return names["reward"]


def test_a_function_of_a_notebook_cell_is_called_in_this_process() -> None:
    text = (
        "import os\nBONUS = 0.25\ndef helper(text): return float(len(text))\n"
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': helper(solution_str) + BONUS, 'pid': os.getpid()}\n"
    )
    part = here(notebook_cell(text))
    try:
        outcome = part.submit(question(), "four").result(GUARD)
        assert outcome == {"function": 4.25, "function/pid": float(os.getpid())}
        assert "runs in the same process" in part.note
    finally:
        part.close()


def test_a_closure_keeps_what_it_closes_over_and_cannot_change_a_row() -> None:
    seen: list[str] = []

    def closure(solution_str: str, extra_info: dict[str, Any], **rest: Any) -> float:
        seen.append(solution_str)
        extra_info["mine"] = 1
        return len(seen)

    asked = question()
    part = here(closure)
    try:
        scores = [part.submit(asked, text).result(GUARD) for text in ("a", "b")]
    finally:
        part.close()
    assert scores == [{"function": 1.0}, {"function": 2.0}]
    assert seen == ["a", "b"]
    assert "mine" not in asked.extra_info
    late = part.submit(asked, "late").result(GUARD)
    assert isinstance(late, Failure)
    assert "the run ended" in late.why


def test_a_function_of_this_process_that_fails_or_stalls_fails_its_response() -> None:
    for_ever = threading.Event()

    def closure(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
        if solution_str == "stall":
            for_ever.wait()
        if solution_str == "exit":
            raise SystemExit(3)
        return {"word": "five", "five": 5}[solution_str]

    before = set(threading.enumerate())
    part = here(closure, time_limit=0.3)
    try:
        waiting = {text: part.submit(question(), text) for text in ("stall", "exit", "gone", "word", "five")}
        found = {text: future.result(GUARD) for text, future in waiting.items()}
    finally:
        part.close()
    assert found["five"] == {"function": 5.0}
    assert found["stall"].why == "did not answer within 0.3 s (reward.time_limit)"
    assert found["exit"].why.startswith("SystemExit: 3 (test_reward_function.py line ")
    assert found["gone"].why.startswith("KeyError: 'gone'")
    assert "returned 'five', " in found["word"].why
    for_ever.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(GUARD)
        assert not thread.is_alive()


def test_a_function_of_this_process_is_held_to_the_same_signatures() -> None:
    def wrong(text: str) -> float:
        return 0.0

    with refuses(":wrong", "invalid-function", "data_source"):
        here(wrong)

    def batch(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
        return [float(len(labels[0]))]

    part = here(batch)
    try:
        assert part.submit(question(), "x").result(GUARD) == {"function": float(len(question().ground_truth))}
    finally:
        part.close()


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("def reward(solution_str, **rest): return len(solution_str)", set()),
        ("def reward(solution_str, **rest): return rest['ground_truth']", {"ground_truth", "data_source"}),
        ("def reward(data_source, solution_str, ground_truth, extra_info): return 1", set()),
        ("def reward(data_source, solution_str, ground_truth, extra_info): return ground_truth", {"ground_truth"}),
        ("def reward(data_source, ground_truth, **r): return any(ground_truth for _ in 'a')", {"ground_truth"}),
        ("def reward(data_source, ground_truth, **r): return locals()", {"ground_truth", "data_source"}),
        ("def reward(queries, prompts, labels): return [x for x in labels]", {"ground_truth"}),
    ],
)
def test_rows_are_asked_for_what_a_cell_reads(text: str, read: set[str]) -> None:
    settings = Reward(function=register_callable("reward.function", notebook_cell(text)))
    assert read_by_rewards(settings) == read


def test_a_script_that_trains_when_it_is_imported_is_refused_by_name(tmp_path: Path) -> None:
    """Another process that loads a function of such a script must not start the run again."""
    script = tmp_path / "script.py"
    script.write_text("import lockstep\ndef reward(**given): return 1.0\nlockstep.train('recipe.yaml')\n")
    with pytest.raises(Refusal) as refused:
        FunctionPart(f"{script}:reward", Reward(workers=1))
    assert 'if __name__ == "__main__":' in str(refused.value)
    with pytest.raises(Refusal, match="notebook"):
        FunctionPart("<ipython-input-9>:gone", Reward(workers=1))
