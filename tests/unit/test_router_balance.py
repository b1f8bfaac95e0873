"""The load-balancing loss of experts: by hand, beside transformers' own, and the same however an update is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import SIZES, write_model
from transformers import LlamaConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from lockstep.algorithms.token_losses import count_routed, load_balance
from lockstep.data.batching import micro_batch
from lockstep.errors import Refusal
from lockstep.methods.sft import token_loss
from lockstep.model.load import load_policy
from lockstep.model.router import refuse_router_loss
from lockstep.parallel.world import World
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.schema import Model
from lockstep.train.optim import Optimizer
from lockstep.train.step import Balance, Learner, token_weights
from lockstep.types import Example, MicroBatch, Origin

ROWS = [
    Example([5, 6, 7, 8, 9, 10, 11], [0, 0, 0, 1, 1, 1, 1], Origin("rows", 0)),
    Example([5, 6, 7, 12, 13], [0, 0, 0, 1, 1], Origin("rows", 1)),
    Example([20, 21, 22], [0, 1, 1], Origin("rows", 2)),
]


def test_by_hand() -> None:
    """Two layers, two tokens, three experts, one chosen: experts 0, 1 and 0, 0."""
    first = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    second = torch.tensor([[0.8, 0.1, 0.1], [0.6, 0.2, 0.2]]).log()
    found = count_routed((first, second), 1, torch.ones(2))
    assert found.chosen_E.tolist() == [3, 1, 0]
    torch.testing.assert_close(found.probs_E, torch.tensor([2.15, 1.05, 0.8]))
    assert float(found.rows) == 4
    # 3 * (3/4 * 2.15/4 + 1/4 * 1.05/4)
    assert float(load_balance(found.chosen_E, found.probs_E, 4)) == pytest.approx(1.40625)
    # The second token is padding: 3 * (2/2 * 1.3/2).
    found = count_routed((first, second), 1, torch.tensor([1.0, 0.0]))
    assert float(load_balance(found.chosen_E, found.probs_E, float(found.rows))) == pytest.approx(1.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    return write_model(tmp_path_factory.mktemp("experts") / "model", config, tiny_folder)


def learner(folder: Path, coefficient: float, **model: bool) -> Learner:
    settings = Model(path=str(folder), **model)  # type: ignore[arg-type]
    policy = load_policy(settings, torch.device("cpu"), "sdpa", seed=0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith("gate.weight"):
                # Sharp enough that experts are chosen very differently.
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    balance = Balance(policy, policy.decoder, coefficient, 2, World()) if coefficient else None
    return Learner(
        policy,
        Optimizer(policy.trainable(), Optim(), masters=False, fused=False),
        torch.device("cpu"),
        World(),
        balance=balance,
    )


def gradients(each: Learner, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    each.forward_backward(batches, token_loss)
    each.optimizer.collect()
    return {name: weight.grad.clone() for name, weight in each.module.named_parameters() if weight.grad is not None}


def transformers_own(folder: Path, coefficient: float) -> tuple[float, dict[str, torch.Tensor]]:
    """The whole update as one padded batch in plain transformers, with its own function."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    each = learner(folder, 0.0)
    width = max(len(row.ids) for row in ROWS)
    ids = torch.tensor([list(row.ids) + [0] * (width - len(row.ids)) for row in ROWS])
    mask = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in ROWS])
    trained = torch.tensor([list(row.loss_mask) + [0] * (width - len(row.ids)) for row in ROWS]).bool()
    with each.module.generating() as model:  # type: ignore[operator]
        model.train()
        output = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
        logprobs = output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        aux = load_balancing_loss_func(output.router_logits, 4, 2, mask)
        (-logprobs[trained[:, 1:]].mean() + coefficient * aux).backward()
    return float(aux.detach()), {
        name: w.grad.clone() for name, w in each.module.named_parameters() if w.grad is not None
    }


def test_the_gradient_is_transformers_own_however_the_update_is_divided(folder: Path) -> None:
    aux, wanted = transformers_own(folder, 0.5)
    plain = gradients(learner(folder, 0.0), [micro_batch(ROWS, packed=True, pad_id=0)])
    divided = {
        "one line": [micro_batch(ROWS, packed=True, pad_id=0)],
        "padded": [micro_batch(ROWS, packed=False, pad_id=0)],
        "three": [micro_batch([row], packed=True, pad_id=0) for row in ROWS],
    }
    for name, batches in divided.items():
        for checkpointing in (False, True):
            each = learner(folder, 0.5, gradient_checkpointing=checkpointing)
            found = gradients(each, batches)
            assert each.balance is not None
            assert each.balance.value == pytest.approx(aux, abs=1e-5), name
            assert found.keys() == wanted.keys()
            for weight, gradient in wanted.items():
                torch.testing.assert_close(found[weight], gradient, atol=2e-6, rtol=1e-4, msg=f"{name}: {weight}")
    gates = [name for name in wanted if name.endswith("gate.weight")]
    assert gates
    assert all((wanted[name] - plain[name]).abs().max() > 1e-3 for name in gates)


def test_a_shared_beginning_counts_once_for_each_sequence(folder: Path) -> None:
    shared = micro_batch(ROWS[:2], packed=True, pad_id=0, shares=[0, 3])
    assert token_weights(shared).tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    whole, once = learner(folder, 0.5), learner(folder, 0.5)
    wanted = gradients(whole, [micro_batch(ROWS[:2], packed=True, pad_id=0)])
    found = gradients(once, [shared])
    assert whole.balance is not None
    assert once.balance is not None
    assert once.balance.value == pytest.approx(whole.balance.value, abs=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4, msg=name)


def test_which_models_have_one() -> None:
    for config in (MixtralConfig(), OlmoeConfig(), Qwen3MoeConfig(mlp_only_layers=[0])):
        refuse_router_loss(config, "folder", 0.01)
    with pytest.raises(Refusal, match="it has no experts"):
        refuse_router_loss(LlamaConfig(), "folder", 0.01)
