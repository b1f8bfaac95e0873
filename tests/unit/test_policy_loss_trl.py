"""Policy losses against TRL's, where it is installed.

TRL's loss is a method of its trainer; it runs here on a stand-in that answers with fixed log-probabilities.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from lockstep.algorithms.divergence import divergence
from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens
from lockstep.algorithms.reduce import aggregation_weights

pytest.importorskip("trl")

MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
LONGEST = 9
ARGUMENTS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.25,  # exact in float32, which TRL holds it in
    "steps_per_generation": 1,
}
ATTRIBUTES = {
    "loss_type": "grpo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "max_completion_length": LONGEST,
    "current_gradient_accumulation_steps": 1,
    "_entropy_bonus_enabled": False,
}


def padded_case():
    """Log-probabilities now, before and of the reference; advantages of four sequences."""
    draw = torch.Generator().manual_seed(5)
    old = -torch.rand(4, 5, generator=draw, dtype=torch.float64) * 3
    logprobs = old + 0.5 * torch.randn(4, 5, generator=draw, dtype=torch.float64)
    reference = old + 0.3 * torch.randn(4, 5, generator=draw, dtype=torch.float64)
    return logprobs.requires_grad_(), old, reference, torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)


def trl_loss(trainer, logprobs, inputs, **attributes):
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        accelerator=SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x, num_processes=1),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        **attributes,
    )
    ones = torch.ones(4, 2, dtype=torch.int64)
    ids = {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": MASK, "completion_mask": MASK}
    return trainer._compute_loss(stand_in, None, {**ids, **inputs})


def our_loss(name, aggregation, beta, logprobs, old, reference, advantages, settings):
    own = MASK.bool()
    sequence = torch.arange(4)[:, None].expand(4, 5)[own]
    weights, divisor = aggregation_weights(aggregation, sequence, MASK[own].double(), 4, max_tokens=LONGEST)
    tokens = PolicyTokens(logprobs[own], old[own], advantages[sequence], weights, sequence)
    divergences = weights * divergence("k3", logprobs[own], reference[own])
    return (LOSSES[name](tokens, **settings).loss + beta * divergences.sum()) / divisor


CLIP = {"low": 0.2, "high": 0.28, "dual": None}
TINY = {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08}


@pytest.mark.parametrize(
    ("name", "aggregation", "ours", "theirs"),
    [
        ("clip", "seq_mean_token_mean", CLIP, {"loss_type": "grpo"}),
        ("clip", "token_mean", CLIP, {"loss_type": "dapo"}),
        ("clip", "token_mean", {**CLIP, "dual": 1.3}, {"loss_type": "bnpo", "delta": 1.3}),
        ("clip", "seq_mean_token_sum_norm", CLIP, {"loss_type": "dr_grpo"}),
        ("gspo", "seq_mean_token_mean", {"low": 0.05, "high": 0.08}, TINY),
        ("cispo", "token_mean", {"low": 1.0, "high": 0.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
        ("sapo", "seq_mean_token_mean", {"positive": 1.0, "negative": 1.25}, {"loss_type": "sapo"}),
    ],
)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_agrees_with_trl_grpo(name, aggregation, ours, theirs, beta):
    from trl import GRPOTrainer

    logprobs, old, reference, advantages = padded_case()
    arguments = {key: theirs.get(key, default) for key, default in ARGUMENTS.items()}
    attributes = {key: theirs.get(key, default) for key, default in ATTRIBUTES.items()}
    inputs = {
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "advantages": advantages,
        "num_items_in_batch": MASK.sum(),
    }
    expected = trl_loss(GRPOTrainer, logprobs, inputs, args=SimpleNamespace(**arguments), beta=beta, **attributes)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    loss = our_loss(name, aggregation, beta, logprobs, old, reference, advantages, ours)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-14)


def test_agrees_with_trl_rloo_on_policy():
    """TRL clips the ratio of the whole sequence; where that ratio is 1 the gradient is the plain policy gradient."""
    from trl import RLOOTrainer

    logprobs, _, reference, advantages = padded_case()
    inputs = {"old_logps": (logprobs * MASK).sum(1).detach(), "advantages": advantages}
    expected = trl_loss(RLOOTrainer, logprobs, inputs, epsilon_low=0.2, epsilon_high=0.2)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    loss = our_loss(
        "policy_gradient", "seq_mean_token_sum", 0.0, logprobs, logprobs.detach(), reference, advantages, {}
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=1e-14)
