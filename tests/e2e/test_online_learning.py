"""Online methods really learn: from one warm start, greedy accuracy on held-out sums with carry rises by 0.25."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import lockstep
from hang import HANG
from lockstep.run.metrics import read_metrics
from warm_starts import warm_started

# Each method at the same number of responses a step; critic and update counts as a user would set them.
STEPS, SLOW_STEPS = 40, 60
METHODS = {
    "grpo": ["batch.prompts=16", "rollout.n=8"],
    "ppo": ["rollout.n=1", "batch.prompts=128", "batch.prompts_per_update=64", "critic.lr=1e-3", "run.steps=32"],
    "reinforce_pp": ["rollout.n=1", "batch.prompts=128"],
    "rloo": ["batch.prompts=16", "rollout.n=8"],
    "dapo": ["batch.prompts=16", "rollout.n=8"],
    "gspo": ["batch.prompts=16", "rollout.n=8"],
}
LONG = ("grpo", "ppo")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_started(tmp_path_factory.mktemp("warm"))


@pytest.mark.slow
@pytest.mark.xdist_group("online learning")
@pytest.mark.parametrize("method", METHODS)
def test_a_method_lifts_held_out_accuracy(warm: Path, method: str) -> None:
    steps = f"run.steps={STEPS if method in LONG else SLOW_STEPS}"
    trained(warm, method, f"method={method}", steps, *METHODS[method])


@pytest.mark.slow
@pytest.mark.xdist_group("online learning")
def test_generation_beside_training_lifts_it_as_far(warm: Path) -> None:
    words = ["method=grpo", f"run.steps={STEPS}", *METHODS["grpo"]]
    history = trained(warm, "beside", "rollout.max_staleness=2", *words)
    turns = trained(warm, "grpo", *words)  # which the test above has trained already, where it was run
    reached = [
        [metrics["val/accuracy"] for metrics in one if "val/accuracy" in metrics][-1] for one in (history, turns)
    ]
    # Two runs of 200 held-out sums that differ by less than their noise: two deviations of a share near a half.
    assert reached[0] >= reached[1] - 2 * (0.5 * 0.5 * 2 / 200) ** 0.5
    staleness = [metrics["async/staleness_max"] for metrics in history if "async/staleness_max" in metrics]
    assert max(staleness) == 2
    assert len(staleness) == STEPS


def trained(warm: Path, name: str, *words: str) -> list[dict[str, float]]:
    """The metrics of a run that has lifted the accuracy by 0.25."""
    done = lockstep(
        "train",
        "grpo-arithmetic",
        f"run.name={name}",
        f"run.folder={warm / 'runs'}",
        f"model.path={warm / 'runs' / 'warmup-arithmetic' / 'export'}",
        f"data.train={warm / 'data' / 'train.parquet'}",
        f"val.questions={warm / 'data' / 'val.parquet'}",
        "run.export=false",
        # Measured before and after; what lies between is not looked at.
        "val.every=1000",
        *words,
        timeout=4 * HANG,
    )
    assert done.returncode == 0, done.stderr
    history = [metrics for _, metrics in read_metrics(warm / "runs" / name / "metrics.jsonl")]
    accuracy = [metrics["val/accuracy"] for metrics in history if "val/accuracy" in metrics]
    assert accuracy[-1] >= accuracy[0] + 0.25
    # The reward on the training prompts rises with it.
    rewards = [metrics["critic/score/mean"] for metrics in history if "critic/score/mean" in metrics]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    return history
