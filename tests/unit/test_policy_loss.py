"""Policy losses by hand, by finite differences and by their properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draws import draws
from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens, user_loss
from lockstep.algorithms.reduce import aggregation_weights
from lockstep.errors import Refusal
from loss_settings import SETTINGS

# Three sequences of 2, 3 and 1 tokens.
RATIOS = [1.0, 1.5, 0.5, 1.5, 0.5, 4.0]
ADVANTAGES = [1.0, 1.0, 1.0, -1.0, -1.0, -2.0]
WEIGHTS = [1.0, 2.0, 0.5, 1.0, 3.0, 0.25]
HELD = [0.0, 0.0, 0.0, 1.0, 1.0, 0.0]
OLD = [-1.0, -2.0, -0.5, -3.0, -1.5, -2.5]
SEQUENCE = [0, 0, 1, 1, 1, 2]
LOGPROBS = [old + math.log(ratio) for old, ratio in zip(OLD, RATIOS, strict=True)]


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def example(**changes) -> PolicyTokens:
    tokens = PolicyTokens(
        logprobs_K=tensor(LOGPROBS).requires_grad_(),
        old_K=tensor(OLD),
        advantages_K=tensor(ADVANTAGES),
        weights_K=tensor(WEIGHTS),
        sequence_K=torch.tensor(SEQUENCE),
        selected_K=tensor(HELD),
    )
    return replace(tokens, **changes)


def run(name: str, tokens: PolicyTokens):
    """Loss, gradient and metrics as plain numbers."""
    sums = LOSSES[name](tokens, **SETTINGS[name])
    (gradient,) = torch.autograd.grad(sums.loss, tokens.logprobs_K)
    assert all(value.ndim == 0 and not value.requires_grad for value in sums.metrics.values())
    return sums.loss.item(), gradient.tolist(), {key: value.item() for key, value in sums.metrics.items()}


def weighed(per_token) -> list[float]:
    return [weight * value for weight, value in zip(WEIGHTS, per_token, strict=True)]


def check(name: str, losses, gradients, **metrics):
    loss, gradient, measured = run(name, example())
    assert loss == pytest.approx(sum(weighed(losses)), rel=1e-12)
    assert gradient == pytest.approx(weighed(gradients), rel=1e-12, abs=1e-14)
    assert measured == pytest.approx({"ppo_kl": -sum(map(math.log, RATIOS)), **metrics})


def test_clip_by_hand():
    check(
        "clip",
        losses=[-1.0, -1.28, -0.5, 1.5, 0.8, 6.0],
        gradients=[-1.0, 0.0, -0.5, 1.5, 0.0, 0.0],
        pg_clipfrac=2,
        pg_clipfrac_lower=1,
    )


def test_clip_without_the_second_bound():
    sums = LOSSES["clip"](example(), low=0.2, high=0.28, dual=None)
    assert sums.loss.item() == pytest.approx(sum(weighed([-1.0, -1.28, -0.5, 1.5, 0.8, 8.0])))
    assert sums.metrics["pg_clipfrac_lower"].item() == 0


def test_gspo_by_hand():
    # Geometric means: sqrt(1.5) = 1.2247, (0.5 * 1.5 * 0.5)^(1/3) = 0.7211, 4.
    one, two = math.sqrt(1.5), 0.375 ** (1 / 3)
    check(
        "gspo",
        losses=[-one, -one, -two, 0.8, 0.8, 8.0],
        gradients=[-one, -one, -two, 0.0, 0.0, 8.0],
        pg_clipfrac=2,
    )


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_that_was_and_is_impossible_has_ratio_one_and_no_gradient(name):
    """-A in sum, as at r = 1; sapo's gate is 2 / tau there, and where log p itself stands in the loss it is -10,000."""
    logprobs, advantages = tensor([-math.inf] * 3).requires_grad_(), [1.0, -2.0, 0.5]
    places = torch.tensor([0, 1, 2])
    tokens = PolicyTokens(logprobs, logprobs.detach(), tensor(advantages), tensor([1.0] * 3), places, tensor([0.0] * 3))
    sums = LOSSES[name](tokens, **SETTINGS[name])
    plain = dict.fromkeys(("cispo", "dppo_tv", "dppo_kl", "dro", "importance", "policy_gradient"), [-1e4] * 3)
    factors = {"sapo": [2.0, 2.0 / 1.05, 2.0], **plain}.get(name, [1.0] * 3)
    assert sums.loss.item() == pytest.approx(-sum(a * f for a, f in zip(advantages, factors, strict=True)))
    assert torch.autograd.grad(sums.loss, logprobs)[0].tolist() == [0.0] * 3
    assert sums.metrics["ppo_kl"].item() == sums.metrics["pg_clipfrac"].item() == 0


