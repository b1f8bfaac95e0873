"""The recipes for agents really learn: the tiny model learns to call the calculator, and to use the answers of a game.

Both start from a warm-up that teaches only the format. Accuracies are greedy, on held-out rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import lockstep
from hang import HANG
from lockstep.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("agent learning")]


def trained(folder: Path, recipe: str, data: Path, model: Path, *words: str) -> list[dict[str, float]]:
    """The metrics of a run of a built-in recipe with files in `folder`."""
    name = "sft_train" if recipe.startswith("warmup") else "train"
    done = lockstep(
        "train",
        recipe,
        f"run.folder={folder / 'runs'}",
        f"model.path={model}",
        f"data.train={data / f'{name}.parquet'}",
        *words,
        timeout=4 * HANG,
    )
    assert done.returncode == 0, done.stderr
    return [metrics for _, metrics in read_metrics(folder / "runs" / recipe / "metrics.jsonl")]


def accuracies(history: list[dict[str, float]]) -> list[float]:
    return [metrics["val/accuracy"] for metrics in history if "val/accuracy" in metrics]


def test_the_model_learns_when_and_what_to_call(tmp_path: Path) -> None:
    data, model = tmp_path / "calculator", tmp_path / "model"
    assert lockstep("tiny", model).returncode == 0
    assert lockstep("data", "calculator", data).returncode == 0
    trained(tmp_path, "warmup-calculator", data, model, f"data.template={data / 'template.jinja'}")
    warm = tmp_path / "runs" / "warmup-calculator" / "export"
    history = trained(tmp_path, "agent-calculator", data, warm, f"val.questions={data / 'val.parquet'}")
    before, *_, after = accuracies(history)
    assert before < 0.1
    assert after > 0.8
    # An answer takes two turns: the call, and the answer after its result.
    turns = [metrics["environment/turns"] for metrics in history if "environment/turns" in metrics]
    calls = [metrics["environment/tool_calls"] for metrics in history if "environment/tool_calls" in metrics]
    assert turns[-1] > 1.9 > turns[0]
    assert calls[-1] > 0.8


def test_the_model_learns_to_use_the_answers_of_the_game(tmp_path: Path) -> None:
    data, model = tmp_path / "game", tmp_path / "model"
    assert lockstep("tiny", model).returncode == 0
    assert lockstep("data", "guess-number", data).returncode == 0
    trained(tmp_path, "warmup-game", data, model)
    warm = tmp_path / "runs" / "warmup-game" / "export"
    history = trained(tmp_path, "agent-game", data, warm, f"val.questions={data / 'val.parquet'}")
    rewards = [metrics["critic/rewards/mean"] for metrics in history if "critic/rewards/mean" in metrics]
    # Three different guesses without regard to the answers find 3 of 7 numbers.
    assert sum(rewards[:5]) / 5 < 3 / 7 + 0.1
    assert sum(rewards[-5:]) / 5 > 3 / 7 + 0.1
    before, *_, after = accuracies(history)
    assert before < 0.45
    assert after > 0.7
