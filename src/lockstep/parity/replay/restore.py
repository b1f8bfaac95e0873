"""A learner put back to where a tape has it."""

from __future__ import annotations

import torch

from lockstep.model.weights import restore_weights
from lockstep.parallel.sharding import fill, let_go
from lockstep.train.step import Learner


def restore_learner(learner: Learner, weights: dict[str, torch.Tensor], where: str) -> None:
    """Weights and optimizer state of a snapshot, whatever precision either side keeps them in."""
    model, state = (_below(weights, f"{learner.name}/{part}/") for part in ("model", "optimizer"))
    masters = _below(state, "master/")
    module, optimizer = learner.module, learner.optimizer
    let_go(module)
    # The finer copy where the recorded run had one: ours may be finer than its weights.
    restore_weights(module.stored, {**model, **masters}, where)  # type: ignore[arg-type]
    if any(name.startswith("exp_avg/") for name in state):
        optimizer.restore({**{f"master/{name}": value for name, value in model.items()}, **state})
    else:
        optimizer.adamw.state.clear()
        for name, master in optimizer.stepped.items():
            fill(master, masters.get(name, model[name]))
    optimizer.forget()


def _below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
