"""What of a model's attention a layout of context parallelism cannot do, said before anything is trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.errors import Problem, Refusal
from lockstep.kernels.masks import HEADS, SOFTCAP, WINDOW
from lockstep.parallel.context import ContextGroup


def refuse_undivided(root: nn.Module, group: ContextGroup | None, path: str) -> None:
    """Look at the attention modules of a loaded model, which were told their windows and heads (`kernels/masks.py`)."""
    if group is None:
        return
    problem = _problem([module for module in root.modules() if hasattr(module, WINDOW)], group, path)
    if problem is not None:
        raise Refusal([problem])


def _problem(attentions: list[Any], group: ContextGroup, path: str) -> Problem | None:
    key, layout = "parallel.context_layout", group.layout
    if layout == "ulysses":
        for module in attentions:
            heads = getattr(module, HEADS)
            if heads % group.size:
                return Problem(
                    "parallel.context",
                    f"{path} has {heads} heads in a layer, which {group.size} processes cannot divide with {layout}",
                    f"choose a divisor of {heads}, or parallel.context_layout=zigzag or gather",
                )
        return None
    for module in attentions:
        if layout == "zigzag" and (window := getattr(module, WINDOW)) is not None:
            why = f"a layer of {path} sees the last {window} tokens alone, and {layout} has no windows"
            return Problem(key, why, "use gather or ulysses")
        if (cap := getattr(module, SOFTCAP)) is not None:
            return Problem(key, f"{path} caps its attention scores at {cap:g}, and {layout} does not", "use ulysses")
        if dropout := getattr(module, "attention_dropout", 0.0):
            why = f"{path} trains with an attention dropout of {dropout:g}, and {layout} has none"
            return Problem(key, why, "use ulysses, or set attention_dropout to 0 in its config.json")
    return None
