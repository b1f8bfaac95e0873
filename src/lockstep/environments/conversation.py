"""The tokens of a conversation between the model and an environment: token in, token out.

Sampled token ids are kept and never tokenised again. Only new messages are rendered and tokenised. The chat template
renders the conversation with a mark instead of the model's last turn; the text after the end token of the marked turn
is what follows the sampled tokens. It begins with separators of the template, such as a line break, and ends with the
generation prompt. All these tokens are context: their loss mask is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data.encode.chat_text import ChatText, TemplateInputs
from lockstep.data.encode.prompt_rows import prompt_ids
from lockstep.data.encode.tokenizer_cache import token_ids
from lockstep.environments.environment import Reply
from lockstep.environments.json_schema import shown
from lockstep.environments.message_images import expanded, with_placeholders, without_images
from lockstep.errors import Refusal
from lockstep.trajectory import ToolCall, TrajectoryRow
from lockstep.types import Completion, Message, Origin, Question
from lockstep.vision.processors import ImageTokens
from lockstep.vision.spans import ImageRef, ImageSpan, same_images_up_to

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The marks of the content and of the reasoning of a turn. No template and no model writes them.
_MARK, _REASONING = "Zq0Xk0Zq", "Zq1Xk1Zq"


class TokenRow:
    """The tokens of the current row of a trajectory, with their loss mask and log-probs, and the earlier rows. Each row
    begins with a `head`: the prompt in the first row, the rendered conversation in a later row."""

    def __init__(self, prompt: Sequence[int], images: Sequence[ImageSpan] = ()):
        self.prompt = self.head = list(prompt)
        self.ids: list[int] = []
        """The tokens after the head."""
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.routes: np.ndarray | None = None
        """The experts of the first tokens of the head and the ids (`Completion.routes`)."""
        self.images = tuple(images)
        """The images of the current row. `start` counts the tokens of the head and the tokens after it."""
        self._earlier: list[tuple[list[int], TrajectoryRow, tuple[ImageSpan, ...]]] = []

    @property
    def context(self) -> list[int]:
        """The token ids after which the model continues."""
        return [*self.head, *self.ids]

    @property
    def used(self) -> int:
        """The number of tokens of the current row beyond the length of the prompt."""
        return len(self.head) + len(self.ids) - len(self.prompt)

    @property
    def number(self) -> int:
        """The number of the current row."""
        return len(self._earlier)

    def add_turn(self, turn: Completion) -> tuple[int, int]:
        """Appends sampled tokens. Returns their start and stop indices after the head of the current row."""
        start = len(self.ids)
        self.ids += turn.ids
        self.loss_mask += [1] * len(turn.ids)
        self.logprobs += turn.logprobs
        self.routes = _with_routes(self.routes, turn.routes)
        return start, start + len(turn.ids)

    def add_context(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> None:
        """Appends tokens that the model did not sample, with their images."""
        before = len(self.head) + len(self.ids)
        self.images += tuple(replace(image, start=image.start + before) for image in images)
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def start_row(self, head: Sequence[int], images: Sequence[ImageSpan] = ()) -> None:
        """Begins a new row."""
        self._earlier = self._every()
        self.head, self.ids, self.loss_mask, self.logprobs, self.routes = list(head), [], [], [], None
        self.images = tuple(images)

    def _every(self) -> list[tuple[list[int], TrajectoryRow, tuple[ImageSpan, ...]]]:
        """Returns the head, the tokens after it and the images of each row."""
        current = TrajectoryRow(self.ids, self.loss_mask, self.logprobs, self.routes)
        return [*self._earlier, (self.head, current, self.images)]

    def row_images(self) -> list[tuple[ImageSpan, ...]]:
        """Returns the images of each row."""
        return [images for *_, images in self._every()]

    def rows(self) -> tuple[list[int], list[TrajectoryRow]]:
        """Returns the prompt that all rows have in common, and the rows after this prompt."""
        every = self._every()
        shared = _common([(head, images) for head, _, images in every])
        rows = [
            TrajectoryRow(
                head[shared:] + row.ids,
                [0] * len(head[shared:]) + row.loss_mask,
                [0.0] * len(head[shared:]) + row.logprobs,
                row.routes,
            )
            for head, row, _ in every
        ]
        return self.prompt[:shared], rows

    def offsets(self) -> list[int]:
        """Returns for each row the index of the first token after its head in the concatenated rows."""
        shared, found, before = len(self.rows()[0]), [], 0
        for head, row, _ in self._every():
            found.append(before + len(head) - shared)
            before += len(head) - shared + len(row.ids)
        return found


def _with_routes(before: np.ndarray | None, turn: np.ndarray | None) -> np.ndarray | None:
    """Returns the experts of a row after a further turn. Tokens of earlier turns keep the experts with which these
    turns were sampled, even if the engine has computed the tokens again."""
    return turn if before is None or turn is None else np.concatenate([before, turn[len(before) :]])


def _common(heads: Sequence[tuple[Sequence[int], Sequence[ImageSpan]]]) -> int:
    """Returns the length of the longest common prefix of tokens and images."""
    (first, images), *others = heads
    length = len(first)
    for other, of_other in others:
        pairs = zip(first[:length], other, strict=False)
        length = next((place for place, (one, two) in enumerate(pairs) if one != two), min(length, len(other)))
        length = same_images_up_to(images, of_other, length)
    return length


@dataclass(frozen=True)
class Suffix:
    """The tokens that new messages add after the sampled tokens. With `new_row` they are a new row instead: the
    conversation as the chat template renders it."""

    ids: list[int]
    new_row: bool = False
    text: str = ""
    """The text of the ids. Only with `rollout.history=as_template`."""
    images: tuple[ImageSpan, ...] = ()
    """The images of the ids."""
    refs: tuple[ImageRef, ...] = ()
    """The images of the new messages."""
    messages: tuple[Message, ...] = ()
    """The new messages, with placeholders for their images."""


@dataclass(frozen=True)
class _AfterTurn:
    """What a chat template renders after an assistant turn: the end token of the turn, and the text after it."""

    end: str
    text: str
    full: str
    """The text of the conversation, with marks in the turn."""
    opens: bool = False
    """Whether `end` is the first token of the next message, because the template has no end token (GLM)."""


@dataclass
class ChatFormat:
    """The chat template of a run, as far as conversations need it. `end_ids` are the token ids that end a turn.
    `images` writes the images of messages, if the model reads images."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int] = frozenset()
    history: str = "keep"
    images: ImageTokens | None = None
    _specials: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        if self.images is not None:
            self.tokenizer.image_family = self.images.family
        table = getattr(self.tokenizer, "added_tokens_decoder", {})  # some tokenizer classes have no such table
        added = [token.content for token in table.values() if token.special]
        words = sorted({word for word in (*added, *self.tokenizer.all_special_tokens) if word}, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, words)) or r"(?!)")

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def render(self, chat: Sequence[Message], inputs: TemplateInputs, origin: Origin, *, open_turn: bool) -> str:
        return ChatText(self.tokenizer, list(chat), origin, inputs).upto(len(chat), open_turn=open_turn)

    def after_turn(
        self, before: Sequence[Message], turn: Message, new: Sequence[Message], inputs: TemplateInputs, origin: Origin
    ) -> _AfterTurn:
        """Renders new messages after an assistant turn, which contains marks, and the generation prompt."""
        full = self.render([*before, turn, *new], inputs, origin, open_turn=True)
        closed = self.render([*before, turn], inputs, origin, open_turn=False)
        marks = closed.count(_MARK)
        after, pieces = closed.rpartition(_MARK)[2], full.split(_MARK, marks)
        if marks and len(pieces) == marks + 1:
            rest, ends = pieces[marks], list(self._specials.finditer(after))
            if ends and rest.startswith(after):
                return _AfterTurn(ends[-1].group(), rest[ends[-1].end() :], full)
            # Some templates end the last turn of a closed chat with another token (gpt-oss), or have no end token.
            opens = not ends and rest.startswith(after)
            other = self._specials.match(rest, len(after) if opens else 0)
            if other is not None and (opens or not turn.get("tool_calls")):
                return _AfterTurn(other.group(), rest[other.end() :], full, opens)
        raise Refusal.at(
            origin,
            "the chat template does not end an assistant turn with a special token, so no messages can follow it",
            "use another template (data.template), or a token-level environment (reset_tokens, step_tokens)",
            code="no-end-token",
        )

    def encode_after(self, end: str, text: str, origin: Origin) -> list[int]:
        """Returns the token ids of the end token and of the text after it. The text is tokenised behind its end token,
        because some tokenizers treat the start of a text differently."""
        ids, end_id = token_ids(self.tokenizer, end + text), self.tokenizer.convert_tokens_to_ids(end)
        if end_id not in ids[:2]:
            raise Refusal.at(
                origin,
                f"the end token {end!r} of the chat template is not a single token of the tokenizer",
                "use another template (data.template)",
                code="unknown-token",
            )
        return ids[ids.index(end_id) :]


