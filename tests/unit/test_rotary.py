"""Positions that move with the length follow each sequence's own length, however rows are packed or padded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from moving_models import FIXED, MOVING, dynamic, longrope, sft_recipe
from small_models import SIZES, load, write_model
from transformers import AutoModelForSequenceClassification, LlamaConfig

from conftest import run
from lockstep.data.batching import micro_batch, plan_micro_batches, shared_beginnings
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.kernels.rotary import OwnPositions, fixed_length
from lockstep.methods import METHODS
from lockstep.model.load import load_tokenizer
from lockstep.recipe import load_recipe
from lockstep.reward.model import load_reward_model
from lockstep.run.metrics import read_metrics
from lockstep.types import Example, Origin

LENGTHS = (40, 5, FIXED, FIXED + 1, 31, 40)


def rows() -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    return [
        Example(torch.randint(0, 250, (length,), generator=generator).tolist(), [1] * length, Origin("rows", row))
        for row, length in enumerate(LENGTHS)
    ]


def alone(model: Any, ids: list[int]) -> torch.Tensor:
    """transformers' own, with no memory of what was run before."""
    for module in model.modules():
        if isinstance(module.forward, OwnPositions):
            module.forward = module.forward.original_forward
        if hasattr(module, "original_inv_freq"):
            module.inv_freq = module.original_inv_freq
            module.max_seq_len_cached = module.original_max_seq_len
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


@pytest.mark.daily
@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@torch.no_grad()
def test_each_sequence_has_its_own_positions(kind: str, packed: bool, tmp_path: Path, tiny_folder: Path) -> None:
    folder = write_model(tmp_path / "model", MOVING[kind](), tiny_folder)
    policy, examples = load(folder).eval(), rows()
    ours = policy(micro_batch(examples, packed=packed, pad_id=0)).logprobs_K
    again = policy(micro_batch(examples[1:3], packed=packed, pad_id=0)).logprobs_K
    other = load(folder).eval()
    with other.generating() as model:
        theirs = torch.cat([alone(model, list(example.ids)) for example in examples])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    # A short line after a long one: no scale is left over from before.
    torch.testing.assert_close(again, ours[39 : 39 + 4 + FIXED - 1], atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_shared_beginning_of_one_length_is_right_and_of_several_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    policy = load(write_model(tmp_path / "model", longrope(), tiny_folder)).eval()
    start = list(range(20))
    pair = [Example([*start, *end], [0] * 20 + [1] * len(end), Origin("rows", 0)) for end in ([9] * 10, [8] * 12)]
    shared = policy(micro_batch(pair, packed=True, pad_id=0, starts=[0, 10], shares=shared_beginnings(pair))).logprobs_K
    apart = policy(micro_batch(pair, packed=True, pad_id=0)).logprobs_K
    # Both are beyond the original length, where longrope has one set of positions.
    torch.testing.assert_close(shared, apart, atol=1e-5, rtol=0)
    short = [pair[0], Example([*start, 7], [0] * 20 + [1], Origin("rows", 0))]
    batch = micro_batch(short, packed=True, pad_id=0, starts=[0, 10], shares=shared_beginnings(short))
    with pytest.raises(NotImplementedError, match="cannot share a prefix, because the rotary"):
        policy(batch)


def test_the_fixed_length_is_that_of_the_kind() -> None:
    assert fixed_length(longrope()) == FIXED
    assert fixed_length(dynamic()) == FIXED
    assert fixed_length(LlamaConfig(**SIZES)) is None
    # Dynamic positions move from the model's own context on, whatever its rotation was trained for.
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}
    assert fixed_length(LlamaConfig(**{**SIZES, "max_position_embeddings": 64}, rope_parameters=rope)) == 64


def answers_of_two_lengths() -> list[dict[str, object]]:
    """Four rows of 26 tokens and four of 50, in turn."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{a}+1?"},
                {"role": "assistant", "content": ("so " * 8 if a % 2 else "") + str(a + 1)},
            ]
        }
        for a in range(8)
    ]


def test_the_token_budget_does_not_change_the_loss(tmp_path: Path, tiny_folder: Path) -> None:
    """Rows on both sides of the original length: short and long ones in lines of their own, mixed, and in one line."""
    original = 40
    folder = write_model(tmp_path / "model", longrope(original), tiny_folder)
    recipe = sft_recipe(tmp_path, folder, answers_of_two_lengths())
    settings = load_recipe(str(recipe), [])
    reader, tokenizer = METHODS["sft"].reader(settings), load_tokenizer(str(folder))
    examples = load_rows(RowRequest(Dataset, reader, settings.data.train, settings.data, tokenizer, 96)).examples
    lengths = [len(example) for example in examples]
    assert sorted(lengths) == [26] * 4 + [50] * 4
    budgets = {52: {1}, 104: {1, 2}, 400: {2}}
    for tokens, sides in budgets.items():
        (lines,) = plan_micro_batches(lengths, devices=1, tokens=tokens, rows=None)
        assert {len({lengths[row] > original for row in line}) for line in lines} == sides
    with torch.no_grad(), load(folder).eval().generating() as model:
        trained = [
            alone(model, list(example.ids))[[place for place, _ in example.scored_tokens()]] for example in examples
        ]
    for tokens in budgets:
        assert run("train", recipe, f"run.name=run{tokens}", f"batch.tokens={tokens}") == 0
        ((_, metrics),) = read_metrics(tmp_path / f"run{tokens}" / "metrics.jsonl")
        assert metrics["train/loss"] == pytest.approx(-torch.cat(trained).mean().item(), abs=1e-5)


@pytest.mark.parametrize("kind", MOVING)
def test_a_reward_does_not_depend_on_the_longest_row_of_its_batch(kind: str, tmp_path: Path, tiny_folder: Path) -> None:
    config = MOVING[kind]()
    config.num_labels = 1
    config.pad_token_id = 0
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_folder / name, tmp_path / "model")
    model = load_reward_model(str(tmp_path / "model"), torch.device("cpu"))
    short, long = list(range(3, 12)), [7 + i % 50 for i in range(40)]
    (alone,) = model.score([short])
    # In one batch, whatever the rows' lengths are.
    beside = model._forward([short, long])[0]
    assert (beside - model.mean) / model.std == pytest.approx(alone, abs=1e-5)
