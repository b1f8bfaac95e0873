"""What `lockstep train` begins with, as words of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.recipe.loader import value_text


def with_beginning(overrides: Sequence[str], resume_from: Path | None, init_from: str | None) -> list[str]:
    """`--init-from` is another model to start from: all else, the optimizer and the schedule too, begins anew."""
    if init_from is None:
        return list(overrides)
    if resume_from is not None:
        raise Refusal.at("--init-from", "set together with --resume-from, which has weights too", "remove one of them")
    if any(word.startswith("model.path=") for word in overrides):
        raise Refusal.at("--init-from", "set together with model.path, which it stands for", "remove one of them")
    return [*overrides, f"model.path={value_text(init_from)}"]