def test_gspo_bounds_the_sequence_ratio():
    logprobs = tensor([15.0, 15.0, 0.0]).requires_grad_()
    tokens = PolicyTokens(logprobs, tensor([0.0] * 3), tensor([-1.0] * 3), tensor([1.0] * 3), torch.tensor([0, 0, 1]))
    sums = LOSSES["gspo"](tokens, low=0.2, high=0.2)
    assert sums.loss.item() == pytest.approx(2 * math.exp(10) + 1)


def test_cispo_by_hand():
    weights = [1.0, 1.28, 0.8, 1.28, 0.8, 1.28]
    constants = [-weight * a for weight, a in zip(weights, ADVANTAGES, strict=True)]
    check(
        "cispo",
        losses=[c * lp for c, lp in zip(constants, LOGPROBS, strict=True)],
        gradients=constants,
        pg_clipfrac=5,
    )


def test_sapo_by_hand():
    losses, gradients = [], []
    for ratio, advantage in zip(RATIOS, ADVANTAGES, strict=True):
        tau = 1.0 if advantage > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        losses.append(-advantage * gate * 4 / tau)
        gradients.append(-advantage * 4 * gate * (1 - gate) * ratio)
    check("sapo", losses, gradients, pg_clipfrac=0)


def test_geo_mean_by_hand():
    # Log ratios after their bounds: sequence 0: 0, 0.3 (was 0.405, A > 0); sequence 1: ln 0.5 (A > 0 has no lower
    # bound), ln 1.5 (A < 0 has no upper), -0.4 (was -0.693, A < 0); sequence 2: ln 4.
    means = [0.15, (math.log(0.5) + math.log(1.5) - 0.4) / 3, math.log(4)]
    ratios = [math.exp(means[s]) for s in SEQUENCE]
    losses = [-a * ratio for a, ratio in zip(ADVANTAGES, ratios, strict=True)]
    # A token moves the mean of its sequence, and with it the losses of all its tokens; bounded tokens move nothing.
    total = [-(1 + 2.0) * ratios[0] / 2, -(0.5 - 1.0 - 3.0) * ratios[2] / 3, 0.25 * 8.0]
    loss, gradient, metrics = run("geo_mean", example())
    assert loss == pytest.approx(sum(weighed(losses)))
    assert gradient == pytest.approx([total[0], 0.0, total[1], total[1], 0.0, total[2]])
    assert metrics["pg_clipfrac"] == 2


def test_clip_cov_by_hand():
    check(
        "clip_cov",
        losses=[-1.0, -1.28, -0.5, 0.0, 0.0, 8.0],
        gradients=[-1.0, 0.0, -0.5, 0.0, 0.0, 8.0],
        pg_clipfrac=1,  # the other clipped token is held
        pg_heldfrac=2,
    )


def test_kl_cov_by_hand():
    check(
        "kl_cov",
        losses=[-1.0, -1.5, -0.5, 1.5 + 0.7 * math.log(1.5), 0.5 + 0.7 * math.log(2), 8.0],
        gradients=[-1.0, -1.5, -0.5, 1.5 + 0.7, 0.5 - 0.7, 8.0],
        pg_clipfrac=0,
        pg_heldfrac=2,
    )


def test_dppo_tv_by_hand():
    # Probabilities move by 0, +0.068 (A > 0: over 0.05), -0.303 (A > 0), +0.025 (A < 0), -0.112 (A < 0: under -0.05),
    # +0.246 (A < 0); the last ratio, 4, weighs 3.
    constants = [-1.0, 0.0, -0.5, 1.5, 0.0, 6.0]
    check(
        "dppo_tv",
        losses=[c * lp for c, lp in zip(constants, LOGPROBS, strict=True)],
        gradients=constants,
        pg_clipfrac=2,
        pg_clipfrac_lower=1,
    )


