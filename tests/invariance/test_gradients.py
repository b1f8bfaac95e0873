"""Gradients of one update equal those of plain transformers, packed and padded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def gradients(tiny_folder: Path, kernel: str, packed: bool, micro: int, chunk: int | None = None) -> tuple[float, dict]:
    """Gradients of one update over eight rows, without the optimizer in between."""
    from lockstep.algorithms.token_losses import nll
    from lockstep.data.batching import micro_batch
    from lockstep.model.load import load_policy, load_tokenizer
    from lockstep.recipe.schema import Model

    policy = load_policy(Model(path=str(tiny_folder)), torch.device("cpu"), kernel, seed=0)
    examples = encoded(load_tokenizer(str(tiny_folder)))
    total = 0.0
    count = sum(example.targets for example in examples)
    for start in range(0, len(examples), micro):
        batch = micro_batch(examples[start : start + micro], packed=packed, pad_id=0)
        sums = nll(policy(batch).logprobs_K)
        (sums.loss / count).backward()
        total += sums.loss.item()
    return total / count, {name: p.grad.clone() for name, p in policy.trainable()}


def encoded(tokenizer) -> list:
    from conftest import chat_rows
    from lockstep.data.encode.sft_rows import Encoder, SupervisedColumns
    from lockstep.recipe.keys_data import Data
    from lockstep.types import Origin

    encoder = Encoder(tokenizer, SupervisedColumns("messages", messages="messages"), Data(train=["unused"]))
    return [encoder(row, Origin("rows", i))[0] for i, row in enumerate(chat_rows(8))]


def plain_transformers(tiny_folder: Path) -> tuple[float, dict]:
    """The same update by transformers: one row at a time, with eager attention and torch's cross entropy."""
    from transformers import AutoModelForCausalLM

    from lockstep.model.load import load_tokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager")
    examples = encoded(load_tokenizer(str(tiny_folder)))
    count = sum(example.targets for example in examples)
    total = 0.0
    for example in examples:
        labels = torch.tensor([t if m else -100 for t, m in zip(example.ids, example.loss_mask, strict=True)])
        logits = model(input_ids=torch.tensor([list(example.ids)])).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        (loss / count).backward()
        total += loss.item()
    return total / count, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.daily
@pytest.mark.parametrize(("packed", "micro"), [(True, 8), (True, 1), (True, 3), (False, 8), (False, 1)])
def test_gradients_equal_plain_transformers(tiny_folder: Path, packed: bool, micro: int) -> None:
    loss, grads = gradients(tiny_folder, "sdpa", packed, micro)
    their_loss, their_grads = plain_transformers(tiny_folder)
    assert loss == pytest.approx(their_loss, rel=1e-6)
    assert grads.keys() == their_grads.keys()
    ours = torch.cat([g.flatten() for g in grads.values()])
    theirs = torch.cat([their_grads[name].flatten() for name in grads])
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