class ChatConversation(TokenRow):
    """A conversation of messages that a chat template renders."""

    def __init__(
        self,
        chat: ChatFormat,
        question: Question,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ):
        self.chat, self.origin = chat, question.origin
        self.start, self.refs = with_placeholders(messages, chat.images, self.origin)
        self.messages = list(self.start)
        asked = replace(question, prompt=self.start, tools=tuple(tools) or question.tools)
        self.tools = asked.tools
        self.inputs = TemplateInputs(asked.tools, question.template_arguments)
        ids = prompt_ids(chat.tokenizer, asked)
        super().__init__(*expanded(ids, self.refs, chat.images, self.origin))
        keeps = chat.history == "keep"
        self.text = "" if keeps else chat.render(self.start, self.inputs, self.origin, open_turn=True)
        """The text of the current row. Only with `rollout.history=as_template`."""

    def add_reply(self, reply: Reply) -> Reply:
        """Adds the message of the model's turn. Returns the turn with parse errors for the calls that the chat template
        refuses."""
        reply = self._with_template_errors(reply)
        self.messages.append(reply.message())
        return reply

    def _with_template_errors(self, reply: Reply) -> Reply:
        if not reply.calls or self._renders(reply, reply.calls):
            return reply
        if not self.tools:  # the parser has reported the calls
            return replace(reply, calls=())
        errors, calls = [reply.parse_error] if reply.parse_error else [], list[ToolCall]()
        before = sum(len(message.get("tool_calls") or ()) for message in self.messages)
        for number, call in enumerate(reply.calls, 1):
            label, named = f"Tool call {number} ({call.name})", replace(call, id=f"call{before + number:05}")
            if self._renders(reply, [call]):
                calls.append(call)
            elif self._renders(reply, [named]):
                error = f"{label}: the id {shown(call.id)} is not possible here."
                calls.append(replace(named, error=call.error or error))
                errors += [] if call.error else [error]
            else:
                errors.append(f"{label} did not run: the call is not possible here.")
        if len(calls) > 1 and not self._renders(reply, calls):
            errors += [
                f"Tool call {number} ({call.name}) did not run: a turn can have only one tool call."
                for number, call in enumerate(reply.calls, 1)
                if call in calls[1:]
            ]
            calls = calls[:1]
        return replace(reply, calls=tuple(calls), parse_error="\n".join(errors))

    def _renders(self, reply: Reply, calls: Sequence[ToolCall]) -> bool:
        """Returns whether the template renders the turn with these calls, and an answer: the results of the calls, or a
        user message if there are no tools."""
        answer = [_result(call) for call in calls] if self.tools else [_QUESTION]
        try:
            self._after(replace(reply, calls=tuple(calls)), answer)
        except Refusal:
            return False
        return True

    def _after(self, reply: Reply, new: Sequence[Message]) -> _AfterTurn:
        turn = _marked(replace(reply, reasoning=""))
        return self.chat.after_turn(self.start, turn, new, self.inputs, self.origin)

    def extension(self, reply: Reply, new: Sequence[Message]) -> Suffix:
        """Returns the tokens of new messages after the model's last turn, `reply`, which is the last message."""
        new, refs = with_placeholders(new, self.chat.images, self.origin)
        if self.chat.history == "as_template":
            try:
                return self._with_images(self._as_template(reply, new), new, refs)
            except Refusal:
                pass  # the template refuses the whole conversation, but maybe not the new messages
        return self._with_images(self._appended(reply, new), new, refs)

    def _with_images(self, suffix: Suffix, new: Sequence[Message], refs: Sequence[ImageRef]) -> Suffix:
        """Returns the suffix with the tokens of its images. A new row has all images of the conversation."""
        written = [*self.refs, *refs] if suffix.new_row else refs
        ids, images = expanded(suffix.ids, written, self.chat.images, self.origin)
        return replace(suffix, ids=ids, images=images, refs=tuple(refs), messages=tuple(new))

    def _appended(self, reply: Reply, new: Sequence[Message]) -> Suffix:
        """Returns what the template renders after the end of the model's last turn."""
        try:
            after = self._after(reply, new)
        except Refusal:
            if not reply.calls:
                raise
            # Some templates want the results of tools after a call. The tokens of the turn stay as sampled.
            after = self._after(replace(reply, content=reply.text, calls=()), new)
        ids = self.chat.encode_after(after.end, after.text, self.origin)
        last = self.ids[-1:]
        ended = last == ids[:1] or (not self.chat.end_ids.isdisjoint(last) and not after.opens)
        text = f"{self._held(reply)}{'' if ended else after.end}{after.text}" if self.text else ""
        return Suffix(ids[1:] if ended else ids, text=text)

    def _held(self, reply: Reply) -> str:
        """Returns the text of the current row with the model's last turn."""
        return self.text + self.chat.decode(list(reply.ids))

    def _as_template(self, reply: Reply, new: Sequence[Message]) -> Suffix:
        """Returns what the template renders after the text of the row; a new row if the template renders the row itself
        differently."""
        tokenizer = self.chat.tokenizer
        full = self.chat.render([*self.messages, *new], self.inputs, self.origin, open_turn=True)
        held = self._held(reply)
        if not full.startswith(held):
            return Suffix(token_ids(tokenizer, full), new_row=True, text=full)
        text = full[len(held) :]
        if not self.chat.end_ids.isdisjoint(self.ids[-1:]):
            end = self.chat.decode([self.ids[-1]])
            return Suffix(self.chat.encode_after(end, text, self.origin)[1:], text=full)
        return Suffix(token_ids(tokenizer, text), text=full)

    def add_messages(self, fields: Mapping[str, Any]) -> None:
        """Adds messages of the environment that the model does not see, because the conversation ends."""
        self.messages += without_images(fields["messages"])

    def extend(self, extension: Suffix) -> None:
        self.messages += extension.messages
        self.refs += extension.refs
        self.text = extension.text
        if extension.new_row:
            self.start_row(extension.ids, extension.images)
        else:
            self.add_context(extension.ids, extension.images)


