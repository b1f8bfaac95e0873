"""Validation questions as prompts, and the judge protocol of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lockstep.data.encode.prompt_rows import check_prompt, prompt_ids, with_format, with_system
from lockstep.recipe.keys_data import Data
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.schema import Recipe
from lockstep.rollout.collect import Judge
from lockstep.types import Prompt, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Noise keys of validation do not overlap with those of training prompts.
FIRST_KEY = 2**40


def validation_keys(count: int) -> list[int]:
    return [FIRST_KEY + index for index in range(count)]


class Examiner(Judge, Protocol):
    """A judge that can also extract the final answer of a response, for majority votes."""

    def answer_of(self, question: Question, text: str) -> str | None: ...


def prompt_format(recipe: Recipe) -> Data | None:
    """The prompt format: an online run uses that of its data, an offline run chats."""
    return recipe.data if recipe.method in ONLINE else None


def encode_questions(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    system: str | None = None,
    data: Data | None = None,
) -> list[Prompt]:
    """`data` decides whether a chat template is used; without it one is."""
    for question in questions:
        check_prompt(tokenizer, question, data)
    formatted = [with_format(with_system(question, system), data) for question in questions]
    return [Prompt(question, prompt_ids(tokenizer, question, data)) for question in formatted]
