"""An environment with a bug in every method: it raises, hangs, returns another type, has no end, writes huge texts,
returns NaN. Its trajectory fails alone and the reason names environment and method, or the run continues; no process is
left. Also constructors and tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import buggy_environments
from buggy_environments import BUGS, METHODS
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts, Host
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.setup import host_setup
from lockstep.launch.supervisor import NOBODY, descendants
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Origin, Question, Request, Sampling
from scripted_engine import Say, Scripted

FILE = buggy_environments.__file__
SLOW = ("hangs", "spins")
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"how": "{}"}}}}\n</tool_call>'
# Seconds after which a method hangs.
TIMEOUT = 2.0


class Watched(EnvironmentHosts):
    def __init__(self, settings: RolloutSettings):
        self.started: list[Host] = []
        super().__init__(host_setup(settings))

    def _start(self) -> Host:
        self.started.append(super()._start())
        assert len(self.hosts) <= 2 * self.setup.workers
        return self.started[-1]


def play(
    folder: Path, settings: RolloutSettings, rows: int, say: Say | None = None, hosts: Watched | None = None
) -> list[Completion]:
    """Plays a batch, and a second one with row 0, which has no bug. Checks that no process is left."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = builtin_text("qwen2.5")
    end = tokenizer.eos_token_id
    hosts = hosts or Watched(settings)
    inner = Scripted(tokenizer, say or (lambda request, turn: "hi"))
    engine = EnvironmentEngine(inner, hosts, settings, ChatFormat(tokenizer, frozenset({end})), len(tokenizer))

    def generated(rows: int) -> list[Completion]:
        prompt = [{"role": "user", "content": "?"}]
        asked = [Request([1], row, question=Question("", prompt, str(row), Origin("x", row))) for row in range(rows)]
        return sorted(engine.generate(asked, Sampling(400, stop_ids=(end,))), key=lambda one: one.request)

    try:
        made = generated(rows)
        (again,) = generated(1)
    finally:
        engine.close()
    assert [pid for host in hosts.started for pid in descendants(NOBODY, host._mark)] == []
    assert len(made) == rows
    assert again.failure == ""
    return made


def buggy(folder: Path, name: str, cases: list[tuple[str, str]], **keys: Any) -> list[Completion]:
    """Plays a row for each case, between two rows without a bug."""
    bugs = {str(row): case for row, case in enumerate(cases, 1)}
    given = {"environment_workers": 1, "step_timeout": TIMEOUT, **keys}
    settings = RolloutSettings(environment=f"{FILE}:{name}", environment_args={"bugs": bugs}, **given)
    return play(folder, settings, len(cases) + 2)


def check(name: str, case: tuple[str, str], made: Completion) -> None:
    """A bug fails the trajectory; the reason names the environment and the method."""
    method, how = case
    if method == "close" and how in ("wrong", "nan", "huge", "endless", "half"):
        assert made.failure == "", case  # the value is not used, and what the method prints is cut
        return
    assert f"{FILE}:{name}: " in made.failure, case
    assert method in made.failure or "returned" in made.failure, (case, made.failure)
    assert len(made.failure) < 2000
    assert made.trajectory is not None
    assert made.trajectory.stop == ("timeout" if "did not return" in made.failure else "tool_error")


