"""The tokens of a conversation between the model and an environment: token in, token out.

Sampled token ids are kept and never tokenised again. Only new messages are rendered and tokenised. The chat template
renders the conversation with a mark instead of the model's last turn; the text after the end token of the marked turn
is what follows the sampled tokens. It begins with separators of the template, such as a line break, and ends with the
generation prompt. All these tokens are context: their loss mask is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.data.encode.chat_text import ChatText, TemplateInputs
from lockstep.data.encode.prompt_rows import prompt_ids
from lockstep.data.encode.tokenizer_cache import token_ids
from lockstep.environments.environment import Reply
from lockstep.errors import Refusal
from lockstep.trajectory import ToolCall, TrajectoryRow
from lockstep.types import Completion, Message, Origin, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The marks of the content and of the reasoning of a turn. No template and no model writes them.
_MARK, _REASONING = "Zq0Xk0Zq", "Zq1Xk1Zq"


class TokenRow:
    """The tokens of the current row of a trajectory, with their loss mask and log-probs, and the earlier rows. Each row
    begins with a `head`: the prompt in the first row, the rendered conversation in a later row."""

    def __init__(self, prompt: Sequence[int]):
        self.prompt = self.head = list(prompt)
        self.ids: list[int] = []
        """The tokens after the head."""
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self._earlier: list[tuple[list[int], TrajectoryRow]] = []

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
        return start, start + len(turn.ids)

    def add_context(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model did not sample."""
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def start_row(self, head: Sequence[int]) -> None:
        """Begins a new row."""
        self._earlier.append((self.head, TrajectoryRow(self.ids, self.loss_mask, self.logprobs)))
        self.head, self.ids, self.loss_mask, self.logprobs = list(head), [], [], []

    def rows(self) -> tuple[list[int], list[TrajectoryRow]]:
        """Returns the prompt that all rows have in common, and the rows after this prompt."""
        every = [*self._earlier, (self.head, TrajectoryRow(self.ids, self.loss_mask, self.logprobs))]
        shared = _common(head for head, _ in every)
        rows = [
            TrajectoryRow(
                head[shared:] + row.ids,
                [0] * len(head[shared:]) + row.loss_mask,
                [0.0] * len(head[shared:]) + row.logprobs,
            )
            for head, row in every
        ]
        return self.prompt[:shared], rows

    def offsets(self) -> list[int]:
        """Returns for each row the index of the first token after its head in the concatenated rows."""
        shared, found, before = len(self.rows()[0]), [], 0
        for head, row in [*self._earlier, (self.head, TrajectoryRow(self.ids, [], []))]:
            found.append(before + len(head) - shared)
            before += len(head) - shared + len(row.ids)
        return found


def _common(heads: Iterable[Sequence[int]]) -> int:
    """Returns the length of the longest common prefix."""
    first, *others = heads
    length = len(first)
    for other in others:
        pairs = zip(first[:length], other, strict=False)
        length = next((place for place, (one, two) in enumerate(pairs) if one != two), min(length, len(other)))
    return length


