"""Trajectories with several rows: loss and gradients against plain autograd, one row at a time, with transformers'
model. A trajectory counts once, whatever its number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hand_rollouts import plans_of, recipe_of, rollout
from lockstep.device.select import select
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import rollout_rows, rollouts_of
from lockstep.train.advantages import TrainBatch, estimate_advantages
from lockstep.train.experience import Experience, ModelOutputs, build_experience
from lockstep.train.models import Models, Packing, build_critic, build_learner
from lockstep.train.update import update_policy
from lockstep.trajectory import TrajectoryRow
from lockstep.types import Rollout

CPU = torch.device("cpu")
BATCHES: list[dict[str, Any]] = [
    {"batch__tokens": 4096},
    {"batch__tokens": 30},
    {"batch__micro_batch_size": 1},
    {"batch__micro_batch_size": 3},
]
# The loss masks of the rows of each trajectory, and its score. The first trajectory has three rows: the history of a
# row is masked, and the last turn of a row is sampled. The trajectories 0 and 1 answer one prompt, 2 and 3 another.
TRAJECTORIES: list[tuple[list[str], float]] = [
    (["1111", "00111", "0000011"], 1.0),
    (["11"], 0.0),
    (["1100111", "000001111"], 0.0),
    (["111111"], 3.0),
]


def row(mask: str, draw: torch.Generator) -> TrajectoryRow:
    ids = torch.randint(0, 256, (len(mask),), generator=draw).tolist()
    trained = [int(one) for one in mask]
    return TrajectoryRow(ids, trained, [-2.0 * one for one in trained])


def joined(rows: Sequence[TrajectoryRow], place: int, score: float, sample: int, prompt: Sequence[int]) -> Rollout:
    ids = [token for one in rows for token in one.ids]
    whole = rollout(place, ids, score, sample=sample, prompt=prompt, trained=[m for one in rows for m in one.loss_mask])
    logprobs = [value for one in rows for value in one.logprobs]
    return replace(whole, logprobs=logprobs, rows=tuple(rows) if len(rows) > 1 else ())


def trajectories() -> list[Rollout]:
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (length,), generator=draw).tolist() for length in (4, 3)]
    return [
        joined([row(mask, draw) for mask in masks], number // 2, score, number % 2, prompts[number // 2])
        for number, (masks, score) in enumerate(TRAJECTORIES)
    ]


def models_of(recipe: Recipe) -> Models:
    where = (select("cpu"), World(), CPU)
    learner, packing = build_learner(recipe, *where), Packing.of(recipe, World(), 0)
    return Models(learner.module, packing, CPU, learner, build_critic(recipe, *where))


@pytest.fixture(scope="module")
def library(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")


def logprobs_by_hand(library: Any, one: Rollout) -> torch.Tensor:
    """The log-probs of the trained tokens of a trajectory: each row alone after the prompt, without packing."""
    found = []
    for part in one.rows or (TrajectoryRow(one.ids, list(one.loss_mask), one.logprobs),):
        ids = torch.tensor([[*one.prompt.ids, *part.ids]])
        every = library(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        trained = torch.tensor([0] * (len(one.prompt.ids) - 1) + list(part.loss_mask)) > 0
        found.append(every.gather(-1, ids[0, 1:, None])[:, 0][trained])
    return torch.cat(found)


# The advantages of GRPO: (score - mean) / (deviation + 1e-6) over the trajectories of each prompt.
def advantages_by_hand() -> list[float]:
    found = []
    for place in (0, 2):
        pair = torch.tensor([score for _, score in TRAJECTORIES[place : place + 2]], dtype=torch.float64)
        found += ((pair - pair.mean()) / (pair.std() + 1e-6)).tolist()
    return found


Loss = Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor]


def clipped(ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def token_mean(new: list[torch.Tensor], old: list[torch.Tensor]) -> torch.Tensor:
    terms = [clipped((n - o).exp(), a) for n, o, a in zip(new, old, advantages_by_hand(), strict=True)]
    return torch.cat(terms).mean()


def sequence_mean(new: list[torch.Tensor], old: list[torch.Tensor]) -> torch.Tensor:
    terms = [clipped((n - o).exp(), a).mean() for n, o, a in zip(new, old, advantages_by_hand(), strict=True)]
    return torch.stack(terms).mean()


def gspo(new: list[torch.Tensor], old: list[torch.Tensor]) -> torch.Tensor:
    """The ratio of a trajectory: the geometric mean over all tokens of all of its rows."""
    terms = [clipped((n - o).mean().exp(), a) for n, o, a in zip(new, old, advantages_by_hand(), strict=True)]
    return torch.stack(terms).mean()


KINDS: dict[str, tuple[dict[str, Any], Loss]] = {
    "token mean": ({"algorithm__aggregation": "token_mean"}, token_mean),
    "sequence mean": ({"algorithm__aggregation": "seq_mean_token_mean"}, sequence_mean),
    "gspo": ({"algorithm__loss": "gspo", "algorithm__aggregation": "seq_mean_token_mean"}, gspo),
}


def recipe(path: Path, **keys: Any) -> Recipe:
    clip = {"algorithm__clip_low": 0.2, "algorithm__clip_high": 0.2}
    return recipe_of(str(path), rollout__n=2, batch__prompts=2, model__dtype="fp32", **clip, **keys)


def trained(
    given: Recipe, rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch, old: Sequence[torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one update, with these old log-probs."""
    models, experience = models_of(given), build_experience(rollouts)
    monkeypatch.setattr(models.trained, "optim_step", lambda lr: {})
    (plan,) = plans_of(experience, models, given.batch)
    outputs = ModelOutputs(torch.cat(list(old)), None, None)
    batch = TrainBatch(experience, outputs, estimate_advantages(experience, outputs, given, 0.0))
    metrics = update_policy(plan, batch, models, given, 0.0, 0.0, (0,))
    found = models.module.model.named_parameters()  # type: ignore[union-attr]
    return metrics["actor/loss"], {name: p.grad for name, p in found if p.grad is not None}


