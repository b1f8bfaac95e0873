"""Limits of the native engine: prompt tokens per prefill pass, and the longest cacheable sequence."""

from __future__ import annotations

from typing import Any

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.kernels.rotary import fixed_length
from lockstep.recipe.keys_rollout import RolloutSettings

# Models whose positions move with the length of a sequence cannot be cached beyond a fixed length.


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


# How many prompt tokens one forward pass of the engine takes, and the memory that they need.

# What one pass may always take, and the share of a device's memory that a longer one may fill.
USUAL, SHARE = 8192, 1 / 8


def prefill_budget(settings: RolloutSettings, device: Device, config: Any, size: int) -> int:
    """Tokens of one pass over prompts: the recipe's, or as many as the device does at once and has the memory for.

    Judged by the memory that the device has, not by what is free: the same in every step and every run.
    """
    if settings.prefill_tokens is not None:
        return settings.prefill_tokens
    if device.prefill_tokens <= USUAL:
        return device.prefill_tokens
    return fitting_prefill(device.prefill_tokens, device.memory().total, config, size)


def fitting_prefill(most: int, memory: int, config: Any, size: int) -> int:
    """Tokens of one pass on a device of that memory that does `most` at once."""
    fitting = int(SHARE * memory) // prefill_bytes(config, 1, size)
    return min(most, max(USUAL, fitting // USUAL * USUAL))


def prefill_bytes(config: Any, tokens: int, size: int) -> int:
    """The most that a Llama-like layer holds at once for `tokens`: nothing is kept for a backward pass.

    Per token: three tensors as wide as the feed-forward, the layer's input, its sum with the attention's output, the
    normalised one and its fp32 copies. `size` is that of a number of the model.
    """
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = (getattr(config, "num_experts_per_tok", None) or 0) * (
        getattr(config, "moe_intermediate_size", None) or 0
    )
    return tokens * (size * (3 * max(inner, experts) + 4 * hidden) + 2 * 4 * hidden)
