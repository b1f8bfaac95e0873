"""Models whose positions mean something else in a batch with a long sequence."""

from __future__ import annotations

from typing import Any

from lockstep.errors import Refusal

# Kinds of rotary embedding that transformers scales by the longest sequence of the forward pass.
BY_LONGEST = ("dynamic", "longrope")


def refuse_moving_positions(config: Any, longest: int, model: str) -> None:
    """Refuse sequences so long that the positions of others in the batch, and of cached keys, would move with them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set for all layers, or a set for each kind of layer.
    for rope in (parameters, *parameters.values()):
        if not isinstance(rope, dict) or rope.get("rope_type") not in BY_LONGEST:
            continue
        fixed = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest > fixed:
            raise Refusal.at(
                "rollout.max_tokens",
                f"prompt and response may have {longest} tokens, and over {fixed} tokens the positions of {model} "
                f"({rope['rope_type']} rotary embedding) depend on the longest sequence of a batch",
                f"lower data.max_prompt_tokens and rollout.max_tokens to {fixed} together",
            )
