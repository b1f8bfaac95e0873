"""Keys that settings of other trainers need: each against a hand computation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.algorithms.advantage import ESTIMATORS, Signals, Whitening, whitened
from lockstep.data.dataset import Loader, steps_and_rows
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.recipe.schema import Optim
from lockstep.reward.shaping import shaped
from lockstep.rollout.sampling import validation_sampling
from lockstep.train.optim import Optimizer
from lockstep.types import Origin, Prompt, Question, Rollout, Score


@pytest.mark.parametrize(("decay_all", "bias"), [(False, 1.0), (True, 0.9)])
def test_decay_reaches_biases_when_asked(decay_all: bool, bias: float) -> None:
    """Without a gradient AdamW's step is the decay alone: p (1 - lr decay) = 1 - 0.5 x 0.2 = 0.9."""
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    settings = Optim(lr=0.5, weight_decay=0.2, decay_all=decay_all)
    optimizer = Optimizer(layer.named_parameters(), settings, masters=False, fused=False)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5, torch.tensor(0.0))
    assert layer.weight.flatten().tolist() == pytest.approx([0.9] * 4)
    assert layer.bias.tolist() == pytest.approx([bias] * 2)


def test_an_epoch_may_end_with_its_last_whole_update() -> None:
    """10 rows, 3 an update: 3 whole updates an epoch, one row left over; 2 epochs are 6 updates of 18 rows."""
    assert steps_and_rows(10, 3, epochs=2, steps=None, drop_last=True) == (6, 18)
    loader = Loader([list(range(10))], None, rows_per_update=3, seed=0, shuffle=False, total_rows=18, drop_last=True)
    assert [loader.take(step) for step in (0, 2, 3, 5)] == [[0, 1, 2], [6, 7, 8], [0, 1, 2], [6, 7, 8]]


def test_fewer_rows_than_an_update_leave_an_empty_epoch() -> None:
    with pytest.raises(Refusal, match=r"data\.drop_last: 2 rows are fewer than the 3 of one update"):
        steps_and_rows(2, 3, epochs=1, steps=None, drop_last=True)


def test_whitening_with_n_and_without_the_division() -> None:
    """1, 2, 6: mean 3, squares 4 + 1 + 9 = 14; variance 14/2 with n - 1, 14/3 with n."""
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    centred = [-2.0, -1.0, 3.0]
    assert whitened(values).tolist() == pytest.approx([x / 7**0.5 for x in centred])
    assert whitened(values, biased=True).tolist() == pytest.approx([x / (14 / 3) ** 0.5 for x in centred])
    assert whitened(values, divide=False).tolist() == pytest.approx(centred)


@pytest.mark.parametrize(
    ("estimator", "whitening", "expected"),
    [
        # Two prompts with two answers of one token each: scores 1, 3 and 0, 0. Less the other's: -2, 2, 0, 0.
        ("rloo", Whitening(), [-2.0, 2.0, 0.0, 0.0]),
        # Variance with n: (4 + 4) / 4 = 2.
        ("rloo", Whitening("step", biased=True), [-(2.0**0.5), 2.0**0.5, 0.0, 0.0]),
        # Scores less the group's mean: -1, 1, 0, 0; their own whitening, with n - 1: variance 2/3.
        ("reinforce_pp_baseline", Whitening(), [-((3 / 2) ** 0.5), (3 / 2) ** 0.5, 0.0, 0.0]),
        ("reinforce_pp_baseline", Whitening("none"), [-1.0, 1.0, 0.0, 0.0]),
        # Scores 1, 3, 0, 0 less their mean of 1.
        ("reinforce_pp", Whitening(divide=False), [0.0, 2.0, -1.0, -1.0]),
    ],
)
def test_estimators_whiten_as_they_are_told(estimator: str, whitening: Whitening, expected: list[float]) -> None:
    signals = Signals(
        torch.tensor([1.0, 3.0, 0.0, 0.0]),
        torch.arange(4),
        torch.tensor([0, 0, 1, 1]),
        whitening=whitening,
    )
    estimate = ESTIMATORS[estimator](signals, gamma=1.0, lam=1.0)
    assert estimate.advantages_K.tolist() == pytest.approx(expected, abs=1e-6)


ONLINE = "method: grpo\nmodel: {path: m}\ndata: {train: q.parquet}\n"


def online(tmp_path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    file = tmp_path / "recipe.yaml"
    file.write_text(ONLINE)
    return load_recipe(str(file), overrides)


@pytest.mark.parametrize(("score", "expected"), [(12.0, 10.0), (-30.0, -10.0), (3.5, 3.5)])
def test_a_score_is_held_within_its_bounds(tmp_path: Path, score: float, expected: float) -> None:
    recipe = online(tmp_path, "reward.clip=[-10, 10]")
    question = Question("s", [], "1", Origin("q", 1), {})
    rollout = Rollout(Prompt(question, [1]), 0, 0, [5], [-0.1], "a", "stop", Score(score, {"model": score}))
    found = shaped(rollout, recipe).score
    assert isinstance(found, Score)
    assert (found.total, found.parts) == (expected, {"model": score})


def test_bounds_the_wrong_way_round_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"reward\.clip"):
        online(tmp_path, "reward.clip=[1, -1]")


def test_validation_draws_as_its_own_keys_say(tmp_path: Path) -> None:
    recipe = online(tmp_path, "val.questions=[a, b]", "val.temperature=0.6", "val.top_p=0.7", "val.top_k=20")
    sampling = validation_sampling(recipe, [2])
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.7, 20)
    with pytest.raises(Refusal, match=r"val\.top_p: a greedy answer"):
        online(tmp_path, "val.questions=a", "val.top_p=0.7")
