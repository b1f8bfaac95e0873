"""Trained weights out of a model and back into it, by parameter name, sharded or not."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.parallel.shard import fill, whole


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters, whole and on the host: of a CPU run they themselves (a collective when sharded)."""
    return {name: whole(p.detach()).cpu() for name, p in model.named_parameters() if p.requires_grad}


def restore_weights(model: nn.Module, weights: dict[str, torch.Tensor], where: str) -> None:
    """Put trained weights back; every name must be there on both sides."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name in sorted(parameters.keys() ^ weights.keys()):
        side = "the checkpoint" if name not in weights else "the model"
        raise Refusal.at(where, f"{side} has no weight {name}", "use the recipe the checkpoint was trained with")
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise Refusal.at(
                where,
                f"{name} is {tuple(weights[name].shape)} in the checkpoint and {tuple(parameter.shape)} in the model",
            )
        fill(parameter, weights[name])
