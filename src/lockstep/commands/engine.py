"""The generator of a command without a recipe: the built-in engine, or transformers where that cannot run a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES
from lockstep.rollout.generator import Generator
from lockstep.rollout.native.engine import NativeEngine
from lockstep.run.console import Console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_generator(
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    device: Device,
    world: World,
    console: Console,
    settings: RolloutSettings | None = None,
) -> Generator:
    """A recipe would be told to set rollout.engine=hf; here that is done, and said."""
    wanted = settings or RolloutSettings()
    try:
        return Generator.load(folder, tokenizer, dtype, device, world, wanted)
    except Refusal as refusal:
        if any(problem.remedy != NativeEngine.instead for problem in refusal.problems):
            raise
        console.say(f"{refusal.problems[0].why}: transformers' own generate answers instead, which is slower")
    plain = next(name for name, row in ENGINES.items() if not row.paged and not row.served)
    return Generator.load(folder, tokenizer, dtype, device, world, wanted.model_copy(update={"engine": plain}))
