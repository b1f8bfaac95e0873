"""Checks of the algorithm, reward and critic keys of an online recipe."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.errors import Problem, conflict, needs, unfit, unused
from lockstep.functions import is_function_path
from lockstep.recipe.registry import ENGINES, estimator_row, loss_row
from lockstep.recipe.schema import Recipe

# The keyword arguments that every reward function gets.
REWARD_CALL = {"prompt", "data_source", "solution_str", "ground_truth", "extra_info"}


def algorithm_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of algorithm keys that contradict each other or have no effect."""
    batch, algorithm = recipe.batch, recipe.algorithm
    per_update = batch.prompts_per_update or batch.prompts
    if not loss_row(algorithm.loss).ratio and (per_update < batch.prompts or algorithm.epochs > 1):
        yield Problem(
            "batch.prompts_per_update" if per_update < batch.prompts else "algorithm.epochs",
            f"loss {algorithm.loss} has no ratio of new to old probability: a second update in a step would treat "
            "off-policy responses as on-policy",
            "use one update per step (lower batch.prompts instead), or a loss with a ratio: algorithm.loss=clip",
            code="off-policy",
        )
    yield from _kl_problems(recipe)
    yield from _dynamic_sampling_problems(recipe)
    yield from _correction_problems(recipe)
    yield from _gdpo_problems(recipe)
    yield from _turn_problems(recipe)
    yield from _routing_problems(recipe)
    yield from _reward_problems(recipe)
    if algorithm.overlong.buffer > recipe.rollout.max_tokens:
        yield Problem(
            "algorithm.overlong.buffer",
            f"is {algorithm.overlong.buffer}, which exceeds rollout.max_tokens={recipe.rollout.max_tokens}",
            "set it to fewer tokens than rollout.max_tokens, or raise rollout.max_tokens",
            code="out-of-range",
        )
    yield from _critic_problems(recipe)


def _kl_problems(recipe: Recipe) -> Iterator[Problem]:
    kl = recipe.algorithm.kl
    if recipe.method == "on_policy_distill" and kl.reference is None:
        yield Problem(
            "algorithm.kl.reference",
            "must be set, because on_policy_distill uses this model as the teacher",
            "set algorithm.kl.reference to the teacher's folder",
            code="not-set",
        )
    if kl.target is not None and kl.where == "none":
        yield needs("algorithm.kl.target", "the run uses no KL divergence", "set algorithm.kl.where to loss or reward")
    if kl.reward_coefficient and kl.where != "loss":
        yield needs(
            "algorithm.kl.reward_coefficient",
            "has an effect only if the loss has a KL term, and this recipe has none",
            "set algorithm.kl.where=loss",
        )
    if kl.where == "reward" and kl.estimator.endswith("+"):
        yield unfit(
            "algorithm.kl.estimator",
            "the + of an estimator changes only its gradient, and a KL penalty in the reward has no gradient",
            "remove the +",
        )
    if kl.weighted and not (kl.where == "loss" and kl.estimator.endswith("+")):
        yield unused(
            "algorithm.kl.weighted",
            "has an effect only for a KL estimator with + in the loss",
            "set algorithm.kl.where=loss and algorithm.kl.estimator=k3+, or remove this key",
        )


def _dynamic_sampling_problems(recipe: Recipe) -> Iterator[Problem]:
    settings, advantage = recipe.algorithm.dynamic_sampling, recipe.algorithm.advantage
    between, batches = settings.between, settings.max_gen_batches
    if between and (between[0] >= between[1] or batches < 2):
        yield Problem(
            "algorithm.dynamic_sampling.between",
            f"with {between} and max_gen_batches, either no group or every group would be replaced",
            "write the lower bound first, and set max_gen_batches above 1",
            code="empty-range",
        )
    if settings.metric and batches < 2:
        yield needs(
            "algorithm.dynamic_sampling.metric",
            "with max_gen_batches=1 no groups are replaced",
            "set max_gen_batches above 1",
        )
    if batches > 1 and not (estimator_row(advantage).groups or is_function_path(advantage)):
        yield unfit(
            "algorithm.dynamic_sampling.max_gen_batches",
            "dynamic sampling needs an advantage estimator that compares several responses to a prompt",
            "use a group method",
        )


def _reward_problems(recipe: Recipe) -> Iterator[Problem]:
    reward = recipe.reward
    models, weights = reward.model, reward.model_weights
    if isinstance(models, list) and not models:
        yield Problem(
            "reward.model", "must not be an empty list", "give a folder, or remove the key", code="empty-value"
        )
    if weights and (not isinstance(models, list) or len(models) != len(weights)):
        yield Problem(
            "reward.model_weights",
            f"{len(weights)} weights do not match the models in reward.model",
            "give one weight per model",
            code="wrong-count",
        )
    if reward.arguments and reward.function is None:
        yield needs("reward.arguments", "reward.function is not set", "set reward.function, or remove reward.arguments")
    for name in reward.arguments.keys() & REWARD_CALL:
        yield Problem(
            f"reward.arguments.{name}",
            "every reward function already gets this argument",
            "choose another name",
            code="duplicate-name",
        )
    if reward.clip and reward.clip[0] >= reward.clip[1]:
        yield Problem(
            "reward.clip",
            f"the lower bound in {reward.clip} is not below the upper bound",
            "write the lower bound first",
            code="empty-range",
        )


