"""What does not go together in generation: prompts and samples, engines and servers, ways of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep.errors import Problem
from lockstep.recipe.registry import ENGINES, estimator_row

if TYPE_CHECKING:
    from lockstep.recipe.schema import Recipe


def rollout_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from _prompt_problems(recipe)
    yield from _hand_over_problems(recipe)
    yield from _server_problems(recipe)


def _prompt_problems(recipe: Recipe) -> Iterator[Problem]:
    """Which prompts are taken, how often each is answered, and how."""
    batch, rollout, algorithm = recipe.batch, recipe.rollout, recipe.algorithm
    if "rows_per_update" in batch.model_fields_set:
        yield Problem("batch.rows_per_update", "online methods count prompts", "use batch.prompts_per_update")
    per_update = batch.prompts_per_update or batch.prompts
    if batch.prompts % per_update:
        fitting = max(d for d in range(1, per_update + 1) if batch.prompts % d == 0)
        yield Problem(
            "batch.prompts_per_update", f"{per_update} does not divide batch.prompts={batch.prompts}", f"use {fitting}"
        )
    if rollout.max_staleness is not None and rollout.function is not None:
        yield Problem(
            "rollout.max_staleness",
            "the process that generates beside training cannot run rollout.function",
            "remove one of them",
        )
    yield from _logprob_check_problems(recipe)
    if rollout.max_staleness is None and rollout.worker_device is not None:
        why = "says how a process generates beside training, and there is none"
        yield Problem("rollout.worker_device", why, "set rollout.max_staleness, or remove it")
    if estimator_row(algorithm.advantage).groups and rollout.n < 2:
        yield Problem(
            "rollout.n",
            f"{algorithm.advantage} compares the samples of a prompt, and there is one",
            "set it to 2 or more",
        )
    truncated = [key for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)) if getattr(rollout, key) != off]
    if truncated and rollout.truncated == "refuse":
        yield Problem(
            f"rollout.{truncated[0]}",
            "responses would come from a truncated distribution while the trainer scores the whole one: every ratio of "
            "new to old probability would be off",
            "remove it, or say rollout.truncated=mask (the trainer truncates too) or ignore",
        )


def _logprob_check_problems(recipe: Recipe) -> Iterator[Problem]:
    limit, key = recipe.rollout.max_logprob_diff, "rollout.max_logprob_diff"
    if isinstance(limit, float) and limit <= 0:
        yield Problem(key, f"{limit:g} is not over 0", "null switches the check off")
    if recipe.rollout.max_staleness and isinstance(limit, float):
        yield Problem(
            key,
            "compares with the policy of the step, and with rollout.max_staleness an older one drew the responses",
            "remove it; rollout_corr/k3 shows how far the two are apart",
        )


def _hand_over_problems(recipe: Recipe) -> Iterator[Problem]:
    """Ways of weights to who generates: there must be somebody, and the way must lead there."""
    rollout, served = recipe.rollout, ENGINES[recipe.rollout.engine].served
    way, key = rollout.hand_over, "rollout.hand_over"
    if way == "auto":
        return
    if not served and rollout.max_staleness is None:
        why = "says how weights reach a server or a process beside training, and there is none"
        yield Problem(key, why, "remove it, or set rollout.engine to a serving engine, or rollout.max_staleness")
    elif served and way == "memory" and rollout.engine != "vllm":
        yield Problem(key, f"{rollout.engine} does not open the run's memory", "use files (in /dev/shm), or collective")
    elif not served and way == "files":
        yield Problem(key, "the process beside training takes no files", "use memory, or collective")
    elif served and way in ("collective", "memory") and recipe.model.lora is not None:
        yield Problem(key, "an adapter reaches a server as a folder of files", "use files")


def _server_problems(recipe: Recipe) -> Iterator[Problem]:
    """Keys of a serving engine without one, and what cannot be had of one."""
    rollout = recipe.rollout
    if not ENGINES[rollout.engine].served:
        for key in ("url", "server", "sleep"):
            if getattr(rollout, key) != type(rollout).model_fields[key].get_default(call_default_factory=True):
                yield Problem(
                    f"rollout.{key}",
                    f"engine {rollout.engine} is no server",
                    f"set rollout.engine to {' or '.join(name for name, row in ENGINES.items() if row.served)}",
                )
        return
    if rollout.url is not None:
        # What is left of the section says how to reach a server, not how to start one.
        for key in ("devices", "tensor_parallel", "args", "env", "python"):
            known = type(rollout.server).model_fields[key]
            if getattr(rollout.server, key) != known.get_default(call_default_factory=True):
                yield Problem(
                    f"rollout.server.{key}", "the server at rollout.url is not started by lockstep", "remove it"
                )
    if rollout.max_staleness is not None:
        yield Problem(
            "rollout.max_staleness",
            f"the process that generates beside training does not run engine {rollout.engine}",
            "remove one of them",
        )
    yield from _truncation_problems(recipe)


def _truncation_problems(recipe: Recipe) -> Iterator[Problem]:
    """Truncations of which the engine tells other log-probs than the trainer scores."""
    rollout, row = recipe.rollout, ENGINES[recipe.rollout.engine]
    if rollout.truncated not in ("refuse", *row.scored):
        yield Problem(
            "rollout.truncated",
            f"engine {rollout.engine} tells log-probs of the truncated distribution, which the trainer would not score",
            "use mask: the trainer truncates too",
        )
    for key in ("top_p", "top_k", "min_p"):
        unused = getattr(rollout, key) == type(rollout).model_fields[key].default
        ways = [way for way, keys in row.scored.items() if key in keys]
        if not unused and rollout.truncated in row.scored and rollout.truncated not in ways:
            yield Problem(
                f"rollout.{key}",
                f"with truncated: {rollout.truncated} engine {rollout.engine} does not tell the log-probs of it",
                f"use truncated: {' or '.join(ways)}" if ways else "remove it",
            )