def old_logprobs(library: Any) -> list[torch.Tensor]:
    """Old log-probs that differ from the new ones by up to 0.4, so that some ratios are clipped."""
    with torch.no_grad():
        new = [logprobs_by_hand(library, one) for one in trajectories()]
    return [one + 0.4 * torch.sin(torch.arange(len(one)) + number) for number, one in enumerate(new)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_the_loss_of_rows_is_that_of_the_trajectory(
    kind: str, batch: dict[str, Any], tiny_folder: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, by_hand = KINDS[kind]
    old = old_logprobs(library)
    library.zero_grad()
    loss = by_hand([logprobs_by_hand(library, one) for one in trajectories()], old)
    loss.backward()
    found, gradients = trained(recipe(tiny_folder, **keys, **batch), trajectories(), monkeypatch, old)
    assert found == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
    wanted = {name: p.grad for name, p in library.named_parameters() if p.grad is not None}
    assert gradients.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert largest > 1e-4
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_count_as_responses_have_another_loss(
    kind: str, tiny_folder: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above notice a trainer that counts rows: it would have this loss."""
    keys, by_hand = KINDS[kind]
    old = old_logprobs(library)
    apart, sample = [], 0
    for one in trajectories():
        for part in one.rows or (TrajectoryRow(one.ids, list(one.loss_mask), one.logprobs),):
            apart.append(joined([part], one.prompt_index, one.score.total, sample, one.prompt.ids))  # type: ignore[union-attr]
            sample += 1
    found, _ = trained(recipe(tiny_folder, batch__tokens=4096, **keys), apart, monkeypatch, old)
    with torch.no_grad():
        loss = by_hand([logprobs_by_hand(library, one) for one in trajectories()], old)
    assert found != pytest.approx(float(loss), rel=1e-2)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_logprobs_and_values_of_rows(batch: dict[str, Any], tiny_folder: Path, library: Any) -> None:
    """Every trained token is scored once, in the context of its row, and all rows of a trajectory are in one
    micro-batch."""
    given = recipe(tiny_folder, method="ppo", **batch)
    models, experience = models_of(given), build_experience(trajectories())
    (plan,) = plans_of(experience, models, given.batch)
    with torch.no_grad():
        wanted = torch.cat([logprobs_by_hand(library, one) for one in trajectories()])
    torch.testing.assert_close(models.logprobs(plan), wanted, rtol=1e-4, atol=1e-5)
    alone = recipe(tiny_folder, method="ppo", batch__micro_batch_size=1)
    apart = []
    for one in trajectories():
        for part in one.rows or (TrajectoryRow(one.ids, list(one.loss_mask), one.logprobs),):
            single = build_experience([joined([part], 0, 0.0, 0, one.prompt.ids)])
            apart.append(
                models.values(plans_of(single, replace(models, packing=Packing.of(alone, World(), 0)), alone.batch)[0])
            )
    torch.testing.assert_close(models.values(plan), torch.cat(apart), rtol=1e-4, atol=1e-5)
    for micro_batch in plan.batches:
        sequences = experience.sequence_K[micro_batch.index_K].unique()
        assert len(micro_batch.index_K) == int(experience.num_response_tokens_S[sequences].sum())


def test_the_sequence_weight_of_a_trajectory_is_the_product_over_all_its_rows(tiny_folder: Path) -> None:
    """Truncated importance sampling over sequences: rows that counted as sequences would have other weights."""
    made = trajectories()
    experience = build_experience(made)
    old_K = experience.rollout_logprobs_K + torch.linspace(-0.3, 0.2, len(experience.sequence_K))
    keys = {"algorithm__rollout_correction": {"weight": "sequence", "cap": 1.5}, "algorithm__kl__where": "none"}
    found = estimate_advantages(experience, ModelOutputs(old_K, None, None), recipe(tiny_folder, **keys), 0.0)
    assert any(len(one.rows) > 1 for one in made)
    start, several = 0, 0
    for one in made:
        stop = start + sum(one.loss_mask)
        difference = (old_K - experience.rollout_logprobs_K)[start:stop].double()
        weight = float(difference.sum().exp().clamp(max=1.5))
        assert found.is_weights_K[start:stop].tolist() == pytest.approx([weight] * (stop - start), rel=1e-5)
        several += len(set(found.is_weights_K[start:stop].tolist()))
        start = stop
    assert (start, several) == (len(old_K), len(made))


def test_generalized_advantages_continue_over_rows(tiny_folder: Path) -> None:
    """The value after the last token of a row is that of the first trained token of the next row."""
    experience: Experience = build_experience([trajectories()[0]])
    values = torch.linspace(-0.3, 0.9, 9)
    keys = {"algorithm__gamma": 0.9, "algorithm__lam": 0.8, "algorithm__whiten__over": "none"}
    given = recipe(tiny_folder, method="ppo", algorithm__kl__where="none", **keys)
    outputs = ModelOutputs(torch.zeros(9), None, values)
    found = estimate_advantages(experience, outputs, given, 0.0).advantages_K
    wanted, later, rewards = [0.0] * 9, 0.0, [0.0] * 8 + [1.0]
    for place in reversed(range(9)):
        following = float(values[place + 1]) if place < 8 else 0.0
        later = rewards[place] + 0.9 * following - float(values[place]) + 0.9 * 0.8 * later
        wanted[place] = later
    torch.testing.assert_close(found, torch.tensor(wanted))


def test_a_trajectory_longer_than_the_budget_has_its_own_micro_batch(tiny_folder: Path) -> None:
    given = recipe(tiny_folder, batch__tokens=14)
    models, experience = models_of(given), build_experience(trajectories())
    (plan,) = plans_of(experience, models, given.batch)
    held = [experience.sequence_K[one.index_K].unique().tolist() for one in plan.batches]
    assert sorted(number for numbers in held for number in numbers) == [0, 1, 2, 3]
    assert [2] in held  # 3 + 7 and 9 more tokens, which share the prompt


def test_a_tape_keeps_rows() -> None:
    assert rollouts_of(rollout_rows(trajectories()), TapeImages(Path())) == trajectories()


def test_rows_must_be_the_ids() -> None:
    one = trajectories()[0]
    with pytest.raises(ValueError, match="the ids of the rows are not the ids"):
        replace(one, rows=one.rows[:2])
