"""Checks for invalid combinations of generation keys: prompts and samples, engines and servers, weight sync."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.errors import Problem, conflict, needs, unfit, unused
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.recipe.precision_checks import rollout_precision_problems
from lockstep.recipe.registry import ENGINES, adapter_row, estimator_row

if TYPE_CHECKING:
    from lockstep.recipe.schema import Recipe


def rollout_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from _prompt_problems(recipe)
    yield from _environment_problems(recipe)
    yield from _weight_sync_problems(recipe)
    yield from _server_problems(recipe)
    yield from rollout_precision_problems(recipe)


def _prompt_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of the keys for prompts per update, samples per prompt, and sampling."""
    batch, rollout, algorithm = recipe.batch, recipe.rollout, recipe.algorithm
    if "rows_per_update" in batch.model_fields_set:
        yield unused("batch.rows_per_update", "online methods count prompts", "use batch.prompts_per_update")
    per_update = batch.prompts_per_update or batch.prompts
    if batch.prompts % per_update:
        fitting = max(d for d in range(1, per_update + 1) if batch.prompts % d == 0)
        yield Problem(
            "batch.prompts_per_update",
            f"{per_update} does not divide batch.prompts={batch.prompts}",
            f"use {fitting}",
            code="indivisible",
        )
    if rollout.max_staleness is not None and rollout.function is not None:
        yield unfit(
            "rollout.max_staleness",
            "the asynchronous generation process cannot run rollout.function",
            "remove one of them",
        )
    yield from _logprob_check_problems(recipe)
    if rollout.max_staleness is None and rollout.worker_device is not None:
        why = "this key applies to asynchronous generation, which is off"
        yield needs("rollout.worker_device", why, "set rollout.max_staleness, or remove rollout.worker_device")
    if estimator_row(algorithm.advantage).groups and rollout.n < 2 and algorithm.lone_response == "zero":
        yield Problem(
            "rollout.n",
            f"{algorithm.advantage} compares the samples of a prompt and needs at least 2 samples",
            "set rollout.n to 2 or more",
            code="out-of-range",
        )
    truncated = [key for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if getattr(rollout, key) != off]
    if truncated and rollout.truncated_sampling == "refuse":
        yield Problem(
            f"rollout.{truncated[0]}",
            "responses would be sampled from a truncated distribution, but the trainer would use the full "
            "distribution: every ratio of new to old probability would be biased",
            "remove this key, or set rollout.truncated_sampling=mask (the trainer truncates too) or ignore",
            code="truncated-sampling",
        )


# Keys that only environments and tools read.
_OF_ENVIRONMENTS = tuple(
    name for name in EnvironmentSettings.model_fields if name not in ("environment", "tools", "agent")
)