def test_dppo_kl_by_hand():
    def coin(old: float, new: float) -> float:
        return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))

    moved = [coin(math.exp(old), math.exp(new)) for old, new in zip(OLD, LOGPROBS, strict=True)]
    assert moved[1] == pytest.approx(0.01559, abs=1e-5)
    assert min(moved[2], moved[4], moved[5]) > 0.02 > moved[1] > 0.01 > moved[3]
    # Over 0.01 and risen with A > 0: the second; over 0.02 and fallen with A < 0: the fifth.
    constants = [-1.0, 0.0, -0.5, 1.5, 0.0, 6.0]
    check(
        "dppo_kl",
        losses=[c * lp for c, lp in zip(constants, LOGPROBS, strict=True)],
        gradients=constants,
        pg_clipfrac=2,
        pg_clipfrac_lower=1,
    )
    # A bound over 0.0156 lets the second one go: 1.5 is its ratio.
    loose = LOSSES["dppo_kl"](example(), low=0.02, high=0.016, cap=3.0)
    expected = sum(weighed([c * lp for c, lp in zip([-1.0, -1.5, *constants[2:]], LOGPROBS, strict=True)]))
    assert loose.loss.item() == pytest.approx(expected)


def test_dro_by_hand():
    squares = [0.3 * math.log(ratio) ** 2 for ratio in RATIOS]
    check(
        "dro",
        losses=[-a * lp + square for a, lp, square in zip(ADVANTAGES, LOGPROBS, squares, strict=True)],
        gradients=[-a + 0.6 * math.log(ratio) for a, ratio in zip(ADVANTAGES, RATIOS, strict=True)],
        pg_clipfrac=0,
    )


def test_importance_by_hand():
    # Products of the sequences' ratios: 1.5, 0.375 and 4, of which 3 counts.
    weights = [1.5, 1.5, 0.375, 0.375, 0.375, 3.0]
    constants = [-weight * a for weight, a in zip(weights, ADVANTAGES, strict=True)]
    losses = [c * lp for c, lp in zip(constants, LOGPROBS, strict=True)]
    check("importance", losses, constants, pg_clipfrac=1)
    own = LOSSES["importance"](example(), cap=1.2, of="token")
    constants = [-min(ratio, 1.2) * a for ratio, a in zip(RATIOS, ADVANTAGES, strict=True)]
    assert own.loss.item() == pytest.approx(sum(weighed([c * lp for c, lp in zip(constants, LOGPROBS, strict=True)])))
    with pytest.raises(Refusal, match=r"algorithm\.ratio_of"):
        LOSSES["importance"](example(), cap=1.2, of="step")


def test_policy_gradient_by_hand():
    check(
        "policy_gradient",
        losses=[-a * lp for a, lp in zip(ADVANTAGES, LOGPROBS, strict=True)],
        gradients=[-a for a in ADVANTAGES],
        pg_clipfrac=0,
    )


@pytest.mark.parametrize("name", ["clip", "sapo", "geo_mean", "clip_cov", "kl_cov", "dro", "policy_gradient"])
def test_gradients_by_finite_differences(name):
    logprobs = tensor(LOGPROBS).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](example(logprobs_K=x), **SETTINGS[name]).loss, (logprobs,))


def test_gspo_has_the_gradient_of_the_sequence_objective_by_finite_differences():
    sequence, keep = torch.tensor(SEQUENCE), torch.ones(6, dtype=torch.float64)
    advantages = tensor([1.0, 1.0, -0.5, -0.5, -0.5, 2.0])
    weights, divisor = aggregation_weights("seq_mean_token_mean", sequence, keep, 3, max_tokens=9)
    logprobs = tensor(OLD) + 0.1 * tensor([1, -2, 1, 2, -1, 0.5])
    tokens = example(logprobs_K=logprobs.requires_grad_(), advantages_K=advantages, weights_K=weights)
    (gradient,) = torch.autograd.grad(LOSSES["gspo"](tokens, low=0.2, high=0.2).loss / divisor, logprobs)

    def objective(point: torch.Tensor) -> float:
        total = 0.0
        for number, advantage in enumerate([1.0, -0.5, 2.0]):
            own = sequence == number
            ratio = math.exp(float((point - tensor(OLD))[own].mean()))
            total += max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)) / 3
        return total

    for place in range(6):
        small = torch.zeros(6, dtype=torch.float64)
        small[place] = 1e-6
        start = logprobs.detach()
        assert gradient[place].item() == pytest.approx((objective(start + small) - objective(start - small)) / 2e-6)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "geo_mean"])
