"""Configurations of small models whose rotary positions move with the length of a sequence."""

from __future__ import annotations

from typing import Any

from small_models import SIZES
from transformers import LlamaConfig, Phi3Config

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
