"""Trained weights out of a model and back into it, by parameter name, sharded or not."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.parallel.sharded_files import fill_all, shapes_of
from lockstep.parallel.sharding import whole

# Of a parameter that its module holds beside others: a norm's scale, an expert's bias.
_BIAS = re.compile(r"(^|_)bias(_|$)")
_NORM = re.compile(r"(^|_)(layer|rms|batch|group)?norm(_|$)")


def biases_and_norms(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay spares, by what they are for: their shapes do not tell. The biases of
    stacked experts are matrices (gpt-oss), and so are the scales of norms that have one for each head (Cohere)."""
    found = set()
    for name, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for leaf, _ in module.named_parameters(recurse=False):
            if norm or _BIAS.search(leaf) or _NORM.search(leaf):
                found.add(f"{name}.{leaf}" if name else leaf)
    return frozenset(found)


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
