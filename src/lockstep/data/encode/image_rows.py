"""The images of rows: reads them with the row, and writes their placeholder tokens into its examples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.data.encode.columns import SYSTEMS, ColumnFinder, lookup
from lockstep.data.encode.messages import ROLES
from lockstep.errors import Refusal
from lockstep.types import Example, Message, Origin, Prompt, Question, Row
from lockstep.vision.images import COLUMNS, MARK, image_column, image_ref, with_placeholders
from lockstep.vision.processors import ImageTokens
from lockstep.vision.spans import ImageRef, ImageSpan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ExampleT = TypeVar("ExampleT", bound=Example)
# The key under which one response of a row is read with its prompt.
_RESPONSE = "response of the row"


class RowImages:
    """Reads the images of the rows of one source, for the model in `folder` (`model.vision`)."""

    def __init__(self, folder: str, tokenizer: PreTrainedTokenizerBase, source: str):
        self.source = source
        self._file, self._parent = "", Path(source).parent
        self.tokens = ImageTokens.of(folder, tokenizer)
        tokenizer.image_family = self.tokens.family  # the chat template gets the images of messages as parts

    @classmethod
    def of(cls, folder: str | None, finder: ColumnFinder, tokenizer: PreTrainedTokenizerBase) -> RowImages | None:
        """Returns the reader of a source, or None without a model folder."""
        if folder is None:
            return None
        finder.also_read.update(COLUMNS)
        return cls(folder, tokenizer, finder.source.path)

    def read(self, row: Row, keys: Sequence[str], origin: Origin) -> tuple[Row, list[ImageRef]]:
        """Returns the row with a placeholder text for each image in the columns `keys`, and the images in order."""
        family, keys = self.tokens.family, tuple(key for key in keys if key)
        for key in SYSTEMS:
            if key not in keys and MARK in str(row.get(key)):
                raise Refusal.at(
                    origin,
                    f"the column {key} contains {MARK}, and images are read from messages and prompts only",
                    "move the image to the prompt, or write the row as messages with a system message",
                    code="wrong-count",
                )
        row = {**row, **_nested(row, keys, origin)}
        return with_placeholders(row, keys, family.placeholder, family.pad, self._folder(origin), origin)

    def _folder(self, origin: Origin) -> Path:
        """Returns the folder of the data file, to which the paths of its images are relative."""
        if self._file != origin.file:
            path, source = Path(origin.file), Path(self.source)
            self._file = origin.file
            self._parent = path.parent if path.is_file() else source if source.is_dir() else source.parent
        return self._parent

    def read_responses(
        self, row: Row, prompt: Sequence[str], responses: Sequence[str], listed: str, origin: Origin
    ) -> tuple[Row, list[list[ImageRef]]]:
        """Returns the row with placeholders, and the images of each response with its prompt. The responses are the
        columns `responses`, or the elements of the column `listed`. A response that is a full chat repeats the images
        of the prompt."""
        shared = [image_ref(one, self._folder(origin), origin) for one in image_column(row, origin)[1]]
        row = {**row, **_nested(row, (*prompt, *responses, listed), origin)}
        prompts = {key: row[key] for key in prompt if row.get(key) is not None}
        values = row.get(listed) if listed else [row.get(key) for key in responses]
        new = {key: value for key, value in row.items() if key not in COLUMNS}
        placed: list[Any] = []
        refs: list[list[ImageRef]] = []
        for value in values if isinstance(values, list) else []:
            before = {} if _is_full_chat(value) else prompts
            made, found = self.read({**before, _RESPONSE: value, COLUMNS[0]: shared}, (*before, _RESPONSE), origin)
            if before is not prompts and prompts:
                made |= self.read({**prompts, COLUMNS[0]: shared}, tuple(prompts), origin)[0]
            placed.append(made.pop(_RESPONSE))
            refs.append(found)
            new |= made
        return {**new, **({listed: placed} if listed else dict(zip(responses, placed, strict=True)))}, refs

    def of_responses(self, examples: Sequence[Example], refs: Sequence[Sequence[ImageRef]]) -> list[Example]:
        """Returns the responses to one prompt with as many placeholder tokens as their images have features. An image
        of the prompt is processed once for all responses."""
        known: dict[str, ImageSpan] = {}
        found = [self.written(*one, all_turns=True, known=known) for one in zip(examples, refs, strict=True)]
        asked = [[image for image in one.images if image.start < one.loss_mask.index(1)] for one in found]
        if any(images != asked[0] for images in asked):
            raise Refusal.at(
                found[0].origin,
                "the responses of the row have prompts with different images",
                "give the responses of a row the same prompt and images",
                code="different-prompts",
            )
        return found

    def without_placeholders(self, messages: Sequence[Message], mark: str = "") -> list[Message]:
        """Returns the messages with `mark` in place of each placeholder."""
        text = self.tokens.family.placeholder
        return [{**turn, "content": str(turn.get("content") or "").replace(text, mark)} for turn in messages]

    def prompt(self, question: Question, ids: Sequence[int]) -> Prompt:
        """Returns the prompt of a question, whose rendered chat has the token ids `ids`."""
        example = self.written(Example(ids, bytes(len(ids)), question.origin), question.images, all_turns=True)
        return Prompt(question, list(example.ids), example.images)

    def written(
        self,
        example: ExampleT,
        refs: Sequence[ImageRef],
        *,
        all_turns: bool,
        known: dict[str, ImageSpan] | None = None,
    ) -> ExampleT:
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
        images = self.tokens.spans(example.ids, refs, example.origin, known)
        ids, mask = self.tokens.expanded(example.ids, example.loss_mask, images)
        return replace(example, ids=ids, loss_mask=mask, images=tuple(images))


def _nested(row: Row, keys: Sequence[str], origin: Origin) -> Row:
    """Returns the values of keys with dots (`extra_info.question`) as columns, which take precedence over the paths."""
    found = {}
    for key in keys:
        if "." in key and key not in row:
            with suppress(Refusal):  # a missing column is reported with the other errors of the row
                found[key] = lookup(row, key, origin)
    return found


def _is_full_chat(value: Any) -> bool:
    """Returns whether a response is a chat that begins with its prompt."""
    first = value[0] if isinstance(value, list) and value else None
    role = str(first.get("role") or first.get("from")).lower() if isinstance(first, dict) else "assistant"
    return ROLES.get(role, role) != "assistant"
