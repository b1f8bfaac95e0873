"""Offline losses against TRL's, where it is installed.

TRL's losses are methods of its trainers; they run here on stand-ins that answer with fixed log-probabilities and
scores. TRL gives means over a batch, ours are sums: the tests divide by the rows, as the training step would.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from lockstep.algorithms import preference as transport
from lockstep.algorithms.divergence import distribution_divergence as divergence
from lockstep.algorithms.kto import kl_estimate, kto_loss
from lockstep.algorithms.preference import Pairs, preference_loss, shared_length_weights
from lockstep.algorithms.ranking import ranking_loss

pytest.importorskip("trl")

# Three chosen responses, then three rejected ones; the first two tokens are the prompt.
LENGTHS = torch.tensor([3, 1, 6, 2, 4, 5])
PROMPT, LONGEST = 2, 6
BETA = 0.3
METRICS = {"accuracy": "accuracies", "chosen": "chosen", "rejected": "rejected", "margin": "margins"}


def masks(lengths: torch.Tensor) -> torch.Tensor:
    places = torch.arange(PROMPT + LONGEST)
    return ((places >= PROMPT) & (places < PROMPT + lengths[:, None])).long()


def token_logprobs(lengths: torch.Tensor, seed: int) -> torch.Tensor:
    """At each place the log-probability of the next token; 0 where that is no token of the response."""
    draw = torch.Generator().manual_seed(seed)
    values = -3 * torch.rand(len(lengths), PROMPT + LONGEST - 1, generator=draw, dtype=torch.float64)
    return values * masks(lengths)[:, 1:]


def stand_in(**attributes) -> SimpleNamespace:
    def same(value, **_):
        return value

    defaults = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same, reduce=same),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "beta": BETA,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**{**defaults, **attributes})


def model_that_says(logprobs: torch.Tensor):
    """A model of TRL's fused kind; its other outputs only go into metrics."""
    zeros = torch.zeros_like(logprobs)
    output = SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    return lambda **_: output


def inputs_of(lengths: torch.Tensor, **more) -> dict[str, torch.Tensor]:
    mask = masks(lengths)
    return {"input_ids": mask, "attention_mask": torch.ones_like(mask), "completion_mask": mask, **more}


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, leaf: torch.Tensor, within: float = 1.0) -> None:
    (gradient,) = torch.autograd.grad(ours, leaf, retain_graph=True)
    (expected,) = torch.autograd.grad(theirs, leaf)
    assert ours.item() == pytest.approx(theirs.item(), rel=within * 1e-12)
    assert torch.allclose(gradient, expected, rtol=within * 1e-10, atol=within * 1e-14)


