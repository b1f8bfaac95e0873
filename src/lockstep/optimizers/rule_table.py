"""The table of update rules, and the bytes of their states."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lockstep.optimizers.adafactor import AdafactorRule
from lockstep.optimizers.adamw8bit import Adamw8bitRule
from lockstep.optimizers.elementwise_rules import AdamwRule, LionRule
from lockstep.optimizers.muon import MuonRule
from lockstep.optimizers.update_rule import Roles, UpdateRule
from lockstep.recipe.keys_optim import Optim

RULES: Mapping[str, type[UpdateRule]] = {
    "adamw": AdamwRule,
    "adamw8bit": Adamw8bitRule,
    "adafactor": AdafactorRule,
    "muon": MuonRule,
    "lion": LionRule,
}


def rule_of(settings: Optim, roles: Roles, moments: torch.dtype) -> UpdateRule:
    return RULES[settings.name](settings, roles, moments)


def refuse_parts(
    settings: Optim, roles: Roles, shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises `Refusal` if the rule has no state for a rank's part of a parameter that tensor parallelism splits."""
    rule = rule_of(settings, roles, torch.float32)
    for name, part in parts.items():
        rule.state(name, shapes[name], part)


def state_bytes_of(
    settings: Optim, roles: Roles, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, masters: bool
) -> int:
    """Returns the bytes of master weights and optimizer state of trained parameters, without the step counts. `dtype`
    is the dtype of the weights."""
    rule = rule_of(settings, roles, torch.float32 if masters else dtype)
    state = sum(tensor.nbytes for name, one in shapes.items() for tensor in rule.state(name, one, one).values())
    return state + 4 * masters * sum(torch.Size(shape).numel() for shape in shapes.values())


def scratch_bytes_of(settings: Optim, roles: Roles, shapes: Mapping[str, tuple[int, ...]], shards: int) -> int:
    """Returns about how many bytes of temporary tensors the update of the largest parameter needs. AdamW of torch and
    the fused AdamW kernel need hardly any."""
    if settings.name == "adamw" and not settings.stochastic_rounding:
        return 0
    rule = rule_of(settings, roles, torch.float32)
    return max((rule.scratch_bytes(name, shape, shards) for name, shape in shapes.items()), default=0)
