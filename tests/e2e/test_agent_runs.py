"""Runs with an agent that uses OpenAI's client: rows, rewards, samples, validation, replay, resume, ranks, learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from commands import torchrun
from conftest import question_rows, run, write_jsonl
from lockstep.errors import Refusal
from lockstep.parity.replay.replay_command import replay
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import rollouts_of
from lockstep.train.start import run_recipe
from runs import stored

# The agent has a conversation of two turns, retries its first request, and asks a sub-agent: three rows. It earns the
# share of letters that are vowels.
AGENT = """
from pathlib import Path
from openai import OpenAI

def run(row, base_url, calls=None, fails=()):
    if calls:
        with Path(calls).open("a") as file:
            file.write("run" + chr(10))
    client = OpenAI(base_url=base_url, max_retries=0)
    def ask(*messages, **keys):
        made = client.chat.completions.create(model="policy", messages=list(messages), **keys)
        return made.choices[0].message.model_dump(exclude_none=True)
    question = row["prompt"][-1]
    ask(question, temperature=0.1)
    first = ask(question)
    more = {"role": "user", "content": "more"}
    second = ask(question, first, more)
    other = ask({"role": "system", "content": "Judge."}, {"role": "user", "content": "?"})
    if row["ground_truth"] in fails:
        raise ValueError("the bug")
    text = first["content"] + second["content"] + other["content"]
    share = sum(letter in "aeiou" for letter in text) / max(len(text), 1)
    return {"reward": {"vowels": share}, "metrics": {"success": float(share > 0)}}
"""


def write_recipe(folder: Path, model: Path, **keys: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(AGENT, encoding="utf-8")
    rows = write_jsonl(folder / "train.jsonl", question_rows(12))
    rollout = {
        "n": 2,
        "max_tokens": 120,
        "turn_tokens": 8,
        "agent": f"{folder}/agent.py:run",
        "environment_workers": 1,
        **keys.pop("rollout", {}),
    }
    values = {
        "method": "grpo",
        "device": "cpu",
        "run": {"name": "run", "folder": str(folder / "runs"), "steps": 2, "export": False, **keys.pop("run", {})},
        "model": {"path": str(model)},
        "data": {"train": str(rows)},
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "batch": {"prompts": 2, "tokens": 2048},
        "rollout": rollout,
        **keys,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run with a tape and validation. Returns its folder."""
    folder = tmp_path_factory.mktemp("agent")
    val = write_jsonl(folder / "val.jsonl", question_rows(2))
    keys = {
        "rollout": {"environment_args": {"calls": str(folder / "calls.txt")}},
        "val": {"questions": str(val), "every": 1, "max_new_tokens": 120},
        "tape": {"record": True},
        "log": {"samples": 8},
    }
    return run_recipe(load_recipe(str(write_recipe(folder, tiny_folder, **keys))))


def test_metrics_and_samples(recorded: Path) -> None:
    metrics = dict(read_metrics(recorded / "metrics.jsonl"))[2]
    assert metrics["environment/turns"] == 4
    assert metrics["environment/rows"] == 3
    assert metrics["environment/ignored_sampling"] == 1
    assert metrics["environment/stop/completed"] == 1
    assert metrics["reward/score/vowels/mean"] == metrics["reward/score/mean"]
    assert metrics["val/turns"] == 4
    # The trainer computes the log-probs of all rows as the engine did when it sampled them.
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["actor/grad_norm"] > 0
    lines = [json.loads(line) for line in (recorded / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        said = [one for one in line["conversation"] if one["role"] == "assistant"]
        assert [one["turn"] for one in said] == [0, 1, 2, 3]
        assert [one["row"] for one in said] == [0, 1, 1, 2]
        assert line["conversation"][-2] == {"role": "user", "content": "?", "row": 2}


@pytest.mark.slow
def test_a_replay_does_not_run_the_agent(recorded: Path) -> None:
    """A forced replay generates each turn of each row again, with the recorded noise."""
    tape = TapeFolder(recorded / "tape")
    for one in rollouts_of(tape.read_table(tape.rollouts_file(1)), TapeImages(tape.path)):
        assert one.trajectory is not None
        assert len(one.rows) == 3
        assert sum(one.loss_mask) == sum(turn.stop - turn.start for turn in one.trajectory.turns)
    calls = recorded.parent.parent / "calls.txt"
    before = calls.read_text()
    found = replay(recorded, "forced", [], Console.silent())
    assert calls.read_text() == before
    assert found is not None
    assert found.in_step, found.cause or found.module
    checks = {check.stage: check for check in found.checks}
    assert "0 of 4 responses diverge" in checks["generation"].what


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tiny_folder: Path, tmp_path: Path) -> None:
    """Bit by bit, because the agent is deterministic."""
    file = write_recipe(tmp_path, tiny_folder)
    whole = lockstep.train(file, **{"run.name": "whole"})
    lockstep.train(file, **{"run.name": "parts", "run.steps": 1})
    parts = lockstep.train(file, **{"run.name": "parts"})
    one, other = stored(parts, 2), stored(whole, 2)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_failures_follow_the_tolerance(tiny_folder: Path, tmp_path: Path) -> None:
    truths = [row["reward_model"]["ground_truth"] for row in question_rows(12)]
    keys: dict[str, Any] = {
        "rollout": {"environment_args": {"fails": truths[:3]}},
        "run": {"steps": 1},
        "batch": {"prompts": 12, "tokens": 2048},
    }
    file = write_recipe(tmp_path, tiny_folder, **keys)
    failing = 2 * sum(truth in truths[:3] for truth in truths)
    folder = run_recipe(load_recipe(str(file), ["reward.max_failures=0.9"]))
    ((_, metrics),) = read_metrics(folder / "metrics.jsonl")
    assert metrics["reward/failed"] == failing
    with pytest.raises(Refusal) as stopped:
        run_recipe(load_recipe(str(file), ["run.name=other", "reward.max_failures=0.01"]))
    (problem,) = stopped.value.problems
    assert problem.where == "rollout.agent"
    assert "agent.py:run: run raised ValueError: the bug" in problem.why


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["rollout.max_staleness=1"], ["rollout.engine=hf"], ["method=ppo", "rollout.n=1"], ["run.deterministic=true"]],
    ids=["worker", "hf", "ppo", "deterministic"],
)
def test_other_engines_and_methods(tiny_folder: Path, tmp_path: Path, words: list[str]) -> None:
    file = write_recipe(tmp_path, tiny_folder)
    folder = run_recipe(load_recipe(str(file), words))
    for _, metrics in read_metrics(folder / "metrics.jsonl"):
        assert metrics["environment/turns"] == 4
        assert metrics["environment/stop/completed"] == 1
        assert metrics["reward/failed"] == 0


