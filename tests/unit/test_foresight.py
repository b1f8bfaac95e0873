"""Policy losses whose gradients are taken while the logits are there, against those of the whole loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hand_rollouts import plans_of, recipe_of, rollout
from lockstep.algorithms.policy_loss import LOSSES
from lockstep.device.select import select
from lockstep.kernels.logprob import Scores, token_scores, token_scores_with_grads
from lockstep.model import policy as policies
from lockstep.parallel.world import World
from lockstep.recipe.registry import loss_row
from lockstep.train import update_terms as policy_loss
from lockstep.train.advantages import Advantages, TrainBatch
from lockstep.train.experience import Experience, ModelOutputs, build_experience
from lockstep.train.models import Models, Packing, build_learner
from lockstep.train.update import update_policy

SEQUENCES = {"gspo", "geo_mean", "importance"}
LENGTHS = (5, 2, 7, 3, 1, 4)


def made() -> Experience:
    """Three prompts with two responses each, drawn at random."""
    draw = torch.Generator().manual_seed(1)
    words = [torch.randint(1, 256, (n,), generator=draw).tolist() for n in LENGTHS]
    return build_experience(
        [
            rollout(i // 2, ids, float(i % 3), sample=i % 2, prompt=[9, 8, 7 + i // 2], logprobs=[-2.0] * len(ids))
            for i, ids in enumerate(words)
        ]
    )


def noise(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(seed))


class FusedScores:
    """`token_scores` as on a device with fused kernels, in chunks of three positions."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(
        self, hidden: torch.Tensor, head: Any, targets: torch.Tensor, *, token_grads: Any, **how: Any
    ) -> Scores:
        if token_grads is None or not torch.is_grad_enabled():
            return token_scores(hidden, head, targets, **how)
        self.asked += 1
        return token_scores_with_grads(
            hidden, head, targets, token_grads, **how, chunk_bytes=3 * 4 * head.weight_VH.shape[0]
        )


def stepped(folder: Path, loss: str, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> dict[str, torch.Tensor]:
    recipe = recipe_of(str(folder), batch__prompts=3, rollout__n=2, algorithm__loss=loss, **keys)
    learner = build_learner(recipe, select("cpu"), World(), torch.device("cpu"))
    models = Models(learner.module, Packing.of(recipe, World(), 0), torch.device("cpu"), learner)
    monkeypatch.setattr(learner, "optim_step", lambda lr: {})
    (plan,) = plans_of(made(), models, recipe.batch)
    old = models.logprobs(plan)
    # Ratios on both sides of every bound, a token that is left out, weights of its own for the others.
    far = old if loss == "policy_gradient" else old + noise(2, 0.4)
    keep = torch.ones(len(old))
    keep[4] = 0
    advantages = Advantages(torch.zeros(len(old)), noise(4), torch.zeros(len(old)), keep, noise(6).exp(), {})
    learned = TrainBatch(made(), ModelOutputs(far, old + noise(3, 0.5), None), advantages)
    update_policy(plan, learned, models, recipe, 0.2, 0.0, (0,))
    return {name: p.grad.clone() for name, p in learner.module.named_parameters() if p.grad is not None}


@pytest.mark.daily
@pytest.mark.parametrize("entropy", [0.0, 0.05])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_an_update_with_token_grads_is_the_same_update(
    loss: str, entropy: float, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"batch__tokens": 40, "algorithm__entropy": entropy}
    if loss == "policy_gradient":
        keys["algorithm__kl__where"] = "none"
    plain = stepped(tiny_folder, loss, monkeypatch, **keys)
    fused = FusedScores()
    monkeypatch.setattr(policies, "token_scores", fused)
    ours = stepped(tiny_folder, loss, monkeypatch, **keys)
    assert bool(fused.asked) == (loss not in SEQUENCES)
    assert ours.keys() == plain.keys()
    for name, wanted in plain.items():
        assert wanted.norm() > 0
        assert (ours[name] - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_a_loss_of_sequences_that_says_it_is_one_of_tokens_is_found_out(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "token_scores", FusedScores())
    monkeypatch.setattr(policy_loss, "loss_row", lambda name: replace(loss_row(name), tokenwise=True))
    found = stepped(tiny_folder, "gspo", monkeypatch, batch__tokens=40)
    assert all(gradient.isnan().any() for gradient in found.values())


def test_a_loss_of_ones_own_may_look_at_all_tokens() -> None:
    assert not loss_row("somebody.py:loss").tokenwise
    assert {name for name in LOSSES if not loss_row(name).tokenwise} == SEQUENCES
