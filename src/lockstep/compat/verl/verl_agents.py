"""Conversion rules of verl's `main_ppo` for tools, agent loops and rollouts of several turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.compat.key_table import Conversion

R = "actor_rollout_ref.rollout"
T, G = f"{R}.multi_turn", f"{R}.agent"
TOOLS = (f"{T}.tool_config_path", f"{T}.function_tool_path")
LOOPS = f"{G}.agent_loop_config_path"
SINGLE, TOOL = "single_turn_agent", "tool_agent"
# Keys that verl reads only for rollouts with tools or a custom agent loop.
_LIMITS = ("max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length",
           "tool_response_truncate_side", "format", "use_inference_chat_template")  # fmt: skip


def agents_rule(done: Conversion) -> None:
    paths = [key for key in TOOLS if done[key]]
    loop, enable = done[f"{G}.default_agent_loop"], f"{T}.enable"
    if done[LOOPS]:
        _loops(done, paths)
    elif loop not in (SINGLE, TOOL):
        why = f"{loop} is not an agent loop of verl"
        done.refuse(f"{G}.default_agent_loop", why, f"use {TOOL} or {SINGLE}, or set {LOOPS}")
    elif paths:
        note = "rows with agent_name single_turn_agent get no tools; all other rows get them"
        tools = [f"verl:{Path(str(done[key]))}" for key in paths]
        done.write("rollout.tools", tools, *paths, *_given(done, enable, f"{G}.default_agent_loop"), note=note)
    else:
        done.ignore("the command has no tools, so a rollout has one turn", enable, f"{G}.default_agent_loop")
        done.ignore("verl reads this key only with tools", *(f"{T}.{name}" for name in _LIMITS))
        return
    _limits(done)
    _text(done)
    estimator = "algorithm.adv_estimator"
    if done[estimator] == "optimal_token_baseline":
        why = "verl's optimal_token_baseline also counts the tokens of tools as positions"
        done.refuse(estimator, why, f"{estimator}=tir_optimal_token_baseline")


def _loops(done: Conversion, paths: list[str]) -> None:
    """Converts agent loops of the user, which run as a token-level environment."""
    key = f"{G}.default_agent_loop"
    note = "the reward_score that a loop returns is added to the other rewards; verl uses it instead of them"
    done.write("rollout.environment", f"verl:{Path(str(done[LOOPS]))}", LOOPS, *_given(done, f"{T}.enable"), note=note)
    if done["custom_reward_function.path"] is None and not done["reward_model.enable"]:
        done.write("reward.weights", {"rule": 1.0}, LOOPS)
    arguments: dict[str, Any] = {"tools": [str(done[path]) for path in paths]} if paths else {}
    arguments["default"] = str(done[key])
    done.write("rollout.environment_args", arguments, *paths, *_given(done, key))


def _given(done: Conversion, *keys: str) -> list[str]:
    return [key for key in keys if done.is_set(key)]


def _limits(done: Conversion) -> None:
    """Converts the limits of turns. N turns of the user allow N + 1 turns of the model."""
    own, user = f"{T}.max_assistant_turns", f"{T}.max_user_turns"
    limits = {own: done.integer(own) if done[own] else 0, user: done.integer(user) + 1 if done[user] else 0}
    given = {key: limit for key, limit in limits.items() if limit}
    if given:
        least = min(given, key=lambda key: given[key])
        done.write("rollout.max_turns", given[least], *given)
        return
    most = done.integer("data.max_response_length")
    done.write("rollout.max_turns", most, note="verl has no limit besides max_response_length")


def _text(done: Conversion) -> None:
    """Converts what the model reads and writes in a turn."""
    if "rollout.tools" in done.recipe:
        parallel, chars, side = (f"{T}.{name}" for name in _LIMITS[2:5])
        note = "calls above the limit get an error message; verl drops them silently"
        done.write("rollout.max_parallel_calls", done.integer(parallel), parallel, note=note)
        note = "lockstep's note names how many characters are left out"
        done.write("rollout.result_chars", max(16, done.integer(chars)), chars, note=note)
        if (ours := done.lookup(side)) is not None:
            done.write("rollout.result_truncation", ours, side)
        if (parser := done.lookup(f"{T}.format")) is not None:
            done.write("rollout.parser", parser, f"{T}.format")
    else:
        done.ignore("agent loops read these keys themselves", *(f"{T}.{name}" for name in _LIMITS[2:6]))
    template = f"{T}.use_inference_chat_template"
    if done[template]:
        note = "a trajectory whose template changes earlier turns has several rows"
        done.write("rollout.history", "as_template", template, note=note)
