"""Generation by transformers' own `generate`: slow, and the oracle for faster engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# Prompts answered at once.
BATCH = 64


@dataclass(frozen=True)
class Generated:
    """What followed a prompt. `stopped` is False when the length limit cut it off."""

    ids: list[int]
    text: str
    stopped: bool


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a generation: the model's own and the tokenizer's."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    ids = own if isinstance(own, list) else [] if own is None else [own]
    return sorted({*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})


def generate_batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    stop_ids: Sequence[int] | None = None,
    batch: int = BATCH,
) -> Iterator[list[Generated]]:
    """Answers in the order of `prompts`, a batch at a time. Temperature 0 is greedy."""
    ends = list(stop_ids) if stop_ids is not None else end_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (ends[0] if ends else 0)
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        yield _generate(model, tokenizer, part, max_new_tokens, temperature, ends, pad)


@torch.no_grad()
def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float,
    ends: list[int],
    pad: int,
) -> list[Generated]:
    width = max(len(prompt) for prompt in prompts)
    device = model.get_input_embeddings().weight.device
    # Left padding, with a mask: every prompt ends where generation begins.
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )
    config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=pad, **sampling)
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return [_trim(row, tokenizer, ends) for row in out[:, width:].tolist()]


def _trim(ids: list[int], tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> Generated:
    """Cut at the first end token; `generate` pads what follows."""
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    kept = ids if end is None else ids[:end]
    return Generated(kept, tokenizer.decode(kept, skip_special_tokens=True), end is not None)