def _environment_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of the keys for environments, tools and agents, and of combinations that they do not support."""
    rollout, fields = recipe.rollout, EnvironmentSettings.model_fields
    if not rollout.interactive and recipe.val.environment is None and recipe.val.agent is None:
        for key in _OF_ENVIRONMENTS:
            if getattr(rollout, key) != fields[key].get_default(call_default_factory=True):
                why = "applies to environments, tools and agents, and the run has none of them"
                remedy = f"set rollout.environment, rollout.tools or rollout.agent, or remove {key}"
                yield needs(f"rollout.{key}", why, remedy)
        return
    named = {f"rollout.{name}": getattr(rollout, name) for name in ("tools", "agent", "environment")}
    key = next((name for name, value in named.items() if value), "val.environment")
    yield from _agent_problems(recipe)
    if rollout.environment is not None and rollout.tools:
        why = "an environment returns its tools itself (Start.tools)"
        yield conflict("rollout.tools", why, "remove rollout.tools or rollout.environment")
    if not rollout.gives_rewards and rollout.environment_args:
        why = "are arguments of rollout.environment or rollout.agent"
        yield needs("rollout.environment_args", why, "set one of them, or remove the arguments")
    if rollout.function is not None:
        yield conflict(key, "and rollout.function both generate the responses", "remove one of them")
    adapter = adapter_row(rollout.environment)
    if recipe.data.template == "none" and (adapter is None or adapter.chat):
        yield unfit(key, "a conversation needs a chat template, and data.template is none", "set data.template to auto")
    if recipe.reward.process is not None:
        why = "scores the steps of a single response, not a conversation"
        yield unfit("reward.process", why, f"remove it, or remove {key}")
    reward, texts = recipe.reward, ("function", "model", "remote", "format")
    by_text = any(getattr(reward, name) is not None for name in texts) or reward.weights.get("rule")
    if rollout.gives_rewards and recipe.val.environment == "none" and not by_text:
        why = "only the environment or the agent gives rewards, so answers without it have no score"
        yield unfit("val.environment", why, "remove it, or set a reward for text, such as reward.weights={rule: 1}")
    yield from _trajectory_limit_problems(recipe)


def _agent_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of the keys for agents."""
    rollout, val = recipe.rollout, recipe.val
    if rollout.agent is not None and (rollout.environment is not None or rollout.tools):
        other = "rollout.environment" if rollout.environment is not None else "rollout.tools"
        yield conflict("rollout.agent", f"and {other} both hold the conversation", "remove one of them")
    if val.agent is not None and val.environment is not None:
        yield conflict("val.agent", "and val.environment both hold the conversation", "remove one of them")
    agents = [agent for agent in (rollout.agent, val.agent) if agent is not None]
    if not agents:
        for key in ("agent_host", "agent_limit_reward"):
            # A stored recipe has all keys, so a key with its default is not a contradiction.
            if getattr(rollout, key) != type(rollout).model_fields[key].default:
                yield needs(f"rollout.{key}", "applies only to agents", f"set rollout.agent, or remove {key}")
    for part in ("environment", "group"):
        if rollout.agent is not None and part in recipe.reward.weights:
            why = "an agent returns one reward for its trajectory, the component score"
            yield unfit(f"reward.weights.{part}", why, "remove it, or set the weight of score")
    if rollout.environment_args and any(agent.startswith("command:") for agent in agents):
        why = "are arguments of a function, and the agent is a program"
        yield unfit("rollout.environment_args", why, "remove them, and write the arguments into the command")


def _trajectory_limit_problems(recipe: Recipe) -> Iterator[Problem]:
    rollout, most = recipe.rollout, recipe.rollout.max_tokens
    names = ("turn_tokens", "trajectory_tokens") if rollout.history == "keep" else ("turn_tokens",)
    for name in names:
        limit = getattr(rollout, name)
        if limit is not None and limit > most:
            why = f"{limit} exceeds rollout.max_tokens={most}, which limits the tokens of a trajectory"
            yield Problem(
                f"rollout.{name}", why, f"lower it, or raise rollout.max_tokens to {limit}", code="out-of-range"
            )


def _logprob_check_problems(recipe: Recipe) -> Iterator[Problem]:
    limit, key = recipe.rollout.max_logprob_diff, "rollout.max_logprob_diff"
    if isinstance(limit, float) and limit <= 0:
        yield Problem(key, f"must be greater than 0 (given: {limit:g})", "null disables the check", code="out-of-range")
    if recipe.rollout.max_staleness and isinstance(limit, float):
        yield unfit(
            key,
            "this check compares log-probs with the current policy, but with rollout.max_staleness an older policy "
            "generated the responses",
            "remove this key; the metric rollout_corr/k3 shows the divergence of the two policies",
        )


