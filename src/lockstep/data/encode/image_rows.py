"""The images of rows: reads them with the row, and writes their placeholder tokens into its examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import Refusal
from lockstep.types import Example, Message, Origin, Prompt, Question, Row
from lockstep.vision.images import with_placeholders
from lockstep.vision.processors import ImageTokens, family_of, image_processor
from lockstep.vision.spans import ImageRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowImages:
    """Reads the images of the rows of one source, for the model in `folder` (`model.vision`)."""

    def __init__(self, folder: str, tokenizer: PreTrainedTokenizerBase, source: str):
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        where = f"model.path {folder}"
        family = family_of(str(config.get("model_type")), where)
        pad_id = tokenizer.convert_tokens_to_ids(family.pad)
        if pad_id != config.get("image_token_id"):
            raise Refusal.at(
                where,
                f"{family.pad} is token {pad_id} of the tokenizer, but image_token_id of config.json is "
                f"{config.get('image_token_id')}",
                "use the tokenizer of the published model",
                code="other-vocabulary",
            )
        image_processor(folder)  # refuses a folder without one before the first row is read
        self.source = source
        self.tokens = ImageTokens(folder, family, pad_id)

    def read(self, row: Row, keys: Sequence[str], origin: Origin) -> tuple[Row, list[ImageRef]]:
        """Returns the row with a placeholder text for each image in the columns `keys`, and the images in order."""
        family, path = self.tokens.family, Path(self.source)
        folder = path / Path(origin.file).parent if path.is_dir() else path.parent
        return with_placeholders(row, tuple(key for key in keys if key), family.placeholder, family.pad, folder, origin)

    def without_placeholders(self, messages: Sequence[Message], mark: str = "") -> list[Message]:
        """Returns the messages with `mark` in place of each placeholder."""
        text = self.tokens.family.placeholder
        return [{**turn, "content": str(turn.get("content") or "").replace(text, mark)} for turn in messages]

    def prompt(self, question: Question, ids: Sequence[int]) -> Prompt:
        """Returns the prompt of a question, whose rendered chat has the token ids `ids`."""
        example = self.written(Example(ids, bytes(len(ids)), question.origin), question.images, all_turns=True)
        return Prompt(question, list(example.ids), example.images)

    def written(self, example: Example, refs: Sequence[ImageRef], *, all_turns: bool) -> Example:
        """Returns the example with as many placeholder tokens as the images have features. An example of an earlier
        turn (`data.turns`) has only the first images of the row."""
        count = list(example.ids).count(self.tokens.pad_id)
        if count > len(refs) or (all_turns and count != len(refs)):
            raise Refusal.at(
                example.origin,
                f"the chat template renders {count} of {len(refs)} images",
                "use the chat template of the published model, or set data.template",
                code="template-changes-chat",
            )
        trained = [at for at, token in enumerate(example.ids) if token == self.tokens.pad_id and example.loss_mask[at]]
        if trained:
            raise Refusal.at(
                example.origin,
                "a trained turn contains an image, which the model cannot generate",
                "move the image to a user turn, or give the turn a weight of 0",
                code="not-text",
            )
        images = self.tokens.spans(example.ids, refs, example.origin)
        ids, mask = self.tokens.expanded(example.ids, example.loss_mask, images)
        return replace(example, ids=ids, loss_mask=mask, images=tuple(images))
