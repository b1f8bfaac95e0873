"""Gymnasium: `rollout.environment: gymnasium:FrozenLake-v1`. The model writes an action in each turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from lockstep.environments.adapters.game import action_of, first_messages, refuse_unknown, row_seed, user
from lockstep.environments.environment import Reply, Start, Turn
from lockstep.environments.return_values import json_or_empty
from lockstep.errors import Refusal
from lockstep.types import ENVIRONMENT

_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)


def import_package() -> None:
    import gymnasium  # noqa: F401


class GymnasiumEnvironment:
    """The reward of a turn is the reward of the step. An invalid action costs a turn and leaves the game unchanged."""

    def __init__(self, environment: str, actions: Sequence[str] = (), render: bool = False, **arguments: Any):
        """`actions` names the actions of a discrete space. With `render`, the model sees the text that the environment
        draws, with marked characters in brackets. Other arguments go to `gymnasium.make`."""
        import gymnasium

        _refuse_unregistered(environment)
        self._actions, self._render = [str(one).lower() for one in actions], render
        self._game = gymnasium.make(environment, **arguments, **({"render_mode": "ansi"} if render else {}))
        kind = type(self._game.action_space).__name__
        if kind not in _READERS:
            why = f"{environment} has actions of the kind {kind}"
            raise Refusal.at(ENVIRONMENT, why, f"use one with {', '.join(_READERS)}", code="unsupported-combination")
        self.info: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        observation, info = self._game.reset(seed=row_seed(row, seed), options=row.get("options"))
        self.info = json_or_empty(info)
        text = self._text(observation)
        return Start(first_messages(row, text), anchor=text)

    def step(self, reply: Reply) -> Turn:
        space = self._game.action_space
        try:
            action = _READERS[type(space).__name__](action_of(reply), space, self._actions)
        except (ValueError, IndexError, TypeError):
            action = None
        if action is None or not space.contains(action):
            return Turn(user(f"invalid action; write {self._allowed()}"), metrics={"invalid_actions": 1.0})
        observation, reward, terminated, truncated, info = self._game.step(action)
        self.info = json_or_empty(info)
        done, text = bool(terminated or truncated), self._text(observation)
        metrics = {"invalid_actions": 0.0, "truncated": float(truncated and not terminated)}
        return Turn([] if done else user(text), float(reward), done, metrics=metrics, anchor=None if done else text)

    def close(self) -> None:
        self._game.close()

    def _allowed(self) -> str:
        space = self._game.action_space
        if self._actions:
            return f"one of: {', '.join(self._actions)}"
        kind = type(space).__name__
        return f"a number from {space.start} to {space.start + space.n - 1}" if kind == "Discrete" else f"{space}"

    def _text(self, observation: Any) -> str:
        if self._render:
            return _COLOURED.sub(r"[\1]", str(self._game.render())).strip("\n")
        return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)


def _refuse_unregistered(environment: str) -> None:
    """Refuses a name that is not registered. A name such as my_package:Maze-v0 imports the module that registers it."""
    import gymnasium

    module, _, name = environment.rpartition(":")
    try:
        if module:
            import_module(module)
        gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv:
        refuse_unknown(name, gymnasium.registry, "gymnasium")
    except (ImportError, gymnasium.error.Error) as error:
        raise Refusal.at(ENVIRONMENT, f"{environment}: {error}", "fix the name", code="unknown-name") from error


def _plain(value: Any) -> Any:
    """Converts values of NumPy for JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _read_discrete(text: str, space: Any, names: Sequence[str]) -> Any:
    """Returns the last action that the text names."""
    if not names:
        return int(re.findall(r"-?\d+", text)[-1][:9])
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return space.start + names.index(re.findall(rf"(?<!\w)({words})(?!\w)", text.lower())[-1])


def _read_numbers(text: str, space: Any, names: Sequence[str]) -> Any:
    import numpy

    return numpy.array(json.loads(re.findall(r"\[[^\[\]]*\]", text)[-1]), space.dtype).reshape(space.shape)


def _read_text(text: str, space: Any, names: Sequence[str]) -> Any:
    return text


# How the action is read from the model's text, by the class of the action space.
_READERS = {"Discrete": _read_discrete, "MultiDiscrete": _read_numbers, "Box": _read_numbers, "Text": _read_text}
