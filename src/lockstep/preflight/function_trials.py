"""Before training: does each function of the user's own return what it must? Tried on a small made-up step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lockstep.algorithms.advantage import Signals
from lockstep.algorithms.policy_loss import PolicyTokens
from lockstep.algorithms.user_functions import ADVANTAGE, LOSS, user_estimator, user_policy_loss
from lockstep.data.encode.prompt_rows import PromptSet
from lockstep.errors import Problem, Refusal
from lockstep.functions import is_function_path
from lockstep.recipe import Recipe
from lockstep.rollout.rollout_function import try_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Of the made-up step: responses of unlike lengths to two prompts, right and wrong ones in both.
LENGTHS = (3, 1, 4, 2)


def try_functions(
    recipe: Recipe, prompts: PromptSet | None, tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> list[str]:
    """What was tried, in lines; refuses with everything that is wrong."""
    lines: list[str] = []
    problems: list[Problem] = []
    algorithm, rollout = recipe.algorithm, recipe.rollout
    tries = []
    if is_function_path(algorithm.advantage):
        tries.append(lambda: try_advantage(algorithm.advantage, recipe.rollout.n, algorithm.function_timeout))
    if is_function_path(algorithm.loss):
        tries.append(lambda: try_loss(algorithm.loss, algorithm.function_timeout))
    if rollout.function is not None and prompts is not None:
        function_path, prompt = rollout.function, next(prompt for source in prompts.sources for prompt in source)
        tries.append(
            lambda: try_function(
                function_path,
                prompt,
                rollout.max_tokens,
                _stand_in(tokenizer),
                lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
                lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
                vocabulary,
                rollout.function_timeout,
            )
        )
    for attempt in tries:
        try:
            lines.append(attempt())
        except Refusal as refusal:
            problems += refusal.problems
    if problems:
        raise Refusal(problems)
    return lines


def try_advantage(function_path: str, n: int, seconds: float) -> str:
    lengths = torch.tensor(LENGTHS[: 2 if n == 1 else None])
    sequence_K = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rewards_K = torch.zeros(len(sequence_K))
    rewards_K[lengths.cumsum(0) - 1] = torch.tensor([1.0, 0.0, 0.25, 0.75])[: len(lengths)]
    group_S = torch.arange(len(lengths)) if n == 1 else torch.tensor([0, 0, 1, 1])
    estimate = user_estimator(function_path, seconds)(Signals(rewards_K, sequence_K, group_S), gamma=1.0, lam=1.0)
    least, most = float(estimate.advantages_K.min()), float(estimate.advantages_K.max())
    return f"{ADVANTAGE} {function_path}: {least:.3g} to {most:.3g}, tried on {len(lengths)} made-up responses"


def try_loss(function_path: str, seconds: float) -> str:
    lengths = torch.tensor(LENGTHS)
    sequence_K = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    steps = torch.linspace(0.0, 1.0, len(sequence_K))
    logprobs_K = (-0.5 - steps).requires_grad_()
    tokens = PolicyTokens(
        logprobs_K,
        -0.6 - 0.8 * steps,
        torch.linspace(-1, 1, len(lengths))[sequence_K],
        torch.ones(len(steps)),
        sequence_K,
    )
    sums = user_policy_loss(function_path, seconds)(tokens)
    (gradient,) = torch.autograd.grad(sums.loss, logprobs_K, allow_unused=True)
    if gradient is None or not bool(torch.isfinite(gradient).all()) or not bool(gradient.any()):
        what = "no gradient" if gradient is None or not bool(gradient.any()) else "a gradient that is not finite"
        raise Refusal.at(
            f"{LOSS} {function_path}",
            f"has {what} at the log-probabilities",
            "make the losses of tokens.logprobs_K",
            code="not-finite",
        )
    return f"{LOSS} {function_path}: mean {sums.loss.item() / len(steps):.3g}, tried on {len(steps)} made-up tokens"


def _stand_in(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A turn that any policy may write: a digit, and the end of its turn where the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer("0", add_special_tokens=False)["input_ids"], *end]
