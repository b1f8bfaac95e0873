"""The engine that a recipe names. The rows are in `recipe/registry.py`: where each engine's `open_engine` is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.device.base import Device
from lockstep.model.policy import Policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES, imported
from lockstep.rollout.engine import Engine
from lockstep.rollout.place import RunPlace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def engine_of(
    settings: RolloutSettings, policy: Policy, device: Device, tokenizer: PreTrainedTokenizerBase, place: RunPlace
) -> Engine:
    row = ENGINES[settings.engine]
    told = (place,) if row.served else ()
    engine: Engine = imported(row.opener)(policy, device, settings, tokenizer, *told)
    return engine
