"""User functions as advantage estimators and policy losses, with checks of their return values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lockstep.algorithms.advantage import Estimate, Signals
from lockstep.algorithms.policy_loss import PolicyTokens, user_loss
from lockstep.functions import UserFunction, load_user_function
from lockstep.types import Sums

ADVANTAGE, LOSS, LIMIT = "algorithm.advantage", "algorithm.loss", "algorithm.function_timeout"


def user_estimator(function_path: str, seconds: float) -> Callable[..., Estimate]:
    """The user's advantage estimator `f(signals)`: one number per response or token, computed within `seconds`."""
    return partial(_estimate, load_user_function(function_path, ADVANTAGE, ("signals",), seconds, LIMIT))


def user_policy_loss(function_path: str, seconds: float) -> Callable[[PolicyTokens], Sums]:
    """The user's policy loss `f(tokens)`, which must return one loss per token within `seconds`."""
    function = load_user_function(function_path, LOSS, ("tokens",), seconds, LIMIT)
    return partial(user_loss, function=partial(_losses, function))


def _estimate(function: UserFunction, signals: Signals, **unused: float) -> Estimate:
    tokens, sequences = len(signals.sequence_K), len(signals.group_S)
    remedy = f"return {sequences} numbers, one for each response (group_S), or {tokens}, one for each token"
    returned = function(signals)
    try:
        values = torch.as_tensor(returned, dtype=signals.rewards_K.dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise function.refuse(
            f"returned a {type(returned).__name__}, not a vector of numbers", remedy, code="invalid-return"
        ) from error
    if values.shape not in ((sequences,), (tokens,)):
        raise function.refuse(f"returned the shape {tuple(values.shape)}", remedy, code="invalid-return")
    if not bool(torch.isfinite(values).all()):
        raise function.refuse(
            f"returned {_count(~torch.isfinite(values))} numbers that are not finite", remedy, code="not-finite"
        )
    advantages_K = values[signals.sequence_K] if len(values) != tokens else values
    return Estimate(advantages_K, signals.scores_S[signals.sequence_K])


def _losses(function: UserFunction, tokens: PolicyTokens) -> torch.Tensor:
    remedy = f"return a tensor of {len(tokens.logprobs_K)} losses, one for each token, computed from tokens.logprobs_K"
    losses = function(tokens)
    if not isinstance(losses, torch.Tensor):
        raise function.refuse(f"returned a {type(losses).__name__}", remedy, code="invalid-return")
    if losses.shape != tokens.logprobs_K.shape:
        raise function.refuse(f"returned the shape {tuple(losses.shape)}", remedy, code="invalid-return")
    if not losses.requires_grad and tokens.logprobs_K.requires_grad:
        raise function.refuse(
            "returned losses without a gradient: nothing would be trained", remedy, code="invalid-return"
        )
    bad = ~torch.isfinite(losses) & tokens.counted_K
    if bool(bad.any()):
        raise function.refuse(f"returned {_count(bad)} losses that are not finite", remedy, code="not-finite")
    return losses


def _count(flags: torch.Tensor) -> int:
    return int(flags.sum())
