"""A model folder ready to answer, for the verbs that only generate: `lockstep eval` and `lockstep sample`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.model.load import DTYPES, load_config, load_policy
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.recipe.online import Rollout
from lockstep.recipe.schema import Model
from lockstep.rollout.engine import Engine
from lockstep.rollout.native.positions import refuse_moving_positions
from lockstep.train.generation import check_engine, make_engine, stop_ids
from lockstep.types import Prompt


@dataclass(frozen=True)
class Answerer:
    """A whole model on this rank's device, with the engine that runs it."""

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    device: torch.device
    stop_ids: tuple[int, ...]

    @classmethod
    def open(
        cls,
        folder: str,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str,
        device: Device,
        world: World,
        rollout: Rollout | None = None,
    ) -> Answerer:
        """Load the model and hold the engine against the trainer's forward pass."""
        place = device.torch_device(world.local_rank)
        settings = Model(path=folder, dtype=dtype)  # type: ignore[arg-type]
        policy = load_policy(settings, place, device.attention, seed=0)
        engine = make_engine(rollout or Rollout(), policy, device, tokenizer)
        check_engine(engine, policy, place, folder)
        return cls(policy, tokenizer, engine, place, tuple(stop_ids(policy, tokenizer)))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def refuse_long_answers(prompts: Sequence[Prompt], max_new_tokens: int, folder: str) -> None:
    """Refuse, before the model is loaded, answers in which the positions of cached keys would move."""
    config = load_config(folder)
    longest = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    refuse_moving_positions(config.get_text_config(), longest, config.model_type, "--max-new-tokens")


def refuse_options(dtype: str, n: int, temperature: float) -> None:
    """Refuse what the options of these verbs cannot mean."""
    if dtype not in DTYPES:
        raise Refusal.at("--dtype", f"{dtype} is not one of {', '.join(DTYPES)}")
    if n > 1 and not temperature:
        raise Refusal.at("--n", f"{n} greedy answers would all be the same", "give a --temperature too")