def trl_dpo(logprobs, reference, lengths, *, loss_types, loss_weights=None, smoothing=0.0, **more):
    from trl import DPOTrainer

    chosen, rejected = reference.sum(1).chunk(2)
    trainer = stand_in(
        loss_types=loss_types,
        loss_weights=loss_weights or [1.0],
        label_smoothing=smoothing,
        use_weighting=False,
        args=SimpleNamespace(discopop_tau=0.4),
        **{"ld_alpha": None, "f_divergence_type": "reverse_kl", **more},
    )
    inputs = inputs_of(lengths, ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    loss = DPOTrainer._compute_loss(trainer, model_that_says(logprobs), inputs, False)
    return loss, trainer._metrics["train"]


def our_pairs(logprobs, reference, lengths) -> Pairs:
    return Pairs(*logprobs.sum(1).chunk(2), *lengths.chunk(2), *reference.sum(1).chunk(2))


@pytest.mark.parametrize(
    ("theirs", "smoothing", "ours"),
    [
        ("sigmoid", 0.0, {"kind": "sigmoid"}),
        ("sigmoid_norm", 0.0, {"kind": "sigmoid", "average": True}),
        ("hinge", 0.0, {"kind": "hinge"}),
        # TRL's IPO always takes means over tokens; ours says so with `average`.
        ("ipo", 0.0, {"kind": "ipo", "average": True}),
        ("robust", 0.2, {"kind": "robust", "label_smoothing": 0.2}),
        # TRL's sigmoid does not look at label smoothing; cDPO is covered by CPO's below.
        ("exo_pair", 0.2, {"kind": "exo_pair", "label_smoothing": 0.2}),
        ("nca_pair", 0.0, {"kind": "nca_pair"}),
        ("bco_pair", 0.0, {"kind": "bco_pair"}),
        ("sppo_hard", 0.0, {"kind": "sppo_hard"}),
        ("apo_zero", 0.0, {"kind": "apo_zero"}),
        ("apo_down", 0.0, {"kind": "apo_down"}),
        ("discopop", 0.0, {"kind": "discopop", "discopop_tau": 0.4}),
    ],
)
def test_agrees_with_trl_dpo(theirs, smoothing, ours):
    logprobs, reference = token_logprobs(LENGTHS, 1).requires_grad_(), token_logprobs(LENGTHS, 2)
    expected, metrics = trl_dpo(logprobs, reference, LENGTHS, loss_types=[theirs], smoothing=smoothing)
    sums = preference_loss(our_pairs(logprobs, reference, LENGTHS), beta=BETA, **ours)
    # TRL takes EXO's logarithms in float32.
    assert_same(sums.loss / 3, expected, logprobs, within=1e6 if theirs == "exo_pair" else 1.0)
    if not ours.get("average"):  # TRL reports summed rewards always, ours are those that the loss sees
        for name, their_name in METRICS.items():
            assert sums.metrics[name].item() / 3 == pytest.approx(metrics[f"rewards/{their_name}"][0])


@pytest.mark.parametrize("kind", ["sigmoid", "hinge", "ipo"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"f_divergence_type": "forward_kl"}, {"divergence": "forward_kl"}),
        ({"f_divergence_type": "js_divergence"}, {"divergence": "js"}),
        # Theirs is the exponent of the ratio plus one; ours is the paper's alpha.
        ({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7}, {"divergence": "alpha"}),
    ],
)
def test_agrees_with_trl_divergences(kind, theirs, ours):
    leaf, reference = token_logprobs(LENGTHS, 1).float().requires_grad_(), token_logprobs(LENGTHS, 2).float()
    expected, _ = trl_dpo(leaf, reference, LENGTHS, loss_types=[kind], **theirs)
    pairs = our_pairs(leaf, reference, LENGTHS)
    sums = preference_loss(pairs, kind=kind, beta=BETA, alpha=0.3, average=kind == "ipo", **ours)
    (gradient,), (wanted,) = torch.autograd.grad(sums.loss / 3, leaf), torch.autograd.grad(expected, leaf)
    assert (sums.loss / 3).item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_agrees_with_trl_ranks(kind):
    """TRL sorts its batch; ours is told the order of the update, here the same."""
    leaf, reference = token_logprobs(LENGTHS, 1).requires_grad_(), token_logprobs(LENGTHS, 2)
    expected, metrics = trl_dpo(leaf, reference, LENGTHS, loss_types=[kind], smoothing=0.2)
    pairs = our_pairs(leaf, reference, LENGTHS)
    known = leaf.detach().sum(1).chunk(2), reference.sum(1).chunk(2)
    partners = (
        transport.paired_partners(*known[0], *known[1])
        if kind == "aot"
        else transport.unpaired_partners(*(own - other for own, other in zip(*known, strict=True)))
    )
    sums = preference_loss(pairs, kind=kind, beta=BETA, label_smoothing=0.2, partners=partners)
    assert_same(sums.loss / 3, expected, leaf)
    for name, their_name in METRICS.items():
        assert sums.metrics[name].item() / 3 == pytest.approx(metrics[f"rewards/{their_name}"][0])


