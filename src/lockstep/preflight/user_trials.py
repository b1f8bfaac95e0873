"""Trial calls of the user's functions and rewards, before weights load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from lockstep.algorithms.advantage import Signals
from lockstep.algorithms.policy_loss import PolicyTokens
from lockstep.algorithms.user_functions import ADVANTAGE, LOSS, user_estimator, user_policy_loss
from lockstep.device.base import Device
from lockstep.environments.agents.agent_setup import try_agent
from lockstep.environments.setup import try_environment
from lockstep.errors import Refusal
from lockstep.model.resolve import image_folder
from lockstep.model.text_model import text_config
from lockstep.model.trials import (
    ADVANTAGE_FUNCTION,
    ENVIRONMENT,
    LOSS_FUNCTION,
    REWARDS,
    ROLLOUT_FUNCTION,
    TrialReport,
    run_trial,
)
from lockstep.preflight.prepared import Context, PreparedOnline
from lockstep.reward.scorer import Scorer
from lockstep.rollout.rollout_function import message_encoder, try_function
from lockstep.run.console import Console
from lockstep.run.folder import run_folder
from lockstep.run.runtime import Runtime
from lockstep.vision.processors import ImageTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The response lengths of the artificial step on which user functions are tried: two prompts, each with two responses.
LENGTHS = (3, 1, 4, 2)


def advantage_function(context: Context) -> None:
    algorithm, n = context.recipe.algorithm, context.recipe.rollout.n
    run_trial(
        ADVANTAGE_FUNCTION,
        lambda: TrialReport([try_advantage(algorithm.advantage, n, algorithm.function_timeout)]),
        console=context.console,
    )


def loss_function(context: Context) -> None:
    algorithm = context.recipe.algorithm
    run_trial(
        LOSS_FUNCTION,
        lambda: TrialReport([try_loss(algorithm.loss, algorithm.function_timeout)]),
        console=context.console,
    )


def rollout_function(context: Context) -> None:
    run_trial(ROLLOUT_FUNCTION, lambda: TrialReport([try_rollout(context)]), console=context.console)


def environment(context: Context) -> None:
    """Tries the environments of training and of validation on one row each."""
    run_trial(ENVIRONMENT, lambda: TrialReport(_environment_lines(context)), console=context.console)


def _environment_lines(context: Context) -> list[str]:
    rollout, val, seed = context.recipe.rollout, context.recipe.val, context.recipe.run.seed
    prompt = next(prompt for source in context.prompts.sources for prompt in source)
    tried = [rollout] if rollout.interactive else []
    validation = rollout.for_validation(val.environment, val.agent)
    tried += [validation] if validation is not None and validation.interactive else []
    folder = image_folder(context.recipe.model)
    images = None if folder is None else ImageTokens.of(folder, context.tokenizer)
    trials = [
        try_environment(one, prompt, context.tokenizer, context.limit, seed, images)
        if one.agent is None
        else try_agent(one, prompt, context.tokenizer, images)
        for one in tried
    ]
    if rollout.interactive and trials[0].prompt_tokens:
        _count_start(context, trials[0].prompt_tokens - len(prompt.ids))
    return [trial.line for trial in trials]


def _count_start(context: Context, added: int) -> None:
    """Adds the tokens with which a trajectory starts besides the prompt of its row, such as tool schemas, to the
    plan."""
    prompts, limit = context.prompts, context.limit
    prompts.added = max(0, min(added, limit - prompts.counts.longest))
    # The schemas of tools are the same for all rows. An environment may write other prompts.
    over = sum(len(prompt.ids) + added > limit for prompt in prompts.items) if context.recipe.rollout.tools else 0
    if over:
        context.remarks.append(
            f"{over:,} of {len(prompts.items):,} prompts have over {limit:,} tokens with the {added:,} tokens of the "
            "tools (rollout.tools), so their trajectories fail; raise data.max_prompt_tokens, or shorten them"
        )


def try_advantage(function_path: str, n: int, seconds: float) -> str:
    lengths = torch.tensor(LENGTHS[: 2 if n == 1 else None])
    sequence_K = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    rewards_K = torch.zeros(len(sequence_K))
    rewards_K[lengths.cumsum(0) - 1] = torch.tensor([1.0, 0.0, 0.25, 0.75])[: len(lengths)]
    group_S = torch.arange(len(lengths)) if n == 1 else torch.tensor([0, 0, 1, 1])
    signals = Signals(rewards_K, sequence_K, group_S)
    estimate = user_estimator(function_path, seconds)(signals, gamma=1.0, lam=1.0)
    least, most = float(estimate.advantages_K.min()), float(estimate.advantages_K.max())
    where = f"{ADVANTAGE} {function_path}"
    return f"{where}: {least:.3g} to {most:.3g}, tried on {len(lengths)} generated responses"


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
    where = f"{LOSS} {function_path}"
    if gradient is None or not bool(gradient.any()) or not bool(torch.isfinite(gradient).all()):
        why = "no gradient" if gradient is None or not bool(gradient.any()) else "a gradient that is not finite"
        raise Refusal.at(
            where, f"has {why} at the log-probabilities", "compute the losses from tokens.logprobs_K", code="not-finite"
        )
    mean = sums.loss.item() / len(steps)
    return f"{where}: mean {mean:.3g}, tried on {len(steps)} generated tokens"


def try_rollout(context: Context) -> str:
    rollout, tokenizer = context.recipe.rollout, context.tokenizer
    return try_function(
        str(rollout.function),
        next(prompt for source in context.prompts.sources for prompt in source),
        rollout.max_tokens,
        _stub_turn(tokenizer),
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        text_config(context.config).vocab_size,
        rollout.function_timeout,
        message_encoder(tokenizer),
    )


def _stub_turn(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token ids of a minimal turn that any policy may generate: a digit, and the end token if the tokenizer
    has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*tokenizer("0", add_special_tokens=False)["input_ids"], *end]


# Rewards.


@contextmanager
def open_scorer(prepared: PreparedOnline, runtime: Runtime) -> Iterator[Scorer]:
    """Opens the reward scorer of an online run and tries it on real rows before it is used."""
    recipe, world = prepared.recipe, runtime.world
    output = run_folder(recipe).reward_output(world.rank)
    device = runtime.device.torch_device(world.local_rank)
    offload = recipe.parallel.offload_reward
    environment = recipe.rollout.gives_rewards
    with Scorer.open(
        recipe.reward,
        _data_sources(prepared),
        device,
        output=output,
        offload=offload,
        environment=environment,
        policy=image_folder(recipe.model),
    ) as scorer:
        _try_rewards(scorer, prepared, runtime.console)
        yield scorer


def try_rewards(prepared: PreparedOnline, device: Device, console: Console) -> None:
    """Tries the rewards on real rows. If a reward needs weights or a server, no reward is tried, and a message says
    so."""
    reward = prepared.recipe.reward
    not_tried = [name for name in ("model", "process", "remote") if getattr(reward, name) is not None]
    if not_tried:
        console.say(f"reward.{', reward.'.join(not_tried)}: tried when training starts, not by a plan")
        return
    environment = prepared.recipe.rollout.gives_rewards
    with Scorer.open(reward, _data_sources(prepared), device.torch_device(0), environment=environment) as scorer:
        _try_rewards(scorer, prepared, console)


def _data_sources(prepared: PreparedOnline) -> list[str]:
    return sorted({*prepared.train.data_sources, *(question.data_source for question in prepared.questions)})


def _try_rewards(scorer: Scorer, prepared: PreparedOnline, console: Console) -> None:
    questions = [*prepared.train.questions, *prepared.questions]
    scorer.set_progress(0, prepared.batches.steps)
    conversations = prepared.recipe.rollout.interactive
    run_trial(REWARDS, lambda: scorer.dry_run(questions, conversations=conversations), console=console)
