"""The images of rows: reads them with the row, and writes their placeholder tokens into its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import Refusal
from lockstep.types import Example, Message, Origin, Row
from lockstep.vision.images import with_placeholders
from lockstep.vision.processors import ImageTokens
from lockstep.vision.spans import ImageRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowImages:
    """Reads the images of the rows of one source, for the model in `folder` (`model.vision`)."""

    def __init__(self, folder: str, tokenizer: PreTrainedTokenizerBase, source: str):
        self.source = source
        self.tokens = ImageTokens.of(folder, tokenizer)
        tokenizer.image_family = self.tokens.family  # the chat template gets the images of messages as parts

    def read(self, row: Row, keys: Sequence[str], origin: Origin) -> tuple[Row, list[ImageRef]]:
        """Returns the row with a placeholder text for each image in the columns `keys`, and the images in order."""
        family, path = self.tokens.family, Path(self.source)
        folder = path / Path(origin.file).parent if path.is_dir() else path.parent
        return with_placeholders(row, tuple(key for key in keys if key), family.placeholder, family.pad, folder, origin)

    def without_placeholders(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages without the texts of placeholders."""
        text = self.tokens.family.placeholder
        return [{**turn, "content": str(turn.get("content") or "").replace(text, "")} for turn in messages]

    def written(self, example: Example, refs: Sequence[ImageRef], *, all_turns: bool) -> Example:
        """Returns the example with as many placeholder tokens as the images have features. An example of an earlier
        turn (`data.turns`) has only the first images of the row."""
        count = list(example.ids).count(self.tokens.token_id)
        if count > len(refs) or (all_turns and count != len(refs)):
            raise Refusal.at(
                example.origin,
                f"the chat template renders {count} of {len(refs)} images",
                "use the chat template of the published model, or set data.template",
                code="template-changes-chat",
            )
        token_id = self.tokens.token_id
        trained = [at for at, token in enumerate(example.ids) if token == token_id and example.loss_mask[at]]
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
