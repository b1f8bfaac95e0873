"""A model with random weights whose responses end at random: what the online benchmarks generate with.

Lengths need no hook in any generator, because the weights make them: one place of the residual stream holds the same
number at every token, and the head reads it. Plain characters get the same score from it, the end token as much
more as ends a response with probability 1/`mean` at every token, and all other tokens so little that they never come.
Lengths are therefore geometric up to the limit, independent of prompt and text, on whatever generates.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.model.tiny import write_tiny
from memory import SHAPE

# Line break (a prompt ends with it) and the printable characters; the tokenizer's ids are bytes.
WRITTEN = (0x0A, *range(0x20, 0x7F))
SHAPES = ("tiny", "half-billion")
# How far below the characters a token scores that never comes.
NEVER = 25.0


def write_random_lengths(
    folder: Path, shape: str, mean: float | None, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> None:
    """Write the model and its byte tokenizer. `mean` is that of the lengths without a limit; None never ends.

    Weights are drawn on `device`: half a billion of them take a processor a minute.
    """
    write_tiny(folder, seed=seed)
    if shape == "half-billion":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ends = transformers.AutoConfig.from_pretrained(folder)
            config = transformers.Qwen2Config(**SHAPE, eos_token_id=ends.eos_token_id, pad_token_id=ends.pad_token_id)
            with torch.device(device):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    teach_endings(model, model.config.eos_token_id, mean, seed)
    model.save_pretrained(folder)


@torch.no_grad()
def teach_endings(model: Any, end: int, mean: float | None, seed: int) -> None:
    """Change the weights of a decoder with a tied head, as the head of this file says."""
    embedding = model.get_input_embeddings().weight
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    written = torch.tensor(WRITTEN)
    draw = torch.Generator().manual_seed(seed)
    text = written[torch.randint(len(written), (4, 256), generator=draw)].to(embedding.device)
    # Of the size of the rest of the stream: large enough to be read, small enough to leave the text to the rest.
    embedding[:, 0] = 0
    constant = _stream(model, text).square().mean().sqrt()
    embedding[written, 0] = constant.to(embedding.dtype)
    final = model.model(input_ids=text, use_cache=False).last_hidden_state.flatten(0, 1).float()
    read = final[:, 0].mean()
    # The score of the end token whose probability, averaged over the text, is 1/mean.
    characters = -(-(final @ embedding[written].float().T).logsumexp(-1)).logsumexp(0) + math.log(len(final))
    silent = torch.ones(len(embedding), dtype=torch.bool)
    silent[written] = False
    embedding[silent, 0] = (constant - NEVER / read).to(embedding.dtype)
    embedding[end] = 0
    embedding[end, 0] = ((characters - (NEVER if mean is None else math.log(mean - 1))) / read).to(embedding.dtype)


def _stream(model: Any, text: torch.Tensor) -> torch.Tensor:
    """The residual stream in front of the last norm."""
    seen: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.model(input_ids=text, use_cache=False)
    hook.remove()
    return seen[0].float()


def write_questions(path: Path, count: int, shortest: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of random letters, log-uniform in length, as rows of the RL schema."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        length = round(math.exp(draw.uniform(math.log(shortest), math.log(longest))))
        text = "".join(draw.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(length))
        rows.append(
            {
                "data_source": "letters",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": "aeiou"},
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows
