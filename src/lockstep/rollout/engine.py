"""What an engine must do: continue prompts, and say how likely each token was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from lockstep.types import Completion, Request, Sampling


class Engine(Protocol):
    """A file with `open_engine(policy, device, settings, tokenizer)`, and an entry of `recipe/registry.py` that
    names it and states its properties before it is opened."""

    instead: str
    """What to do about a model that this engine does not generate from as the trainer scores it."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Every completion of every request, each as soon as it is finished.

        Its log-probs are those of the distribution that was sampled from: temperature applied, left-out tokens left
        out.
        """
        ...

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the policy's weights as they are now. Called before prompts are generated from."""
        ...

    def free(self) -> None:
        """Give back the memory that only generation needs."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


@runtime_checkable
class OtherProgram(Protocol):
    """An engine that is another program, and says which."""

    def told(self) -> dict[str, Any]:
        """Plain values for the run's record: `version` of the program, and what else tells it apart."""
        ...


class Further(Protocol):
    """Requests that an engine may go on with once it has room for them."""

    longest_prompt: int
    """In tokens."""

    def take(self, room: int) -> Sequence[Request]:
        """Some for at most `room` more responses; none where there is none left."""
        ...


class SharedWeights:
    """For engines that run the trained modules themselves: there is no second copy to bring up to date."""

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing to do: what was trained is what generates."""

    def free(self) -> None:
        """Nothing is held between two calls."""

    def close(self) -> None:
        self.free()
