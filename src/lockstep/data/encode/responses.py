"""Encodes the responses to one prompt so that all share the same prompt tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from lockstep.data.encode.chat import check_messages, is_trained, render_chat, render_turn
from lockstep.data.encode.chat_text import NO_INPUTS, TemplateInputs, render_prompt
from lockstep.data.encode.dialogue import SpecialText, Turns, spoken
from lockstep.data.encode.encoding import Encoding, as_chat, prompt_length, written
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.template_refusals import contains_turn
from lockstep.data.encode.trained_tokens import Spans, encode_spans
from lockstep.errors import Refusal
from lockstep.types import Example, Message, Origin, Row
from lockstep.vision.spans import ImageRef

DIALOGUES = "dialogues"
"""Key under which a row reader's `tally` counts the dialogues that `as_chats` converted to chats."""


_SHORTER = (
    "move all turns of the response but the last into the prompt, or use a template that only appends (data.template)"
)


class ResponseEncoder:
    """Encodes prompts and responses to examples in which only the response is trained."""

    def __init__(self, encoding: Encoding, images: RowImages | None = None):
        self.encoding, self.images = encoding, images
        self.split_rows = self.special_rows = self.unseparated_rows = 0
        self.special_text = SpecialText(encoding.tokenizer)

    def __call__(
        self,
        prompt: Turns,
        responses: Sequence[Turns],
        origin: Origin,
        inputs: TemplateInputs = NO_INPUTS,
        tally: Counter[str] | None = None,
    ) -> list[Example]:
        """Encodes the responses to a prompt. `tally` counts the rows that each append-only template rendered."""
        plain = all(isinstance(turns, str) for turns in (prompt, *responses))
        if plain and not inputs and not self.encoding.templated:
            before = self.encoding.unseparated
            examples = self._joined(prompt, responses, origin)
            self.unseparated_rows += self.encoding.unseparated > before
        else:
            prompt = written(prompt, self.encoding.prompt_format, origin)
            spans = self._all_spans(prompt, responses, origin, inputs)
            if tally is not None:
                tally.update({version for one in spans if (version := one.version)})
            examples = self._rendered(spans, origin)
            texts = [prompt, *responses]
            read = texts if self.images is None else [self.images.without_placeholders(as_chat(one)) for one in texts]
            self.special_rows += self.special_text.inside(read)
        return [self.encoding.checked(example) for example in examples]

    def as_chats(self, prompt: Turns, responses: list[Turns], tally: Counter[str]) -> tuple[Turns, list[Turns]]:
        """Converts a dialogue stored as one text to a chat if a chat template is used. Counts the conversion in
        `tally`."""
        chat = spoken(prompt, responses) if self.encoding.templated else None
        if chat is None:
            return prompt, responses
        tally[DIALOGUES] += 1
        return chat

    def _joined(self, prompt: Turns, responses: Sequence[Turns], origin: Origin) -> list[Example]:
        return [self.encoding.joined(str(prompt), str(response), origin) for response in responses]

    def _all_spans(
        self, prompt: Turns, responses: Sequence[Turns], origin: Origin, inputs: TemplateInputs
    ) -> list[Spans]:
        self.encoding.need_template(origin)
        return [self._spans(as_chat(prompt), _answer(response), origin, inputs) for response in responses]

    def _rendered(self, rendered: Sequence[Spans], origin: Origin) -> list[Example]:
        tokenizer = self.encoding.tokenizer
        encoded = [encode_spans(tokenizer, spans, origin) for spans in rendered]
        examples, split = [example for example, _ in encoded], any(split for _, split in encoded)
        if not _begin_alike(examples):
            # A response can change how the prompt's last word is tokenised, so the prompt is tokenised separately.
            examples, split = [self._apart(spans, origin) for spans in rendered], True
        if not _begin_alike(examples):
            raise Refusal.at(
                origin,
                "the chat template renders the prompt differently for each response",
                "use a template that renders the prompt the same for every response",
                code="template-unstable",
            )
        self.split_rows += split
        return examples

    def _spans(self, prompt: list[Message], answer: list[Message], origin: Origin, inputs: TemplateInputs) -> Spans:
        """Renders the full chat as text, and marks the assistant turns of the answer as trained."""
        tokenizer, append_only = self.encoding.tokenizer, self.encoding.append_only
        check_messages([*prompt, *answer], origin)
        if not is_trained(answer[0]):
            raise Refusal.at(
                origin,
                "the first turn of a response has a weight of 0, so it would not be compared",
                "move the turn into the prompt, or remove the weight",
                code="invalid-turn-weight",
            )
        prompt = self.encoding.with_system(prompt)
        if len(answer) == 1:
            # Earlier assistant turns, which are in the prompt, may be shortened by the template.
            chat = [*prompt, *answer]
            spans = render_turn(
                tokenizer, chat, len(prompt), origin, inputs, append_only=append_only, where="the response"
            )
        else:
            # A weight of 0 excludes the prompt's assistant turns from the loss, so only the answer is trained.
            earlier = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in prompt]
            spans = render_chat(
                tokenizer, [*earlier, *answer], origin, inputs, append_only=append_only, remedy=_SHORTER
            )
        before = spans.text[: spans.trained[0][0]]
        if not spans.version:
            before = render_prompt(tokenizer, prompt, origin, inputs)
        unchanged = contains_turn(spans.text, len(before), len(spans.text), answer[0])
        if not spans.text.startswith(before) or not unchanged:
            raise Refusal.at(
                origin,
                "the chat template does not render the response unchanged after the generation prompt",
                "fix the template, or use one that neither drops nor changes assistant turns",
                code="template-changes-chat",
            )
        return spans

    def _apart(self, spans: Spans, origin: Origin) -> Example:
        tokenizer, border = self.encoding.tokenizer, spans.trained[0][0]
        prompt = self.encoding.ids(spans.text[:border])
        moved = Spans(spans.text[border:], tuple((start - border, end - border) for start, end in spans.trained))
        answer, _ = encode_spans(tokenizer, moved, origin)
        return Example(array("q", [*prompt, *answer.ids]), bytes([*[0] * len(prompt), *answer.loss_mask]), origin)


Refs = list[list[ImageRef]]
"""The images of each response of a row with its prompt."""


class ResponseRows:
    """Base class of row readers that encode with a `ResponseEncoder`. This class provides the row counts of the
    encoder, and reads the images of rows (`model.vision`)."""

    encode: ResponseEncoder

    def read_images(
        self, row: Row, prompt: Sequence[str], responses: Sequence[str], listed: str, origin: Origin
    ) -> tuple[Row, Refs]:
        """Returns the row with placeholders for its images, and the images. Without `model.vision` there are none."""
        images = self.encode.images
        return (row, []) if images is None else images.read_responses(row, prompt, responses, listed, origin)

    def with_images(self, examples: list[Example], refs: Refs) -> list[Example]:
        """Returns the responses of a row with the placeholder tokens of their images."""
        images = self.encode.images
        return examples if images is None else images.of_responses(examples, refs)

    @property
    def split_rows(self) -> int:
        return self.encode.split_rows

    @property
    def special_rows(self) -> int:
        return self.encode.special_rows

    @property
    def unseparated_rows(self) -> int:
        return self.encode.unseparated_rows


def _answer(response: Turns) -> list[Message]:
    return response if isinstance(response, list) else [{"role": "assistant", "content": response}]


def _begin_alike(examples: Sequence[Example]) -> bool:
    return len({tuple(example.ids[: prompt_length(example)]) for example in examples}) == 1
