"""Estimators and policy losses by name: ours, or a function of the user's own, whose return value is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lockstep.algorithms.advantage import ESTIMATORS, Estimate, Signals
from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens, own_loss
from lockstep.functions import OwnFunction, is_function_path, own_function
from lockstep.types import Sums

ADVANTAGE, LOSS, LIMIT = "algorithm.advantage", "algorithm.loss", "algorithm.function_timeout"


def estimator(name: str, seconds: float) -> Callable[..., Estimate]:
    """`advantage(signals)` of the user's gives one number for each response, or one for each token, in `seconds`."""
    if is_function_path(name):
        return partial(_estimated, own_function(name, ADVANTAGE, ("signals",), seconds, LIMIT))
    return ESTIMATORS[name]


def policy_loss(name: str, keys: Mapping[str, Any], seconds: float) -> Callable[[PolicyTokens], Sums]:
    """`loss(tokens)` of the user's gives a loss at each token, in `seconds`; ours take their settings from `keys`."""
    if is_function_path(name):
        return partial(own_loss, function=partial(_losses, own_function(name, LOSS, ("tokens",), seconds, LIMIT)))
    return partial(LOSSES[name], **keys)


def _estimated(function: OwnFunction, signals: Signals, **unused: float) -> Estimate:
    tokens, sequences = len(signals.sequence_K), len(signals.group_S)
    remedy = f"return {sequences} numbers, one for each response (group_S), or {tokens}, one for each token"
    found = function(signals)
    try:
        values = torch.as_tensor(found, dtype=signals.rewards_K.dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise function.refuse(
            f"returned a {type(found).__name__} that is no vector of numbers", remedy, code="invalid-return"
        ) from error
    if values.shape not in ((sequences,), (tokens,)):
        raise function.refuse(f"returned the shape {tuple(values.shape)}", remedy, code="invalid-return")
    if not bool(torch.isfinite(values).all()):
        raise function.refuse(
            f"returned {_count(~torch.isfinite(values))} numbers that are not finite", remedy, code="not-finite"
        )
    advantages_K = values[signals.sequence_K] if len(values) != tokens else values
    return Estimate(advantages_K, signals.scores_S[signals.sequence_K])


def _losses(function: OwnFunction, tokens: PolicyTokens) -> torch.Tensor:
    remedy = f"return a tensor of {len(tokens.logprobs_K)} losses, one for each token, made of tokens.logprobs_K"
    found = function(tokens)
    if not isinstance(found, torch.Tensor):
        raise function.refuse(f"returned a {type(found).__name__}", remedy, code="invalid-return")
    if found.shape != tokens.logprobs_K.shape:
        raise function.refuse(f"returned the shape {tuple(found.shape)}", remedy, code="invalid-return")
    if not found.requires_grad and tokens.logprobs_K.requires_grad:
        raise function.refuse(
            "returned losses without a gradient: nothing would be trained", remedy, code="invalid-return"
        )
    bad = ~torch.isfinite(found) & tokens.counted_K
    if bool(bad.any()):
        raise function.refuse(f"returned {_count(bad)} losses that are not finite", remedy, code="not-finite")
    return found


def _count(flags: torch.Tensor) -> int:
    return int(flags.sum())
