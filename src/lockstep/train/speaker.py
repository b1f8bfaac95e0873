"""The policy as one who answers: its engine, where it stops, and the questions a validation asks it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lockstep.device.base import Device
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.rollout.native.engine import NativeEngine
from lockstep.rollout.native.positions import refuse_moving_positions
from lockstep.train.answers import Examiner, answers, encode_questions
from lockstep.train.evaluate import answer_metrics
from lockstep.train.generation import check_engine, make_engine, ready, stop_ids, validation_sampling
from lockstep.train.setup import Checked, Prepared, PreparedOnline
from lockstep.types import Rollout


class Speaker:
    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared | PreparedOnline,
        policy: Policy,
        device: Device,
        place: torch.device,
        world: World,
        judge: Examiner,
    ):
        self.recipe, self.policy, self.place, self.world, self.judge = recipe, policy, place, world, judge
        self.engine = make_engine(recipe.rollout, policy, device, prepared.tokenizer)
        self.stop_ids = stop_ids(policy, prepared.tokenizer, prepared.end_tokens)
        self.questions = encode_questions(prepared.tokenizer, prepared.questions, recipe.data.system)
        self.decode = _decoder(prepared)
        with ready(policy, world, place):
            check_engine(self.engine, policy, place, recipe.model.path)
        if isinstance(self.engine, NativeEngine) and self.questions:
            longest = max(len(prompt.ids) for prompt in self.questions) + recipe.val.max_new_tokens
            config = policy.causal_lm.config
            refuse_moving_positions(config.get_text_config(), longest, config.model_type, "val.max_new_tokens")

    def examine(self) -> tuple[dict[str, float], list[Rollout]]:
        """Answers to the validation's questions, and what they are worth."""
        n = self.recipe.val.n
        given = answers(
            self.policy,
            self.engine,
            self.judge,
            self.questions,
            n,
            validation_sampling(self.recipe, self.stop_ids),
            self.world,
            self.place,
            self.decode,
        )
        return answer_metrics(given, self.judge.answer_of, n), given


def _decoder(prepared: Checked) -> Callable[[list[int]], str]:
    return lambda ids: prepared.tokenizer.decode(ids, skip_special_tokens=True)
