"""Updates against plain autograd on padded tensors with the library's own model: gradients, losses and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hand_rollouts import plans_of, recipe_of, rollout
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.train import update as updates
from lockstep.train.advantages import Advantages, TrainBatch, next_coefficient
from lockstep.train.experience import Experience, ModelOutputs, UpdatePlan, build_experience
from lockstep.train.models import Models, Packing, build_critic, build_learner
from lockstep.train.step import Outcome
from lockstep.train.update import update, update_policy
from lockstep.train.update_terms import policy_metrics, refuse_disagreement, update_critic

CPU = torch.device("cpu")
BETA, ENTROPY, TEMPERATURE = 0.2, 0.05, 0.7
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
BATCHES: list[dict[str, Any]] = [{"batch__tokens": 4096}, {"batch__tokens": 20}, {"batch__micro_batch_size": 2}]
LENGTHS = ((3, 5), (4, 2), (2, 7), (6, 3), (3, 1), (5, 4))
TOKENS = sum(response for _, response in LENGTHS)


@contextmanager
def untimed(name: str) -> Iterator[None]:
    yield


def made() -> Experience:
    """Three prompts with two responses each, of different lengths; the tokens are drawn at random."""
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=draw).tolist()

    return build_experience(
        [
            rollout(i // 2, ids(response), float(i % 3), sample=i % 2, prompt=ids(prompt), logprobs=[-2.0] * response)
            for i, (prompt, response) in enumerate(LENGTHS)
        ]
    )


def noise(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed))


def models_of(recipe: Recipe, world: World | None = None) -> Models:
    where = (select("cpu"), World(), CPU)
    learner, packing = build_learner(recipe, *where), Packing.of(recipe, world or World(), 0)
    return Models(learner.module, packing, CPU, learner, build_critic(recipe, *where))


def planned(models: Models, recipe: Recipe) -> list[UpdatePlan]:
    return plans_of(made(), models, recipe.batch)


def known_of(old: torch.Tensor | None, reference: torch.Tensor | None = None, **more: torch.Tensor) -> TrainBatch:
    """Advantages drawn at random; everything is kept and weighs 1 unless given."""
    base = {
        "rewards_K": torch.zeros(TOKENS),
        "advantages_K": noise(4),
        "returns_K": torch.zeros(TOKENS),
        "keep_K": torch.ones(TOKENS),
        "is_weights_K": torch.ones(TOKENS),
    }
    known = ModelOutputs(old, reference, more.pop("values_K", None))
    return TrainBatch(made(), known, Advantages(**{**base, **more}, metrics={}))


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def stepped(models: Models, recipe: Recipe, learned: TrainBatch, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, dict]:
    """Metrics and gradients of one update of the policy that stops short of its optimizer."""
    monkeypatch.setattr(models.trained, "optim_step", lambda lr: {})
    (plan,) = planned(models, recipe)
    metrics = update_policy(plan, learned, models, recipe, BETA, 0.0, (0,))
    return metrics, gradients(models.module.model)  # type: ignore[arg-type]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    assert largest > 1e-4
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, n=name: n + m)


# -- the independent computation ---------------------------------------------------------------------------------------


class Padded:
    """The responses as right-padded rows; (R, L) tensors hold the response tokens of each row."""

    def __init__(self) -> None:
        rows = made().rollouts
        width = max(len(r.prompt.ids) + len(r.ids) for r in rows)
        self.ids = torch.zeros(len(rows), width, dtype=torch.long)
        self.attended = torch.zeros_like(self.ids)
        self.trained = torch.zeros(len(rows), width - 1)
        for i, r in enumerate(rows):
            line = [*r.prompt.ids, *r.ids]
            self.ids[i, : len(line)] = torch.tensor(line)
            self.attended[i, : len(line)] = 1
            self.trained[i, len(r.prompt.ids) - 1 : len(line) - 1] = 1

    def spread(self, vector_K: torch.Tensor) -> torch.Tensor:
        placed = torch.zeros_like(self.trained)
        placed[self.trained > 0] = vector_K
        return placed

    def scores(self, model: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=self.ids, attention_mask=self.attended, use_cache=False).logits[:, :-1] / temperature
        every = logits.log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        return every.gather(-1, self.ids[:, 1:, None])[..., 0], entropy

    def averaged(self, values: torch.Tensor, kind: str, keep: torch.Tensor, limit: int) -> torch.Tensor:
        kept = values * keep
        sums, lengths = kept.sum(1), keep.sum(1)
        some = (lengths > 0).sum()
        if kind == "token_mean":
            return kept.sum() / keep.sum()
        if kind == "seq_mean_token_mean":
            return (sums / lengths.clamp(min=1)).sum() / some
        return sums.sum() / some / (limit if kind == "seq_mean_token_sum_norm" else 1)


@pytest.fixture(scope="module")
def library(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")


@pytest.fixture(scope="module")
def drawn(library: Any) -> torch.Tensor:
    """The policy's own log-probabilities, by the library."""
    padded = Padded()
    with torch.no_grad():
        return padded.scores(library, TEMPERATURE)[0][padded.trained > 0]


