"""10,000 random small cases of every loss with extreme and left-out tokens: values and gradients stay finite numbers.

A case is a sequence, a pair, a row, a ranking or a place. Many go through a loss together, each loss gets 10,000 of its
own; a NaN or an infinity of any one of them shows in the sum and in its own gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from hand_rollouts import recipe_of
from lockstep.algorithms import correction, preference
from lockstep.algorithms import divergence as kl
from lockstep.algorithms import preference as pair_losses
from lockstep.algorithms import token_selection as covariance
from lockstep.algorithms.divergence import DIVERGENCES, fold_rest
from lockstep.algorithms.divergence import distribution_divergence as divergence
from lockstep.algorithms.kto import kl_estimate, kto_loss, row_logratios, row_means
from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens
from lockstep.algorithms.ranking import PAIR_LOSSES, ranking_loss
from lockstep.algorithms.reduce import AGGREGATIONS, aggregation_weights, sum_by
from lockstep.algorithms.token_losses import good_probability, nll, step_loss, value_loss
from lockstep.kernels.logprob import Head, Scores, token_scores
from lockstep.recipe.keys_online import Kl
from lockstep.train.update_terms import PolicyLoss, make_policy_loss
from loss_settings import SETTINGS

CASES, TOGETHER = 10_000, 250
INF, NAN = math.inf, math.nan
# Impossible, below any type's smallest number, the logarithms of 1e-45 and 1e-30, certain, and over 1 by rounding.
LOGPROBS = (-INF, -INF, -1e5, -1e4, -9999.0, -103.0, -69.0, -20.0, -1.0, -1e-7, -1e-30, 0.0, 1e-30, 1e-7)
SIZES = (0.0, 1e-30, -1e-30, 1e-4, -1e-4, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4)
# What a token that is left out may hold.
ANYTHING = (-INF, INF, NAN, -1e30, 1e30, 0.0)
ESTIMATORS = get_args(Kl.model_fields["estimator"].annotation)


class Draw:
    """Seeded draws; half of the numbers are extreme, the others ordinary."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def whole(self, low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (count,), generator=self.generator)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def chance(self, share: float, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator) < share

    def of(self, values: tuple[float, ...], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=self.generator)]

    def logprobs(self, *shape: int) -> torch.Tensor:
        return torch.where(self.chance(0.5, *shape), self.of(LOGPROBS, *shape), -3 * self.normal(*shape).abs())

    def others(self, like: torch.Tensor) -> torch.Tensor:
        """The same tokens by another model: often near, sometimes as impossible, sometimes far away."""
        near = like + 0.3 * self.normal(*like.shape)
        return torch.where(self.chance(0.6, *like.shape), near, self.logprobs(*like.shape))

    def sizes(self, *shape: int) -> torch.Tensor:
        return torch.where(self.chance(0.5, *shape), self.of(SIZES, *shape), self.normal(*shape))


