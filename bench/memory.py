"""Planned against measured peak memory of an update, on a device that counts its memory.

python bench/memory.py --out bench/results/memory.json
python bench/memory.py --cases 7b --out bench/results/memory_7b.json   # all weights trained, AdamW's state on the host
python bench/memory.py --cases activations --out bench/results/memory_activations.json   # kept on the host or not
python bench/memory.py --cases qwen3.5-2b --out bench/results/memory_qwen3.5_2b.json   # recurrent layers
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.data.batching import micro_batch
from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.methods.sft import token_loss
from lockstep.model.load import load_config, load_policy
from lockstep.parallel.world import World
from lockstep.preflight.memory_plan import MemoryPlan, plan_memory
from lockstep.recipe.recipe_checks import with_derived_defaults
from lockstep.recipe.schema import Recipe
from lockstep.train.optim import Optimizer
from lockstep.train.optim_offload import HostOptimizer
from lockstep.train.step import Learner
from lockstep.types import Example, Origin
from shapes import SHAPES

# The shape of Qwen2.5-0.5B, with random weights.
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
HALF_BILLION = [
    {"dtype": "bf16", "tokens": 4096},
    {"dtype": "bf16", "tokens": 16384},
    {"dtype": "bf16", "tokens": 16384, "gradient_checkpointing": True},
    {"dtype": "bf16", "tokens": 16384, "lora": {"rank": 16}},
    {"dtype": "fp32", "tokens": 4096},
]
ON_HOST = {"dtype": "bf16", "tokens": 8192, "gradient_checkpointing": True, "offload": "optimizer"}
SEVEN_BILLION = [ON_HOST, {**ON_HOST, "micro_batches": 3}]
LONG = {"dtype": "bf16", "tokens": 65536}
# What the layers keep for the backward pass, on the device and on the host.
ACTIVATIONS = [
    {**LONG, **keys, **where}
    for keys in ({}, {"gradient_checkpointing": True})
    for where in ({}, {"activation_offload": True})
]
# As the rows of docs/speed.md.
RECURRENT = [{"dtype": "bf16", "tokens": 16384}, {"dtype": "bf16", "tokens": 16384, "gradient_checkpointing": True}]
CASES = {"0.5b": HALF_BILLION, "7b": SEVEN_BILLION, "activations": ACTIVATIONS, "qwen3.5-2b": RECURRENT}
# The other cases have SHAPE.
SHAPES_OF_CASES = {"7b": "qwen2.5-7b", "qwen3.5-2b": "qwen3.5-2b"}
UPDATES = 3
# Bytes that a case may find on the device: tables of libraries.
LEFT_OVER = 2**27
# Tokens of a row.
LENGTH = 512


def recipe_of(case: dict, folder: Path) -> Recipe:
    """An update is one micro-batch of `tokens`, or `micro_batches` of them."""
    settings = {key: value for key, value in case.items() if key not in ("tokens", "offload", "micro_batches")}
    rows = case.get("micro_batches", 1) * case["tokens"] // LENGTH
    return with_derived_defaults(
        Recipe.model_validate(
            {
                "model": {"path": str(folder), **settings},
                "data": {"train": "unused"},
                "batch": {"tokens": case["tokens"], "rows_per_update": rows},
                "parallel": {"offload": case.get("offload", "none")},
            }
        )
    )


def planned(recipe: Recipe, config: Any, device: Device | type[Device]) -> MemoryPlan:
    return plan_memory(
        recipe,
        config,
        1,
        LENGTH,
        recipe.batch.rows_per_update,
        device=device,
    )


def measure(folder: Path, case: dict, device_name: str) -> dict:
    device = select(device_name)
    recipe = recipe_of(case, folder)
    plan = planned(recipe, load_config(str(folder)), device)
    # Hooks of a model refer to the model, so only the collector frees it.
    gc.collect()
    torch.cuda.empty_cache()
    before = device.memory().allocated
    if before > LEFT_OVER:
        sys.exit(f"{before / 2**30:.1f} GiB of the case before are still there: what is measured would count them")
    device.reset_peak()
    policy = load_policy(recipe.model, device.torch_device(), device.attention, seed=0)
    how = {"masters": bool(recipe.model.master_weights), "fused": device.fused_optimizer, "kernel": device.adamw}
    if "offload" in case:
        where = {"device": device.torch_device(), "state_on_host": True}
        optimizer: Optimizer = HostOptimizer(policy.trainable(), recipe.optim, **how, **where)
    else:
        optimizer = Optimizer(policy.trainable(), recipe.optim, **how)
    learner = Learner(policy, optimizer, device.torch_device(), World())
    draw = torch.Generator().manual_seed(0)
    rows = []
    for row in range(case["tokens"] // LENGTH):
        ids = torch.randint(SHAPE["vocab_size"], (LENGTH,), generator=draw).tolist()
        rows.append(Example(ids, [1] * LENGTH, Origin("random", row)))
    losses = []
    for _ in range(UPDATES):
        begun = time.perf_counter()
        batches = [micro_batch(rows, packed=True, pad_id=0)] * case.get("micro_batches", 1)
        losses.append(learner.forward_backward(batches, token_loss).loss)
        learner.optim_step(1e-5)
        seconds = time.perf_counter() - begun
    measured = device.memory().peak
    peak = plan.peak.total
    sizes = {"planned_gib": peak / 2**30, "measured_gib": measured / 2**30, "ratio": peak / measured}
    return {**case, **sizes, "update_s": seconds, "losses": losses}


def _write(folder: str, cases: str, device: str) -> None:
    large = SHAPES_OF_CASES.get(cases)
    config = SHAPES[large].config() if large else transformers.Qwen2Config(**SHAPE)
    torch.manual_seed(0)
    # Billions of numbers take a processor minutes to draw.
    with torch.device(device if large else "cpu"):
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", choices=CASES, default="0.5b")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        _write(folder, words.cases, words.device)
        for case in CASES[words.cases]:
            result = measure(Path(folder), case, words.device)
            results.append(result)
            print({key: round(v, 3) if isinstance(v, float) else v for key, v in result.items()}, flush=True)
    if words.out:
        facts = {"torch": torch.__version__, "transformers": transformers.__version__, **select(words.device).facts()}
        words.out.write_text(json.dumps({"versions": facts, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
