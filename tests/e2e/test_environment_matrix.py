"""Trajectories together with everything else: every online method, PPO's critic, the teacher of on-policy distillation,
asynchronous training, several ranks, Ray and servers."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

import environment_classes
from commands import cold_lockstep
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.metrics import read_metrics
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import rollouts_of
from lockstep.train.start import run_recipe
from lockstep.types import Rollout
from runs import facts, samples
from sglang_server import serving

TURNS = 2
SETTINGS = (
    f"rollout.environment={environment_classes.__file__}:Echo",
    "rollout.environment_workers=1",
    "rollout.turn_tokens=6",
    "rollout.max_tokens=120",
    "run.steps=2",
    "run.export=false",
    "tape=true",
)


def train(file: Path, *words: str) -> Path:
    return run_recipe(load_recipe(str(file), [*SETTINGS, *words]))


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [metrics for _, metrics in read_metrics(run / "metrics.jsonl")]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def recorded(run: Path, step: int) -> list[Rollout]:
    tape = TapeFolder(run / "tape")
    return rollouts_of(tape.read_table(tape.rollouts_file(step)), TapeImages(tape.path))


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=[] if one == "ppo" else pytest.mark.slow, id=one) for one in ONLINE]
)
def test_every_method_trains_on_trajectories(online_file: Path, tmp_path: Path, method: str) -> None:
    """The trainer computes the log-probs of the engine, and only sampled tokens are trained. PPO's critic has a value
    for each of them; the teacher of on-policy distillation scores them."""
    words = [f"method={method}"]
    if method == "on_policy_distill":
        write_tiny(tmp_path / "teacher", hidden=64, layers=2, seed=1)
        words.append(f"algorithm.kl.reference={tmp_path / 'teacher'}")
    run = train(online_file, *words)
    for step, metrics in enumerate(metrics_of(run), start=1):
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["environment/turns"] == TURNS
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
        assert ("critic/values/mean" in metrics) == (method == "ppo")
        rollouts = recorded(run, step)
        sampled = sum(turn.stop - turn.start for one in rollouts for turn in one.trajectory.turns)  # type: ignore[union-attr]
        assert sum(sum(one.loss_mask) for one in rollouts) == sampled
        vectors = TapeFolder(run / "tape").read_step(step).tensors
        assert len(vectors["step/advantages"]) == sampled
        assert ("step/values" in vectors) == (method == "ppo")
        assert len(vectors.get("step/values", vectors["step/advantages"])) == sampled


@pytest.mark.slow
def test_dynamic_sampling_counts_trajectories(online_file: Path) -> None:
    """All trajectories of `Echo` get the same reward, so no group has a signal: the step is filled with them."""
    run = train(online_file, "run.steps=1", "algorithm.dynamic_sampling.max_gen_batches=2", "reward.function=null")
    (metrics,) = metrics_of(run)
    prompts = load_recipe(str(online_file), []).batch.prompts
    assert metrics["train/num_gen_batches"] == 2
    assert metrics["train/uniform_groups"] == 2 * prompts
    assert metrics["train/filled_groups"] == prompts


@pytest.mark.slow
def test_asynchronous_trajectories_name_the_weights_of_every_token(online_file: Path) -> None:
    """Trajectories that wait for their environment during a weight sync continue with newer weights."""
    run = train(online_file, "run.steps=4", "rollout.max_staleness=1", "log.samples=99")
    ages: list[int] = []
    for step, metrics in read_metrics(run / "metrics.jsonl"):
        for one in recorded(run, step):
            assert len(one.versions) == len(one.ids)
            assert list(one.versions) == sorted(one.versions)
            ages += [step - 1 - version for version, mask in zip(one.versions, one.loss_mask, strict=True) if mask]
        assert metrics["async/staleness_max"] <= 1
        assert metrics["environment/turns"] == TURNS
    assert {0, 1} >= set(ages)
    assert 1 in ages


@pytest.mark.slow
def test_asynchronous_conversations_have_the_prompt_limit_of_the_run(online_file: Path) -> None:
    """The prompts of the rows are within the limit. What the environment makes of most of them is not, and fails."""
    words = ["run.steps=1", "rollout.max_staleness=0", "reward.max_failures=1.0", "data.max_prompt_tokens=40"]
    run = train(online_file, *words, f"rollout.environment={environment_classes.__file__}:Wordy", "batch.prompts=20")
    (metrics,) = metrics_of(run)
    assert metrics["environment/stop/context_overflow"] == pytest.approx(19 / 20)
    # The last turn of the other one is cut (rollout.turn_tokens), unless the model ends it.
    whole = [metrics.get(f"environment/stop/{reason}", 0.0) for reason in ("completed", "max_tokens")]
    assert sorted(whole) == [0.0, pytest.approx(1 / 20)]


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_two_ranks_train_what_one_does(online_file: Path, launcher: str) -> None:
    if launcher == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    words = [*SETTINGS, "run.deterministic=true", "log.samples=99", "run.steps=1"]
    two = [] if launcher == "local" else ["parallel.launcher=ray"]
    for name, more in (("one", []), ("two", ["parallel.devices=2", *two])):
        done = cold_lockstep("train", online_file, *words, f"run.name={name}", *more)
        assert done.returncode == 0, done.stderr[-3000:]
    one, other = (online_file.parent / "runs" / name for name in ("one", "two"))
    assert samples(one) == samples(other)
    for (_, alone), (_, both) in zip(facts(one), facts(other), strict=True):
        for name in ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm"):
            assert both[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_trajectories_of_a_server(online_file: Path, tiny_folder: Path) -> None:
    """The server speaks SGLang's schema. Its turns are trained with the weights that generated them."""
    with serving(tiny_folder, "--enable-deterministic-inference", "--dtype", "float32") as server:
        run = train(online_file, "rollout.engine=sglang", f"rollout.url={server.url}", "log.samples=99")
    for metrics in metrics_of(run):
        assert metrics["environment/turns"] == TURNS
        assert metrics["training/rollout_probs_diff_mean"] < 1e-5
        assert metrics["rollout/prefill_tokens"] > 0
    drawn: set[tuple[Any, Any]] = {(line["step"], version) for line in lines(run) for version in line["versions"]}
    assert drawn == {(1, 0), (2, 1)}


@pytest.mark.slow
def test_the_stored_conversation_is_shown_by_speaker(online_file: Path) -> None:
    """What `lockstep view` reads: one entry per message, and for the model's turns their rewards and tokens."""
    run = train(online_file, "run.steps=1", "log.samples=2")
    for sample in lines(run):
        roles = [message["role"] for message in sample["conversation"]]
        assert roles == ["user", "assistant"] * TURNS
        assert [turn["reward"] for turn in sample["turns"]] == [0.25, 1.0]
