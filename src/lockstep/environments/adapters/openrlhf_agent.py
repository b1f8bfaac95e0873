"""Agents of OpenRLHF as environments: `rollout.environment: openrlhf:agent_func.py`.

The file has a class `AgentExecutor`, a `MultiTurnAgentExecutor` with a class of `AgentInstanceBase`. The feedback of an
agent is raw text, which the tokenizer encodes without a chat template. Without OpenRLHF, `openrlhf.utils.agent` is a
stand-in with the classes of this module.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from lockstep.environments.adapters.stand_in import install_stand_ins
from lockstep.environments.environment import Reply, TextTurn
from lockstep.environments.return_values import shown
from lockstep.errors import Refusal
from lockstep.functions import Unloadable, run_file
from lockstep.trajectory import Trajectory

MODULE = "openrlhf.utils.agent"
_EXECUTOR = "AgentExecutor"
_EXAMPLE = "write: class AgentExecutor(MultiTurnAgentExecutor): def __init__(self): super().__init__(AgentInstance)"
# The attributes of sampling_params that an agent may change.
_STOPS = ("stop", "stop_token_ids")


class AgentInstanceBase(ABC):
    """One conversation (stand-in for OpenRLHF's class)."""

    @abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    @abstractmethod
    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]: ...


class AgentExecutorBase(ABC):
    """Runs an agent (stand-in for OpenRLHF's class)."""

    @abstractmethod
    async def execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]: ...


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Runs instances of an agent class for several turns (stand-in for OpenRLHF's class)."""

    def __init__(self, agent_instance_cls: type[AgentInstanceBase]):
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("lockstep generates the turns itself")


class SamplingParams:
    """What an agent gets as `sampling_params`. It may change the strings and token ids that end the next turn. The run
    decides everything else; OpenRLHF, too, sets `max_tokens` anew for every turn."""

    def __init__(self) -> None:
        self.stop: list[str] | str | None = None
        self.stop_token_ids: list[int] | None = None
        self.max_tokens: int | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"sampling_params.{name} is not known to agents; lockstep has the key rollout.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (*_STOPS, "max_tokens"):
            raise AttributeError(f"sampling_params.{name} cannot be changed by an agent; set rollout.{name}")
        object.__setattr__(self, name, value)


class OpenrlhfAgent:
    """One conversation of the model with an agent. The reward is the sum of `rewards`. The last `extra_logs` and
    `scores` are metrics. With `scores=True` the last `scores` are also the result of `score`, a reward component."""

    def __init__(self, environment: str, scores: bool = False):
        self._agent = agent_class(environment)()
        self._params = SamplingParams()
        self._observation, self._label = "", ""
        self._reported: dict[str, float] = {}
        self._scores = 0.0
        self._total = 0.0
        self.info: dict[str, Any] = {}
        if scores:
            self.score = self._last_scores

    async def reset_text(self, row: Mapping[str, Any], seed: int) -> TextTurn:
        self._label = row["ground_truth"]
        states = {"observation": row["prompt_text"], "label": self._label}
        found = await _awaited(self._agent.reset(states))
        self._observation = _entry(found, "observation", "reset")
        return TextTurn(self._observation)

    async def step_text(self, reply: Reply) -> TextTurn:
        states = {
            "observation_text": self._observation,
            "action_text": reply.text,
            "label": self._label,
            "sampling_params": self._params,
        }
        found = await _awaited(self._agent.step(states))
        feedback, done = _entry(found, "environment_feedback", "step"), bool(_entry(found, "done", "step"))
        if found.get("environment_images"):
            raise ValueError("step returned environment_images, and lockstep reads no images of an OpenRLHF agent")
        reward = _number(_entry(found, "rewards", "step"), "rewards")
        self._total += reward
        self._scores = _number(found.get("scores", self._total), "scores")
        logs = {
            str(name): _number(value, f"extra_logs {name!r}") for name, value in (found.get("extra_logs") or {}).items()
        }
        self.info = {"scores": self._scores, "extra_logs": logs}
        self._observation += reply.text + feedback
        self._take_params(found.get("sampling_params"))
        stop = [self._params.stop] if isinstance(self._params.stop, str) else self._params.stop
        metrics = self._changes({**logs, "scores": self._scores})
        return TextTurn(feedback, reward, done, stop, self._params.stop_token_ids, metrics)

    def _last_scores(self, trajectory: Trajectory) -> float:
        return self._scores

    def _changes(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns how the metrics differ from those of the last turn. A run adds the metrics of all turns, so their sum
        is the last value, as in OpenRLHF."""
        names = {**self._reported, **metrics}
        changes = {name: metrics.get(name, 0.0) - self._reported.get(name, 0.0) for name in names}
        self._reported = metrics
        return changes

    def _take_params(self, given: Any) -> None:
        if given is None or given is self._params:
            return
        if not isinstance(given, SamplingParams):
            raise ValueError(
                f"step returned sampling_params of its own ({type(given).__name__}); change stop or stop_token_ids of "
                "the sampling_params that it gets"
            )
        self._params = given


@lru_cache(maxsize=8)
def agent_class(source: str) -> type[Any]:
    """Loads the agent class of a file. Raises `Refusal`."""
    path = Path(source).expanduser().absolute()
    if not path.is_file():
        raise Refusal.at(source, "the file does not exist", "give the path of the agent's file", code="no-such-file")
    install_stand_ins("openrlhf", _stand_ins())
    try:
        module = run_file(path)
    except Unloadable as error:
        raise Refusal.at(source, error.why, _remedy(error), code=error.code) from None
    executor = getattr(module, _EXECUTOR, None)
    if not inspect.isclass(executor):
        raise Refusal.at(source, f"has no class {_EXECUTOR}", _EXAMPLE, code="invalid-function")
    if not any(base.__name__ == "MultiTurnAgentExecutor" for base in executor.__mro__):
        why = f"{_EXECUTOR} is not a MultiTurnAgentExecutor, so its execute generates by itself"
        raise Refusal.at(source, why, f"{_EXAMPLE}, or use rollout.agent", code="unsupported-setting")
    if "execute" in vars(executor):
        why = f"{_EXECUTOR} overrides execute, and lockstep generates the turns itself"
        raise Refusal.at(source, why, "move its work into reset and step of the agent", code="unsupported-setting")
    try:
        found = getattr(executor(), "agent_instance_cls", None)
    except Exception as error:  # noqa: BLE001 - whatever the user's class raises is the reason
        why = f"{_EXECUTOR}() raised {type(error).__name__}: {error}"
        raise Refusal.at(source, why, _EXAMPLE, code="function-raised") from None
    if not inspect.isclass(found) or not callable(getattr(found, "step", None)):
        raise Refusal.at(source, f"{shown(found)} has no method step", _EXAMPLE, code="invalid-function")
    return found


def _stand_ins() -> dict[str, dict[str, Any]]:
    classes = (AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor)
    return {MODULE: {one.__name__: one for one in classes}}


def _remedy(error: Unloadable) -> str:
    missing = "No module named 'openrlhf" in error.why
    return "install OpenRLHF (pip install openrlhf), or remove the import" if missing else error.remedy


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _entry(found: Any, name: str, method: str) -> Any:
    if not isinstance(found, Mapping) or name not in found:
        raise ValueError(f"{method} returned {shown(found)}, expected a dict with {name!r}")
    return found[name]


def _number(value: Any, name: str) -> float:
    """Returns a number, or the only element of a tensor or array."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"step returned {shown(value)} as {name}, expected one number") from None
