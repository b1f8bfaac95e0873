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

from lockstep.data.encode.chat_text import ChatText, TemplateInputs
from lockstep.data.encode.prompt_rows import prompt_ids
from lockstep.data.encode.tokenizer_cache import token_ids
from lockstep.environments.messages import Reply
from lockstep.errors import Refusal
from lockstep.trajectory import ToolCall, TrajectoryRow
from lockstep.types import Completion, Message, Origin, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The marks of the content and of the reasoning of a turn. No template and no model writes them.
_MARK, _REASONING = "Zq0Xk0Zq", "Zq1Xk1Zq"


class TokenRow:
    """The tokens of one row after the prompt, with their loss mask and log-probs."""

    def __init__(self, prompt: Sequence[int]):
        self.prompt = list(prompt)
        self.ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.finished: list[TrajectoryRow] = []
        """The earlier rows of the trajectory."""

    @property
    def context(self) -> list[int]:
        """The token ids after which the model continues."""
        return [*self.prompt, *self.ids]

    @property
    def before(self) -> int:
        """The number of tokens in the earlier rows."""
        return sum(len(row.ids) for row in self.finished)

    @property
    def rows(self) -> list[TrajectoryRow]:
        return [*self.finished, TrajectoryRow(self.ids, self.loss_mask, self.logprobs)]

    def add_turn(self, turn: Completion) -> tuple[int, int]:
        """Appends sampled tokens. Returns their start and stop indices in the trajectory."""
        start = self.before + len(self.ids)
        self.ids += turn.ids
        self.loss_mask += [1] * len(turn.ids)
        self.logprobs += turn.logprobs
        return start, start + len(turn.ids)

    def add_context(self, ids: Sequence[int]) -> None:
        """Appends tokens that the model did not sample."""
        self.ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def start_row(self, ids: Sequence[int]) -> None:
        """Begins a new row with context tokens after the prompt."""
        self.finished.append(TrajectoryRow(self.ids, self.loss_mask, self.logprobs))
        self.ids, self.loss_mask, self.logprobs = [], [], []
        self.add_context(ids)


@dataclass(frozen=True)
class Extension:
    """The tokens that new messages add. With `new_row` they follow the prompt in a new row, else the sampled tokens."""

    ids: list[int]
    new_row: bool = False


@dataclass
class ChatFormat:
    """The chat template of a run, as far as conversations need it. `end_ids` are the token ids that end a turn."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int] = frozenset()
    history: str = "keep"
    _specials: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        words = sorted({word for word in (*added, *self.tokenizer.all_special_tokens) if word}, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, words)) or r"(?!)")

    def render(self, chat: Sequence[Message], inputs: TemplateInputs, origin: Origin, *, open_turn: bool) -> str:
        return ChatText(self.tokenizer, list(chat), origin, inputs).upto(len(chat), open_turn=open_turn)

    def after_turn(
        self, before: Sequence[Message], turn: Message, new: Sequence[Message], inputs: TemplateInputs, origin: Origin
    ) -> tuple[str, str, str]:
        """Renders new messages after an assistant turn. Returns the end token of the turn, the text after it up to the
        end of the generation prompt, and the text of the conversation. `turn` contains marks."""
        full = self.render([*before, turn, *new], inputs, origin, open_turn=True)
        closed = self.render([*before, turn], inputs, origin, open_turn=False)
        marks = closed.count(_MARK)
        after, pieces = closed.rpartition(_MARK)[2], full.split(_MARK, marks)
        ends = list(self._specials.finditer(after))
        if marks and len(pieces) == marks + 1 and ends:
            rest, end = pieces[marks], ends[-1]
            if rest.startswith(after):
                return end.group(), rest[end.end() :], full
            # Some templates end the last turn of a closed chat with another token (gpt-oss).
            other = self._specials.match(rest)
            if other is not None and not turn.get("tool_calls"):
                return other.group(), rest[other.end() :], full
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

    def add_reply(self, reply: Reply) -> None:
        self.messages.append(reply.message())

    def extension(self, reply: Reply, new: Sequence[Message]) -> Extension:
        """Returns the tokens of new messages after the model's last turn, `reply`, which is the last message."""
        turn, history = _marked(reply), self.messages[:-1]
        before = self.start if self.chat.history == "keep" else history
        end, text, full = self.chat.after_turn(before, turn, new, self.inputs, self.origin)
        if self.chat.history == "as_template":
            held = self.chat.render(history, self.inputs, self.origin, open_turn=True)
            if not full.startswith(held) or (reply.reasoning and _REASONING not in full):
                return Extension(self._rendered(new), new_row=True)
        ids = self.chat.encode_after(end, text, self.origin)
        ended = bool(self.ids) and (self.ids[-1] in self.chat.end_ids or self.ids[-1] == ids[0])
        return Extension(ids[1:] if ended else ids)

    def extend(self, extension: Extension, new: Sequence[Message]) -> None:
        self.messages += new
        if extension.new_row:
            self.start_row(extension.ids)
        else:
            self.add_context(extension.ids)

    def _rendered(self, new: Sequence[Message]) -> list[int]:
        """Returns the tokens of the conversation after its prompt, as the chat template renders it."""
        text = self.chat.render([*self.messages, *new], self.inputs, self.origin, open_turn=True)
        ids = token_ids(self.chat.tokenizer, text)
        if ids[: len(self.prompt)] != self.prompt:
            raise Refusal.at(
                self.origin,
                "the chat template changes the prompt when messages follow, so the rows of a trajectory have no common "
                "prompt",
                "set rollout.history=keep, or use another template (data.template)",
                code="template-unstable",
            )
        return ids[len(self.prompt) :]


class TokenConversation(TokenRow):
    """A conversation with an environment that writes token ids. It has no messages."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, ids: Sequence[int], decode: Callable[[list[int]], str]):
        super().__init__(ids)
        self._decode = decode
        self.messages: list[Message] = [{"role": "user", "content": decode(list(ids))}]

    def add_reply(self, reply: Reply) -> None:
        self.messages.append({"role": "assistant", "content": reply.text})

    def extend(self, extension: Extension, new: Sequence[Message] = ()) -> None:
        self.messages.append({"role": "user", "content": self._decode(extension.ids)})
        self.add_context(extension.ids)


def _marked(reply: Reply) -> Message:
    """Returns the model's turn with marks instead of its text. The text itself never reaches the template here, so it
    cannot contain an end token."""
    calls = [ToolCall(_name(call.name), {"x": _MARK}, call.id) for call in reply.calls]
    turn: Message = {"role": "assistant", "content": _MARK}
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
            "a tool result": (Reply("a", "a", calls=(call,)), result, (_TOOL,)),
            "a tool result that follows reasoning": (Reply("a", "a", "b", calls=(call,)), result, (_TOOL,)),
        }
    changes, refuses = [], []
    for name, (reply, message, given) in probes.items():
        inputs = TemplateInputs(given, arguments)
        try:
            held = chat.render([_QUESTION], inputs, Origin("the chat template", 0), open_turn=True)
            _, _, full = chat.after_turn([_QUESTION], _marked(reply), [message], inputs, Origin("the chat template", 0))
        except Refusal as refusal:
            refuses.append(f"{name}: {refusal.problems[0].why}")
            continue
        if not full.startswith(held) or (reply.reasoning and _REASONING not in full):
            changes.append(name)
    return TemplateReport(tuple(changes), tuple(refuses))
