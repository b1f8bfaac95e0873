"""Small recorded runs, for replays with and without a fault in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from conftest import REWARD, chat_rows, question_rows, write_jsonl
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from preference_rows import METHODS as ROWS

LAYERS = 3
BF16 = "-bf16"

# Key by key what a recipe has besides the common ones.
SFT = "batch: {rows_per_update: 8, tokens: 256}"
ONLINE_BATCH = """batch: {prompts: 4, prompts_per_update: 2, tokens: 256}
rollout: {n: 4, max_tokens: 20, temperature: 0.8}"""
GRPO = f"""{ONLINE_BATCH}
algorithm:
  clip_low: 0.1
  clip_high: 0.1
  kl: {{where: loss, coefficient: 0.2}}
  overlong: {{buffer: 8, factor: 0.5}}"""
RECIPES = {
    "sft": f"method: sft\n{SFT}",
    "sft-fp16": f"method: sft\n{SFT}",
    "dpo": "method: dpo\nbatch: {rows_per_update: 6, tokens: 512}\npreference: {beta: 0.1}",
    "kto": "method: kto\nbatch: {rows_per_update: 6, tokens: 512}",
    "rm": "method: rm\nbatch: {rows_per_update: 6, tokens: 512}",
    "grpo": f"method: grpo\n{GRPO}",
    "grpo-tight": f"method: grpo\n{GRPO}",
    "grpo-top-p": f"method: grpo\n{GRPO}",
    "ppo": "method: ppo\nbatch: {prompts: 8, prompts_per_update: 4, tokens: 256}\n"
    "rollout: {n: 1, max_tokens: 20}\nalgorithm: {gamma: 0.98, lam: 0.9, kl: {where: reward, coefficient: 0.1}}\n"
    "critic: {lr: 1.0e-3}",
}
OWN = {
    "sft-fp16": ["model.dtype=fp16"],
    "dpo": ["optim.lr=1e-4"],
    # Room for two of the sixteen responses, and a few blocks.
    "grpo-tight": ["rollout.block_tokens=4", "rollout.cache_gb=2.2e-4"],
    "grpo-top-p": ["rollout.top_p=0.7", "rollout.truncated_sampling=mask"],
}


def write_lively(folder: Path) -> Path:
    """A random model in which everything matters: attention looks somewhere, biases are not 0, norms not 1."""
    from transformers import AutoModelForCausalLM

    write_tiny(folder, hidden=128, layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed" in name:
                weight.copy_(0.08 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def recorder(folder: Path, *, steps: int = 2) -> Callable[[str], Path]:
    """The recorded run of a recipe with the lively model, created on first use."""
    model = write_lively(folder / "model")
    return cache(lambda recipe: record(folder, model, recipe, steps=steps))


def record(folder: Path, model: Path, name: str, *, steps: int = 2, device: str = "cpu") -> Path:
    """The run folder of a short run with a snapshot at every step. `<recipe>-bf16` is the recipe in bf16."""
    here = folder / name
    here.mkdir(parents=True)
    plain = name.removesuffix(BF16)
    text = RECIPES[plain]
    method = text.split()[1]
    online = method in ONLINE
    if online:
        (here / "reward.py").write_text(REWARD, encoding="utf-8")
        text += f'\nreward: {{function: "{here / "reward.py"}:letters", workers: 1}}'
    rows = question_rows(20) if online else chat_rows(48) if method == "sft" else ROWS[method](24, 0)
    train = write_jsonl(here / "train.jsonl", rows)
    recipe = here / "recipe.yaml"
    recipe.write_text(
        f"""{text}
device: {device}
run: {{name: run, folder: {here / "runs"}, steps: {steps}, export: false}}
model: {{path: {model}}}
data: {{train: {train}}}
optim: {{lr: 1.0e-3, weight_decay: 0.1, schedule: constant}}
tape: {{record: true, every: 1}}
""",
        encoding="utf-8",
    )
    settings = load_recipe(str(recipe), [*OWN.get(plain, []), *(["model.dtype=bf16"] if plain != name else [])])
    (train_online if online else train_offline)(settings, Console.silent())
    return here / "runs" / "run"