@dataclass(frozen=True)
class Suffix:
    """The tokens that new messages add after the sampled tokens. With `new_row` they are a new row instead: the
    conversation as the chat template renders it."""

    ids: list[int]
    new_row: bool = False
    text: str = ""
    """The text of the ids. Only with `rollout.history=as_template`."""


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
    """The chat template of a run, as far as conversations need it. `end_ids` are the token ids that end a turn."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int] = frozenset()
    history: str = "keep"
    _specials: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        table = getattr(self.tokenizer, "added_tokens_decoder", {})  # some tokenizer classes have no such table
        added = [token.content for token in table.values() if token.special]
        words = sorted({word for word in (*added, *self.tokenizer.all_special_tokens) if word}, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, words)) or r"(?!)")

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
        self.start, self.messages = list(messages), list(messages)
        asked = replace(question, prompt=self.start, tools=tuple(tools) or question.tools)
        self.tools = asked.tools
        self.inputs = TemplateInputs(asked.tools, question.template_arguments)
        super().__init__(prompt_ids(chat.tokenizer, asked))
        keeps = chat.history == "keep"
        self.text = "" if keeps else chat.render(self.start, self.inputs, self.origin, open_turn=True)
        """The text of the current row. Only with `rollout.history=as_template`."""

    def add_reply(self, reply: Reply) -> None:
        self.messages.append(reply.message())

    def extension(self, reply: Reply, new: Sequence[Message]) -> Suffix:
        """Returns the tokens of new messages after the model's last turn, `reply`, which is the last message."""
        if self.chat.history == "as_template":
            return self._as_template(reply, new)
        turn = _marked(replace(reply, reasoning=""))
        after = self.chat.after_turn(self.start, turn, new, self.inputs, self.origin)
        ids = self.chat.encode_after(after.end, after.text, self.origin)
        ended = self.ids[-1] == ids[0] or (self.ids[-1] in self.chat.end_ids and not after.opens)
        return Suffix(ids[1:] if ended else ids)

    def _as_template(self, reply: Reply, new: Sequence[Message]) -> Suffix:
        """Returns what the template renders after the text of the row; a new row if the template renders the row itself
        differently."""
        tokenizer = self.chat.tokenizer
        full = self.chat.render([*self.messages, *new], self.inputs, self.origin, open_turn=True)
        held = self.text + str(tokenizer.decode(list(reply.ids), skip_special_tokens=False))
        if not full.startswith(held):
            return Suffix(token_ids(tokenizer, full), new_row=True, text=full)
        text = full[len(held) :]
        if self.ids[-1] in self.chat.end_ids:
            end = str(tokenizer.decode([self.ids[-1]], skip_special_tokens=False))
            return Suffix(self.chat.encode_after(end, text, self.origin)[1:], text=full)
        return Suffix(token_ids(tokenizer, text), text=full)

    def extend(self, extension: Suffix, new: Sequence[Message]) -> None:
        self.messages += new
        self.text = extension.text
        if extension.new_row:
            self.start_row(extension.ids)
        else:
            self.add_context(extension.ids)


class TokenConversation(TokenRow):
    """A conversation with an environment that writes token ids. It has no messages."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, ids: Sequence[int], decode: Callable[[list[int]], str]):
        super().__init__(ids)
        self._decode = decode
        self.messages: list[Message] = [{"role": "user", "content": decode(list(ids))}]

    def add_reply(self, reply: Reply) -> None:
        self.messages.append({"role": "assistant", "content": reply.text})

    def extend(self, extension: Suffix, new: Sequence[Message] = ()) -> None:
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


@dataclass(frozen=True)
class TemplateReport:
    """What a chat template does with earlier turns. `changes` names the messages after which it changes them."""

    changes: tuple[str, ...]
    refuses: tuple[str, ...]
    """The messages that the template refuses."""

    def sentence(self, history: str) -> str:
        if not self.changes:
            return "the chat template only appends"
        what = "kept as sampled" if history == "keep" else "rendered again in a new row"
        return (
            f"the chat template changes earlier turns after {' and '.join(self.changes)}; they are {what} "
            f"(rollout.history={history})"
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
    call = ToolCall("look", {"x": "?"}, "call00001")
    result: Message = {"role": "tool", "name": "look", "content": "!", "tool_call_id": call.id}
    probes: dict[str, tuple[Reply, Message, tuple[dict[str, Any], ...]]] = {
        "a user message": (Reply("a", "a"), _QUESTION, ()),
        "a user message that follows reasoning": (Reply("a", "a", "b"), _QUESTION, ()),
    }
    if tools:
        probes = {
            "a tool result": (Reply("a", calls=(call,)), result, (_TOOL,)),
            "a tool result that follows reasoning": (Reply("a", "", "b", calls=(call,)), result, (_TOOL,)),
        }
    changes, refuses = [], []
    for name, (reply, message, given) in probes.items():
        inputs = TemplateInputs(given, arguments)
        try:
            held = chat.render([_QUESTION], inputs, Origin("the chat template", 0), open_turn=True)
            full = chat.after_turn([_QUESTION], _marked(reply), [message], inputs, Origin("the chat template", 0)).full
        except Refusal as refusal:
            refuses.append(f"{name}: {refusal.problems[0].why}")
            continue
        if not full.startswith(held) or (reply.reasoning and _REASONING not in full):
            changes.append(name)
    return TemplateReport(tuple(changes), tuple(refuses))
