"""Environments with a bug in every method: only their trajectories fail, the reason names the environment and the
method, and no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
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
ROWS = 3


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def question(row: int) -> Question:
    return Question("sums", [{"role": "user", "content": "?"}], str(row), Origin("rows.jsonl", row))


class Watched(EnvironmentHosts):
    """Remembers every host process."""

    def __init__(self, settings: RolloutSettings):
        self.started: list[Host] = []
        super().__init__(host_setup(settings))

    def _start(self) -> Host:
        self.started.append(super()._start())
        return self.started[-1]

    def left(self) -> list[int]:
        """The living processes of all hosts."""
        return [pid for host in self.started for pid in descendants(NOBODY, host._mark)]


def run(tokenizer: Any, environment: str, batches: int = 1, **keys: Any) -> tuple[list[Completion], Watched]:
    """Generates with an environment. Afterwards no process is left."""
    settings = RolloutSettings(environment=f"{FILE}:{environment}", **{"environment_workers": 1, **keys})
    hosts = Watched(settings)
    chat = ChatFormat(tokenizer, frozenset({tokenizer.eos_token_id}))
    engine = EnvironmentEngine(Scripted(tokenizer, lambda request, turn: "hi"), hosts, settings, chat, len(tokenizer))
    ids = tokenizer("?")["input_ids"]
    requests = [Request(ids, row, question=question(row)) for row in range(ROWS)]
    try:
        for _ in range(batches):
            made = list(engine.generate(requests, Sampling(200, stop_ids=(tokenizer.eos_token_id,))))
            assert not any(host.stuck or host.calls.keys() & host.trajectories for host in hosts.hosts)
    finally:
        engine.close()
    assert hosts.left() == []
    return sorted(made, key=lambda one: one.request), hosts


def failures(made: Sequence[Completion]) -> list[str]:
    assert [one.request for one in made] == list(range(ROWS))
    return [one.failure for one in made]


@pytest.mark.parametrize(
    ("where", "how", "why"),
    [
        ("reset", "raises", "reset raised ValueError: the bug (environment_classes.py line"),
        ("reset", "wrong type", "reset returned 7, expected Start(messages=[...])"),
        ("reset", "huge", "returned 33,554"),
        ("step", "raises", "step raised ValueError: the bug (environment_classes.py line"),
        ("step", "exits", "step raised SystemExit: 3"),
        ("step", "wrong type", "step returned 7, expected Turn(...)"),
        ("step", "nan", "step returned nan as the reward, which is not a finite number"),
        ("step", "huge", "returned 33,554"),
        ("step", "nothing", "step returned neither messages nor done=True"),
        ("step", "not text", "step returned 3 as the content of message 1, not text"),
        ("step", "assistant", "step returned message 1 with the role 'assistant'"),
        ("score", "raises", "score raised ValueError: the bug"),
        ("score", "wrong type", "score returned 'seven' as the score, which is not a finite number"),
        ("score", "nan", "score returned nan as the score"),
        ("close", "raises", "close raised ValueError: the bug"),
    ],
)
def test_a_bug_fails_its_trajectory_alone(tokenizer: Any, where: str, how: str, why: str) -> None:
    made, _ = run(tokenizer, "Buggy", environment_args={"where": where, "how": how})
    good, bad, other = failures(made)
    assert (good, other) == ("", "")
    assert f"environment_classes.py:Buggy: {why}" in bad
    assert (made[1].stop, made[1].ids) == ("failed", [])
    assert made[1].trajectory is not None
    assert made[1].trajectory.stop == "tool_error"
    assert made[0].trajectory is not None
    assert made[0].trajectory.scores == {"score": 1.0}


def test_an_endless_environment_ends_at_the_limit_of_turns(tokenizer: Any) -> None:
    made, _ = run(tokenizer, "Buggy", environment_args={"where": "step", "how": "endless"}, max_turns=4)
    assert failures(made) == ["", "", ""]
    assert [one.trajectory.stop for one in made if one.trajectory is not None] == [
        "completed",
        "max_turns",
        "completed",
    ]


@pytest.mark.parametrize("where", ["reset", "step", "score", "close"])
def test_a_hanging_method_is_named_and_its_host_replaced(tokenizer: Any, where: str) -> None:
    made, hosts = run(
        tokenizer, "Buggy", 2, environment_args={"where": where, "how": "hangs"}, step_timeout=1.0, max_concurrent=8
    )
    good, bad, other = failures(made)
    assert (good, other) == ("", "")
    name = "finish" if where in ("score", "close") else where
    assert f"Buggy: {name} did not return within 1 s (rollout.step_timeout)" in bad
    assert made[1].trajectory is not None
    assert made[1].trajectory.stop == "timeout"
    assert len(hosts.started) == 2  # each batch leaves a thread that cannot be cancelled


def test_a_hanging_trajectory_delays_no_other(tokenizer: Any) -> None:
    settings = RolloutSettings(
        environment=f"{FILE}:Buggy", environment_args={"where": "step", "how": "hangs"}, step_timeout=5.0
    )
    hosts = Watched(settings)
    chat = ChatFormat(tokenizer, frozenset({tokenizer.eos_token_id}))
    engine = EnvironmentEngine(Scripted(tokenizer, lambda request, turn: "hi"), hosts, settings, chat, len(tokenizer))
    requests = [Request(tokenizer("?")["input_ids"], row, question=question(row)) for row in range(ROWS)]
    made = [one.request for one in engine.generate(requests, Sampling(200, stop_ids=(tokenizer.eos_token_id,)))]
    engine.close()
    assert made[-1] == 1
    assert sorted(made) == [0, 1, 2]


@pytest.mark.parametrize("how", ["waits", "stays", "exits"])
def test_a_coroutine_that_hangs_is_cancelled(tokenizer: Any, how: str) -> None:
    made, hosts = run(tokenizer, "AsyncBuggy", environment_args={"where": "step", "how": how}, step_timeout=1.0)
    good, bad, other = failures(made)
    assert (good, other) == ("", "")
    assert ("step raised SystemExit" if how == "exits" else "step did not return within 1 s") in bad
    assert len(hosts.started) == 1


def test_a_coroutine_that_blocks_its_host_is_killed_with_it(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.environments.loop.ACKNOWLEDGE_SECONDS", 0.5)
    args = {"where": "step", "how": "blocks"}
    made, hosts = run(tokenizer, "AsyncBuggy", environment_args=args, step_timeout=1.0)
    assert "step did not return within 1 s" in failures(made)[1]
    assert hosts.hosts == []


def test_a_host_that_dies_fails_its_trajectories_and_is_replaced(tokenizer: Any) -> None:
    made, hosts = run(tokenizer, "Buggy", 2, environment_args={"where": "step", "how": "kills"})
    assert "its process was killed (SIGKILL)" in failures(made)[1]
    assert len(hosts.started) >= 2


def test_close_is_called_for_every_trajectory_also_after_a_failure(tokenizer: Any, tmp_path: Path) -> None:
    log = tmp_path / "closed.txt"
    run(tokenizer, "Buggy", environment_args={"where": "step", "how": "raises", "log": str(log)})
    assert sorted(log.read_text().splitlines()) == ["closed 0", "closed 1", "closed 2"]


def test_an_interrupted_batch_leaves_no_call_behind(tokenizer: Any) -> None:
    settings = RolloutSettings(environment=f"{FILE}:Echo", environment_workers=2)
    hosts = Watched(settings)
    chat = ChatFormat(tokenizer, frozenset({tokenizer.eos_token_id}))

    def broken(request: Request, turn: int) -> str:
        raise RuntimeError("the engine fails")

    engine = EnvironmentEngine(Scripted(tokenizer, broken), hosts, settings, chat, len(tokenizer))
    requests = [Request(tokenizer("?")["input_ids"], row, question=question(row)) for row in range(ROWS)]
    with pytest.raises(RuntimeError, match="the engine fails"):
        list(engine.generate(requests, Sampling(200)))
    assert hosts.hosts == []
    assert hosts.left() == []


# -- before training ---------------------------------------------------------------------------------------------------


def tried(tokenizer: Any, environment: str, **keys: Any) -> str:
    settings = RolloutSettings(environment=environment, **keys)
    return try_environment(settings, Prompt(question(1), [1]), tokenizer, 100, 0)


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
        ({"environment_args": {"where": "reset", "how": "raises"}}, "reset raised ValueError: the bug"),
        ({"environment_args": {"nowhere": 1}}, "__init__ raised TypeError"),
        ({"environment_args": {"where": "reset", "how": "hangs"}, "step_timeout": 0.5}, "did not return within 0.5 s"),
        ({"environment_args": {"where": "close", "how": "raises"}}, "close raised ValueError: the bug"),
        ({"environment_args": {"where": "", "how": ""}, "parser": "no such"}, "there is no parser"),
    ],
)
def test_a_bug_in_the_first_call_is_refused(tokenizer: Any, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(Refusal, match=re.escape(why)):
        tried(tokenizer, f"{FILE}:Buggy", **keys)


# -- the end of the run ------------------------------------------------------------------------------------------------

ALONE = """
import sys, time
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.setup import host_setup
from lockstep.recipe.keys_rollout import RolloutSettings
hosts = EnvironmentHosts(host_setup(RolloutSettings(environment=sys.argv[1])))
print(hosts.hosts[0]._mark, flush=True)
time.sleep(10000)
"""


def test_hosts_end_when_the_run_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ALONE, f"{FILE}:Echo"], stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdout is not None
        mark = alone.stdout.readline().strip()
        assert descendants(NOBODY, mark)
        os.kill(alone.pid, signal.SIGKILL)
        wait_until(lambda: not descendants(NOBODY, mark))