class TokenConversation(TokenRow):
    """A conversation with an environment that writes token ids. It has no messages."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, ids: Sequence[int], decode: Callable[[list[int]], str], images: Sequence[ImageSpan] = ()):
        super().__init__(ids, images)
        self._decode = decode
        self.messages: list[Message] = [{"role": "user", "content": decode(list(ids))}]

    def add_reply(self, reply: Reply) -> Reply:
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply

    def add_messages(self, fields: Mapping[str, Any]) -> None:
        self.messages += [{"role": "user", "content": self._decode(fields["ids"])}] if fields["ids"] else []

    def extend(self, extension: Suffix) -> None:
        self.messages.append({"role": "user", "content": self._decode(extension.ids)})
        self.add_context(extension.ids)


def with_ids(
    tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any], prompt: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns the answer of an environment that writes raw text with the token ids of the text. Text that is the
    rendered prompt has the ids of the prompt. Other answers stay unchanged."""
    if "text" not in fields:
        return dict(fields)
    same = bool(prompt) and fields["text"] == prompt_text(tokenizer, prompt)
    return {**fields, "ids": list(prompt) if same else token_ids(tokenizer, fields["text"])}


def prompt_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Returns the text of a tokenized prompt, with its special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def refuse_unknown(ids: Sequence[int], vocabulary: int) -> None:
    """Raises `Refusal` if an environment wrote a token id that the model does not have."""
    unknown = [token for token in ids if token >= vocabulary]
    if unknown:
        raise Refusal.at(
            "token ids",
            f"token id {unknown[0]}, but the model's vocabulary has {vocabulary} tokens",
            "return token ids of this model's tokenizer",
            code="unknown-token",
        )


