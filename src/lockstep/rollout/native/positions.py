"""Models whose positions move with the length of a sequence cannot be cached beyond a fixed length."""

from __future__ import annotations

from typing import Any

from lockstep.errors import Refusal
from lockstep.kernels.rotary import fixed_length


def refuse_moving_positions(config: Any, longest: int, model: str, key: str = "rollout.max_tokens") -> None:
    """Refuse sequences that would grow past the length from which on cached keys stand at other positions."""
    fixed = fixed_length(config)
    if fixed is not None and longest > fixed:
        raise Refusal.at(
            key,
            f"prompt and response may have {longest} tokens, and over {fixed} tokens all positions of {model} "
            "move with the length of the sequence (longrope or dynamic rotary embedding), those of cached keys too",
            f"keep prompt and {key} within {fixed} together",
        )
