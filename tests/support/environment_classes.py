"""Environments for the tests: some that work, and one with a bug in the method that its arguments name. The host
processes load this file by its path."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.environments import Reply, Start, TokenTurn, Trajectory, Turn

FOREVER = 10_000


class Echo:
    """Answers each turn with its text, for `turns` turns, also if the turn calls one of `tools`. Asynchronous."""

    def __init__(
        self,
        turns: int = 2,
        stop: Sequence[str] = (),
        answer: str = "you said {}",
        tools: Sequence[dict[str, Any]] = (),
    ):
        self.turns, self.stop, self.answer, self.tools = turns, stop, answer, tools
        self.info: dict[str, Any] = {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        self.info = {"seed": seed, "row": row["ground_truth"], "seen": []}
        return Start(row["prompt"], self.tools, self.stop)

    async def step(self, reply: Reply) -> Turn:
        self.info["seen"].append([reply.text, reply.finish, list(reply.ids)])
        if len(self.info["seen"]) == self.turns:
            return Turn(reward=1.0, done=True, metrics={"said": len(reply.text)})
        return Turn([{"role": "user", "content": self.answer.format(reply.text)}], 0.25, metrics={"said": 1})


class Counting(Echo):
    """Reports metrics with the names of metrics of the run."""

    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        return replace(turn, metrics={"turns": 20, "seconds": 0.5, "rows": 3, "stop/completed": 7, "own/rows": 1})


class Slow(Echo):
    """Takes a second for its last step."""

    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        await asyncio.sleep(float(turn.done))
        return turn


class Wordy(Echo):
    """Writes longer prompts than the rows have, except for the first row, with which an environment is tried."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        await super().reset(row, seed)
        return Start([{"role": "user", "content": "word" if row["ground_truth"] == "0" else "many words " * 10}])


class Scored(Echo):
    """Has all optional methods. Synchronous."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:  # type: ignore[override]
        self.info = {"seed": seed, "seen": []}
        return Start(row["prompt"])

    def step(self, reply: Reply) -> Turn:  # type: ignore[override]
        self.info["seen"].append(reply.text)
        done = len(self.info["seen"]) == self.turns
        return Turn([] if done else [{"role": "user", "content": "go on"}], 0.5, done)

    def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"turns": len(trajectory.turns), "reward": trajectory.reward}

    @classmethod
    def score_group(cls, trajectories: Sequence[Trajectory]) -> list[float]:
        return [float(len(trajectories) + number / 10) for number in range(len(trajectories))]


class Farewell(Echo):
    """Says something also in its last answer. `score` is the number of messages that it sees."""

    async def step(self, reply: Reply) -> Turn:
        turn = await super().step(reply)
        return Turn([{"role": "user", "content": self.answer}], 1.0, turn.done)

    def score(self, trajectory: Trajectory) -> float:
        return float(len(trajectory.messages))


class Buggy:
    """Has a bug for some rows: `bugs` has a method and a bug by ground truth. Two turns without a bug."""

    def __init__(self, bugs: Mapping[str, Sequence[str]], log: str = ""):
        self._bugs, self._log = bugs, log
        self._row = ""
        self._turns = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        self._row = row["ground_truth"]
        return self._bug("reset", Start([{"role": "user", "content": "?"}]))

    def step(self, reply: Reply) -> Turn:
        self._turns += 1
        turn = Turn(done=True, reward=1.0) if self._turns == 2 else Turn([{"role": "user", "content": "more"}])
        return self._bug("step", turn)

    def score(self, trajectory: Trajectory) -> float:
        return self._bug("score", 1.0)

    def close(self) -> None:
        if self._log:
            with open(self._log, "a", encoding="utf-8") as log:
                log.write(f"closed {self._row}\n")
        self._bug("close", None)

    def _bug(self, method: str, value: Any) -> Any:
        where, how = self._bugs.get(self._row, ("", ""))
        return BUGS[how](value) if method == where else value


class AsyncBuggy:
    """As `Buggy`, but with coroutines: the bug of a row hangs in an await, cannot be cancelled, or blocks the loop of
    its host."""

    def __init__(self, bugs: Mapping[str, str]):
        self._bugs, self._row = bugs, ""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        self._row = row["ground_truth"]
        return Start([{"role": "user", "content": "?"}])

    async def step(self, reply: Reply) -> Turn:
        how = self._bugs.get(self._row, "")
        if how == "waits":
            await asyncio.sleep(FOREVER)
        if how == "blocks":
            time.sleep(FOREVER)
        if how == "stays":
            await _stay()
        if how == "exits":
            raise SystemExit("asynchronous")
        return Turn(done=True, reward=1.0)


async def _stay() -> None:
    """Cannot be cancelled."""
    while True:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            continue


def _raises(value: Any) -> Any:
    raise ValueError("the bug")


def _exits(value: Any) -> Any:
    raise SystemExit(3)


def _hangs(value: Any) -> Any:
    time.sleep(FOREVER)


def _kills(value: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _nan(value: Any) -> Any:
    return Turn(reward=float("nan"), done=True) if isinstance(value, Turn) else float("nan")


def _huge(value: Any) -> Any:
    messages = [{"role": "user", "content": "x" * 2**25}]
    return Turn(messages) if isinstance(value, Turn) else Start(messages)


def _endless(value: Any) -> Any:
    return Turn([{"role": "user", "content": "again"}])


BUGS = {
    "raises": _raises,
    "exits": _exits,
    "hangs": _hangs,
    "kills": _kills,
    "wrong type": lambda value: 7 if isinstance(value, Start | Turn) else "seven",
    "nan": _nan,
    "huge": _huge,
    "endless": _endless,
    "nothing": lambda value: Turn(),
    "not text": lambda value: Turn([{"role": "user", "content": 3}]),
    "assistant": lambda value: Turn([{"role": "assistant", "content": "I"}]),
}


class Tokens:
    """Works with token ids: answers with the reversed ids of the turn."""

    def __init__(self) -> None:
        self.turns = 0

    def reset_tokens(self, row: Mapping[str, Any], seed: int) -> TokenTurn:
        return TokenTurn([65, 66, 67], stop_ids=[10])

    def step_tokens(self, ids: Sequence[int]) -> TokenTurn:
        self.turns += 1
        return TokenTurn(list(reversed(ids)), reward=0.5, done=self.turns == 2)

    def score(self, trajectory: Trajectory) -> float:
        return float(len(trajectory.messages))


def weather(place: str) -> str:
    """Returns the weather of a place.

    Args:
        place: The name of the place.
    """
    return f"In {place}: 7 °C ☔"


async def height(place: str) -> str:
    """Returns the height of a place.

    Args:
        place: The name of the place.
    """
    return f"{place}: {len(place)} m über 海"


class TextTools:
    """The same tools for models whose chat template has no tools: the calls are in the text, and their results are
    messages of the user."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        return Start(row["prompt"])

    async def step(self, reply: Reply) -> Turn:
        if "<tool_call>" not in reply.text:
            return Turn(done=True)
        results = []
        for text in re.findall(r"<tool_call>(.*?)(?:</tool_call>|$)", reply.text, re.DOTALL):
            try:
                call = json.loads(text)
            except ValueError:
                results.append("not JSON")
                continue
            given = call["arguments"]
            results.append(weather(**given) if call["name"] == "weather" else await height(**given))
        return Turn([{"role": "user", "content": "\n".join(results)}])