def _marked(reply: Reply) -> Message:
    """Returns the model's turn with marks instead of its text. The text itself never reaches the template here, so it
    cannot contain an end token."""
    calls = [ToolCall(_name(call.name), {"x": _MARK}, call.id) for call in reply.calls]
    turn: Message = {"role": "assistant", "content": _MARK if reply.content or not calls else ""}
    if reply.reasoning:
        turn["reasoning_content"] = _REASONING
    if calls:
        turn["tool_calls"] = [call.message() for call in calls]
    return turn


def _name(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]{1,64}", name) else "unknown"


def _result(call: ToolCall) -> Message:
    return {"role": "tool", "name": _name(call.name), "content": "!", "tool_call_id": call.id}


@dataclass(frozen=True)
class TemplateReport:
    """What a chat template does with earlier turns. `changes` names the messages after which it changes them."""

    changes: tuple[str, ...]
    refuses: tuple[str, ...]
    """The messages that the template refuses."""
    one_call: bool = False
    """Whether the template refuses a second tool call in a turn. Such a call is a parse error."""

    def sentence(self, history: str) -> str:
        only = "; a turn can have only one tool call" if self.one_call else ""
        if not self.changes:
            return f"the chat template only appends{only}"
        what = "kept as sampled" if history == "keep" else "rendered again in a new row"
        return (
            f"the chat template changes earlier turns after {' and '.join(self.changes)}; they are {what} "
            f"(rollout.history={history}){only}"
        )


