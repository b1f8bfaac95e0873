"""Questions of a validation, answered by the policy and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from lockstep.data.prompts import check_prompt, prompt_ids, with_system
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.rollout.collect import Judge, collect
from lockstep.rollout.engine import Engine
from lockstep.train.generation import ready
from lockstep.types import Prompt, Question, Rollout, Sampling

# Validation draws its noise where no training prompt does.
FIRST_KEY = 2**40


class Examiner(Judge, Protocol):
    """A judge that can also read the final answer out of a response, for majority votes."""

    def answer_of(self, question: Question, text: str) -> str | None: ...


def encode_questions(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], system: str | None = None
) -> list[Prompt]:
    for question in questions:
        check_prompt(tokenizer, question)
    asked = [with_system(question, system) for question in questions]
    return [Prompt(question, prompt_ids(tokenizer, question)) for question in asked]


def answers(
    policy: Policy,
    engine: Engine,
    judge: Judge,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    world: World,
    device: torch.device,
    decode: Callable[[list[int]], str],
    advance: Callable[[int], None] = lambda done: None,
) -> list[Rollout]:
    """`n` answers to each prompt, in order."""
    keys = [FIRST_KEY + place for place in range(len(prompts))]
    with ready(policy, world, device):
        return collect(engine, judge, prompts, keys, n, sampling, world, decode, _untimed, advance)


@contextmanager
def _untimed(name: str) -> Iterator[None]:
    yield