def test_on_policy_every_loss_is_the_policy_gradient(name):
    tokens = example(logprobs_K=tensor(OLD).requires_grad_(), selected_K=tensor([0.0] * 6))
    _, gradient, metrics = run(name, tokens)
    assert gradient == pytest.approx(weighed([-a for a in ADVANTAGES]))
    assert metrics["ppo_kl"] == 0
    assert metrics["pg_clipfrac"] == 0


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_of_weight_zero_do_not_matter_whatever_they_hold(name):
    places = torch.tensor([0, 1, 3, 5])
    plain = example()
    fields = {
        key: getattr(plain, key)[places] for key in ("old_K", "advantages_K", "weights_K", "sequence_K", "selected_K")
    }
    without = PolicyTokens(logprobs_K=tensor(LOGPROBS)[places].requires_grad_(), **fields)
    weights = tensor(WEIGHTS)
    weights[[2, 4]] = 0
    logprobs, old, advantages = tensor(LOGPROBS), tensor(OLD), tensor(ADVANTAGES)
    logprobs[2], logprobs[4], old[4], advantages[2] = float("-inf"), float("nan"), 1e300, float("inf")
    poisoned = example(logprobs_K=logprobs.requires_grad_(), old_K=old, advantages_K=advantages, weights_K=weights)
    loss, gradient, metrics = run(name, poisoned)
    expected_loss, expected_gradient, expected_metrics = run(name, without)
    assert loss == pytest.approx(expected_loss, rel=1e-13)
    assert [gradient[place] for place in places.tolist()] == pytest.approx(expected_gradient, rel=1e-13)
    assert gradient[2] == gradient[4] == 0
    assert metrics == pytest.approx(expected_metrics)


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_keep_the_graph(name):
    none = torch.zeros(0, requires_grad=True)
    empty = torch.zeros(0)
    sums = LOSSES[name](PolicyTokens(none, empty, empty, empty, empty.long(), selected_K=empty), **SETTINGS[name])
    sums.loss.backward()
    assert sums.loss.item() == 0
    assert sums.loss.dtype == torch.float32
    assert none.grad is not None
    assert all(value.item() == 0 for value in sums.metrics.values())


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("cispo", "policy_gradient")])
def test_ratios_are_bounded(name):
    logprobs = tensor([-1.0, -900.0]).requires_grad_()
    pair = PolicyTokens(
        logprobs, tensor([-900.0, -1.0]), tensor([-1.0, -1.0]), tensor([1.0, 1.0]), torch.tensor([0, 1])
    )
    loss, gradient, metrics = run(name, replace(pair, selected_K=tensor([0.0, 0.0])))
    assert math.isfinite(loss)
    assert all(math.isfinite(value) for value in gradient)
    assert metrics["ppo_kl"] == 0  # +20 and -20


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_losses_need_the_selected_tokens(name):
    with pytest.raises(Refusal, match="selected tokens"):
        LOSSES[name](example(selected_K=None), **SETTINGS[name])


token = st.tuples(st.floats(-1, 1), st.floats(-2, 2), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 1))
batches = st.lists(st.lists(token, min_size=0, max_size=4), min_size=2, max_size=5)


def batch(sequences) -> PolicyTokens:
    flat = [(number, *one) for number, tokens in enumerate(sequences) for one in tokens]
    columns = tensor(flat).reshape(-1, 5).unbind(1)
    number, change, advantage, weight, held = columns
    old = -1 - advantage.abs()
    return PolicyTokens((old + change).requires_grad_(), old, advantage, weight, number.long(), selected_K=held)


@pytest.mark.daily("clip", "gspo", "kl_cov", "policy_gradient")
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=draws(10, 20))
@given(sequences=batches, cut=st.integers(1, 4))
def test_micro_batches_add_up(name, sequences, cut):
    whole = run(name, batch(sequences))
    parts = [run(name, batch(part)) for part in (sequences[:cut], sequences[cut:])]
    assert sum(part[0] for part in parts) == pytest.approx(whole[0], abs=1e-12)
    assert [value for part in parts for value in part[1]] == pytest.approx(whole[1], abs=1e-12)
    for key, value in whole[2].items():
        assert sum(part[2][key] for part in parts) == pytest.approx(value, abs=1e-12)


@settings(max_examples=50)
@given(st.floats(-3, 3), st.floats(-3, 3))
def test_the_clip_stops_gradients_exactly_where_it_must(log_ratio, advantage):
    logprobs = tensor([log_ratio]).requires_grad_()
    tokens = PolicyTokens(logprobs, tensor([0.0]), tensor([advantage]), tensor([1.0]), torch.tensor([0]))
    _, (gradient,), _ = run("clip", tokens)
    ratio = math.exp(log_ratio)
    if (advantage >= 0 and ratio > 1.2801) or (advantage <= 0 and (ratio < 0.7999 or ratio > 3.0001)):
        assert gradient == 0 or advantage == 0
    elif (advantage > 0 and ratio < 1.2799) or (advantage < 0 and 0.8001 < ratio < 2.9999):
        assert gradient == pytest.approx(-advantage * ratio)