_QUESTION: Message = {"role": "user", "content": "?"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "What."}}},
    },
}


def probe_template(chat: ChatFormat, arguments: Mapping[str, Any], tools: bool) -> TemplateReport:
    """Tries the template on small conversations: a user message after a turn, after a turn with reasoning, and the
    result of a tool call."""
    call, second = (ToolCall("look", {"x": "?"}, f"call0000{number}") for number in (1, 2))
    result, both = _result(call), Reply("a", calls=(call, second))
    probes: dict[str, tuple[Reply, Message, tuple[dict[str, Any], ...]]] = {
        "a user message": (Reply("a", "a"), _QUESTION, ()),
        "a user message that follows reasoning": (Reply("a", "a", "b"), _QUESTION, ()),
    }
    if tools:
        probes = {
            "a tool result": (Reply("a", calls=(call,)), result, (_TOOL,)),
            "a tool result that follows reasoning": (Reply("a", "", "b", calls=(call,)), result, (_TOOL,)),
        }
    changes, refuses, origin = list[str](), list[str](), Origin("the chat template", 0)
    for name, (reply, message, given) in probes.items():
        inputs = TemplateInputs(given, arguments)
        try:
            held = chat.render([_QUESTION], inputs, origin, open_turn=True)
            full = chat.after_turn([_QUESTION], _marked(reply), [message], inputs, origin).full
        except Refusal as refusal:
            refuses.append(f"{name}: {refusal.problems[0].why}")
            continue
        if not full.startswith(held) or (reply.reasoning and _REASONING not in full):
            changes.append(name)
    one_call = False
    if tools and not refuses:
        try:
            results = [result, _result(second)]
            chat.after_turn([_QUESTION], _marked(both), results, TemplateInputs((_TOOL,), arguments), origin)
        except Refusal:
            one_call = True
    return TemplateReport(tuple(changes), tuple(refuses), one_call)
