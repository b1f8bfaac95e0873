"""What reward models take of a device, told from their config alone."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.recipe import Recipe
from lockstep.recipe.methods import ONLINE
from lockstep.reward.model import reward_config
from lockstep.reward.process import process_config


def reward_bytes(recipe: Recipe) -> int:
    """The weights of `reward.model` and `reward.process`, each in the precision it is stored in. Every device has all
    of them: they are not sliced."""
    if recipe.method not in ONLINE:
        return 0
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    named = recipe.reward.model or []
    found = [
        (AutoModelForSequenceClassification, reward_config(path))
        for path in ([named] if isinstance(named, str) else named)
    ]
    if recipe.reward.process is not None:
        found.append((AutoModelForCausalLM, process_config(recipe.reward.process)))
    return sum(_weights(kind, config) for kind, config in found)


def _weights(kind: Any, config: Any) -> int:
    with torch.device("meta"):
        model = kind.from_config(config, trust_remote_code=False)
    # A config that does not say it: transformers then looks into the files, which hold no more than fp32.
    size = (getattr(config, "dtype", None) or torch.float32).itemsize
    return sum(parameter.numel() for parameter in model.parameters()) * int(size)
