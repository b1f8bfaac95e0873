"""TextArena: `rollout.environment: textarena:GuessTheNumber-v0`. The model is player 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.environments.adapters.game import (
    OwnRandom,
    action_of,
    first_messages,
    refuse_unknown,
    row_seed,
    user,
)
from lockstep.environments.environment import Reply, Start, Turn
from lockstep.environments.return_values import json_or_empty
from lockstep.errors import Refusal
from lockstep.functions import load_user_function
from lockstep.types import ENVIRONMENT


def import_package() -> None:
    import textarena  # noqa: F401


class TextArenaEnvironment:
    """The model sees the messages of the game and of the other player that are new in each turn, because the
    conversation is the history. TextArena gives the reward at the end of a game."""

    def __init__(self, environment: str, opponent: str | None = None, **arguments: Any):
        """`opponent` is a function (`file.py:name`) that plays the second player: it gets the new messages as text and
        returns its action. Other arguments go to `textarena.make`."""
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        refuse_unknown(environment, ENV_REGISTRY, "textarena")
        self._name, self._random = environment, OwnRandom(0)
        self._opponent: Callable[[str], str] | None = None
        if opponent is not None:
            self._opponent = load_user_function(opponent, "rollout.environment_args.opponent", ("messages",))
        with self._random():
            self._game = textarena.make(environment, **arguments)
        inner = self._game
        while isinstance(inner, textarena.Wrapper):
            inner = inner.env
        self._messages = inner.get_observation
        self._own_action = textarena.ObservationType.PLAYER_ACTION
        self.info: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        players, seed = (1 if self._opponent is None else 2), row_seed(row, seed)
        self._random = OwnRandom(seed)
        with self._random():
            try:
                self._game.reset(num_players=players, seed=seed)
            except AssertionError as error:
                why = f"{self._name} does not have {players} player{'s' * (players > 1)}: {error}"
                remedy = "use a game for one player, or give the second one: environment_args: {opponent: file.py:name}"
                raise Refusal.at(ENVIRONMENT, why, remedy, code="unsupported-combination") from error
            done = self._play_opponent()
            text = self._new_text()
        if done:
            raise RuntimeError("the opponent ended the game before the model's first turn")
        return Start(first_messages(row, text))

    def step(self, reply: Reply) -> Turn:
        with self._random():
            done = bool(self._game.step(action_of(reply))[0]) or self._play_opponent()
            if not done:
                return Turn(user(self._new_text()))
            rewards, info = self._game.close()
        self.info = json_or_empty((info or {}).get(0))
        invalid = float(bool(self.info.get("invalid_move")))
        return Turn(reward=float((rewards or {}).get(0, 0.0)), done=True, metrics={"invalid_move": invalid})

    def _play_opponent(self) -> bool:
        """Plays until it is the model's turn. Returns whether the game has ended."""
        while self._opponent is not None and self._game.state.current_player_id != 0:
            if bool(self._game.step(self._opponent(self._new_text()))[0]):
                return True
        return False

    def _new_text(self) -> str:
        """Returns the new messages for the current player, without its own actions."""
        player, messages = self._messages()
        names = self._game.state.role_mapping
        return "\n".join(
            text.strip() if sender < 0 else f"[{names.get(sender, f'Player {sender}')}] {text.strip()}"
            for sender, text, kind in messages
            if sender != player or kind != self._own_action
        )