def test_agrees_with_trl_length_desensitisation():
    leaf, reference = token_logprobs(LENGTHS, 1).requires_grad_(), token_logprobs(LENGTHS, 2)
    logprobs = leaf * masks(LENGTHS)[:, 1:]
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # theirs are all chosen ones first
    sequence = torch.repeat_interleave(torch.arange(6), LENGTHS[order])
    flat = shared_length_weights(sequence, LENGTHS[order], 0.25)
    weights = torch.zeros(6, PROMPT + LONGEST - 1, dtype=torch.float64)
    for number, own in zip(order.tolist(), flat.split(LENGTHS[order].tolist()), strict=True):
        weights[number, PROMPT - 1 : PROMPT - 1 + len(own)] = own.double()
    expected, _ = trl_dpo(logprobs, reference * weights, LENGTHS, loss_types=["sigmoid"], ld_alpha=0.25)
    pairs = our_pairs(logprobs * weights, reference * weights, LENGTHS)
    assert_same(preference_loss(pairs, kind="sigmoid", beta=BETA).loss / 3, expected, leaf)


def test_agrees_with_trl_dpo_and_likelihood():
    """TRL's likelihood is a mean over the batch's tokens, ours over each response's: they meet at equal lengths."""
    lengths = torch.tensor([4, 4, 4, 2, 6, 5])
    leaf, reference = token_logprobs(lengths, 1).requires_grad_(), token_logprobs(lengths, 2)
    logprobs = leaf * masks(lengths)[:, 1:]
    expected, _ = trl_dpo(logprobs, reference, lengths, loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.7])
    sums = preference_loss(our_pairs(logprobs, reference, lengths), kind="sigmoid", beta=BETA, nll=0.7)
    assert_same(sums.loss / 3, expected, leaf)