# Values of the two counters for one token with d = log p - log p_old and the advantage A. A value exactly at a bound is
# inside.
TIES = [
    ("clip", {"low": 0.2, "high": 0.2, "dual": 1.0}, 0.0, -1.0, {"pg_clipfrac": 0, "pg_clipfrac_lower": 0}),
    ("geo_mean", {"low": 0.25, "high": 0.5}, 0.5, 1.0, {"pg_clipfrac": 0}),
    ("geo_mean", {"low": 0.25, "high": 0.5}, 0.75, 1.0, {"pg_clipfrac": 1}),
    ("geo_mean", {"low": 0.25, "high": 0.5}, -0.25, -1.0, {"pg_clipfrac": 0}),
    ("geo_mean", {"low": 0.25, "high": 0.5}, -0.5, -1.0, {"pg_clipfrac": 1}),
    ("geo_mean", {"low": 0.25, "high": 0.5}, 0.75, 0.0, {"pg_clipfrac": 0}),
    ("geo_mean", {"low": 0.25, "high": 0.5}, -0.5, 0.0, {"pg_clipfrac": 0}),
    ("dppo_tv", {"low": 0.0, "high": 0.0, "cap": 1.0}, 0.0, 1.0, {"pg_clipfrac": 0, "pg_clipfrac_lower": 0}),
    ("dppo_tv", {"low": 0.0, "high": 0.0, "cap": 1.0}, 0.0, -1.0, {"pg_clipfrac": 0, "pg_clipfrac_lower": 0}),
    ("dppo_kl", {"low": 0.0, "high": 0.0, "cap": 1.0}, 0.0, 1.0, {"pg_clipfrac": 0, "pg_clipfrac_lower": 0}),
    ("dppo_kl", {"low": 0.0, "high": 0.0, "cap": 1.0}, 0.0, -1.0, {"pg_clipfrac": 0, "pg_clipfrac_lower": 0}),
    # Without an advantage a token that rose is not beyond `high`.
    ("dppo_tv", {"low": 0.01, "high": 0.01, "cap": 3.0}, 0.75, 0.0, {"pg_clipfrac": 0, "pg_clipfrac_lower": 0}),
    ("dppo_kl", {"low": 0.01, "high": 0.01, "cap": 3.0}, 0.75, 0.0, {"pg_clipfrac": 0, "pg_clipfrac_lower": 0}),
    ("importance", {"cap": 1.0, "of": "token"}, 0.0, 1.0, {"pg_clipfrac": 0}),
    ("cispo", {"low": 0.0, "high": 0.0}, 0.0, 1.0, {"pg_clipfrac": 0}),
]


@pytest.mark.parametrize(("name", "bounds", "d", "advantage", "counted"), TIES)
def test_a_value_at_its_bound_is_inside(name, bounds, d, advantage, counted):
    one = {"weights_K": tensor([1.0]), "sequence_K": torch.tensor([0]), "advantages_K": tensor([advantage])}
    sums = LOSSES[name](PolicyTokens(logprobs_K=tensor([-1.0 + d]), old_K=tensor([-1.0]), **one), **bounds)
    assert {key: int(value) for key, value in sums.metrics.items() if key != "ppo_kl"} == counted


def test_a_user_loss_counts_where_the_weight_is_not_zero():
    """Losses 2, NaN and 4 at the weights 1, 0 and 0.5; d is 0.5, -1 (not counted) and -0.25."""
    logprobs = tensor([-1.0, -3.0, -2.0]).requires_grad_()
    tokens = PolicyTokens(
        logprobs, tensor([-1.5, -2.0, -1.75]), tensor([1.0, 1.0, 1.0]), tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0])
    )

    def per_token(given: PolicyTokens) -> torch.Tensor:
        assert given.logprobs_K.tolist() == [-1.0, 0.0, -2.0]
        return -2 * given.logprobs_K + tensor([0.0, math.nan, 0.0])

    sums = user_loss(tokens, function=per_token)
    assert sums.loss.item() == 1.0 * 2 + 0.5 * 4
    assert {key: value.item() for key, value in sums.metrics.items()} == {"ppo_kl": -(0.5 - 0.25)}
    (gradient,) = torch.autograd.grad(sums.loss, logprobs)
    assert gradient.tolist() == [-2.0, 0.0, -1.0]
