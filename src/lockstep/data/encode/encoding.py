"""Encodes texts and chats within the token limit; shared by all row readers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.data.encode.chat import check_messages, render_chat, render_turn, trained_messages
from lockstep.data.encode.chat_text import NO_INPUTS, TemplateInputs
from lockstep.data.encode.messages import with_image_surroundings
from lockstep.data.encode.tokenizer_cache import token_ids
from lockstep.data.encode.trained_tokens import Spans, encode_spans, special_ids
from lockstep.errors import Refusal
from lockstep.recipe.keys_data import Data
from lockstep.types import Example, Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ExampleT = TypeVar("ExampleT", bound=Example)

_DROP = "raise data.max_tokens or drop the row"
_RAISE = "raise data.max_tokens as far as batch.tokens and the model's context allow"
_SMALLER = (
    f"{_RAISE}, set data.overlong=drop, or make the images smaller: the image processor of model.path limits their "
    "pixels by size.longest_edge (or max_pixels) of preprocessor_config.json"
)


class OverLimit(Refusal):
    """Raised for a row over the token limit. The key `data.overlong`, not `data.bad_rows`, says what happens to rows
    that are too long."""


def kept_span(tokens: int, limit: int, overlong: str, over: Refusal) -> slice | None:
    """Returns the range of tokens that `data.overlong` keeps, or None if the row is dropped.

    If `overlong` is `error`, raises the given error `over`.
    """
    if tokens <= limit:
        return slice(0, tokens)
    if overlong == "drop":
        return None
    if overlong == "error":
        raise over
    return slice(tokens - limit, tokens) if overlong == "truncate_left" else slice(0, limit)


def too_long(example: Example, what: str, limit: int, also: str = "") -> OverLimit:
    """Returns the error of an example over the limit. `also` is a further remedy."""
    remedy = f"{_RAISE}, or set data.overlong to drop, truncate_left or truncate_right{also}"
    why, places = f"{what} tokens, over data.max_tokens={limit}", sum(image.tokens for image in example.images)
    if places:
        # Truncation never cuts an image, so it often does not help.
        why, remedy = f"{why}; {places} of them are of {len(example.images)} images", _SMALLER
    return OverLimit.at(example.origin, why, remedy, code="row-too-long")


def _keep_images(examples: Sequence[Example], span: slice, limit: int, overlong: str) -> None:
    """Raises `OverLimit` if the slice `span` leaves out an image, or a part of it."""
    for example in examples:
        if not all(span.start <= image.start and image.stop <= span.stop for image in example.images):
            why = f"has {len(example)} tokens, and {overlong} to {limit} tokens would cut an image"
            raise OverLimit.at(example.origin, why, _SMALLER, code="row-too-long")


def fit(example: ExampleT, limit: int, overlong: str, needed: str = "trained token", also: str = "") -> ExampleT | None:
    """Cuts the example to `limit` tokens; it must keep a trained token. Returns None if the example is dropped. `also`
    is a further remedy for an example over the limit."""
    if len(example) <= limit:
        return example
    over = too_long(example, f"has {len(example)}", limit, also)
    span = kept_span(len(example), limit, overlong, over)
    if span is None:
        return None
    _keep_images([example], span, limit, overlong)
    short = example.cut(span)
    if not short.targets:
        raise Refusal.at(
            example.origin, f"{overlong} to {limit} tokens leaves no {needed}", _DROP, code="truncated-away"
        )
    return short


def split_text(example: Example, limit: int) -> list[Example]:
    """Cuts a long text into consecutive pieces of at most `limit` tokens. Every target of the text is a target of
    exactly one piece.

    A later piece starts with the last token of the piece before it. The repeated token is only context in the later
    piece, because the earlier piece trains it. No BOS token is added to later pieces, and only the last piece has the
    end token.
    """
    pieces = [example.cut(slice(0, limit))]
    for first in range(limit - 1, len(example) - 1, limit - 1):
        piece = example.cut(slice(first, first + limit))
        pieces.append(replace(piece, loss_mask=bytes([0, *piece.loss_mask[1:]])))
    if not all(piece.targets for piece in pieces):
        raise Refusal.at(
            example.origin,
            f"data.long_text=split to {limit} tokens leaves a piece without a trained token",
            "raise data.max_tokens",
            code="truncated-away",
        )
    return pieces


def fit_responses(
    examples: Sequence[Example], names: Sequence[str], limit: int, overlong: str
) -> Sequence[Example] | None:
    """Cuts each sequence of prompt and response to `limit` tokens; returns None if the row is dropped.

    truncate_left cuts the prompt, at the same position for all responses; truncate_right cuts each response.
    """
    longest = max(len(example) for example in examples)
    if longest <= limit:
        return examples
    origin, name = examples[0].origin, names[[len(example) for example in examples].index(longest)]
    span = kept_span(longest, limit, overlong, too_long(examples[0], f"prompt and {name} have {longest}", limit))
    if span is None:
        return None
    _keep_images(examples, span, limit, overlong)
    if overlong == "truncate_left":
        prompt = prompt_length(examples[0])
        if span.start >= prompt:
            raise Refusal.at(
                origin,
                f"{name} alone has {longest - prompt} tokens, which leaves no token of {limit} for the prompt",
                _DROP,
                code="truncated-away",
            )
        return [example.cut(span) for example in examples]
    short = [example.cut(span) for example in examples]
    for name, example in zip(names, short, strict=True):
        if not example.targets:
            raise Refusal.at(
                origin, f"truncate_right to {limit} tokens leaves nothing of {name}", _DROP, code="truncated-away"
            )
    refuse_equal(short, names, f" after truncation to {limit} tokens")
    return short


def prompt_length(example: Example) -> int:
    """Returns the number of tokens before the response."""
    return example.loss_mask.index(1)


def refuse_equal(examples: Sequence[Example], names: Sequence[str], after: str = "") -> None:
    """Raises a `Refusal` for responses with identical tokens, because there is no preference between them."""
    first: dict[tuple[int, ...], str] = {}
    for name, example in zip(names, examples, strict=True):
        twin = first.setdefault(tuple(example.ids), name)
        if twin != name:
            raise Refusal.at(
                example.origin,
                f"{twin} and {name} are identical{after}",
                _DROP if after else "remove the row",
                code="identical-responses",
            )


def no_trained_token(origin: Origin) -> Refusal:
    return Refusal.at(
        origin,
        "no token of the row is trained",
        "remove the row, or give a turn a weight of 1",
        code="no-trained-token",
    )


@dataclass(frozen=True)
class EncodedChat:
    """A chat as tokens. `split` says whether the text was tokenised in pieces at a turn border."""

    example: Example
    split: bool
    spans: Spans


class Encoding:
    """A tokenizer with the recipe's `data` settings. If `learned` is False, rows need no trained end token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: Data, *, learned: bool = True):
        self.tokenizer = tokenizer
        self.system, self.template = data.system, data.template
        self.templated = data.template != "none" and bool(tokenizer.chat_template)
        self.prompt_format = data.prompt_format
        self.turns, self.train_roles = data.turns, tuple(data.train_roles)
        self.append_only = data.template == "auto"
        """Whether chats that the tokenizer's template rewrites are rendered with its append-only version."""
        self.require_end = data.require_end and learned
        self.special = special_ids(tokenizer)
        self.unseparated = 0
        """Number of prompts joined to a response without a space or line break between them."""
        # Tokens that the tokenizer puts before plain text: a BOS token, or nothing.
        self.opening: list[int] = list(tokenizer("")["input_ids"])
        if data.system and not self.templated:
            raise Refusal.at(
                "data.system",
                "rows without a chat template cannot have a system message",
                "remove it",
                code="no-chat-template",
            )

    def ids(self, text: str) -> list[int]:
        """Returns the tokens of the text; no special tokens are added."""
        return token_ids(self.tokenizer, text)

    def chat(self, messages: list[Message], origin: Origin, inputs: TemplateInputs = NO_INPUTS) -> list[EncodedChat]:
        """Encodes a chat; the turns that `data.turns` and `data.train_roles` select are trained. With `data.turns:
        each` there is one sequence per turn."""
        check_messages(messages, origin)
        self.need_template(origin)
        messages = self.with_system(messages)
        if self.turns == "all":
            rendered = [
                render_chat(
                    self.tokenizer, messages, origin, inputs, roles=self.train_roles, append_only=self.append_only
                )
            ]
        else:
            turns = trained_messages(messages)[0 if self.turns == "each" else -1 :]
            if not turns:
                raise no_trained_token(origin)
            rendered = [
                render_turn(self.tokenizer, messages, turn, origin, inputs, append_only=self.append_only)
                for turn in turns
            ]
        return [EncodedChat(*encode_spans(self.tokenizer, spans, origin), spans) for spans in rendered]

    def joined(self, prompt: str, response: str, origin: Origin) -> Example:
        """Encodes prompt and response separately. Only the response and the end token are trained."""
        prompt = with_image_surroundings(self.tokenizer, formatted(prompt, self.prompt_format))
        self.unseparated += bool(prompt[-1:].strip() and response[:1].strip())
        before = self.opening + self.ids(prompt)
        after = self.ids(response) + self.end(origin)
        return Example(array("q", before + after), bytes([0] * len(before) + [1] * len(after)), origin)

    def text(self, text: str, origin: Origin) -> Example:
        """Encodes plain text; all its tokens are trained."""
        after = self.ids(with_image_surroundings(self.tokenizer, text)) + self.end(origin)
        trained = bytes([0] * len(self.opening) + [1] * len(after))
        return Example(array("q", self.opening + after), trained, origin)

    def with_system(self, messages: list[Message]) -> list[Message]:
        return after_system(messages, self.system)

    def need_template(self, origin: Origin) -> None:
        if self.template == "none":
            raise Refusal.at(
                origin,
                "the row is a chat (messages, system message, tools or template arguments), and data.template is none",
                "set data.template to auto, or give rows of plain text",
                code="no-chat-template",
            )
        if not self.tokenizer.chat_template:
            raise Refusal.at(
                origin,
                "the row contains a chat, but the tokenizer has no chat template",
                "set data.template, use a model whose tokenizer has a chat template, or use rows of plain text",
                code="no-chat-template",
            )

    def end(self, origin: Origin) -> list[int]:
        if self.tokenizer.eos_token_id is not None:
            return [self.tokenizer.eos_token_id]
        if self.require_end:
            raise Refusal.at(
                origin,
                "the tokenizer has no eos token to train as the end of a response",
                "set data.require_end=false",
                code="no-end-token",
            )
        return []

    def checked(self, example: Example) -> Example:
        """Returns the example. Refuses a row with two BOS tokens, without trained tokens, or without an end token."""
        self.refuse_two_openings(example)
        if not example.targets:
            raise no_trained_token(example.origin)
        last = last_trained(example)
        if self.require_end and last not in self.special:
            token = self.tokenizer.decode([last])
            raise Refusal.at(
                example.origin,
                f"the last trained token is {token!r}, not an end token: the model would not learn to stop",
                "use a chat template that ends assistant turns with the end token, or set data.require_end=false",
                code="no-end-token",
            )
        return example

    def refuse_two_openings(self, example: Example) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and list(example.ids[:2]) == [bos, bos]:
            raise Refusal.at(
                example.origin,
                f"starts with two {self.tokenizer.bos_token!r} tokens",
                "the rows or the template already contain the BOS token; remove it from the rows",
                code="two-bos-tokens",
            )


