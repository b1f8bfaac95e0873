"""The policy loss that a recipe names, with the keys it reads, and the tokens that some losses hold back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import torch

from lockstep.algorithms import own
from lockstep.algorithms.covariance import HELD
from lockstep.algorithms.policy import PolicyTokens
from lockstep.recipe.online import Algorithm
from lockstep.recipe.rows import loss_row
from lockstep.train.advantages import Learned
from lockstep.types import Sums


def loss_of(algorithm: Algorithm) -> Callable[[PolicyTokens], Sums]:
    """The policy loss with the keys it reads."""
    keys = _keys(algorithm, loss_row(algorithm.loss).keys)
    return own.policy_loss(algorithm.loss, keys, algorithm.function_limit)


def _keys(algorithm: Algorithm, names: Mapping[str, str]) -> dict[str, Any]:
    return {argument: getattr(algorithm, key) for argument, key in names.items()}


def held_tokens(algorithm: Algorithm, learned: Learned, tokens: slice, seed: tuple[int, ...]) -> torch.Tensor | None:
    """Tokens that the covariance losses hold back, chosen over the whole update."""
    held = loss_row(algorithm.loss).held
    if held is None:
        return None
    old_K, advantages = learned.known.old_K, learned.advantages
    assert old_K is not None
    vectors = old_K[tokens], advantages.advantages_K[tokens], advantages.keep_K[tokens]
    draw = torch.Generator().manual_seed(int.from_bytes(sha256(repr(seed).encode()).digest()[:7], "big"))
    return HELD[algorithm.loss](*vectors, **_keys(algorithm, held), generator=draw)
