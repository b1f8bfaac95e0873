"""What the adapters of games share: first messages, the seed of a row, names of a package, random numbers."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from lockstep.environments.environment import Reply
from lockstep.errors import Refusal
from lockstep.types import ENVIRONMENT, Message

_swap = threading.Lock()


def first_messages(row: Mapping[str, Any], observation: str) -> list[Message]:
    """Returns the prompt of the row with the first observation after its last message."""
    *before, last = row["prompt"]
    return [*before, {**last, "content": f"{last['content']}\n\n{observation}".strip()}]


def user(observation: str) -> list[Message]:
    return [{"role": "user", "content": observation}]


def action_of(reply: Reply) -> str:
    """Returns the text that the game reads: the turn without its reasoning."""
    return (reply.content or reply.text).strip()


def row_seed(row: Mapping[str, Any], seed: int) -> int:
    """Returns the seed of the game: the column `seed` of the row, so that all samples of a row play the same game, or
    else the seed of the trajectory."""
    given = row.get("seed", (row.get("extra_info") or {}).get("seed"))
    if given is None:
        return seed
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 2**32:
        why = f"the row has {given!r} as seed"
        raise Refusal.at(ENVIRONMENT, why, "give an integer from 0 to 4294967295", code="out-of-range")
    return given


def refuse_unknown(name: str, names: Iterable[str], package: str) -> None:
    """Raises a `Refusal` with the closest names, unless the package has an environment of this name."""
    known = sorted(names)
    if name in known:
        return
    close = get_close_matches(name, known, n=3, cutoff=0.5) or [one for one in known if name.lower() in one.lower()][:3]
    remedy = f"use {' or '.join(close)}" if close else f"use one of its {len(known)} names, such as {known[0]}"
    raise Refusal.at(ENVIRONMENT, f"{package} has no environment {name!r}", remedy, code="unknown-name")


class OwnRandom:
    """The state of the global random generators (of Python and NumPy) for one game. Packages that draw from the global
    generators would otherwise mix the random numbers of the games that run in one process."""

    def __init__(self, seed: int):
        self._states: tuple[Any, Any] = (random.Random(seed).getstate(), None)
        self._seed = seed

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Gives the block the generators of this game. Only one game of a process is in its block at a time."""
        with _swap:
            before = random.getstate(), _numpy_state()
            self._enter()
            try:
                yield
            finally:
                self._states = random.getstate(), _numpy_state()
                random.setstate(before[0])
                if before[1] is not None:
                    sys.modules["numpy"].random.set_state(before[1])

    def _enter(self) -> None:
        random.setstate(self._states[0])
        if "numpy" in sys.modules:
            generator = sys.modules["numpy"].random
            generator.seed(self._seed) if self._states[1] is None else generator.set_state(self._states[1])


def _numpy_state() -> Any:
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
