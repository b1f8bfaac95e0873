"""Environments with a bug in every method: only their trajectories fail, the reason names the environment and the
method, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import environment_classes
from hang import wait_until
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts, Host
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.setup import host_setup, try_environment
from lockstep.errors import Refusal
from lockstep.launch.supervisor import NOBODY, descendants
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Origin, Prompt, Question, Request, Sampling
from scripted_engine import Scripted

FILE = environment_classes.__file__


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def question(row: int) -> Question:
    return Question("sums", [{"role": "user", "content": "?"}], str(row), Origin("rows.jsonl", row))


class Watched(EnvironmentHosts):
    """Remembers every host process."""

    def __init__(self, settings: RolloutSettings):
        self.started: list[Host] = []
        self.most = 0
        """The largest number of hosts at one time."""
        super().__init__(host_setup(settings))

    def _start(self) -> Host:
        self.started.append(super()._start())
        self.most = max(self.most, len(self.hosts))
        return self.started[-1]

    def left(self) -> list[int]:
        """The living processes of all hosts."""
        return [pid for host in self.started for pid in descendants(NOBODY, host._mark)]


def engine_of(tokenizer: Any, environment: str, **keys: Any) -> EnvironmentEngine:
    settings = RolloutSettings(environment=f"{FILE}:{environment}", **{"environment_workers": 1, **keys})
    chat = ChatFormat(tokenizer, frozenset({tokenizer.eos_token_id}))
    inner = Scripted(tokenizer, lambda request, turn: "hi")
    return EnvironmentEngine(inner, Watched(settings), settings, chat, len(tokenizer))


def generated(engine: EnvironmentEngine, tokenizer: Any, rows: int) -> list[Completion]:
    requests = [Request(tokenizer("?")["input_ids"], row, question=question(row)) for row in range(rows)]
    return list(engine.generate(requests, Sampling(200, stop_ids=(tokenizer.eos_token_id,))))


def run(tokenizer: Any, environment: str, bugs: dict[str, Any], rows: int, **keys: Any) -> tuple[list[str], Any, Any]:
    """Generates with an environment that has bugs. Returns the reason and the stop reason of each row, and the hosts.
    Afterwards no process is left."""
    more = keys.pop("more", {})
    engine = engine_of(tokenizer, environment, environment_args={"bugs": bugs, **more}, **keys)
    hosts = engine.hosts
    assert isinstance(hosts, Watched)
    try:
        made = sorted(generated(engine, tokenizer, rows), key=lambda one: one.request)
        assert not any(host.stuck for host in hosts.hosts)
        again = generated(engine, tokenizer, 1)
    finally:
        engine.close()
    assert hosts.left() == []
    assert [one.request for one in made] == list(range(rows))
    for one in [*again, *made]:
        assert (one.stop == "failed", one.ids == []) == (bool(one.failure), bool(one.failure))
        if not one.failure and environment == "Buggy":
            assert one.trajectory is not None
            assert one.trajectory.scores == {"score": 1.0}
    stops = [one.trajectory.stop for one in made if one.trajectory is not None]
    return [one.failure for one in made], stops, hosts


BUGS = [
    ("reset", "raises", "reset raised ValueError: the bug (environment_classes.py line"),
    ("reset", "wrong type", "reset returned 7, expected Start(messages=[...])"),
    ("reset", "huge", "reset returned 33,554"),
    ("step", "raises", "step raised ValueError: the bug (environment_classes.py line"),
    ("step", "exits", "step raised SystemExit: 3"),
    ("step", "wrong type", "step returned 7, expected Turn(...)"),
    ("step", "nan", "step returned nan as the reward, which is not a finite number"),
    ("step", "huge", "step returned 33,554"),
    ("step", "nothing", "step returned neither messages nor done=True"),
    ("step", "not text", "step returned 3 as the content of message 1, not text"),
    ("step", "assistant", "step returned message 1 with the role 'assistant'"),
    ("score", "raises", "score raised ValueError: the bug"),
    ("score", "wrong type", "score returned 'seven' as the score, which is not a finite number"),
    ("score", "nan", "score returned nan as the score"),
    ("close", "raises", "close raised ValueError: the bug"),
]


def test_a_bug_fails_its_trajectory_alone(tokenizer: Any, tmp_path: Path) -> None:
    bugs = {str(row): [where, how] for row, (where, how, _) in enumerate(BUGS, 1)}
    log, rows = tmp_path / "closed.txt", len(BUGS) + 2
    reasons, stops, hosts = run(tokenizer, "Buggy", bugs, rows, more={"log": str(log)})
    assert reasons[0] == reasons[-1] == ""
    for reason, (_, _, why) in zip(reasons[1:], BUGS, strict=False):
        assert f"environment_classes.py:Buggy: {why}" in reason
    assert stops == ["completed", *["tool_error"] * len(BUGS), "completed"]
    assert len(hosts.started) == 1
    # Every environment is closed, also after a failure; the first row ran twice.
    closed = sorted(log.read_text().split()[1::2], key=int)
    assert closed == ["0", *map(str, range(rows))]


def test_an_endless_environment_ends_at_the_limit_of_turns(tokenizer: Any) -> None:
    reasons, stops, _ = run(tokenizer, "Buggy", {"1": ["step", "endless"]}, 2, max_turns=4)
    assert (reasons, stops) == (["", ""], ["completed", "max_turns"])


@pytest.mark.slow
def test_methods_that_hang_are_named_and_their_host_is_replaced(tokenizer: Any) -> None:
    methods = ("reset", "step", "score", "close")
    bugs = {str(row): [method, "hangs"] for row, method in enumerate(methods, 1)}
    reasons, stops, hosts = run(tokenizer, "Buggy", bugs, 6, step_timeout=1.0)
    assert reasons[0] == reasons[-1] == ""
    for reason, method in zip(
        reasons[1:], ("reset", "step", "score, info or close", "score, info or close"), strict=False
    ):
        assert f"Buggy: {method} did not return within 1 s (rollout.step_timeout)" in reason
    assert stops == ["completed", *["timeout"] * 4, "completed"]
    assert len(hosts.started) == 2  # a thread cannot be cancelled


@pytest.mark.slow
def test_a_hanging_thread_blocks_no_trajectory_that_starts_later(tokenizer: Any) -> None:
    """The next trajectory starts as soon as the first has failed, and the host has a single thread."""
    bugs = {"0": ["step", "hangs"], "2": ["reset", "hangs"]}
    reasons, _, hosts = run(tokenizer, "Buggy", bugs, 5, step_timeout=1.0, max_concurrent=1)
    assert [bool(reason) for reason in reasons] == [True, False, True, False, False]
    assert hosts.most <= 2


@pytest.mark.slow
def test_the_number_of_stuck_hosts_is_limited(tokenizer: Any) -> None:
    """A trajectory waits if it would need another host. It goes on when a stuck host has ended."""
    settings = RolloutSettings(environment=f"{FILE}:Echo", environment_workers=2)
    hosts = Watched(settings)
    try:
        for trajectory in range(4):
            placed = hosts.place(trajectory)
            assert placed is not None
            placed.stuck = True
        assert hosts.place(4) is None
        assert len(hosts.hosts) == 4
        hosts.release(hosts.hosts[0], 0)
        found = hosts.place(4)
        assert found is not None
        assert found not in hosts.started[:4]
        assert len(hosts.hosts) == 4
    finally:
        hosts.close()
    assert hosts.left() == []


@pytest.mark.slow
def test_many_stuck_threads_end_with_few_hosts(tokenizer: Any) -> None:
    bugs = {str(row): ["step", "hangs"] for row in range(0, 24, 2)}
    reasons, _, hosts = run(tokenizer, "Buggy", bugs, 24, step_timeout=0.5, max_concurrent=3)
    assert [bool(reason) for reason in reasons] == [True, False] * 12
    assert hosts.most <= 2


@pytest.mark.slow
def test_a_hanging_trajectory_delays_no_other(tokenizer: Any) -> None:
    bugs = {"0": ["step", "hangs"]}
    engine = engine_of(tokenizer, "Buggy", environment_args={"bugs": bugs}, step_timeout=2.0)
    made = [one.request for one in generated(engine, tokenizer, 4)]
    engine.close()
    assert (made[-1], sorted(made)) == (0, [0, 1, 2, 3])


@pytest.mark.slow
def test_coroutines_that_hang_are_cancelled(tokenizer: Any) -> None:
    reasons, _, hosts = run(tokenizer, "AsyncBuggy", {"1": "waits", "2": "exits"}, 4, step_timeout=1.0)
    assert reasons[0] == reasons[3] == ""
    assert "AsyncBuggy: step did not return within 1 s" in reasons[1]
    assert "AsyncBuggy: step raised SystemExit" in reasons[2]
    assert len(hosts.started) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("how", "others"), [("stays", 0), ("blocks", 1)])
def test_a_coroutine_that_cannot_be_cancelled_is_killed_with_its_host(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, how: str, others: int
) -> None:
    """A coroutine that blocks the loop of its host also ends the other trajectories of this host."""
    monkeypatch.setattr("lockstep.environments.dispatch.ACKNOWLEDGE_SECONDS", 1.0)
    reasons, _, hosts = run(tokenizer, "AsyncBuggy", {"1": how}, 3, step_timeout=1.0)
    assert "AsyncBuggy: step did not return within 1 s" in reasons[1]
    assert sum(map(bool, reasons)) <= 1 + 2 * others
    assert len(hosts.started) == 2


def test_a_host_that_dies_fails_its_trajectories_and_is_replaced(tokenizer: Any) -> None:
    reasons, _, hosts = run(tokenizer, "Buggy", {"1": ["step", "kills"]}, 3)
    assert "its process was killed (SIGKILL)" in reasons[1]
    assert len(hosts.started) == 2


def test_a_host_that_cannot_be_started_again_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tokenizer, "Buggy", environment_args={"bugs": {"0": ["step", "kills"]}}, max_concurrent=1)

    def refused(*given: Any, **named: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    try:
        monkeypatch.setattr("lockstep.launch.process_pool.subprocess.Popen", refused)
        with pytest.raises(Refusal) as stopped:
            generated(engine, tokenizer, 3)
    finally:
        engine.close()
    (problem,) = stopped.value.problems
    assert (problem.where, problem.code) == (f"rollout.environment {FILE}:Buggy", "process-lost")
    assert "Resource temporarily unavailable" in problem.why
    assert isinstance(engine.hosts, Watched)
    assert engine.hosts.left() == []


def test_no_trajectory_starts_on_a_host_that_has_died(tokenizer: Any) -> None:
    """The run may not have handled the end of the host yet."""
    hosts = Watched(RolloutSettings(environment=f"{FILE}:Echo", environment_workers=1))
    try:
        first = hosts.place(0)
        assert first is not None
        os.kill(first._process.pid, signal.SIGKILL)
        wait_until(lambda: not first.alive)
        second = hosts.place(1)
        assert second is not first
        assert second is not None
        assert second.alive
    finally:
        hosts.close()
    assert hosts.left() == []


@pytest.mark.slow
def test_an_interrupted_batch_leaves_no_process(tokenizer: Any) -> None:
    engine = engine_of(tokenizer, "Echo", environment_workers=2)

    def broken(request: Request, turn: int) -> str:
        raise RuntimeError("the engine fails")

    engine.inner = Scripted(tokenizer, broken)
    with pytest.raises(RuntimeError, match="the engine fails"):
        generated(engine, tokenizer, 3)
    assert engine.hosts.hosts == []
    assert isinstance(engine.hosts, Watched)
    assert engine.hosts.left() == []


# -- before training ---------------------------------------------------------------------------------------------------


def tried(tokenizer: Any, environment: str, **keys: Any) -> str:
    settings = RolloutSettings(environment=environment, **keys)
    return try_environment(settings, Prompt(question(1), [1]), tokenizer, 100, 0).line


def test_the_trial_reports_the_first_prompt(tokenizer: Any) -> None:
    found = tried(tokenizer, f"{FILE}:Echo")
    assert found.startswith(f"rollout.environment {FILE}:Echo: a prompt of 20 tokens for rows.jsonl row 1; ")


@pytest.mark.parametrize(
    ("environment", "why", "code"),
    [
        ("none.py:Game", "file none.py does not exist", "no-such-file"),
        ("no_such_module:Game", "module no_such_module cannot be imported", "import-failed"),
        (f"{FILE}:Absent", "has no class Absent", "invalid-function"),
        (f"{FILE}:FOREVER", "has no class FOREVER", "invalid-function"),
        ("collections:OrderedDict", "OrderedDict has no method reset", "invalid-function"),
    ],
)
def test_a_class_that_cannot_be_loaded_is_refused(tokenizer: Any, environment: str, why: str, code: str) -> None:
    with pytest.raises(Refusal) as refused:
        tried(tokenizer, environment)
    (problem,) = refused.value.problems
    assert why in problem.why
    assert problem.where == f"rollout.environment {environment}"
    assert problem.code == code


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"environment_args": {"bugs": {"1": ["reset", "raises"]}}}, "reset raised ValueError: the bug"),
        ({"environment_args": {"nowhere": 1}}, "__init__ raised TypeError"),
        ({"environment_args": {"bugs": {"1": ["reset", "hangs"]}}, "step_timeout": 0.5}, "did not return within 0.5 s"),
        ({"environment_args": {"bugs": {"1": ["close", "raises"]}}}, "close raised ValueError: the bug"),
        ({"environment_args": {"bugs": {}}, "parser": "no such"}, "there is no parser"),
    ],
)
def test_a_bug_in_the_first_call_is_refused(tokenizer: Any, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(Refusal, match=re.escape(why)):
        tried(tokenizer, f"{FILE}:Buggy", **keys)


def test_the_remedy_names_the_classes_of_the_file_and_the_key_of_the_arguments(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from lockstep.environments import Start, Turn\n"
        "class Game:\n"
        "    def __init__(self, low): ...\n"
        "    def reset(self, row): ...\n"
        "class Sized(Game):\n"
        "    def reset(self, row, seed): ...\n"
        "    def step(self, reply): ...\n"
    )
    remedies = []
    for name in ("Absent", "Game", "Sized"):
        with pytest.raises(Refusal) as refused:
            tried(tokenizer, f"{file}:{name}")
        remedies.append(refused.value.problems[0].remedy)
    assert remedies[:2] == ["those of the file are: Game, Sized", "write: def reset(self, row, seed)"]
    assert "rollout.environment_args" in remedies[2]


# -- the end of the run ------------------------------------------------------------------------------------------------

ALONE = """
import sys, time
from lockstep.environments.host import EnvironmentHosts, HostSetup
hosts = EnvironmentHosts(HostSetup(sys.argv[1], {}, "rollout.environment", sys.argv[1], 1, 4))
print(hosts.hosts[0]._mark, flush=True)
time.sleep(10000)
"""


@pytest.mark.slow
def test_hosts_end_when_the_run_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ALONE, f"{FILE}:Echo"], stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdout is not None
        mark = alone.stdout.readline().strip()
        assert descendants(NOBODY, mark)
        os.kill(alone.pid, signal.SIGKILL)
        wait_until(lambda: not descendants(NOBODY, mark))
