"""Agents that fail, hang, die or cannot be loaded: only their trajectories fail, and no process is left. Programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep.http_server
from agent_engines import FILE, Watched, engine_of, question, repeats, run
from lockstep.environments.agents.agent_setup import try_agent
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Prompt, Request, Sampling


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


FAILURES = {
    "raises": "run raised ValueError: the bug (agent_functions.py line",
    "exits": "run raised SystemExit: 3",
    "text": "run returned 'good' as the score, which is not a finite number",
    "nan": "run returned nan as the score, which is not a finite number",
    "nothing": "run returned no reward",
    "empty": "run returned an empty dict",
    "unknown": "run returned the key 'score' besides reward",
    "silent": "run ended without a turn of the model",
}


def test_a_bug_fails_its_trajectory_alone(tokenizer: Any) -> None:
    names = [*FAILURES, "leaves", ""]
    bugs = {name: name for name in names}
    engine = engine_of(tokenizer, "buggy", repeats(tokenizer), environment_args={"bugs": bugs})
    watched = Watched(engine)
    try:
        made = run(engine, names)
        again = run(engine, [""])
    finally:
        engine.close()
    for name, one in zip(names, made, strict=True):
        assert FAILURES.get(name, "") in one.failure, name
        assert (one.stop == "failed") == (name in FAILURES)
        if name in FAILURES:
            assert one.failure.startswith(f"{FILE}:buggy: ")
            assert one.failure_key == "rollout.agent"
    assert again[0].failure == ""
    assert watched.left() == []


@pytest.mark.slow
def test_agents_that_hang_are_killed_and_named(tokenizer: Any) -> None:
    bugs = {"bad": "hangs"}
    keys = {"environment_args": {"bugs": bugs}, "step_timeout": 4.0}
    engine = engine_of(tokenizer, "buggy", repeats(tokenizer), **keys)
    watched = Watched(engine)
    try:
        bad, good = run(engine, ["bad", "good"])
    finally:
        engine.close()
    assert good.failure == ""
    assert "buggy: run neither asked the model nor returned within 4 s (rollout.step_timeout)" in bad.failure
    assert bad.trajectory is not None
    assert bad.trajectory.stop == "timeout"
    assert watched.left() == []


@pytest.mark.slow
def test_a_coroutine_that_hangs_is_cancelled(tokenizer: Any) -> None:
    engine = engine_of(tokenizer, "waits", repeats(tokenizer), step_timeout=4.0)
    watched = Watched(engine)
    try:
        (made,) = run(engine)
        assert len(engine.hosts.hosts) == 1  # a coroutine is cancelled, so that its host is not killed
    finally:
        engine.close()
    assert "waits: run neither asked" in made.failure
    assert watched.left() == []


@pytest.mark.slow
def test_a_host_that_dies_fails_its_trajectories(tokenizer: Any) -> None:
    keys = {"environment_args": {"bugs": {"bad": "kills"}}, "max_concurrent": 1}
    engine = engine_of(tokenizer, "buggy", repeats(tokenizer), **keys)
    watched = Watched(engine)
    try:
        bad, good = run(engine, ["bad", "good"])
    finally:
        engine.close()
    assert "its process" in bad.failure
    assert good.failure == ""
    assert watched.left() == []


@pytest.mark.slow
def test_an_interrupted_batch_leaves_nothing(tokenizer: Any) -> None:
    engine = engine_of(tokenizer, "buggy", repeats(tokenizer), environment_args={"bugs": {"bad": "hangs"}})
    watched = Watched(engine)
    requests = [Request([1], row, question=question(truth)) for row, truth in enumerate(("good", "bad"))]
    made = engine.generate(requests, Sampling(200, stop_ids=(tokenizer.eos_token_id,)))
    next(iter(made))
    made.close()  # type: ignore[attr-defined]
    engine.close()
    assert watched.left() == []


# -- programs ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, time
from openai import OpenAI

row = json.loads(sys.stdin.readline())
assert sys.argv[1] == os.environ["OPENAI_BASE_URL"]
client = OpenAI()
reply = client.chat.completions.create(model="m", messages=row["prompt"]).choices[0].message.content
print("a line of the log")
if row["ground_truth"] == "hangs":
    time.sleep(10_000)
if row["ground_truth"] == "fails":
    sys.exit(3)
if row["ground_truth"] != "no reward":
    print(json.dumps({"reward": len(reply), "metrics": {"seed": int(os.environ["LOCKSTEP_SEED"]) % 7}}))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    return f"command:{sys.executable} {file} {{base_url}}"


@pytest.mark.slow
def test_a_program_is_an_agent(tokenizer: Any, program: str) -> None:
    engine = engine_of(tokenizer, program, repeats(tokenizer))
    try:
        (right,) = run(engine, ["right"])
    finally:
        engine.close()
    assert right.failure == ""
    assert right.trajectory is not None
    assert right.trajectory.scores == {"score": float(len("re 2+3?"))}
    assert "seed" in right.trajectory.metrics


@pytest.mark.slow
def test_programs_that_fail_or_hang(tokenizer: Any, program: str) -> None:
    engine = engine_of(tokenizer, program, repeats(tokenizer), step_timeout=20.0)
    watched = Watched(engine)
    try:
        fails, silent, hangs = run(engine, ["fails", "no reward", "hangs"])
    finally:
        engine.close()
    assert "the program ended with exit status 3" in fails.failure
    assert "run returned no reward" in silent.failure
    assert "run neither asked the model nor returned within" in hangs.failure
    assert watched.left() == []


# -- before training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "code", "why"),
    [
        ("wrong.py:missing", "invalid-function", "has no function missing"),
        ("wrong.py:NotAFunction", "invalid-function", "NotAFunction is a class"),
        ("wrong.py:no_url", "invalid-function", "no_url cannot be called"),
        ("nowhere.py:run", "no-such-file", "nowhere.py"),
        ("command:no-such-program x", "no-such-file", "no-such-program"),
        ("command:'x", "invalid-function", "command line"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_refused(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, code: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text("class NotAFunction: pass\ndef no_url(row): pass\n", encoding="utf-8")
    with pytest.raises(Refusal) as refused:
        try_agent(RolloutSettings(agent=agent), Prompt(question("5"), [1]), tokenizer)
    (problem,) = refused.value.problems
    assert problem.where.startswith("rollout.agent ")
    assert problem.code == code
    assert why in problem.why


def test_an_agent_needs_the_extra_of_the_server(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "lockstep.http_server.asgi", raising=False)
    monkeypatch.delattr(lockstep.http_server, "asgi", raising=False)
    with pytest.raises(Refusal) as refused:
        try_agent(RolloutSettings(agent=f"{FILE}:tree"), Prompt(question("5"), [1]), tokenizer)
    (problem,) = refused.value.problems
    assert problem.code == "missing-package"
    assert "serve" in problem.remedy


@pytest.mark.slow
def test_the_trial_loads_the_agent(tokenizer: Any) -> None:
    said = try_agent(RolloutSettings(agent=f"{FILE}:tree"), Prompt(question("5"), [1]), tokenizer).line
    assert said.startswith(f"rollout.agent {FILE}:tree: loaded")
    settings = RolloutSettings(agent=f"{FILE}:tree", agent_host="203.0.113.7")
    with pytest.raises(Refusal) as refused:
        try_agent(settings, Prompt(question("5"), [1]), tokenizer)
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == ("rollout.agent_host 203.0.113.7", "port-unavailable")
