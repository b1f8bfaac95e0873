"""Whole runs through functions of one's own: copies of ours train alike; an environment is seen, not trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from commands import completed, warm_python
from hang import HANG
from lockstep.errors import Refusal
from lockstep.run.metrics import read_metrics

OWN = '''
import json
import torch

def advantage(signals):
    """GRPO's, written anew."""
    scores, found = signals.scores_S.double(), []
    for own, group in zip(scores, signals.group_S):
        others = scores[signals.group_S == group]
        deviation = others.std() if len(others) > 1 else torch.tensor(0.0)
        found.append((own - others.mean()) / (deviation + 1e-6))
    return torch.stack(found)

def loss(tokens):
    ratio = (tokens.logprobs_K - tokens.old_K).exp()
    free = -tokens.advantages_K * ratio
    return torch.maximum(free, -tokens.advantages_K * ratio.clamp(0.8, 1.2))

def straight(prompt, generate):
    turn = generate(prompt.ids)
    return turn.ids, [1] * len(turn.ids)

def echo(prompt, generate):
    """Four tokens of the policy, two of the environment, four of the policy."""
    first = generate(prompt.ids, max_tokens=4)
    said = generate.encode("ok")
    then = generate([*prompt.ids, *first.ids, *said], max_tokens=4)
    return first.ids + said + then.ids, [1] * len(first.ids) + [0, 0] + [1] * len(then.ids)

def reader(path):
    with open(path) as file:
        yield from map(json.loads, file)

def nothing(prompt, generate):
    return None

def flat(signals):
    return [0.0]
