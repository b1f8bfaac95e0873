"""Policy losses whose gradients are taken while the logits are there, against those of the whole loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_update import BETA, ENTROPY, gradients, known_of, models_of, noise, planned

from hand_rollouts import recipe_of
from lockstep.algorithms.policy import LOSSES
from lockstep.kernels.logprob import Scores, foreseen_token_scores, token_scores
from lockstep.model import policy as policies
from lockstep.recipe.rows import loss_row
from lockstep.train import policy_loss
from lockstep.train.update import update_policy

SEQUENCES = {"gspo", "geo_mean"}


class Foreseen:
    """`token_scores` as on a device with fused kernels, in chunks of three positions."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, hidden: torch.Tensor, head: Any, targets: torch.Tensor, *, foresee: Any, **how: Any) -> Scores:
        if foresee is None or not torch.is_grad_enabled():
            return token_scores(hidden, head, targets, **how)
        self.asked += 1
        return foreseen_token_scores(hidden, head, targets, foresee, **how, chunk_bytes=3 * 4 * head.weight_VH.shape[0])


def stepped(folder: Path, loss: str, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> dict[str, torch.Tensor]:
    recipe = recipe_of(str(folder), batch__prompts=3, rollout__n=2, algorithm__loss=loss, **keys)
    models = models_of(recipe)
    monkeypatch.setattr(models.trained, "optim_step", lambda lr: {})
    (plan,) = planned(models, recipe)
    old = models.logprobs(plan)
    # Ratios on both sides of every bound, a token that is left out, weights of its own for the others.
    far = old if loss == "policy_gradient" else old + noise(2, 0.4)
    keep = torch.ones(len(old))
    keep[4] = 0
    learned = known_of(far, old + noise(3, 0.5), keep_K=keep, importance_K=noise(6).exp())
    update_policy(plan, learned, models, recipe, BETA, 0.0, (0,))
    return gradients(models.module)


@pytest.mark.parametrize("entropy", [0.0, ENTROPY])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_foreseen_update_is_the_same_update(
    loss: str, entropy: float, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"batch__tokens": 40, "algorithm__entropy": entropy}
    if loss == "policy_gradient":
        keys["algorithm__kl__where"] = "none"
    plain = stepped(tiny_folder, loss, monkeypatch, **keys)
    foreseen = Foreseen()
    monkeypatch.setattr(policies, "token_scores", foreseen)
    ours = stepped(tiny_folder, loss, monkeypatch, **keys)
    assert bool(foreseen.asked) == (loss not in SEQUENCES)
    assert ours.keys() == plain.keys()
    for name, wanted in plain.items():
        assert wanted.norm() > 0
        assert (ours[name] - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_a_loss_of_sequences_that_says_it_is_one_of_tokens_is_found_out(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "token_scores", Foreseen())
    monkeypatch.setattr(policy_loss, "loss_row", lambda name: replace(loss_row(name), tokenwise=True))
    found = stepped(tiny_folder, "gspo", monkeypatch, batch__tokens=40)
    assert all(gradient.isnan().any() for gradient in found.values())


def test_a_loss_of_ones_own_may_look_at_all_tokens() -> None:
    assert not loss_row("somebody.py:loss").tokenwise
    assert {name for name in LOSSES if not loss_row(name).tokenwise} == SEQUENCES
