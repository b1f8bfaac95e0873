"""The engines by name: `rollout.engine` of a recipe is a key of this table."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from lockstep.device.base import Device
from lockstep.model.policy import Policy
from lockstep.recipe.online import RolloutSettings
from lockstep.rollout.engine import Engine
from lockstep.rollout.hf import HfEngine
from lockstep.rollout.native.engine import NativeEngine

Opener = Callable[[Policy, Device, RolloutSettings, PreTrainedTokenizerBase], Engine]

ENGINES: dict[str, Opener] = {
    "native": lambda policy, device, settings, tokenizer: NativeEngine(policy, device, settings, tokenizer.decode),
    "hf": lambda policy, device, settings, tokenizer: HfEngine(policy.generating, tokenizer.decode),
}
