"""The options that migrated recipes of verl set, by hand. tests/migration compares them with verl itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hand_rollouts import recipe_of, rollout
from lockstep.algorithms.advantage import ESTIMATORS, Signals
from lockstep.algorithms.correction import Band, Corrected, correct
from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens
from lockstep.algorithms.reduce import aggregation_weights
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.train.advantages import estimate_advantages
from lockstep.train.experience import ModelOutputs, build_experience

# Sequences of 2, 3 and 1 tokens; the ratios trainer/engine of each token.
SEQUENCE = torch.tensor([0, 0, 1, 1, 1, 2])
RATIOS = [1.5, 0.5, 4.0, 1.0, 2.0, 0.1]


def corrected(**choices: Any) -> Corrected:
    engine = torch.full((6,), -1.0, dtype=torch.float64)
    trainer = engine + torch.tensor(RATIOS, dtype=torch.float64).log()
    off = {"weight": "token", "cap": 3.0, "mask": "none", "low": 0.5, "high": 2.0}
    return correct(trainer, engine, SEQUENCE, 3, **{**off, **choices})


def test_weights_out_of_the_range_are_zero_and_still_count_in_the_mean() -> None:
    zeroed = corrected(floor=0.4, outside="zero").weights_K
    assert zeroed.tolist() == pytest.approx([1.5, 0.5, 0, 1, 2, 0], abs=1e-12)
    assert bool((zeroed > 0).all())  # so that the token stays in the means of its sequence
    normalized = corrected(floor=0.4, outside="zero", normalize=True).weights_K
    assert normalized.tolist() == pytest.approx([w * 6 / 5 for w in (1.5, 0.5, 0, 1, 2, 0)], abs=1e-12)


def test_a_geometric_mean_is_over_the_kept_tokens_of_a_response() -> None:
    found = corrected(weight="geometric_mean")
    second = (3.0 * 1.0 * 2.0) ** (1 / 3)  # the first ratio is capped
    assert found.weights_K.tolist() == pytest.approx([math.sqrt(0.75)] * 2 + [second] * 3 + [0.1])
    kept = corrected(weight="geometric_mean", reject=[Band("token", "ratio", 2.5)])
    assert kept.keep_K.tolist() == [1, 1, 0, 1, 1, 1]
    assert kept.weights_K[3:5].tolist() == pytest.approx([math.sqrt(2)] * 2)


def test_rejected_tokens_are_counted_by_the_divisors() -> None:
    band = [Band("token", "ratio", 1.2)]
    assert corrected(reject=band, rejected="counted").counts_masked
    assert not corrected(reject=band).counts_masked
    # Kept: one token of the first sequence, two of the second, none of the third.
    keep, loss = torch.tensor([1.0, 0, 1, 1, 0, 0]), torch.tensor([2.0, 9, 4, 6, 9, 9])
    expected = {
        "token_mean": 12 / 6,
        "token_sum": 12.0,
        "seq_mean_token_sum": 12 / 3,
        "seq_mean_token_mean": (2 + 5) / 3,
        "seq_mean_token_sum_norm": 12 / 3 / 10,
    }
    for kind, wanted in expected.items():
        weights, divisor = aggregation_weights(kind, SEQUENCE, keep, 3, 10, counts_masked=True)
        assert float((weights * loss).sum() / divisor) == pytest.approx(wanted), kind


def test_the_ratio_of_a_response_includes_masked_tokens() -> None:
    ratios = torch.tensor([2.0, 0.5, 3.0])
    tokens = PolicyTokens(
        ratios.log() - 1, torch.full((3,), -1.0), torch.ones(3), torch.tensor([1.0, 1, 0]), torch.zeros(3).long()
    )
    plain = -(ratios.log() - 1)[:2].sum()
    for of, product in (("sequence", 1.0), ("response", 3.0)):
        assert float(LOSSES["importance"](tokens, cap=9.0, of=of).loss) == pytest.approx(product * float(plain))


def signals(**more: Any) -> Signals:
    """Scores 2, 5 and 0 of a group, and a lone response with the score 3."""
    rewards = torch.tensor([2.0, 5.0, 0.0, 3.0], dtype=torch.float64)
    return Signals(rewards, torch.arange(4), torch.tensor([0, 0, 0, 1]), **more)


def advantages(name: str, **more: Any) -> list[float]:
    return ESTIMATORS[name](signals(**more), gamma=1.0, lam=1.0).advantages_K.tolist()


def test_pass_at_k_need_not_divide() -> None:
    deviation = math.sqrt(((2 - 7 / 3) ** 2 + (5 - 7 / 3) ** 2 + (7 / 3) ** 2) / 2)
    assert advantages("grpo_passk") == pytest.approx([0, 3 / (deviation + 1e-6), 0, 0])
    assert advantages("grpo_passk", divide_by_std=False) == pytest.approx([0, 3, 0, 0])


def test_gpg_may_count_scores_that_are_not_zero() -> None:
    centred = [2 - 7 / 3, 5 - 7 / 3, -7 / 3, 0]
    assert advantages("gpg") == pytest.approx([a * 4 / 3 for a in centred])  # three are in a mixed group
    assert advantages("gpg", gpg_nonzero=True) == pytest.approx([a * 4 / 3 for a in centred])  # three are not 0
    lone = advantages("gpg", gpg_nonzero=True, lone_score=True)
    assert lone == pytest.approx([a * 4 / 3 for a in (*centred[:3], 3)])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "optimal_token_baseline"])
def test_a_lone_response_may_keep_its_score(name: str) -> None:
    energy = {"energy_K": torch.ones(4)} if name == "optimal_token_baseline" else {}
    without, with_score = advantages(name, **energy), advantages(name, lone_score=True, **energy)
    assert without[:3] == with_score[:3]
    assert without[3] == 0
    assert with_score[3] == pytest.approx(3, rel=2e-6)  # grpo divides by 1 + 1e-6


@pytest.fixture
def base(tmp_path: Path) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text("method: grpo\nmodel: {path: m}\ndata: {train: rows.jsonl}\n")
    return str(file)


def test_one_response_per_prompt_needs_the_option(base: str) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(base, ["rollout.n=1"])
    assert [problem.where for problem in caught.value.problems] == ["rollout.n"]
    assert load_recipe(base, ["rollout.n=1", "algorithm.lone_response=score"]).rollout.n == 1


def test_a_mask_may_come_before_the_advantages() -> None:
    """The last token of the second response is rejected: its reward is lost, and whitening skips it."""
    engine = [[-1.0, -1.0], [-1.0, -1.0]]
    rows = [rollout(i, [5, 6], score, logprobs=engine[i]) for i, score in enumerate((1.0, 4.0))]
    old_K = torch.tensor([-1.0, -1.0, -1.0, 2.0])
    found = {}
    for first in (False, True):
        correction = {"weight": "none", "mask": "token", "mask_first": first, "rejected": "counted"}
        keys = {"algorithm__rollout_correction": correction, "algorithm__kl__where": "none"}
        recipe = recipe_of(method="reinforce_pp", **keys)
        found[first] = estimate_advantages(build_experience(rows), ModelOutputs(old_K, None, None), recipe, 0.0)
    assert found[True].keep_K.tolist() == [1, 1, 1, 0]
    assert found[True].counts_masked
    # Returns without the lost reward: 1, 1, 0. Their mean is 2/3, their variance 1/3.
    scale = 1 / math.sqrt(1 / 3 + 1e-8)
    assert found[True].advantages_K.tolist() == pytest.approx([scale / 3, scale / 3, -2 * scale / 3, 0], rel=1e-5)
    assert found[True].returns_K.tolist() == [1, 1, 0, 0]
    assert found[False].returns_K.tolist() == [1, 1, 4, 4]


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.rollout_correction.mask_first=true"],
        [
            "algorithm.rollout_correction.mask_first=true",
            "algorithm.rollout_correction.mask=token",
            "algorithm.rollout_correction.rejected=zero",
        ],
        [
            "algorithm.rollout_correction.mask_first=true",
            "algorithm.rollout_correction.mask=token",
            "algorithm.advantage=own.py:advantage",
        ],
    ],
)
def test_a_mask_that_cannot_come_first_is_refused(base: str, words: list[str]) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(base, words)
    assert "algorithm.rollout_correction.mask_first" in {problem.where for problem in caught.value.problems}