def rounds() -> Iterator[tuple[Draw, int]]:
    for seed in range(CASES // TOGETHER):
        yield Draw(seed), TOGETHER


def sequences(draw: Draw, count: int) -> torch.Tensor:
    """`count` sequences of 1 to 6 tokens."""
    return torch.repeat_interleave(torch.arange(count), draw.whole(1, 6, count))


def kept_weights(draw: Draw, sequence_K: torch.Tensor, count: int) -> torch.Tensor:
    """Weights of an update, of a random aggregation, with dropped tokens and importance weights."""
    keep_K = (~draw.chance(0.3, len(sequence_K))).float()
    kind = AGGREGATIONS[int(draw.whole(0, len(AGGREGATIONS) - 1, 1))]
    loss_weights_K, divisor = aggregation_weights(kind, sequence_K, keep_K, count, 64)
    return loss_weights_K / divisor * draw.of((1.0, 1.0, 2.0, math.exp(-20)), len(sequence_K))


def finite(*values: torch.Tensor) -> None:
    for value in values:
        assert value.isfinite().all(), value[~value.isfinite()]


def gradient_of(loss: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    finite(loss)
    (gradient,) = torch.autograd.grad(loss, by)
    finite(gradient)
    return gradient


def overwritten(draw: Draw, values_K: torch.Tensor, left_out_K: torch.Tensor) -> torch.Tensor:
    return torch.where(left_out_K, draw.of(ANYTHING, len(values_K)), values_K)


# -- online ------------------------------------------------------------------------------------------------------------


def policy_tokens(draw: Draw, count: int) -> PolicyTokens:
    sequence_K = sequences(draw, count)
    logprobs_K, size = draw.logprobs(len(sequence_K)), len(sequence_K)
    weights_K = kept_weights(draw, sequence_K, count)
    return PolicyTokens(
        logprobs_K.requires_grad_(),
        draw.others(logprobs_K.detach()),
        draw.sizes(size),
        weights_K,
        sequence_K,
        draw.chance(0.2, size).float() * (weights_K > 0),
    )


@pytest.mark.daily("clip", "gspo", "geo_mean", "cispo", "kl_cov")
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses(name: str) -> None:
    for draw, count in rounds():
        tokens = policy_tokens(draw, count)
        sums = LOSSES[name](tokens, **SETTINGS[name])
        gradient = gradient_of(sums.loss, tokens.logprobs_K)
        finite(*sums.metrics.values())
        left_out = tokens.weights_K == 0
        assert left_out.any()
        assert not gradient[left_out].any()
        changed = replace(
            tokens,
            logprobs_K=overwritten(draw, tokens.logprobs_K.detach(), left_out).requires_grad_(),
            old_K=overwritten(draw, tokens.old_K, left_out),
            advantages_K=overwritten(draw, tokens.advantages_K, left_out),
        )
        again = LOSSES[name](changed, **SETTINGS[name])
        assert again.loss.item() == sums.loss.item()
        assert torch.equal(gradient_of(again.loss, changed.logprobs_K), gradient)
        assert {k: v.item() for k, v in again.metrics.items()} == {k: v.item() for k, v in sums.metrics.items()}


@pytest.mark.daily("clip", "gspo", "cispo", "kl_cov")
@pytest.mark.parametrize("name", LOSSES)
def test_the_whole_loss_of_an_update_with_divergence_and_entropy(name: str) -> None:
    for draw, count in rounds():
        tokens = policy_tokens(draw, count)
        logprobs, size = tokens.logprobs_K, len(tokens.logprobs_K)
        estimator = ESTIMATORS[int(draw.whole(0, len(ESTIMATORS) - 1, 1))]
        recipe = recipe_of(
            algorithm__loss=name, algorithm__entropy=0.1, algorithm__kl={"where": "loss", "estimator": estimator}
        )
        average = tokens.weights_K
        reference, entropies = draw.others(logprobs.detach()), draw.normal(size).abs().requires_grad_()
        engine, left_out = draw.others(logprobs.detach()), average == 0

        def of(
            logprobs: torch.Tensor,
            entropies: torch.Tensor,
            reference: torch.Tensor,
            *,
            tokens: PolicyTokens = tokens,
            recipe: Any = recipe,
            engine: torch.Tensor = engine,
        ) -> Any:
            loss = PolicyLoss(
                recipe.algorithm,
                make_policy_loss(recipe.algorithm),
                torch.device("cpu"),
                0.2,
                sequence_K=tokens.sequence_K,
                advantages_K=tokens.advantages_K,
                loss_weights_K=tokens.weights_K,
                penalty_K=tokens.weights_K,
                is_weights_K=torch.ones(len(logprobs)),
                rollout_logprobs_K=engine,
                old_K=tokens.old_K,
                reference_K=reference,
                selected_K=tokens.selected_K,
            )
            batch: Any = SimpleNamespace(vector_index_K=torch.arange(len(logprobs)))
            return loss(Scores(logprobs, entropies), batch)

        sums = of(logprobs, entropies, reference)
        finite(sums.loss, *sums.metrics.values(), *sums.maxima.values())
        gradients = torch.autograd.grad(sums.loss, (logprobs, entropies))
        finite(*gradients)
        moved, spread = (overwritten(draw, v.detach(), left_out).requires_grad_() for v in (logprobs, entropies))
        again = of(moved, spread, overwritten(draw, reference, left_out))
        assert again.loss.item() == sums.loss.item()
        for one, two in zip(torch.autograd.grad(again.loss, (moved, spread)), gradients, strict=True):
            assert torch.equal(one, two)
        for metric in set(sums.metrics) - {"probs_diff", "probs_diff_squared"}:
            assert again.metrics[metric].item() == sums.metrics[metric].item(), metric


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_divergences_of_tokens(estimator: str) -> None:
    for draw, count in rounds():
        logprobs = draw.logprobs(count).requires_grad_()
        reference = draw.others(logprobs.detach())
        reference[:20] = logprobs.detach()[:20]
        each = kl.divergence(estimator, logprobs, reference)
        finite(each)
        assert not each[:20].any(), "the same number of both is no divergence, -inf among them"
        gradient_of(each.sum(), logprobs)


@pytest.mark.parametrize("clip", [0.5, None])
def test_values(clip: float | None) -> None:
    for draw, count in rounds():
        values, old, returns = (draw.sizes(count) for _ in range(3))
        weights = (~draw.chance(0.3, count)).float()
        values.requires_grad_()
        sums = value_loss(values, old, returns, weights, clip=clip)
        gradient = gradient_of(sums.loss, values)
        finite(*sums.metrics.values())
        moved = overwritten(draw, values.detach(), weights == 0).requires_grad_()
        others = (overwritten(draw, vector, weights == 0) for vector in (old, returns))
        again = value_loss(moved, *others, weights, clip=clip)
        assert again.loss.item() == sums.loss.item()
        assert torch.equal(gradient_of(again.loss, moved), gradient)


@pytest.mark.daily
@pytest.mark.parametrize("weight", correction.CHOICES)
@pytest.mark.parametrize("mask", correction.CHOICES)
def test_corrections(weight: str, mask: str) -> None:
    for draw, count in rounds():
        sequence_K = sequences(draw, count)
        trainer = draw.logprobs(len(sequence_K))
        found = correction.correct(
            trainer, draw.others(trainer), sequence_K, count, weight=weight, cap=2.0, mask=mask, low=0.5, high=2.0
        )
        finite(found.weights_K, found.keep_K)
        assert all(math.isfinite(value) for value in found.metrics.values()), found.metrics
        assert ((found.keep_K == 0) | (found.keep_K == 1)).all()


def test_tokens_held_back_by_covariance() -> None:
    for draw, count in rounds():
        old, advantages = draw.logprobs(count), draw.sizes(count)
        keep = (~draw.chance(0.3, count)).float()
        held = covariance.select_kl_cov(old, advantages, keep, share=0.1)
        assert int(held.sum()) == max(int(0.1 * int(keep.sum())), 1)
        # The same by hand, with an impossible token at -10,000.
        places = keep.nonzero().flatten().tolist()
        own = {i: (float(advantages[i].double()), max(float(old[i].double()), -1e4)) for i in places}
        mean_a, mean_o = (sum(pair[side] for pair in own.values()) / len(own) for side in range(2))
        product = {i: (a - mean_a) * (o - mean_o) for i, (a, o) in own.items()}
        least_held = min(product[i] for i in held.nonzero().flatten().tolist())
        most_free = max(product[i] for i in places if not held[i])
        assert least_held >= most_free - 1e-6 * max(1.0, abs(most_free))


# -- offline -----------------------------------------------------------------------------------------------------------


def test_supervised() -> None:
    for draw, count in rounds():
        logprobs = draw.logprobs(count).requires_grad_()
        gradient = gradient_of(nll(logprobs).loss, logprobs)
        assert (gradient[logprobs.detach() >= -1e4] == -1).all()


def responses(draw: Draw, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens with a gradient, their sums, a reference's sums, and lengths."""
    sequence_K = sequences(draw, count)
    # One token in twenty is extreme: with six of them most sums would be.
    tokens = -2 * draw.normal(len(sequence_K)).abs()
    tokens = torch.where(draw.chance(0.05, len(tokens)), draw.of(LOGPROBS, len(tokens)), tokens).requires_grad_()
    reference = torch.where(draw.chance(0.9, len(tokens)), tokens.detach(), draw.of(LOGPROBS, len(tokens)))
    lengths = sum_by(torch.ones(len(tokens)), sequence_K, count)
    return tokens, sum_by(tokens, sequence_K, count), sum_by(reference, sequence_K, count), lengths


@pytest.mark.daily
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kind", pair_losses.LOSSES)
def test_preferences(kind: str, average: bool) -> None:
    for draw, count in rounds():
        tokens, sums, reference, lengths = responses(draw, 2 * count)
        known = (None, None) if kind in pair_losses.REFERENCE_FREE else (reference[0::2], reference[1::2])
        pairs = preference.Pairs(sums[0::2], sums[1::2], lengths[0::2], lengths[1::2], *known)
        others = pair_losses.DIVERGENCES if kind in pair_losses.DIVERGENT else ("reverse_kl",)
        found = preference.preference_loss(
            pairs,
            kind=kind,
            beta=float(draw.of((0.01, 0.1, 2.0), 1)),
            label_smoothing=0.1 if kind in pair_losses.SMOOTHED else 0.0,
            gamma=1.0 if kind == "simpo" else 0.0,
            divergence=others[int(draw.whole(0, len(others) - 1, 1))],
            average=average,
            nll=1.0,
        )
        gradient_of(found.loss, tokens)
        finite(*found.metrics.values())


@pytest.mark.parametrize("free", [False, True])
def test_kto(free: bool) -> None:
    for draw, count in rounds():
        tokens, sums, reference, lengths = responses(draw, count)
        ratios = row_means(sums, lengths) if free else row_logratios(sums, reference)
        baseline = kl_estimate(ratios.detach()[:50])
        found = kto_loss(ratios, draw.chance(0.5, count), kl=baseline, beta=0.1, desirable=1.0, undesirable=1.3)
        gradient_of(found.loss, tokens)
        finite(*found.metrics.values())


@pytest.mark.parametrize("ranking", ["pairs", "plackett_luce"])
@pytest.mark.parametrize("kind", PAIR_LOSSES)
def test_rankings(kind: str, ranking: str) -> None:
    for draw, count in rounds():
        ranking_S = torch.repeat_interleave(torch.arange(count), draw.whole(2, 5, count))
        scores = draw.sizes(len(ranking_S)).requires_grad_()
        found = ranking_loss(scores, ranking_S, draw.sizes(count), kind=kind, ranking=ranking, centre=0.01)
        gradient_of(found.loss, scores)
        finite(*found.metrics.values())


def test_steps() -> None:
    for draw, count in rounds():
        words = int(draw.whole(2, 4, 1))
        logprobs = draw.logprobs(count, words)
        logprobs[:5] = -INF
        logprobs.requires_grad_()
        labels = torch.where(draw.chance(0.5, count, 1), torch.eye(words)[draw.whole(0, words - 1, count)], 1 / words)
        found = step_loss(logprobs, labels)
        gradient_of(found.loss, logprobs)
        finite(*found.metrics.values())
        good = good_probability(logprobs.detach())
        assert ((good >= 0) & (good <= 1)).all()


def logits(draw: Draw, count: int, words: int) -> torch.Tensor:
    """Some words are impossible, some nearly certain; one of each place is ordinary."""
    extreme = draw.of((-INF, -INF, -1e4, 1e4, -100.0, 100.0, 0.0, 1e-30), count, words)
    drawn = torch.where(draw.chance(0.3, count, words), extreme, 3 * draw.normal(count, words))
    drawn[torch.arange(count), draw.whole(0, words - 1, count)] = 0.0
    return drawn


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_distillation(kind: str, cut: bool) -> None:
    for draw, count in rounds():
        words = int(draw.whole(2, 8, 1))
        drawn = logits(draw, count, words).requires_grad_()
        student, teacher = drawn.log_softmax(-1), logits(draw, count, words).log_softmax(-1)
        teacher[:20] = student.detach()[:20]
        if cut:
            ids = teacher.topk(words - 1).indices
            student, teacher = fold_rest(student, ids), fold_rest(teacher, ids)
        each = divergence(student, teacher, kind=kind, mix=0.3)
        finite(each)
        assert (each >= -1e-5).all(), each.min()
        assert (each[:20].abs() < 1e-5).all(), "the same distribution is no divergence"
        gradient_of(each.sum(), drawn)


def test_entropy_and_log_probability_of_impossible_words() -> None:
    """Of the kernel that the losses stand on: a bias of -inf makes a word impossible, the target among them."""
    for draw, count in rounds():
        hidden, weight = draw.normal(count, 4).requires_grad_(), draw.normal(7, 4).requires_grad_()
        bias = torch.where(draw.chance(0.4, 7), -INF, 0.0)
        bias[int(draw.whole(0, 6, 1))] = 0.0
        targets = draw.whole(0, 6, count)
        scores = token_scores(hidden, Head(weight, bias), targets, entropy=True)
        assert scores.entropies_K is not None
        possible = bias == 0
        every = (hidden @ weight.T)[:, possible].log_softmax(-1)
        assert torch.allclose(scores.entropies_K, -(every.exp() * every).sum(-1), atol=1e-5)
        counted = possible[targets]
        assert (scores.logprobs_K[~counted] == -INF).all()
        loss = torch.where(counted, scores.logprobs_K, 0.0).sum() + scores.entropies_K.sum()
        finite(loss, *torch.autograd.grad(loss, (hidden, weight)))