QUICK = [(method, how) for method in METHODS[1:] for how in BUGS if how not in SLOW]
# One method for each bug, and one bug for each method.
SOME = list(dict.fromkeys(QUICK[i * len(QUICK) // 8 + i % 7 :][0] for i in range(8)))


@pytest.mark.parametrize("name", ["EveryBug", "EveryAsyncBug"])
@pytest.mark.parametrize("cases", [SOME, pytest.param(QUICK, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_bug_in_any_method_fails_its_trajectory_alone(
    tiny_folder: Path, name: str, cases: list[tuple[str, str]]
) -> None:
    made = buggy(tiny_folder, name, cases, step_timeout=60.0)
    assert made[0].failure == made[-1].failure == ""
    for case, one in zip(cases, made[1:-1], strict=True):
        check(name, case, one)


DAILY = [("reset", "hangs"), ("score_group", "hangs"), ("info", "spins")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EveryBug", "EveryAsyncBug"])
def test_a_method_without_an_end_fails_its_trajectory_alone(tiny_folder: Path, name: str) -> None:
    cases = [case for case in DAILY if name == "EveryBug" or case[1] == "hangs"]
    made = buggy(tiny_folder, name, cases)
    assert made[0].failure == made[-1].failure == ""
    for case, one in zip(cases, made[1:-1], strict=True):
        check(name, case, one)


@pytest.mark.slow
@pytest.mark.parametrize("how", SLOW)
@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("name", ["EveryBug", "EveryAsyncBug"])
def test_every_method_without_an_end(tiny_folder: Path, name: str, method: str, how: str) -> None:
    """A coroutine that computes without an end blocks its host, so the other trajectories of this host fail too."""
    made = buggy(tiny_folder, name, [(method, how)])
    check(name, (method, how), made[1])
    if name == "EveryBug" or how != "spins" or method == "info":
        assert made[0].failure == made[-1].failure == ""


@pytest.mark.slow
def test_many_groups_that_hang_fail_only_themselves(tiny_folder: Path) -> None:
    cases = [("score_group", "hangs") if i % 2 else ("step", "spins") for i in range(10)]
    made = buggy(tiny_folder, "EveryBug", cases, max_concurrent=4)
    assert made[0].failure == made[-1].failure == ""
    for case, one in zip(cases, made[1:-1], strict=True):
        check("EveryBug", case, one)


@pytest.mark.slow
def test_groups_wait_while_all_hosts_are_stuck(tiny_folder: Path) -> None:
    """A group that would need a third host waits until a stuck host has ended. `Watched` refuses a third host."""
    settings = RolloutSettings(environment=f"{FILE}:EveryBug", environment_args={"bugs": {}}, environment_workers=1)
    hosts = Watched(settings)

    def say(request: Request, turn: int) -> str:
        if request.session == 0 and turn == 1:
            first = hosts.hosts[0]
            first.stuck = True
            other = hosts.place(99)
            assert other is not None
            other.stuck = True
            assert len(hosts.hosts) == 2
            assert len(first.trajectories) == 3
        return "hi"

    made = play(tiny_folder, settings, 3, say, hosts)
    assert [one.failure for one in made] == ["", "", ""]
    assert [one.trajectory.scores["group"] for one in made if one.trajectory is not None] == [0.5, 0.5, 0.5]


@pytest.mark.daily("raises")
@pytest.mark.parametrize("how", ["raises", "hangs", pytest.param("exits", marks=pytest.mark.slow)])
def test_a_bug_in_a_constructor(tiny_folder: Path, tmp_path: Path, how: str) -> None:
    arguments = {"bugs": {"__init__": ("__init__", how)}, "objects": str(tmp_path / "objects.txt")}
    keys: dict[str, Any] = {"environment_workers": 1, "step_timeout": TIMEOUT, "max_concurrent": 1}
    settings = RolloutSettings(environment=f"{FILE}:EveryBug", environment_args=arguments, **keys)
    made = play(tiny_folder, settings, 3)
    assert [bool(one.failure) for one in made] == [False, True, False]
    assert f"{FILE}:EveryBug: " in made[1].failure
    assert ("__init__" if how != "hangs" else "reset did not return") in made[1].failure


def test_tokens_without_an_end_fail_their_trajectory(tiny_folder: Path) -> None:
    settings = RolloutSettings(environment=f"{FILE}:EndlessTokens", environment_workers=1, step_timeout=30.0)
    made = play(tiny_folder, settings, 3)
    assert [bool(one.failure) for one in made] == [False, True, False]
    assert "step_tokens returned" in made[1].failure


@pytest.mark.daily("tool")
@pytest.mark.parametrize("name", ["tool", "async_tool"])
def test_a_bug_in_a_tool_is_a_message_to_the_model(tiny_folder: Path, name: str) -> None:
    names = [how for how in BUGS if how not in SLOW]
    settings = RolloutSettings(tools=[f"{FILE}:{name}"], environment_workers=1)

    def say(request: Request, turn: int) -> str:
        how = names[request.session] if turn == 0 and (request.session or 0) < len(names) else ""
        return CALL.format(name, how) if how else "done"

    made = play(tiny_folder, settings, len(names), say)
    for how, one in zip(names, made, strict=True):
        assert one.failure == "", how
        assert one.trajectory is not None
        (result,) = (message["content"] for message in one.trajectory.messages if message["role"] == "tool")
        assert result.startswith("error: ") == (how.startswith("raises") or how == "exits"), (how, result[:99])
        assert len(result) < 10_000
        assert result.isprintable() or how != "half"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("tool", "hangs"), ("tool", "spins"), ("async_tool", "hangs")])
def test_a_tool_that_hangs_is_a_message_to_the_model(tiny_folder: Path, name: str, how: str) -> None:
    settings = RolloutSettings(tools=[f"{FILE}:{name}"], environment_workers=1, step_timeout=1.0)
    call = CALL.format(name, how)
    made = play(tiny_folder, settings, 1, lambda request, turn: call if turn == 0 and request.session == 0 else "done")
    assert made[0].failure == ""
    assert made[0].trajectory is not None
    assert "did not return within 1 s" in made[0].trajectory.messages[2]["content"]
