"""Images for reward models: writes the images of a prompt into the chat of a reward model, and returns its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.messages import as_written, with_image_surroundings
from lockstep.errors import Refusal
from lockstep.model.pretrained import tokenizer_of
from lockstep.types import Example, Message, Origin, Question
from lockstep.vision.families import FAMILIES
from lockstep.vision.processors import ImageTokens, config_with_images, pixels_of
from lockstep.vision.spans import ImageSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTokens(list[int]):
    """The tokens of a chat, with its images."""

    def __init__(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()):
        super().__init__(ids)
        self.images = tuple(images)


class JudgedImages:
    """Writes the images of prompts of the policy in the folder `policy` into chats of the reward model in `folder`. The
    two models may be of different families. Raises `Refusal` if the reward model reads no images."""

    def __init__(self, policy: str, folder: str, tokenizer: PreTrainedTokenizerBase, where: str):
        kind = config_with_images(folder).model_type
        if kind not in FAMILIES:
            raise Refusal.at(
                where,
                f"{kind} models read no images, and the prompts of the run have images (model.vision)",
                "use a reward model trained on images (method rm or prm with model.vision), or a reward function",
                code="wrong-model-kind",
            )
        self._mark = ImageTokens.of(policy, tokenizer_of(policy, where)).family.placeholder
        self._rows = RowImages(folder, tokenizer, folder)
        self._known: dict[str, ImageSpan] = {}

    def prompt(self, question: Question) -> Question:
        """Returns the question with the placeholders of the reward model. The images that an environment returned are
        not in the prompt, so they are left out."""
        own, count, prompt = self._rows.tokens.family.placeholder, 0, list[Message]()
        for message in question.prompt:
            content = message.get("content")
            if isinstance(content, str):
                count += content.count(self._mark)
                message = {**message, "content": content.replace(self._mark, own)}
            prompt.append(message)
        return replace(question, prompt=prompt, images=question.images[:count])

    def rendered(self, tokenizer: PreTrainedTokenizerBase, chat: list[Message]) -> str:
        """Returns the text of a chat, with one token per image."""
        chat = as_written(tokenizer, chat, tokenizer.get_chat_template())
        return with_image_surroundings(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False))

    def tokens(self, ids: Sequence[int], question: Question) -> ChatTokens:
        """Returns the tokens of a rendered chat with all placeholder tokens. Raises `Refusal` if the chat has another
        number of images than the prompt."""
        example = Example(ids, bytes(len(ids)), question.origin)
        found = self._rows.written(example, question.images, all_turns=True, known=self._known)
        return ChatTokens(found.ids, found.images)

    def forget(self) -> None:
        """Forgets the images of the last step, which are kept so that each is processed once for all responses."""
        self._known.clear()


def image_arguments(model: Any, rows: Sequence[Sequence[int]], ids_NT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the arguments of transformers' forward pass for the images of padded rows."""
    images = [image for row in rows if isinstance(row, ChatTokens) for image in row.images]
    if not images:
        return {}
    dtype, device = next(model.parameters()).dtype, ids_NT.device
    where = Origin("the prompt", 0)
    pixels = torch.from_numpy(np.concatenate([pixels_of(image, where) for image in images])).to(device, dtype)
    grids_I3 = torch.tensor([image.grid for image in images], device=device)
    given: dict[str, torch.Tensor] = FAMILIES[model.config.model_type].tower(pixels, grids_I3)
    known = inspect.signature(model.forward).parameters
    types = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in known), None)
    if types is not None:
        given[types] = (ids_NT == model.config.image_token_id).int()
    return given
