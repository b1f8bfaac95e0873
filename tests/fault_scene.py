"""Injects a fault into a live replay, right after a step's weights were restored."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_loop import Mode, Replay
from lockstep.parity.replay.replay_result import Replayed
from lockstep.run.console import Console
from lockstep.train.training import Training


@dataclass(frozen=True)
class Scene:
    """`patch` undoes what is changed outside the run."""

    training: Training
    replay: Replay
    patch: pytest.MonkeyPatch

    def module(self, name: str) -> Any:
        """By its name in the Hugging Face model."""
        return self.policy.causal_lm.get_submodule(name)

    @property
    def policy(self) -> Any:
        return self.training.models.trained.module

    @property
    def optimizer(self) -> Any:
        return self.training.models.trained.optimizer


Inject = Callable[[Scene], None]


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Give one object's method another one around it: `around(original, *args, **kwargs)`."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    if isinstance(owner, nn.Module):
        owner.__dict__[name] = wrapped
    else:
        setattr(owner, name, wrapped)


def replay_with(
    run: Path, inject: Inject, words: Sequence[str] = (), mode: Mode = "forced", steps: Sequence[int] = (2,)
) -> Replayed | None:
    """The second step by default: moments are not 0, and the policy is no longer its reference."""
    with pytest.MonkeyPatch.context() as patch:

        class Faulty(Replay):
            def restore(self, training: Training, step: int) -> None:
                super().restore(training, step)
                inject(Scene(training, self, patch))

        patch.setattr("lockstep.parity.replay.replay_command.Replay", Faulty)
        return replay(run, mode, list(words), Console.silent(), steps)


def patched(scene: Scene, module: str, name: str, around: Callable[..., Any]) -> None:
    """A function as one module of the loop knows it."""
    original = getattr(importlib.import_module(module), name)
    scene.patch.setattr(f"{module}.{name}", lambda *args, **kwargs: around(original, *args, **kwargs))


def around_method(scene: Scene, kind: type, name: str, around: Callable[..., Any]) -> None:
    original = getattr(kind, name)
    scene.patch.setattr(kind, name, lambda *args, **kwargs: around(original, *args, **kwargs))
