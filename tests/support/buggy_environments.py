"""Environments with a bug in any method, synchronous and asynchronous, and tools with bugs.

The host processes load this file by its path. `bugs` has a method and a bug by the ground truth of the row. The second
object, counted by the lines of the file `objects`, has the bug of `__init__`.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.environments import Reply, Start, TokenTurn, Trajectory, Turn

FOREVER = 10_000
HUGE = 2**24 + 99  # over the largest answer of a host


HALF = "\udcff"  # a lone surrogate, which Python reads from the name of a file that is not UTF-8


class BugError(Exception):
    pass


def raises(value: Any) -> Any:
    raise BugError("the bug")


def raises_much(value: Any) -> Any:
    raise BugError("x" * HUGE)


def raises_half(value: Any) -> Any:
    raise BugError(f"the file {HALF} is missing")


class WordlessError(Exception):
    def __str__(self) -> str:
        raise BugError("no words")


def raises_wordless(value: Any) -> Any:
    raise WordlessError


def exits(value: Any) -> Any:
    raise SystemExit(3)


def hangs(value: Any) -> Any:
    time.sleep(FOREVER)


def spins(value: Any) -> Any:
    while True:
        pass


def wrong(value: Any) -> Any:
    return object()


def nan(value: Any) -> Any:
    if isinstance(value, Turn):
        return Turn(reward=float("nan"), done=True)
    return (
        {"a": float("nan")} if isinstance(value, dict) else [float("nan")] if isinstance(value, list) else float("nan")
    )


def huge(value: Any) -> Any:
    """Returns much, and prints much."""
    print("y" * 2**22)
    print("y" * 2**22, file=sys.stderr)
    messages = [{"role": "user", "content": "x" * HUGE}]
    if isinstance(value, Turn):
        return Turn(messages)
    if isinstance(value, Start):
        return Start(messages)
    if isinstance(value, dict):
        return {"a": "x" * HUGE}
    return {"x" * HUGE: 1.0} if isinstance(value, float) else [0.0] * 2**20


def half(value: Any) -> Any:
    """Returns half of a character."""
    messages = [{"role": "user", "content": HALF}]
    if isinstance(value, Turn):
        return Turn(messages)
    if isinstance(value, Start):
        return Start(messages)
    return {"a": HALF} if isinstance(value, dict) else {HALF: 1.0} if isinstance(value, float) else HALF


class Endless(Sequence):  # type: ignore[type-arg]
    """A list without an end."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return {"role": "user", "content": "again"}


def endless(value: Any) -> Any:
    if isinstance(value, Turn):
        return Turn(Endless())
    if isinstance(value, Start):
        return Start(Endless())
    return itertools.count()


BUGS = {
    "raises": raises,
    "raises much": raises_much,
    "raises half": raises_half,
    "raises wordless": raises_wordless,
    "exits": exits,
    "hangs": hangs,
    "spins": spins,
    "wrong": wrong,
    "nan": nan,
    "huge": huge,
    "endless": endless,
    "half": half,
}
METHODS = ("__init__", "reset", "step", "info", "score", "close", "score_group")


class EveryBug:
    """Two turns without a bug."""

    def __init__(self, bugs: Mapping[str, Sequence[str]], objects: str = ""):
        self._bugs, self._row, self._turns = bugs, "", 0
        if not objects:
            return
        with open(objects, "a", encoding="utf-8") as file:
            file.write("object\n")
        if Path(objects).read_text(encoding="utf-8").count("\n") == 2:
            BUGS[bugs["__init__"][1]](None)

    @property
    def info(self) -> Any:
        return self._bug("info", {"row": self._row, "bug": self._bugs.get(self._row, ("", ""))})

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._row = row["ground_truth"]
        return self._bug("reset", Start([{"role": "user", "content": "?"}]))

    def step(self, reply: Reply) -> Any:
        self._turns += 1
        turn = Turn(done=True, reward=1.0) if self._turns == 2 else Turn([{"role": "user", "content": "more"}])
        return self._bug("step", turn)

    def score(self, trajectory: Trajectory) -> Any:
        return self._bug("score", 1.0)

    def close(self) -> Any:
        return self._bug("close", None)

    @classmethod
    def score_group(cls, trajectories: Sequence[Trajectory]) -> Any:
        where, how = trajectories[0].info["bug"]
        scores = [0.5] * len(trajectories)
        return BUGS[how](scores) if where == "score_group" else scores

    def _bug(self, method: str, value: Any) -> Any:
        where, how = self._bugs.get(self._row, ("", ""))
        return BUGS[how](value) if method == where else value


class EveryAsyncBug(EveryBug):
    """The bugs are in coroutines. One that hangs does so in an await."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self._row = row["ground_truth"]
        return await self._later("reset", Start([{"role": "user", "content": "?"}]))

    async def step(self, reply: Reply) -> Any:
        self._turns += 1
        turn = Turn(done=True, reward=1.0) if self._turns == 2 else Turn([{"role": "user", "content": "more"}])
        return await self._later("step", turn)

    async def score(self, trajectory: Trajectory) -> Any:
        return await self._later("score", 1.0)

    async def close(self) -> Any:
        return await self._later("close", None)

    @classmethod
    async def score_group(cls, trajectories: Sequence[Trajectory]) -> Any:
        where, how = trajectories[0].info["bug"]
        if where == "score_group" and how == "hangs":
            await asyncio.sleep(FOREVER)
        return super().score_group(trajectories)

    async def _later(self, method: str, value: Any) -> Any:
        await asyncio.sleep(0)
        if tuple(self._bugs.get(self._row, ())) == (method, "hangs"):
            await asyncio.sleep(FOREVER)
        return self._bug(method, value)


class EndlessTokens:
    """Returns token ids without an end, in the turn of row 1."""

    def reset_tokens(self, row: Mapping[str, Any], seed: int) -> TokenTurn:
        self._row = row["ground_truth"]
        return TokenTurn([65, 66, 67])

    def step_tokens(self, ids: Sequence[int]) -> TokenTurn:
        return TokenTurn(itertools.repeat(65) if self._row == "1" else (), done=True)  # type: ignore[arg-type]


def tool(how: str) -> str:
    """Has a bug.

    Args:
        how: The name of the bug.
    """
    return str(BUGS[how]("")) if how in BUGS else "fine"


async def async_tool(how: str) -> str:
    """Has a bug.

    Args:
        how: The name of the bug.
    """
    await asyncio.sleep(FOREVER if how == "hangs" else 0)
    return str(BUGS[how]("")) if how in BUGS else "fine"
