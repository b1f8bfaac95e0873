"""Sandboxes that cannot start: the program is not the reason, so nothing is graded, and the failure follows
`reward.max_failures`."""

from __future__ import annotations

import json
import os
import signal
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from hang import HANG, wait_until
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments import sandbox
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.grading import grade
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.sandbox import (
    BUBBLEWRAP,
    LIMITS,
    NAMESPACES,
    SandboxFailed,
    SandboxLimits,
    execute,
    run_bash,
    why_unusable,
)
from lockstep.environments.sandbox_process import descendants
from lockstep.environments.setup import host_setup
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_reward import Reward
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.reward.scorer import RulePart
from lockstep.types import Failure, Origin, Question, Request, Sampling
from scripted_engine import Scripted

UNHURRIED = SandboxLimits(seconds=HANG)
isolated = pytest.mark.skipif(bool(why_unusable(NAMESPACES)), reason=why_unusable(NAMESPACES))
EVERY = [pytest.param(NAMESPACES, marks=isolated), LIMITS]
CODE, TESTS = "```python\ndef add(a, b):\n    return a + b\n```", "assert add(1, 2) == 3"


@pytest.mark.parametrize("isolation", EVERY)
def test_the_exit_code_of_a_program_is_no_failure(isolation: str) -> None:
    for code in (1, 125, 126, 127):
        assert run_bash(f"exit {code}", UNHURRIED, isolation=isolation).status == code


@pytest.mark.parametrize("isolation", EVERY)
def test_a_program_that_cannot_be_executed_is_a_failure(isolation: str) -> None:
    with pytest.raises(SandboxFailed, match="No such file"):
        execute(["/no/such/program"], {}, UNHURRIED, isolation=isolation)


@isolated
def test_a_mount_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "visible_folders", lambda: ["/no/such/folder"])
    with pytest.raises(SandboxFailed, match="No such file"):
        run_bash("echo", UNHURRIED, isolation=NAMESPACES)


def test_a_folder_that_cannot_be_made_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(SandboxFailed, match="No such file"):
        run_bash("echo", UNHURRIED, isolation=LIMITS)


