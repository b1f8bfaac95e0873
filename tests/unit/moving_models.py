"""Small models whose rotary positions move with the length of a sequence, and a run that trains one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_models import SIZES
from transformers import LlamaConfig, Phi3Config

from conftest import write_jsonl

# Up to so many tokens the positions of a sequence are fixed.
FIXED = 24


def longrope(original: int = FIXED) -> Any:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [4.0, 5.0, 6.0, 7.0],
        "original_max_position_embeddings": original,
    }
    sizes = {**SIZES, "max_position_embeddings": 96}
    return Phi3Config(**sizes, original_max_position_embeddings=original, pad_token_id=0, rope_parameters=rope)


def dynamic() -> Any:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return LlamaConfig(**{**SIZES, "max_position_embeddings": FIXED}, rope_parameters=rope)


MOVING = {"longrope": longrope, "dynamic": dynamic}


def sft_recipe(folder: Path, model: Path, rows: list[dict[str, object]], more: str = "") -> Path:
    """A recipe of one update over all rows in one line; its runs lie in `folder`."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
method: sft
device: cpu
run: {{folder: {folder}, steps: 1, export: false}}
model: {{path: {model}}}
data: {{train: {write_jsonl(folder / "train.jsonl", rows)}}}
batch: {{rows_per_update: {len(rows)}, tokens: 400}}
optim: {{warmup: 0}}
{more}
""",
        encoding="utf-8",
    )
    return recipe
