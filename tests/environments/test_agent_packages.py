"""Unmodified agents of other packages: OpenAI's Agents SDK, and verifiers through the program of `examples/agents`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_engines import engine_of, marked, run, whole
from conftest import question_rows, write_jsonl
from hang import HANG
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.model.load import load_tokenizer
from lockstep.run.metrics import read_metrics
from lockstep.types import Completion, Request
from scripted_engine import Say

HERE = Path(__file__).parent
PROGRAM = HERE.parents[1] / "examples" / "agents" / "verifiers_agent.py"
SDK = f"{HERE / 'sdk_agent.py'}:run"
VERIFIERS = f"command:{os.environ['LOCKSTEP_VERIFIERS_PYTHON']} {PROGRAM} verifiers_sums"


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    found: Any = load_tokenizer(str(tiny_folder))
    found.chat_template = builtin_text("qwen2.5")
    return found


@pytest.fixture(autouse=True)
def task_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers imports the task set `verifiers_sums` of this folder."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def played(tokenizer: Any, agent: str, say: Say, truth: str = "", extra: Any = None, **keys: Any) -> Completion:
    engine = engine_of(tokenizer, agent, say, step_timeout=HANG, **keys)
    try:
        (made,) = run(engine, [truth], extra)
    finally:
        engine.close()
    assert made.failure == ""
    return made


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_agents_sdk_calls_its_tools(tokenizer: Any, api: str) -> None:
    """The model calls the tool, reads its result and answers."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

    def say(request: Request, turn: int) -> str:
        return "it is 5" if "<tool_response>" in tokenizer.decode(list(request.ids)) else call

    made = played(tokenizer, SDK, say, "5", environment_args={"api": api})
    found = made.trajectory
    assert found is not None
    assert (found.scores, found.info) == ({"score": 1.0}, {"output": "it is 5"})
    assert (found.metrics["turns"], found.metrics["tool_calls"]) == (2, 1)
    (row,) = whole(made)
    assert marked(tokenizer, row).startswith("<system\nUse the tool.")
    # Only the two turns are trained; the result of the tool is not.
    trained = [tokenizer.decode(made.ids[turn.start : turn.stop]) for turn in found.turns]
    assert trained == [f"{call}<|im_end|>", "it is 5<|im_end|>"]
    assert sum(made.loss_mask) == sum(turn.stop - turn.start for turn in found.turns)


@pytest.mark.parametrize(("text", "score"), [("it is 4", 1.0), ("it is 5", 0.0)])
def test_verifiers_plays_a_task_and_gives_the_reward(tokenizer: Any, text: str, score: float) -> None:
    """The task with the number 2 asks for 2+2."""
    found = played(tokenizer, VERIFIERS, lambda request, turn: text, extra={"idx": 2}).trajectory
    assert found is not None
    assert [message["content"] for message in found.messages] == ["2+2?", text]
    assert found.scores == {"score": score}


@pytest.mark.parametrize("agent", [SDK, VERIFIERS], ids=["agents SDK", "verifiers"])
def test_an_agent_trains(tiny_folder: Path, tmp_path: Path, agent: str) -> None:
    rows = [{**row, "extra_info": {"idx": number % 4}} for number, row in enumerate(question_rows(4))]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    recipe = {
        "method": "grpo",
        "device": "cpu",
        "run": {"name": "run", "folder": str(tmp_path), "steps": 1, "export": False},
        "model": {"path": str(tiny_folder)},
        "data": {"train": str(train), "template": "qwen2.5", "max_prompt_tokens": 900},
        "batch": {"prompts": 1, "tokens": 2048},
        "rollout": {"n": 2, "max_tokens": 700, "turn_tokens": 8, "agent": agent, "step_timeout": HANG},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "lockstep", "train", "recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (_, found), *_ = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (found["reward/failed"], found["environment/stop/completed"]) == (0, 1)
    assert found["environment/turns"] >= 1
