"""Gives attention modules that scale their queries by position (Llama 4) the positions of packed tokens.

In Llama 4, layers without rotary embedding scale the query of a token by its position. Such a layer computes positions
from the number of cached tokens that its KV cache reports. In a packed row or a decode batch, one number for all tokens
would give wrong positions. So `PositionCache` replaces the KV cache and reports, for each token, the number from which
the layer computes the right position.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# The keyword of the forward pass with the position of every token, (rows, tokens).
POSITIONS = "token_positions"


class PositionCache:
    """Replaces a transformers cache. It stores no keys, and only reports the position offset of each token."""

    def __init__(self, positions_NT: torch.Tensor):
        # The rows of a padded batch have the same positions.
        positions_T = positions_NT[0]
        self._before_T = positions_T - torch.arange(len(positions_T), device=positions_T.device)

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        return self._before_T

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


def scales_by_position(module: nn.Module) -> bool:
    """Returns whether an attention module scales its queries by the position of the token."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def give_positions(attentions: Iterable[nn.Module]) -> bool:
    """Prepares the attention modules that scale queries by position. Returns whether such modules exist. If they exist,
    forward passes need the keyword `POSITIONS`."""
    scaling = [module for module in dict.fromkeys(attentions) if scales_by_position(module)]
    for module in scaling:
        module.register_forward_pre_hook(_with_positions, with_kwargs=True)
    return bool(scaling)


def _with_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # Gradient checkpointing removes caches from a layer's arguments, but this hook adds the cache inside the layer. The
    # keyword POSITIONS is missing in forward passes that transformers starts.
    positions = kwargs.pop(POSITIONS, None)
    return args, kwargs if positions is None else {**kwargs, "past_key_values": PositionCache(positions)}
