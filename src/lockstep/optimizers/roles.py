"""Finds the embeddings and the weight matrices of a model, which some update rules treat in their own way."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.optimizers.update_rule import Roles


def roles_of(model: nn.Module) -> Roles:
    """Returns the names of embeddings and of weight matrices. A matrix is the weight of a linear layer or the stacked
    weights of experts. The output head and heads with one output are not among the matrices."""
    heads = _heads(model)
    embeddings, matrices = set(), set()
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}" if name else leaf
            if isinstance(module, nn.Embedding):
                embeddings.add(full)
            elif parameter.ndim >= 2 and id(module) not in heads and _is_matrix(module, leaf, parameter):
                matrices.add(full)
    return Roles(frozenset(embeddings), frozenset(matrices))


def _is_matrix(module: nn.Module, leaf: str, parameter: nn.Parameter) -> bool:
    kind = type(module).__name__
    if isinstance(module, nn.Linear) or kind == "Conv1D":  # GPT-2's linear layer
        return leaf == "weight" and min(parameter.shape) > 1
    return "expert" in kind.lower() and parameter.ndim == 3


def _heads(model: nn.Module) -> set[int]:
    found = set()
    for module in model.modules():
        getter: Any = getattr(module, "get_output_embeddings", None)
        if callable(getter):
            found.add(id(getter()))
    return found