@isolated
def test_a_helper_that_is_killed_is_a_failure() -> None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            run_bash("sleep 100000", UNHURRIED, isolation=NAMESPACES)
        except SandboxFailed as error:
            found.append(error)

    def helpers() -> list[int]:
        children = [pid for pid in descendants(os.getpid()) if (Path("/proc") / str(pid)).exists()]
        return [pid for pid in children if b"sandbox_process.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: any(b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(os.getpid())))
    os.kill(helpers()[0], signal.SIGKILL)
    thread.join(HANG)
    assert len(found) == 1


# A program in the place of `bwrap` or `docker`: executes the command, or fails before. Neither is on most machines.
BWRAP = """#!/bin/bash
{before}
while [ "$1" != -- ]; do shift; done
shift; exec "$@"
"""
DOCKER = """#!/bin/bash
case "$1" in
  image) exit 0 ;;
  rm) exit 0 ;;
  run)
    {before}
    while [ "$1" != known ]; do [ "$1" = --volume ] && folder="${{2%%:*}}"; shift; done
    shift; cd "$folder" || exit 1
    exec "$@" ;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def write(folder: Path, name: str, text: str, before: str = "") -> None:
    (folder / name).write_text(text.format(before=before))
    (folder / name).chmod(stat.S_IRWXU)


def test_bubblewrap_that_is_missing_or_fails_is_a_failure(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as missing:
        missing.setenv("PATH", str(programs))  # the machine may have one
        with pytest.raises(SandboxFailed, match="bwrap"):
            run_bash("echo", UNHURRIED, isolation=BUBBLEWRAP)
    write(programs, "bwrap", BWRAP, "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    with pytest.raises(SandboxFailed, match="uid map: Permission denied"):
        run_bash("echo", UNHURRIED, isolation=BUBBLEWRAP)
    write(programs, "bwrap", BWRAP)
    done = execute(["/bin/bash", "-c", "echo out; echo 'bwrap: me' >&2; exit 1"], {}, UNHURRIED, isolation=BUBBLEWRAP)
    assert (done.stdout, done.stderr, done.status) == ("out\n", "bwrap: me\n", 1)


@pytest.mark.parametrize("code", [125, 126, 127])
def test_a_container_that_does_not_start_is_a_failure(programs: Path, code: int) -> None:
    daemon = "docker: Error response from daemon: no space left on device."
    write(programs, "docker", DOCKER, f"echo '{daemon}' >&2; exit {code}")
    with pytest.raises(SandboxFailed, match="no space left on device"):
        run_bash("echo", UNHURRIED, isolation="docker:known")
    write(programs, "docker", DOCKER, "echo 'WARNING: no swap limit' >&2")
    done = run_bash(f"echo '{daemon}' >&2; exit {code}", UNHURRIED, isolation="docker:known")
    assert (done.stderr, done.status) == (f"WARNING: no swap limit\n{daemon}\n", code)


def test_a_container_that_starts_too_late_is_a_failure(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_GRACE", 0.5)
    write(programs, "docker", DOCKER, "exec >/dev/null 2>&1; exec sleep 1000000")
    with pytest.raises(SandboxFailed, match="docker:known"):
        run_bash("echo", SandboxLimits(seconds=0.5), isolation="docker:known")


# -- grading and tools -------------------------------------------------------------------------------------------------


def test_grading_fails_if_its_program_does_not_start(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the container starts, but has no Python."""
    monkeypatch.setenv("LOCKSTEP_SANDBOX", "docker:known")
    for before in ("exit 125", 'PATH="/no/such"'):
        write(programs, "docker", DOCKER, before)
        with pytest.raises(SandboxFailed):
            grade(CODE, TESTS, UNHURRIED)


@isolated
@pytest.mark.parametrize("last", ["import os; os._exit(125)", "import os, signal; os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("truth", [TESTS, json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})])
def test_code_cannot_turn_a_zero_into_a_failure(last: str, truth: str) -> None:
    assert grade(f"```python\nprint()\n{last}\n```", truth, UNHURRIED) == 0.0


def test_the_rule_returns_a_failure(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(programs, "docker", DOCKER, "echo 'docker: no space left' >&2; exit 125")
    monkeypatch.setenv("LOCKSTEP_SANDBOX", "docker:known")
    question = Question("code", [], TESTS, Origin("rows.jsonl", 1))
    part = RulePart(Reward(rules={"code": "sandbox"}, workers=1, time_limit=600), ["code"])
    try:
        outcome = part.submit(question, CODE).result()
    finally:
        part.close()
    assert isinstance(outcome, Failure)
    assert "no space left" in outcome.why


@pytest.mark.slow
def test_a_tool_whose_sandbox_does_not_start_fails_its_trajectory(
    programs: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    write(programs, "docker", DOCKER, "echo 'docker: no space left' >&2; exit 125")
    monkeypatch.setenv("LOCKSTEP_SANDBOX", "docker:known")
    tokenizer = load_tokenizer(str(tiny_folder))
    tokenizer.chat_template = builtin_text("qwen2.5")
    settings = RolloutSettings(tools=["bash"], environment_workers=1)
    text = '<tool_call>\n{"name": "bash", "arguments": {"script": "ls"}}\n</tool_call>'
    hosts = EnvironmentHosts(host_setup(settings))
    chat = ChatFormat(tokenizer, frozenset({tokenizer.eos_token_id}))
    engine = EnvironmentEngine(Scripted(tokenizer, lambda request, turn: text), hosts, settings, chat, len(tokenizer))
    question = Question("", [{"role": "user", "content": "?"}], "", Origin("rows.jsonl", 1))
    try:
        (made,) = engine.generate(
            [Request([1], 0, question=question)], Sampling(2000, stop_ids=(tokenizer.eos_token_id,))
        )
    finally:
        engine.close()
    assert "no space left" in made.failure
