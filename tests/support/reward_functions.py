"""A user's reward function in real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.recipe.keys_reward import Reward
from lockstep.types import Origin, Question

# Seconds after which something hangs: nothing here takes so long on any machine.
GUARD = 120


def question(truth: str = "18") -> Question:
    return Question("sums", [{"role": "user", "content": "9+9?"}], truth, Origin("rows", 1), {"index": 7})


def settings(**values) -> Reward:
    return Reward(**{"workers": 1, "time_limit": 20.0, "memory_limit_gb": 1.0, **values})


def running(command: str) -> list[str]:
    """Processes whose command line holds these words; one that has ended has no command line."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            lines.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if command in line]


def until(happened: Callable[[], bool]) -> None:
    """Wait for an event of another process."""
    for _ in range(GUARD * 100):
        if happened():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")
