"""What an engine must do: continue prompts, and say how likely each token was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from lockstep.types import Completion, Request, Sampling


class Engine(Protocol):
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Every completion of every request, each as soon as it is finished."""
        ...