@pytest.mark.slow
def test_validation_has_its_own_agent(tiny_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        AGENT.replace("def run(", "def judge(").replace("    first = ask", "    ask(question)\n    first = ask")
    )
    val = write_jsonl(tmp_path / "val.jsonl", question_rows(2))
    keys = {"val": {"questions": str(val), "every": 1, "max_new_tokens": 120, "agent": f"{other}:judge"}}
    folder = run_recipe(load_recipe(str(write_recipe(tmp_path, tiny_folder, run={"steps": 1}, **keys))))
    ((_, metrics),) = read_metrics(folder / "metrics.jsonl")
    assert (metrics["environment/turns"], metrics["val/turns"]) == (4, 5)


@pytest.mark.slow
def test_eval_and_sample_run_the_agent(recorded: Path, tiny_folder: Path, tmp_path: Path) -> None:
    folder = recorded.parent.parent
    words = ["--agent", f"{folder}/agent.py:run", "--device", "cpu", "--max-new-tokens", 200]
    out = tmp_path / "eval.jsonl"
    assert run("eval", tiny_folder, folder / "val.jsonl", *words, "--out", out) == 0
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(told) == 2
    assert all("score/vowels" in one["parts"] for one in told if one["score"] is not None)
    sampled = tmp_path / "samples.parquet"
    assert run("sample", tiny_folder, folder / "val.jsonl", sampled, "-n", 2, *words, "--max-failures", 1) == 0
    assert run("eval", tiny_folder, folder / "val.jsonl", *words, "--tool", "calculator") == 2


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_ranks(tiny_folder: Path, tmp_path: Path, recorded: Path) -> None:
    """Two ranks make the second update of one process. In the first, no response has a vowel."""
    file = write_recipe(tmp_path, tiny_folder)
    done = torchrun("train", file)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (dict(read_metrics(run / "metrics.jsonl"))[2] for run in (recorded, tmp_path / "runs" / "run"))
    assert two["environment/turns"] == 4
    assert two["actor/grad_norm"] > 0
    for name in ("actor/grad_norm", "actor/entropy", "reward/score/mean"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name
    assert two["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.slow
def test_the_policy_learns(tiny_folder: Path, tmp_path: Path) -> None:
    """The reward is the share of vowels in the text of all rows."""
    keys: dict[str, Any] = {
        "rollout": {"n": 8, "turn_tokens": 12},
        "run": {"steps": 9},
        "batch": {"prompts": 2, "tokens": 8192},
        "optim": {"lr": 1e-2, "schedule": "constant"},
    }
    folder = run_recipe(load_recipe(str(write_recipe(tmp_path, tiny_folder, **keys))))
    rewards = [metrics["reward/score/mean"] for _, metrics in read_metrics(folder / "metrics.jsonl")]
    assert max(rewards[:2]) < 0.2
    assert min(rewards[-2:]) > 0.6


REFUSED = [
    (["rollout.tools=[calculator]"], "rollout.agent", "conflicting-keys"),
    (["rollout.environment=guess_number"], "rollout.agent", "conflicting-keys"),
    (["val.environment=none"], "val.environment", "unsupported-combination"),
    (["rollout.agent=null", "rollout.agent_limit_reward=0"], "rollout.agent_limit_reward", "needs-key"),
    (["rollout.agent=command:true", "rollout.environment_args={x: 1}"], "rollout.environment_args", ""),
    (["parallel.tensor_parallel=2"], "rollout.agent", ""),
    (["reward.weights={group: 1.0}"], "reward.weights.group", "unsupported-combination"),
    (["algorithm.advantage=gigpo"], "algorithm.advantage", "needs-key"),
]


@pytest.mark.parametrize(("words", "where", "code"), REFUSED, ids=[where for _, where, _ in REFUSED])
def test_combinations_that_are_refused(
    tiny_folder: Path, tmp_path: Path, words: list[str], where: str, code: str
) -> None:
    with pytest.raises(Refusal) as refused:
        load_recipe(str(write_recipe(tmp_path, tiny_folder)), words)
    found = {problem.where: problem for problem in refused.value.problems}
    assert where in found, list(found)
    assert not code or found[where].code == code, found[where]