def _critic_problems(recipe: Recipe) -> Iterator[Problem]:
    advantage, steps = recipe.algorithm.advantage, recipe.run.steps
    if recipe.critic.model_fields_set and not estimator_row(advantage).critic:
        yield unused("critic", f"advantage {advantage} uses no critic", "use method ppo, or remove the critic keys")
    elif steps is not None and recipe.critic.warmup >= steps:
        yield Problem(
            "critic.warmup",
            f"with {recipe.critic.warmup} critic-only steps, the policy is trained in none of the {steps} steps",
            "lower critic.warmup, or raise run.steps",
            code="no-steps-left",
        )


def _correction_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of rollout correction keys that would be applied twice or not at all."""
    algorithm, settings = recipe.algorithm, recipe.algorithm.rollout_correction
    if settings.low > settings.high:
        yield Problem(
            "algorithm.rollout_correction.low", "exceeds algorithm.rollout_correction.high", code="empty-range"
        )
    if settings.cap is not None and settings.floor > settings.cap:
        yield Problem(
            "algorithm.rollout_correction.floor", "exceeds algorithm.rollout_correction.cap", code="empty-range"
        )
    for number, band in enumerate(settings.reject):
        if band.low is not None and band.low > band.high:
            yield Problem(f"algorithm.rollout_correction.reject.{number}.low", "exceeds its high", code="empty-range")
    if settings.rejected != "left_out" and settings.mask == "none" and not settings.reject:
        yield needs(
            "algorithm.rollout_correction.rejected", "nothing is rejected", "set mask or reject, or remove this key"
        )
    if settings.mask_first and (settings.rejected == "zero" or (settings.mask == "none" and not settings.reject)):
        yield needs(
            "algorithm.rollout_correction.mask_first",
            "no token is masked before the advantages are computed",
            "set mask or reject, and rejected to left_out or counted, or remove this key",
        )
    if settings.mask_first and is_function_path(algorithm.advantage):
        yield unfit(
            "algorithm.rollout_correction.mask_first",
            "your own estimator gets all tokens",
            "remove this key",
        )
    if settings.bypass and settings.weight != "none":
        yield conflict(
            "algorithm.rollout_correction.weight",
            "with bypass, the ratio in the loss already corrects for the engine's probabilities, and a weight would"
            " correct twice",
            "remove one of them",
        )
    if settings.bypass and not loss_row(algorithm.loss).ratio:
        yield unfit(
            "algorithm.rollout_correction.bypass",
            f"loss {algorithm.loss} has no ratio of new to old probability",
            "use loss importance",
        )


def _turn_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of keys that need conversations of several turns."""
    algorithm, rollout = recipe.algorithm, recipe.rollout
    if estimator_row(algorithm.advantage).turns and rollout.environment is None:
        yield needs(
            "algorithm.advantage",
            f"{algorithm.advantage} compares the turns of conversations with an environment",
            "set rollout.environment, or use the advantage grpo",
        )
    if algorithm.turn_discount == 1.0:
        return
    if not rollout.interactive and rollout.function is None:
        yield needs(
            "algorithm.turn_discount",
            "has an effect only on conversations of several turns",
            "set rollout.environment or rollout.tools, or remove this key",
        )
    if estimator_row(algorithm.advantage).greedy_baseline:
        yield conflict(
            "algorithm.turn_discount",
            f"{algorithm.advantage} subtracts the score of the greedy response, which is not discounted",
            "remove this key, or use the advantage grpo",
        )
    if estimator_row(algorithm.advantage).parts:
        yield conflict(
            "algorithm.turn_discount",
            f"{algorithm.advantage} normalizes the separate rewards of a response, which have no turn",
            "remove this key, or use the advantage grpo",
        )


def _routing_problems(recipe: Recipe) -> Iterator[Problem]:
    key, mode, rollout = "algorithm.routing_replay", recipe.algorithm.routing_replay, recipe.rollout
    if mode == "off":
        return
    if recipe.model.aux_loss_coef:
        why = "the load-balancing loss counts the experts that routers choose, not the replayed ones"
        yield unfit(key, why, "set model.aux_loss_coef=0, or algorithm.routing_replay=off")
    if mode == "old":
        return
    if not ENGINES[rollout.engine].routes:
        with_routes = " or ".join(name for name, row in ENGINES.items() if row.routes)
        why = f"engine {rollout.engine} does not return the experts of each token"
        yield unfit(key, why, f"use rollout.engine={with_routes}, or algorithm.routing_replay=old")
    for name in ("function", "agent"):
        if getattr(rollout, name) is not None:
            why = f"rollout.{name} returns tokens and log-probs, but not the experts of each token"
            yield unfit(key, why, "set it to old, or use rollout.environment")
    if recipe.method == "on_policy_distill":
        why = "the reference is the teacher, which must choose its experts itself"
        yield unfit(key, why, "set it to old, or to off")


def _gdpo_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of keys that have no effect with gdpo, because they change only the total score, and gdpo
    compares the separate rewards."""
    algorithm = recipe.algorithm
    if not estimator_row(algorithm.advantage).parts:
        if algorithm.gdpo_rewards:
            yield unused("algorithm.gdpo_rewards", f"advantage {algorithm.advantage} does not read it", "remove it")
        return
    ignored = {
        "algorithm.kl.where": algorithm.kl.in_reward(),
        "reward.clip": recipe.reward.clip is not None,
        "algorithm.overlong.truncated_reward": algorithm.overlong.truncated_reward is not None,
    }
    for key, on in ignored.items():
        if on:
            remedy = "set algorithm.kl.where to loss or none" if key.endswith("where") else "remove it"
            yield unused(
                key,
                f"{algorithm.advantage} compares the separate rewards, and this key changes only the total score",
                remedy,
            )
