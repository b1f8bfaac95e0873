"""GRPO with an environment: two steps of the tiny model, failures within and over the tolerance, several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import environment_classes
from commands import torchrun
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.run.metrics import read_metrics
from lockstep.train.start import run_recipe

FILE = environment_classes.__file__
SETTINGS = ("rollout.max_tokens=120", "rollout.turn_tokens=6", "run.steps=2", "run.export=false")


def words(environment: str, *more: str) -> list[str]:
    return [f"rollout.environment={FILE}:{environment}", *SETTINGS, *more]


def train(file: Path, *more: str) -> list[dict[str, float]]:
    folder = run_recipe(load_recipe(str(file), list(more)))
    return [metrics for _, metrics in read_metrics(folder / "metrics.jsonl")]


def samples(file: Path) -> list[dict[str, Any]]:
    lines = (file.parent / "runs" / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_two_steps_with_an_environment(online_file: Path) -> None:
    first, second = train(online_file, *words("Echo", "rollout.environment_args={turns: 3}", "log.samples=4"))
    for metrics in (first, second):
        assert metrics["environment/turns"] == 3
        assert metrics.get("environment/stop/completed", 0) + metrics.get("environment/stop/max_tokens", 0) == 1
        assert metrics["reward/failed"] == 0
        assert 3 <= metrics["response_length/mean"] <= 18  # sampled tokens alone
        assert metrics["environment/tokens"] > 60
        assert metrics["actor/grad_norm"] > 0
    assert samples(online_file)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(online_file: Path) -> None:
    setting = words("Echo", "run.deterministic=true", "run.steps=1")

    def numbers(name: str, *more: str) -> dict[str, float]:
        (metrics,) = train(online_file, *setting, f"run.name={name}", *more)
        return {key: value for key, value in metrics.items() if not key.startswith(("timing", "perf"))}

    one, two = numbers("one"), numbers("two", "rollout.environment_workers=1")
    differs = {key for key in one if one[key] != two.get(key)}
    assert differs <= {"environment/seconds"}


@pytest.mark.slow
def test_failures_within_the_tolerance_are_excluded_and_over_it_stop_the_run(online_file: Path) -> None:
    bugs = "{bugs: {'0': [step, raises], '2': [reset, raises], '4': [step, nan], '6': [score, raises]}}"
    setting = words("Buggy", f"rollout.environment_args={bugs}", "run.steps=1", "batch.prompts=20")
    (metrics,) = train(online_file, *setting, "reward.max_failures=0.5")
    assert metrics["reward/failed"] == 12  # four rows, three samples of each
    assert metrics["environment/stop/tool_error"] == pytest.approx(12 / 60)
    with pytest.raises(Refusal) as stopped:
        train(online_file, *setting, "run.name=other", "reward.max_failures=0.1")
    (problem,) = stopped.value.problems
    assert problem.where == "rollout.environment"
    assert "12 of 60 responses could not be generated or scored" in problem.why
    assert "environment_classes.py:Buggy: " in problem.why
    assert "fix the environment" in problem.remedy


@pytest.mark.slow
def test_validation_has_its_own_environment(online_file: Path) -> None:
    questions = f"val.questions={online_file.parent / 'prompts.jsonl'}"
    setting = words("Echo", "run.steps=1", questions, "val.question_rows=2", "val.max_new_tokens=100")
    folder = run_recipe(load_recipe(str(online_file), [*setting, f"val.environment={FILE}:Scored"]))
    (_, metrics), *_ = read_metrics(folder / "metrics.jsonl")
    assert metrics["val/turns"] == 2
    run_recipe(load_recipe(str(online_file), [*setting, "val.environment=none", "run.name=plain"]))


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_ranks_train_on_the_trajectories_of_both(online_file: Path) -> None:
    done = torchrun("train", online_file, *words("Echo", "run.steps=1"))
    assert done.returncode == 0, done.stderr[-3000:]
    (_, metrics), *_ = read_metrics(online_file.parent / "runs" / "run" / "metrics.jsonl")
    assert metrics["environment/turns"] == 2
    assert metrics["actor/grad_norm"] > 0
