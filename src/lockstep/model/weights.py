"""Trained weights out of a model and back into it, by parameter name, sharded or not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.parallel.shard import whole
from lockstep.parallel.stored import fill_all, shapes_of


def held_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters as this rank holds them: slices where they are sharded."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters, whole and on the host: of a CPU run they themselves (a collective when sharded)."""
    return {name: whole(p).cpu() for name, p in held_weights(model).items()}


def restore_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Put trained weights back; every name must be there on both sides."""
    fill_all(refuse_other_weights(model, weights, where), weights)


def refuse_other_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], where: str) -> dict[str, nn.Parameter]:
    """The trained parameters by name, where the weights are theirs."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name in sorted(parameters.keys() ^ weights.keys()):
        side = "the checkpoint" if name not in weights else "the model"
        raise Refusal.at(where, f"{side} has no weight {name}", "use the recipe the checkpoint was trained with")
    shapes = shapes_of(weights)
    for name, parameter in parameters.items():
        if parameter.shape != shapes[name]:
            raise Refusal.at(
                where, f"{name} is {tuple(shapes[name])} in the checkpoint and {tuple(parameter.shape)} in the model"
            )
    return parameters