def by_hand(library: Any, recipe: Recipe, learned: TrainBatch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """PPO's clip with a dual bound, k3 divergence and entropy, written out over padded rows."""
    padded, kind, limit = Padded(), recipe.algorithm.aggregation, recipe.rollout.max_tokens
    penalties = recipe.algorithm.penalty_aggregation or kind
    known, advantages = learned.outputs, learned.advantages
    assert known.old_K is not None
    assert known.reference_K is not None
    old, reference, advantages, keep, importance = (
        padded.spread(v)
        for v in (
            known.old_K,
            known.reference_K,
            advantages.advantages_K,
            advantages.keep_K,
            advantages.is_weights_K,
        )
    )
    library.zero_grad()
    logprobs, entropy = padded.scores(library, TEMPERATURE)
    ratio = torch.exp(logprobs - old)
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.3)
    surrogate = torch.maximum(plain, bounded)
    surrogate = torch.where(advantages < 0, torch.minimum(surrogate, -advantages * 1.5), surrogate)
    away = reference - logprobs
    k3 = away.exp() - away - 1
    pg_loss = padded.averaged(surrogate * importance, kind, keep, limit)
    kl_loss = padded.averaged(k3, penalties, keep, limit)
    loss = pg_loss + BETA * kl_loss - ENTROPY * padded.averaged(entropy, penalties, keep, limit)
    loss.backward()
    counted = padded.trained * keep > 0
    metrics = {
        "actor/loss": loss,
        "actor/pg_loss": pg_loss,
        "actor/kl_loss": kl_loss,
        "actor/entropy": entropy[counted].mean(),
        "actor/kl": k3[counted].mean(),
        "actor/pg_clipfrac": (bounded > plain)[counted].float().mean(),
        "actor/pg_clipfrac_lower": ((advantages < 0) & (torch.maximum(plain, bounded) > -advantages * 1.5))[counted]
        .float()
        .mean(),
        "actor/ppo_kl": (old - logprobs)[counted].mean(),
        "training/rollout_probs_diff_mean": (known.old_K.exp() - torch.tensor(-2.0).exp()).abs().mean(),
        "training/rollout_probs_diff_max": (known.old_K.exp() - torch.tensor(-2.0).exp()).abs().max(),
        "training/rollout_probs_diff_std": (known.old_K.exp() - torch.tensor(-2.0).exp()).abs().std(correction=0),
    }
    return {name: float(value.detach()) for name, value in metrics.items()}, gradients(library)


def grpo(tiny_folder: Path, **more: Any) -> Recipe:
    return recipe_of(
        str(tiny_folder),
        **{
            "batch__prompts": 3,
            "rollout__n": 2,
            "rollout__max_tokens": 9,
            "rollout__temperature": TEMPERATURE,
            "algorithm__clip_high": 0.3,
            "algorithm__dual_clip": 1.5,
            "algorithm__entropy": ENTROPY,
            **more,
        },
    )


