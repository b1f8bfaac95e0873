"""Settings that must not change what is learned: packing, micro-batches, checkpointing, chunking, twins.

Each compares losses, gradient norms and final weights of a short run with those of the reference run (fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import write_sft_recipe
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline

REFERENCE = "batch.tokens=256"
VARIANTS = {
    "padded, one row a micro-batch": ["batch.tokens=null", "batch.micro_batch_size=1"],
    "padded, eight rows a micro-batch": ["batch.tokens=null", "batch.micro_batch_size=8"],
    "packed, everything at once": ["batch.tokens=4096"],
    "packed, small budget": ["batch.tokens=128"],
    "gradient checkpointing": ["model.gradient_checkpointing=true"],
}


Trained = tuple[list[float], list[float], dict[str, torch.Tensor], list]
"""Losses, gradient norms, final weights and validation losses."""


def run(recipe_file: Path, name: str, *overrides: str) -> Trained:
    recipe = load_recipe(str(recipe_file), [f"run.name={name}", "run.export=false", *overrides])
    train_offline(recipe, Console.silent())
    folder = Path(recipe.run.folder) / name
    history = read_metrics(folder / "metrics.jsonl")
    losses = [metrics["train/loss"] for _, metrics in history]
    norms = [metrics["train/grad_norm"] for _, metrics in history]
    weights = load_file(folder / "checkpoints" / "step_6" / "model.safetensors")
    return losses, norms, weights, [metrics.get("val/loss") for _, metrics in history if "val/loss" in metrics]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Callable[..., Trained]:
    """The run that the others are held against, trained when it is first asked for."""

    def trained(*common: str) -> Trained:
        recipe = write_sft_recipe(tmp_path_factory.mktemp("reference"), tiny_folder)
        return run(recipe, "reference", REFERENCE, *common)

    return cache(trained)


# With an adapter, the smallest micro-batches of either kind every day; all of them without one.
LORA_DAILY = ("packed, small budget", "padded, one row a micro-batch")


@pytest.mark.parametrize(
    ("variant", "lora"),
    [
        pytest.param(variant, lora, marks=pytest.mark.slow if lora and variant not in LORA_DAILY else ())
        for lora in (False, True)
        for variant in VARIANTS
    ],
)
def test_the_same_run_however_it_is_cut(
    reference: Callable[..., Trained], recipe_file: Path, variant: str, lora: bool
) -> None:
    common = ["model.lora.rank=4", "optim.lr=1e-2"] if lora else []
    losses, norms, weights, val = reference(*common)
    other_losses, other_norms, other_weights, other_val = run(recipe_file, "variant", *common, *VARIANTS[variant])
    assert losses[-1] < losses[0]
    # The first update starts from equal weights: only the order of sums differs.
    assert other_losses[0] == pytest.approx(losses[0], rel=1e-6)
    assert other_norms[0] == pytest.approx(norms[0], rel=1e-5)
    assert other_losses == pytest.approx(losses, rel=1e-4)
    assert other_val == pytest.approx(val, rel=1e-4)
    for name, weight in weights.items():
        assert (other_weights[name] - weight).norm() <= 2e-3 * weight.norm() + 1e-6, name


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
    return [encoder(row, Origin("rows", i)) for i, row in enumerate(chat_rows(8))]


def plain_transformers(tiny_folder: Path) -> tuple[float, dict]:
    """The same update by transformers alone: one row at a time, its own attention and cross entropy."""
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


@pytest.mark.parametrize(("packed", "micro"), [(True, 8), (True, 1), (True, 3), (False, 8), (False, 1)])
def test_gradients_equal_plain_transformers(tiny_folder: Path, packed: bool, micro: int) -> None:
    loss, grads = gradients(tiny_folder, "sdpa", packed, micro)
    their_loss, their_grads = plain_transformers(tiny_folder)
    assert loss == pytest.approx(their_loss, rel=1e-6)
    assert grads.keys() == their_grads.keys()
    whole = torch.cat([g.flatten() for g in grads.values()])
    theirs = torch.cat([their_grads[name].flatten() for name in grads])
    assert (whole - theirs).norm() <= 1e-6 * theirs.norm()
