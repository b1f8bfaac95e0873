"""Limits of the native engine: prompt tokens per prefill pass, and the longest cacheable sequence."""

from __future__ import annotations

from typing import Any

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.kernels.rotary import fixed_length
from lockstep.recipe.keys_rollout import RolloutSettings


def refuse_moving_positions(config: Any, longest: int, model: str, key: str = "rollout.max_tokens") -> None:
    """Refuses sequences beyond the length at which the rotary embedding of cached keys would change."""
    fixed = fixed_length(config)
    if fixed is not None and longest > fixed:
        raise Refusal.at(
            key,
            f"prompt and response can have {longest} tokens; over {fixed} tokens the rotary embedding of {model} "
            "depends on the sequence length (longrope or dynamic), so cached keys become invalid",
            f"keep the sum of prompt and {key} within {fixed}",
            code="rotary-limit",
        )


# Tokens that one prefill pass can always have, and the share of device memory that a longer pass may use.
USUAL, SHARE = 8192, 1 / 8


def prefill_budget(settings: RolloutSettings, device: Device, config: Any, size: int) -> int:
    """Tokens per prefill pass: the recipe's value, or as many as suit the device and its memory.

    It depends on the total memory, not on the free memory, so it is the same in every step and every run.
    """
    if settings.prefill_tokens is not None:
        return settings.prefill_tokens
    if device.prefill_tokens <= USUAL:
        return device.prefill_tokens
    return fitting_prefill(device.prefill_tokens, device.memory().total, config, size)


def fitting_prefill(most: int, memory: int, config: Any, size: int) -> int:
    """Tokens per prefill pass on a device with this memory, at most `most`."""
    fitting = int(SHARE * memory) // prefill_bytes(config, 1, size)
    return min(most, max(USUAL, fitting // USUAL * USUAL))


def prefill_bytes(config: Any, tokens: int, size: int) -> int:
    """Peak memory of a Llama-like layer for `tokens` without a backward pass.

    Per token: three tensors of the feed-forward width, the layer's input, its sum with the attention's output, the
    normalised one and its fp32 copies. `size` is the bytes per element.
    """
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    experts = (getattr(config, "num_experts_per_tok", None) or 0) * (
        getattr(config, "moe_intermediate_size", None) or 0
    )
    return tokens * (size * (3 * max(inner, experts) + 4 * hidden) + 2 * 4 * hidden)