@pytest.mark.daily
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_policys_gradient_is_that_of_the_loss_written_out(
    tiny_folder: Path,
    library: Any,
    drawn: torch.Tensor,
    aggregation: str,
    batch: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = grpo(tiny_folder, algorithm__aggregation=aggregation, **batch)
    known = known_of(drawn + noise(2, 0.4), drawn + noise(3, 0.4))
    expected, expected_gradients = by_hand(library, recipe, known)
    metrics, found = stepped(models_of(recipe), recipe, known, monkeypatch)
    assert 0.1 < expected["actor/pg_clipfrac"] < 0.9, "the bounds must matter"
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    same(found, expected_gradients)


@pytest.mark.parametrize("penalties", ["token_mean", "seq_mean_token_sum_norm"])
def test_penalties_may_be_averaged_otherwise(
    tiny_folder: Path, library: Any, drawn: torch.Tensor, penalties: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = grpo(tiny_folder, algorithm__aggregation="seq_mean_token_mean", algorithm__penalty_aggregation=penalties)
    keep = torch.ones(TOKENS)
    keep[5:7] = 0  # the whole second response
    known = known_of(drawn + noise(2, 0.4), drawn + noise(3, 0.4), keep_K=keep)
    expected, expected_gradients = by_hand(library, recipe, known)
    metrics, found = stepped(models_of(recipe), recipe, known, monkeypatch)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    same(found, expected_gradients)


@pytest.mark.daily
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_tokens_have_no_part_and_weights_scale_the_surrogate_alone(
    tiny_folder: Path,
    library: Any,
    drawn: torch.Tensor,
    aggregation: str,
    batch: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Metrics are means over the tokens that are kept; only the engine is held against the trainer on all tokens."""
    keep = torch.ones(TOKENS)
    keep[[0, 3, 9]] = 0
    keep[5:7] = 0  # the whole second response
    known = known_of(
        drawn + noise(2, 0.4), drawn + noise(3, 0.4), keep_K=keep, is_weights_K=noise(5, 0.5).exp().clamp(max=2)
    )
    recipe = grpo(tiny_folder, algorithm__aggregation=aggregation, **batch)
    expected, expected_gradients = by_hand(library, recipe, known)
    metrics, found = stepped(models_of(recipe), recipe, known, monkeypatch)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert set(metrics) == set(expected)
    same(found, expected_gradients)


class Rank:
    """One of two ranks, which hears what the other said at the same collective."""

    def __init__(self, other: list[Any] | None = None):
        self.other, self.said = other, []  # type: ignore[var-annotated]

    def gather(self, value: Any) -> list[Any]:
        self.said.append(value)
        return [value] if self.other is None else [value, self.other[len(self.said) - 1]]

    def sum(self, values: Sequence[float]) -> list[float]:
        return [sum(share) for share in zip(*self.gather(list(values)), strict=True)]


def test_metrics_of_kept_tokens_do_not_depend_on_the_number_of_processes(
    tiny_folder: Path, drawn: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks keep different shares of their tokens."""
    keep = torch.ones(TOKENS)
    keep[[0, 1, 2, 3, 9]] = 0
    known = known_of(drawn + noise(2, 0.4), drawn + noise(3, 0.4), keep_K=keep)
    recipe = grpo(tiny_folder, batch__tokens=20)
    alone, _ = stepped(models_of(recipe), recipe, known, monkeypatch)

    def share(rank: int, world: Rank) -> dict[str, float]:
        models = models_of(recipe, World(rank, 2))
        models.trained.world = world  # type: ignore[assignment]
        monkeypatch.setattr(models.trained, "optim_step", lambda lr: {})
        (plan,) = planned(models, recipe)
        return update_policy(plan, known, models, recipe, BETA, 0.0, (0,))

    # What a rank says depends on its own tokens only: the first says it to nobody, the second hears it.
    first = Rank()
    share(0, first)
    second = Rank(first.said)
    assert share(1, second) == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert len(second.said) == len(first.said) > 2


def test_an_update_that_keeps_nothing_has_no_means_and_weighs_nothing_in_the_steps(
    tiny_folder: Path, drawn: torch.Tensor
) -> None:
    """Its zeros would lower the divergence that the coefficient follows."""
    recipe = grpo(tiny_folder, batch__prompts_per_update=1, optim__lr=1e-30)
    keep = torch.ones(TOKENS)
    keep[:7] = 0  # both responses to the first prompt
    known = known_of(drawn, drawn - 0.5, keep_K=keep)
    models = models_of(recipe)
    plans = planned(models, recipe)
    metrics = update(plans, known, models, recipe, BETA, 0, 10, untimed)
    # k3 of d = 0.5 at every kept token.
    assert metrics["actor/kl"] == pytest.approx(torch.tensor(-0.5).exp().item() + 0.5 - 1, rel=1e-3)
    for nothing in (torch.zeros(TOKENS), torch.zeros(TOKENS)):
        metrics = update(plans, known_of(drawn, drawn, keep_K=nothing), models_of(recipe), recipe, BETA, 0, 10, untimed)
        assert metrics["actor/loss"] == 0.0
        assert "actor/pg_loss" not in metrics
        assert not {"actor/kl", "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl"} & set(metrics)


@pytest.mark.parametrize(("measured", "coefficient"), [({"actor/kl": 0.2}, 0.12), ({}, 0.1)])
def test_the_coefficient_follows_what_was_measured(measured: dict[str, float], coefficient: float) -> None:
    """A horizon of 6 sequences applies the bounded error of +0.2 in full; a step that measured nothing changes none."""
    recipe = recipe_of(algorithm__kl={"where": "loss", "target": 0.1, "horizon": 6})
    assert next_coefficient(recipe, 0.1, measured, made().sequences) == pytest.approx(coefficient)


def test_an_impossible_token_that_is_left_out_changes_nothing(
    tiny_folder: Path, drawn: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real model whose head finds a word impossible: a bias of -inf at the tokens that are left out."""
    ids = [token for one in made().rollouts for token in one.ids]
    word = ids[3]
    keep = torch.tensor([float(token != word) for token in ids])
    assert 0 < keep.sum() < TOKENS
    recipe = grpo(tiny_folder, batch__tokens=20)
    models = models_of(recipe)
    head = models.module.model.lm_head  # type: ignore[union-attr]
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
    head.bias.data[word] = -torch.inf
    old = torch.where(keep > 0, drawn, -torch.inf)
    metrics, found = stepped(models, recipe, known_of(old, old, keep_K=keep), monkeypatch)
    assert all(torch.tensor(value).isfinite() for value in metrics.values()), metrics
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert metrics["actor/kl"] < 1.0


def test_without_old_log_probabilities_the_ratio_is_one(
    tiny_folder: Path, library: Any, drawn: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = grpo(tiny_folder, batch__tokens=20)
    reference = drawn + noise(3, 0.4)
    expected, expected_gradients = by_hand(library, recipe, known_of(drawn, reference))
    metrics, found = stepped(models_of(recipe), recipe, known_of(None, reference), monkeypatch)
    assert "actor/ppo_kl" not in metrics  # 0 by definition
    assert metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-4)
    assert metrics["actor/pg_loss"] == pytest.approx(-float(noise(4).mean()), rel=1e-4)
    same(found, expected_gradients)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_held_tokens_do_not_depend_on_the_micro_batches(
    tiny_folder: Path, drawn: torch.Tensor, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for batch in BATCHES:
        recipe = grpo(
            tiny_folder,
            algorithm__loss=loss,
            algorithm__cov_ratio=0.4,
            algorithm__cov_low=-100.0,
            algorithm__cov_high=100.0,
            algorithm__kl={"where": "none"},
            **batch,
        )
        found.append(stepped(models_of(recipe), recipe, known_of(drawn + noise(2, 0.4)), monkeypatch))
    for metrics, gradient in found:
        # 40 % of 22 tokens, rounded down.
        assert metrics["actor/pg_heldfrac"] == pytest.approx(8 / 22)
        assert metrics["actor/loss"] == pytest.approx(found[0][0]["actor/loss"], rel=1e-4)
        same(gradient, found[0][1])


def test_kl_cov_holds_the_tokens_of_highest_covariance(
    tiny_folder: Path, library: Any, drawn: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, advantages = drawn + noise(2, 0.4), noise(4)
    covariance = [
        (float(a) - float(advantages.mean())) * (float(o) - float(old.mean()))
        for a, o in zip(advantages, old, strict=True)
    ]
    held = sorted(range(TOKENS), key=lambda i: -covariance[i])[:4]  # 20 % of 22, rounded down
    padded = Padded()
    library.zero_grad()
    now = padded.scores(library, TEMPERATURE)[0][padded.trained > 0]
    tokens = -advantages * (now - old).exp()
    loss = (tokens.sum() + 0.5 * (now - old)[held].abs().sum()) / TOKENS
    loss.backward()
    recipe = grpo(
        tiny_folder,
        algorithm__loss="kl_cov",
        algorithm__cov_ratio=0.2,
        algorithm__cov_kl=0.5,
        algorithm__entropy=0.0,
        algorithm__kl={"where": "none"},
    )
    metrics, found = stepped(models_of(recipe), recipe, known_of(old), monkeypatch)
    assert metrics["actor/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    same(found, gradients(library))


# -- the critic --------------------------------------------------------------------------------------------------------


def ppo(tiny_folder: Path, **more: Any) -> Recipe:
    kl = {"where": "none"}
    return recipe_of(
        str(tiny_folder), method="ppo", **{"batch__prompts": 3, "batch__tokens": 20, "algorithm__kl": kl, **more}
    )


@pytest.mark.daily
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("clip", [0.3, None])
def test_the_critics_gradient_is_that_of_the_loss_written_out(
    tiny_folder: Path, library: Any, clip: float | None, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = ppo(tiny_folder, critic__clip=clip, **{"batch__tokens": None, **batch})
    models = models_of(recipe)
    assert models.critic is not None
    monkeypatch.setattr(models.critic, "optim_step", lambda lr: {})
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(6)) / 8
    with torch.no_grad():
        models.critic.module.head.weight.copy_(head)  # type: ignore[union-attr, operator]
    keep = torch.ones(TOKENS)
    keep[[2, 10]] = 0
    old, returns = noise(7), noise(8)
    (plan,) = planned(models, recipe)
    known = known_of(None, values_K=old, returns_K=returns, keep_K=keep)
    metrics = update_critic(plan, known, models, recipe, 0.0)

    padded = Padded()
    library.zero_grad()
    weight = head.clone().requires_grad_()
    hidden = library.model(input_ids=padded.ids, attention_mask=padded.attended).last_hidden_state[:, :-1]
    values = (hidden @ weight.T)[..., 0][padded.trained > 0]
    error = (values - returns) ** 2
    if clip is not None:
        error = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
    loss = 0.5 * (error * keep).sum() / 20  # 22 tokens, two of them masked
    loss.backward()
    assert weight.grad is not None
    assert metrics["critic/vf_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    kept = keep > 0
    assert metrics["critic/vpred_mean"] == pytest.approx(float(values.detach()[kept].mean()), rel=1e-3)
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        share = ((near - returns).square() > (values - returns).square())[kept].float().mean()
        assert metrics["critic/vf_clipfrac"] == pytest.approx(float(share))
    expected = {f"decoder.{name}": gradient for name, gradient in gradients(library.model).items()}
    same(gradients(models.critic.module), {**expected, "head.weight": weight.grad})


@pytest.mark.parametrize(("aggregation", "divisor"), [("token_mean", 22), ("seq_mean_token_sum", 6)])
def test_the_critics_losses_are_averaged_as_the_recipe_says(
    tiny_folder: Path, aggregation: str, divisor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is zero, so that every value is 0 and its loss half the squared return."""
    recipe = ppo(tiny_folder, critic__clip=None, critic__aggregation=aggregation)
    models = models_of(recipe)
    monkeypatch.setattr(models.critic, "optim_step", lambda lr: {})
    (plan,) = planned(models, recipe)
    returns = noise(8)
    metrics = update_critic(plan, known_of(None, values_K=noise(7), returns_K=returns), models, recipe, 0.0)
    assert metrics["critic/vf_loss"] == pytest.approx(float(0.5 * returns.square().sum() / divisor), rel=1e-5)


def bits(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_steps_of_the_critics_warm_up_leave_the_policy_bit_for_bit(tiny_folder: Path) -> None:
    recipe = ppo(tiny_folder, critic__warmup=2, critic__lr=1e-3, optim__lr=1e-3, optim__schedule="constant")
    models = models_of(recipe)
    assert models.critic is not None
    known = known_of(None, values_K=noise(7), returns_K=noise(8))
    plans = planned(models, recipe)
    moved = []
    for step in range(3):
        before, critic_before = bits(models.module), bits(models.critic.module)
        metrics = update(plans, known, models, recipe, 0.0, step, 10, untimed)
        assert "critic/vf_loss" in metrics
        assert not torch.equal(bits(models.critic.module)["head.weight"], critic_before["head.weight"])
        after = bits(models.module)
        moved.append(any(not torch.equal(after[name], before[name]) for name in before))
        assert ("actor/pg_loss" in metrics) is moved[-1]
    assert moved == [False, False, True]


# -- several updates ---------------------------------------------------------------------------------------------------


def test_metrics_of_several_updates_are_means_and_maxima(
    tiny_folder: Path, drawn: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = grpo(tiny_folder, batch__prompts_per_update=1, algorithm__epochs=2, optim__schedule="constant")
    known = known_of(drawn + noise(2, 0.4), drawn + noise(3, 0.4))
    models = models_of(recipe)
    plans = planned(models, recipe)
    seen: list[tuple[UpdatePlan, dict[str, float]]] = []

    def recorded(plan: UpdatePlan, *rest: Any) -> dict[str, float]:
        seen.append((plan, update_policy(plan, *rest)))
        return seen[-1][1]

    monkeypatch.setattr(updates, "update_policy", recorded)
    metrics = update(plans, known, models, recipe, BETA, 0, 10, untimed)
    assert [plan.tokens for plan, _ in seen] == [plan.tokens for plan in plans] * 2
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "training/rollout_probs_diff_mean"):
        assert metrics[name] == pytest.approx(sum(each[name] for _, each in seen) / 6), name
    largest = "training/rollout_probs_diff_max"
    assert metrics[largest] == max(each[largest] for _, each in seen)
    assert len({each[largest] for _, each in seen}) > 1


def test_the_rates_follow_the_step_and_the_critic_has_its_own_peak(tiny_folder: Path) -> None:
    recipe = ppo(tiny_folder, optim__lr=0.01, optim__schedule="linear", critic__lr=0.1)
    models = models_of(recipe)
    plans = planned(models, recipe)
    known = known_of(None, values_K=noise(7), returns_K=noise(8))
    metrics = update(plans, known, models, recipe, 0.0, 5, 20, untimed)
    assert metrics["actor/lr"] == pytest.approx(0.0075)
    assert metrics["critic/lr"] == pytest.approx(0.075)


# -- engine and trainer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "most", "stops"), [(0.1, 0.1, False), (0.101, 0.1, True), (9.0, None, False)])
def test_a_disagreement_over_the_limit_names_the_key(mean: float, most: float | None, stops: bool) -> None:
    metrics = {"training/rollout_probs_diff_mean": mean}
    if not stops:
        refuse_disagreement(metrics, most)
        return
    with pytest.raises(Refusal) as caught:
        refuse_disagreement(metrics, most)
    (problem,) = caught.value.problems
    assert problem.where == "rollout.max_probs_diff"
    assert "0.101" in problem.why
    assert "algorithm.rollout_correction" in problem.remedy


def test_a_disagreement_stops_before_the_weights_move(tiny_folder: Path, drawn: torch.Tensor) -> None:
    recipe = grpo(tiny_folder, rollout__max_probs_diff=1e-9, algorithm__kl={"where": "none"})
    models = models_of(recipe)
    before = bits(models.module)
    (plan,) = planned(models, recipe)
    with pytest.raises(Refusal):
        update_policy(plan, known_of(drawn), models, recipe, 0.0, 1e-2, (0,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(models.module).items())


def test_metrics_over_no_token_and_deviations_of_one_are_missing() -> None:
    sums = {"pg_loss": 0.0, "kl_loss": 0.0, "ppo_kl": 0.0, "probs_diff": 0.2, "probs_diff_squared": 0.04}
    alone = policy_metrics(Outcome(0.0, sums, {"probs_diff": 0.2}, targets=1, tokens=4), 1.0, 0.0)
    assert alone == {
        "actor/loss": 0.0,
        "training/rollout_probs_diff_mean": 0.2,
        "training/rollout_probs_diff_max": 0.2,
    }
    two = policy_metrics(Outcome(0.5, {**sums, "pg_loss": 1.0}, {"probs_diff": 0.2}, targets=2, tokens=4), 2.0, 2.0)
    assert two["actor/pg_loss"] == 0.5
    assert two["training/rollout_probs_diff_std"] == pytest.approx((0.02 - 0.01) ** 0.5)