'''
TIMES = ("timing_s/", "perf/")


def numbers(run: Path) -> list[dict[str, float]]:
    """What was computed, without what was timed."""
    return [
        {name: value for name, value in metrics.items() if not name.startswith(TIMES) and name != "actor/pg_clipfrac"}
        for _, metrics in read_metrics(run / "metrics.jsonl")
    ]


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "own.py")


@pytest.mark.slow
def test_copies_of_ours_train_what_ours_do(online_file: Path, own: str) -> None:
    short: dict[str, Any] = {"run.steps": 2, "run.export": False, "algorithm.dual_clip": None}
    usual = lockstep.train(online_file, **short)
    doors = {
        "algorithm.advantage": f"{own}:advantage",
        "algorithm.loss": f"{own}:loss",
        "rollout.function": f"{own}:straight",
        "data.reader": f"{own}:reader",
    }
    found = lockstep.train(online_file, **{**short, **doors, "run.name": "own"})
    for ours, theirs in zip(numbers(usual), numbers(found), strict=True):
        ours.pop("actor/pg_clipfrac_lower", None)
        assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_what_an_environment_says_is_seen_and_not_trained(online_file: Path, own: str) -> None:
    run = lockstep.train(online_file, **{"run.steps": 2, "run.export": False, "rollout.function": f"{own}:echo"})
    for metrics in numbers(run):
        # The policy wrote 8 tokens at most of 10, and engine and trainer agree on each of them.
        assert 2 <= metrics["response_length/mean"] <= 8
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert all("ok" in sample["response"] for sample in samples)


@pytest.mark.slow
def test_a_reader_reads_the_questions_of_validation_too(online_file: Path, own: str) -> None:
    """From a name that is no file at all; the rows are those of the training file."""
    rows = next(online_file.parent.glob("*.jsonl"))
    (online_file.parent / "reader.py").write_text(
        f"import json\ndef read(path):\n    assert path in ('db://train', 'db://val'), path\n"
        f"    return [json.loads(line) for line in open({str(rows)!r})][: 2 if path == 'db://val' else None]\n"
    )
    keys = {"data.reader": f"{online_file.parent / 'reader.py'}:read", "data.train": "db://train"}
    val = {"val.questions": "db://val", "val.every": 1, "val.max_new_tokens": 2}
    run = lockstep.train(online_file, **{"run.steps": 1, "run.export": False, **keys, **val})
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {line["origin"] for line in samples if line["kind"] == "val"} == {"db://val row 0", "db://val row 1"}


def test_everything_wrong_is_told_at_once_before_a_weight_is_loaded(online_file: Path, own: str) -> None:
    bad = {"algorithm.advantage": f"{own}:flat", "algorithm.loss": f"{own}:gone", "rollout.function": f"{own}:nothing"}
    with pytest.raises(Refusal) as caught:
        lockstep.train(online_file, **bad)
    where = [problem.where for problem in caught.value.problems]
    assert where == [f"algorithm.advantage {own}:flat", f"algorithm.loss {own}:gone", f"rollout.function {own}:nothing"]
    assert all(problem.remedy for problem in caught.value.problems)
    assert not (online_file.parent / "runs").exists()


FAILS = """
def sometimes(prompt, generate):
    turn = generate(prompt.ids, max_tokens=4)
    if prompt.question.extra_info["index"] % 4 == 1:
        raise ConnectionError("the environment is gone")
    return turn.ids, [1] * len(turn.ids)
"""


@pytest.mark.slow
def test_failed_rollouts_are_counted_and_left_out_as_failed_rewards_are(online_file: Path) -> None:
    """Rows 1, 5, 9, ... fail: of 4 consecutive rows one, with all of its 3 samples."""
    own = online_file.parent / "fails.py"
    own.write_text(FAILS, encoding="utf-8")
    words: dict[str, Any] = {"run.steps": 2, "run.export": False, "data.shuffle": False, "log.samples": 99}
    words |= {"rollout.function": f"{own}:sometimes", "val.questions": str(online_file.parent / "prompts.jsonl")}
    words |= {"val.every": 2, "val.max_new_tokens": 9}
    run = lockstep.train(online_file, **words, **{"reward.max_failures": 0.25})
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["kind"] == "failed"]
    assert len(failed) == 2 * 3
    for line in failed:
        assert line["failure"].startswith("rollout.function: raised ConnectionError: the environment is gone")
        assert (line["score"], line["response"], line["stop"]) == (None, "", "failed")
    for step, metrics in enumerate(numbers(run), start=1):
        scores = [line["score"] for line in lines if line["kind"] == "train" and line["step"] == step]
        assert metrics["reward/failed"] == 3
        assert len(scores) == 9
        assert metrics["critic/score/mean"] == pytest.approx(sum(scores) / 9)
        assert metrics["response_length/min"] >= 1
        assert metrics["actor/grad_norm"] > 0
    assert numbers(run)[1]["val/failed"] == 5  # of 20 questions
    assert numbers(run)[1]["val/answered"] == 15 / 20
    with pytest.raises(Refusal) as caught:
        lockstep.train(online_file, **{**words, "run.name": "strict"})
    (problem,) = caught.value.problems
    assert (problem.where, problem.code) == ("rollout.function", "reward-failed")
    assert "3 of 12 responses" in problem.why
    assert "reward.max_failures=0.1" in problem.why
    assert "reward.max_failures" in problem.remedy


SCRIPT = """
import os
import lockstep

calls = []


def letters(data_source, solution_str, ground_truth, extra_info):
    calls.append(os.getpid())
    return len(set(solution_str)) / 20


run = lockstep.train("{recipe}", **{{"reward.function": letters, "run.steps": 1, "run.export": False}})
assert set(calls) == {{os.getpid()}}
print("trained", run.name)
"""


@pytest.mark.slow
def test_a_reward_of_a_plain_script_trains_without_a_guard(online_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(recipe=online_file), encoding="utf-8")
    done = completed([*warm_python(), str(script)], HANG, {})
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert said.count("trained run") == 1
    assert "is defined in this script or notebook" in said
    (metrics,) = numbers(tmp_path / "runs" / "run")
    assert metrics["reward/function/mean"] > 0
    assert metrics["actor/grad_norm"] > 0
    # A command that loads the function from the stored path must not start the run again.
    with pytest.raises(Refusal, match=r'if __name__ == "__main__"'):
        lockstep.train(tmp_path / "runs" / "run" / "recipe.yaml", **{"run.name": "again"})