@pytest.mark.parametrize("kind", ["cpo", "simpo"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_agrees_with_trl_cpo(kind, smoothing):
    from trl.experimental.cpo import CPOTrainer

    lengths = torch.tensor([4, 4, 4, 2, 6, 5])  # equal chosen lengths, for the likelihood as above
    logprobs = token_logprobs(lengths, 1).requires_grad_()
    pairs = our_pairs(logprobs, logprobs, lengths)
    seen = logprobs.sum(1) / (lengths if kind == "simpo" else 1)
    nll = -pairs.chosen_P.sum() / 12
    trainer = stand_in(
        loss_type="simpo" if kind == "simpo" else "sigmoid",
        simpo_gamma=0.4,
        alpha=0.0,
        label_smoothing=smoothing,
        cpo_alpha=1.0,
        concatenated_forward=lambda *_: (*seen.chunk(2), logprobs, logprobs, nll),
    )
    trainer.cpo_loss = lambda *logps: CPOTrainer.cpo_loss(trainer, *logps)
    expected, metrics = CPOTrainer.get_batch_loss_metrics(trainer, None, {})
    gamma = {"gamma": 0.4} if kind == "simpo" else {}
    sums = preference_loss(pairs, kind=kind, beta=BETA, label_smoothing=smoothing, nll=1.0, **gamma)
    assert_same(sums.loss / 3, expected, logprobs)
    for name, their_name in METRICS.items():
        assert sums.metrics[name].item() / 3 == pytest.approx(metrics[f"rewards/{their_name}"])
    assert sums.metrics["nll"].item() / 3 == pytest.approx(metrics["nll_loss"])


def test_agrees_with_trl_orpo():
    """The odds-ratio term. TRL's likelihood term counts the prompt's tokens too; ours is the response's (`nll`)."""
    from trl.experimental.orpo import ORPOTrainer

    logprobs = token_logprobs(LENGTHS, 1).requires_grad_()
    means = (logprobs.sum(1) / LENGTHS).chunk(2)
    theirs, chosen, rejected, _, _ = ORPOTrainer.odds_ratio_loss(stand_in(), *means)
    sums = preference_loss(our_pairs(logprobs, logprobs, LENGTHS), kind="orpo", beta=BETA)
    (gradient,), (expected,) = torch.autograd.grad(sums.loss, logprobs), torch.autograd.grad(-theirs.sum(), logprobs)
    # TRL turns to float32 here.
    assert sums.loss.item() == pytest.approx(-theirs.sum().item(), rel=1e-6)
    assert torch.allclose(gradient, expected, rtol=1e-5)
    assert sums.metrics["chosen"].item() == pytest.approx(chosen.sum().item())
    assert sums.metrics["rejected"].item() == pytest.approx(rejected.sum().item())


@pytest.mark.parametrize("shift", [-1.0, 1.0])
def test_agrees_with_trl_kto(shift):
    """On TRL's own mismatched log-probabilities, with a negative and a positive mean.

    TRL pairs a row with the completion before it in a fixed batch, whatever its prompt; ours with the next one that
    really differs. TRL's estimate is of one micro-batch on all devices, ours of the whole update.
    """
    from trl import KTOTrainer

    logprobs, reference = token_logprobs(LENGTHS, 1).requires_grad_(), token_logprobs(LENGTHS, 2)
    mismatched = token_logprobs(LENGTHS, 3).sum(1)
    mismatched_reference = mismatched - shift
    label = torch.tensor([True, False, False, True, False, True])
    trainer = stand_in(
        _compute_kl_logps=lambda *_: mismatched,
        calculate_KL=True,
        loss_type="kto",
        desirable_weight=1.3,
        undesirable_weight=0.9,
    )
    inputs = inputs_of(LENGTHS, label=label, ref_logps=reference.sum(1), ref_KL_logps=mismatched_reference)
    expected = KTOTrainer._compute_loss(trainer, model_that_says(logprobs), inputs, False)
    kl = kl_estimate(mismatched - mismatched_reference)
    sums = kto_loss((logprobs - reference).sum(1), label, kl=kl, beta=BETA, desirable=1.3, undesirable=0.9)
    assert kl == pytest.approx(max(shift, 0.0))
    assert_same(sums.loss / 6, expected, logprobs)
    metrics = trainer._metrics["train"]
    assert sums.metrics["reward_desirable"].item() / 3 == pytest.approx(metrics["rewards/chosen"][0])
    assert sums.metrics["reward_undesirable"].item() / 3 == pytest.approx(metrics["rewards/rejected"][0])


@pytest.mark.parametrize("ranking", ["pairs", "plackett_luce"])
@pytest.mark.parametrize("centre", [None, 0.05])
def test_agrees_with_trl_reward_model(ranking, centre):
    from trl import RewardTrainer

    draw = torch.Generator().manual_seed(8)
    scores = torch.randn(2, 5, generator=draw, dtype=torch.float64).requires_grad_()
    margins = torch.rand(5, generator=draw, dtype=torch.float64)
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=centre))
    inputs = {"margin": margins, "attention_mask": torch.ones(10)}
    output = SimpleNamespace(logits=scores.reshape(10, 1))
    expected = RewardTrainer.compute_loss(trainer, lambda **_: output, inputs)
    sums = ranking_loss(
        scores.T.flatten(), torch.arange(5).repeat_interleave(2), margins, ranking=ranking, centre=centre or 0.0
    )
    assert_same(sums.loss / 5, expected, scores)
    metrics = trainer._metrics["train"]
    for name in ("accuracy", "margin"):
        assert sums.metrics[name].item() / 5 == pytest.approx(metrics[name][0])


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.3)])
def test_agrees_with_trl_gkd(kind, beta):
    from trl.experimental.gkd import GKDTrainer

    draw = torch.Generator().manual_seed(4)
    student = torch.randn(2, 4, 9, generator=draw, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(2, 4, 9, generator=draw, dtype=torch.float64)
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=2.0, reduction="sum")
    values = divergence((student / 2).log_softmax(-1), (teacher / 2).log_softmax(-1), kind=kind, mix=0.3)
    assert_same(values.sum(), expected, student)