def after_system(messages: list[Message], system: str | None) -> list[Message]:
    """Returns the chat with `system` as system message, if the chat has no system message or an empty one."""
    present = [message for message in messages if message["role"] in ("system", "developer")]
    if not system or any(str(message["content"]).strip() for message in present):
        return messages
    return [{"role": "system", "content": system}, *(message for message in messages if message not in present)]


def written(prompt: Any, form: str | None, origin: Origin) -> Any:
    """Applies `data.prompt_format` to a text, or to the only user message of a chat."""
    if form is None or isinstance(prompt, str):
        return prompt if form is None else formatted(prompt, form)
    users = [number for number, turn in enumerate(prompt) if turn["role"] == "user"]
    if len(users) != 1 or any(turn["role"] not in ("system", "user") for turn in prompt):
        raise Refusal.at(
            origin,
            "the prompt is a chat of several turns, and data.prompt_format needs a single turn",
            "remove data.prompt_format",
            code="unused-key",
        )
    user = prompt[users[0]]
    turns = list(prompt)
    turns[users[0]] = {**user, "content": formatted(str(user["content"]), form)}
    return turns


def formatted(prompt: str, form: str | None) -> str:
    """Applies `data.prompt_format` to a text."""
    return prompt if form is None else form.replace("{}", prompt, 1)


def last_trained(example: Example) -> int:
    """Returns the last trained token of the row, at which generation must stop."""
    return example.ids[bytes(example.loss_mask).rindex(1)]


def as_chat(prompt: Any) -> list[Any]:
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