def _weight_sync_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem if `rollout.weight_sync` does not match the engine: a server, an asynchronous process or
    neither."""
    rollout, served = recipe.rollout, ENGINES[recipe.rollout.engine].served
    mode, key = rollout.weight_sync, "rollout.weight_sync"
    if mode == "auto":
        return
    if not served and rollout.max_staleness is None:
        why = "this key applies to a server or to asynchronous generation, and the run uses neither"
        yield needs(
            key, why, "remove rollout.weight_sync, set rollout.engine to a serving engine, or set rollout.max_staleness"
        )
    elif served and mode == "memory" and rollout.engine != "vllm":
        yield unfit(
            key, f"{rollout.engine} cannot map the device memory of the run", "use files (in /dev/shm), or collective"
        )
    elif not served and mode == "files":
        yield unfit(key, "asynchronous generation does not read weights from files", "use memory, or collective")
    elif served and mode in ("collective", "memory") and recipe.model.lora is not None:
        yield unfit(key, "an adapter is sent to a server as files", "use files")


def _server_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of keys that need a serving engine if the engine is not a server, and of keys that a serving
    engine does not support."""
    rollout = recipe.rollout
    if not ENGINES[rollout.engine].served:
        for key in ("url", "server", "sleep"):
            if getattr(rollout, key) != type(rollout).model_fields[key].get_default(call_default_factory=True):
                yield unused(
                    f"rollout.{key}",
                    f"engine {rollout.engine} is not a server",
                    f"set rollout.engine to {' or '.join(name for name, row in ENGINES.items() if row.served)}",
                )
        return
    if rollout.url is not None:
        # The other keys of `rollout.server` also apply to a server that lockstep did not start.
        for key in ("devices", "tensor_parallel", "replicas", "cpus", "labels", "args", "env", "python"):
            field = type(rollout.server).model_fields[key]
            if getattr(rollout.server, key) != field.get_default(call_default_factory=True):
                yield unused(f"rollout.server.{key}", "lockstep does not start the server at rollout.url", "remove it")
    yield from _replica_problems(recipe)
    if rollout.max_staleness is not None:
        yield unfit(
            "rollout.max_staleness",
            f"asynchronous generation does not support engine {rollout.engine}",
            "remove one of them",
        )
    yield from _truncation_problems(recipe)


def _replica_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of keys that contradict engines on other nodes of a Ray cluster."""
    rollout, server = recipe.rollout, recipe.rollout.server
    if server.replicas is None:
        if server.cpus is not None:
            yield needs("rollout.server.cpus", "Ray reserves it for the engines of rollout.server.replicas", "set both")
        if server.labels:
            why = "Ray selects the nodes of the engines of rollout.server.replicas by these labels"
            yield needs("rollout.server.labels", why, "set rollout.server.replicas, or remove rollout.server.labels")
        return
    if recipe.parallel.launcher != "ray":
        remedy = "set parallel.launcher=ray, or remove it: process 0 then starts one engine"
        yield needs("rollout.server.replicas", "only Ray places engines", remedy)
    if server.devices is not None:
        yield unfit(
            "rollout.server.devices", "Ray chooses the devices of rollout.server.replicas", "remove one of them"
        )
    if rollout.weight_sync == "memory":
        yield unfit(
            "rollout.weight_sync",
            "the engines of rollout.server.replicas may run on other nodes, which cannot map the memory of the run",
            "use collective or files",
        )


def _truncation_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of truncated sampling for which the engine's log-probs would not match the trainer's."""
    rollout, row = recipe.rollout, ENGINES[recipe.rollout.engine]
    if rollout.truncated_sampling not in ("refuse", *row.scored):
        yield Problem(
            "rollout.truncated_sampling",
            f"engine {rollout.engine} returns log-probs of the truncated distribution, but the trainer would use the "
            "full distribution",
            "use mask, so that the trainer truncates too",
            code="truncated-sampling",
        )
    for key in ("top_p", "top_k", "min_p"):
        unused = getattr(rollout, key) == type(rollout).model_fields[key].default
        modes = [mode for mode, keys in row.scored.items() if key in keys]
        if not unused and rollout.truncated_sampling in row.scored and rollout.truncated_sampling not in modes:
            yield Problem(
                f"rollout.{key}",
                f"engine {rollout.engine} does not return log-probs that match the trainer's with "
                f"truncated_sampling: {rollout.truncated_sampling}",
                f"use truncated_sampling: {' or '.join(modes)}" if modes else "remove it",
                code="truncated-sampling",
            )
