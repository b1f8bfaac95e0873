"""The rows of an agent's trajectory.

A request whose messages extend a recorded conversation continues from the kept token ids of that conversation. If the
conversation already continues elsewhere, the request is a branch: a new row that begins with the same ids. Any other
request, such as one of a sub-agent or one after a compaction, starts a new row with its rendered messages. A turn is
trained in the row in which it was sampled; it is context in rows that branch off after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from lockstep.environments.agents.agent_replies import as_sent
from lockstep.environments.agents.agent_requests import TurnSpec
from lockstep.environments.conversation import ChatConversation, ChatFormat, Suffix, TokenRow
from lockstep.environments.environment import Reply
from lockstep.trajectory import TurnRecord
from lockstep.types import Completion, Message, Question
from lockstep.vision.spans import ImageSpan, cut_images


@dataclass(frozen=True)
class MessageKey:
    """What identifies a message. Two messages are the same if their keys are equal, apart from reasoning that an agent
    did not send back."""

    text: str
    reasoning: str

    def matches(self, other: MessageKey) -> bool:
        """Returns whether the message that an agent sent, `other`, is this message."""
        return self.text == other.text and other.reasoning in ("", self.reasoning)


def message_key(message: Mapping[str, Any]) -> MessageKey:
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    content = message["content"] or ""
    if isinstance(content, list):  # images are long
        content = sha256(json.dumps(content).encode()).hexdigest()
    fields = [message["role"], content, calls, message.get("tool_call_id", "")]
    return MessageKey(json.dumps(fields, sort_keys=True), str(message.get("reasoning_content") or ""))


@dataclass(frozen=True)
class TurnEnd:
    """The end of a turn, from which later requests continue: the numbers of messages and of tokens at the end."""

    reply: Reply
    messages: int
    ids: int
    text: str
    """The text of the row before the turn. Only with `rollout.history=as_template`."""


@dataclass(eq=False)
class AgentRow:
    """A row: a conversation, and the ends of its turns."""

    conversation: ChatConversation
    keys: list[MessageKey]
    """The keys of all messages of the conversation."""
    ends: list[TurnEnd] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    shown: int = 0
    """The number of messages at the start that an earlier row shows."""
    last: int = -1
    """The number of the trajectory's last turn in this row."""
    session: int = -1
    """The engine's session of the row."""

    def held(self, end: TurnEnd | None) -> ChatConversation:
        """Returns a copy of the conversation up to the end of a turn; with None, up to the last message."""
        made = copy(self.conversation)
        if end is None:
            return made
        made.ids, made.loss_mask, made.logprobs = made.ids[: end.ids], made.loss_mask[: end.ids], []
        made.messages, made.text = made.messages[: end.messages], end.text
        made.images = self.images(end)
        made.refs = made.refs[: len(made.images)]  # a row has all images of its messages
        return made

    def images(self, end: TurnEnd) -> tuple[ImageSpan, ...]:
        """Returns the images up to the end of a turn."""
        return cut_images(self.conversation.images, slice(0, len(self.conversation.head) + end.ids))

    def is_tip(self, end: TurnEnd) -> bool:
        return end.ids == len(self.conversation.ids)


@dataclass(frozen=True)
class Continuation:
    """How a request continues: the conversation after which its new messages come, the row that they extend, or None
    for a new row, and the token ids after which the model continues."""

    conversation: ChatConversation
    keys: list[MessageKey]
    context: list[int]
    images: tuple[ImageSpan, ...]
    """The images of the context."""
    suffix: Suffix | None = None
    row: AgentRow | None = None
    shown: int = 0

    @property
    def used(self) -> int:
        """The number of tokens of the row beyond the length of the prompt."""
        return len(self.context) - len(self.conversation.prompt)


class AgentRows:
    """The rows of one trajectory."""

    def __init__(self, chat: ChatFormat, question: Question):
        self.chat, self.question = chat, question
        self.rows: list[AgentRow] = []

    def find(self, spec: TurnSpec) -> Continuation:
        """Returns how a request continues. Raises `Refusal` if the chat template does not accept the messages."""
        keys = [message_key(message) for message in spec.messages]
        found = self._extended(keys, spec)
        if found is None:
            question = replace(self.question, tools=())
            conversation = ChatConversation(self.chat, question, spec.messages, spec.tools)
            return Continuation(conversation, keys, conversation.context, conversation.images)
        row, end = found
        new = list(spec.messages[end.messages :])
        tip = row.is_tip(end)
        held = row.conversation if tip else row.held(end)
        suffix = held.extension(end.reply, new)
        continues = row if tip and not suffix.new_row else None
        known = [*row.keys[: end.messages], *keys[end.messages :]]
        context, images = list(suffix.ids), suffix.images
        if not suffix.new_row:
            before = len(held.context)
            images = (*held.images, *(replace(image, start=image.start + before) for image in images))
            context = [*held.context, *context]
        # Earlier messages are shown in the row in which they were new.
        return Continuation(held, known, context, images, suffix, continues, shown=end.messages)

    def _extended(self, keys: Sequence[MessageKey], spec: TurnSpec) -> tuple[AgentRow, TurnEnd] | None:
        """Returns the turn after which the messages of a request continue: the last one of the longest conversation
        that they extend. A turn after which no other request continued comes first."""
        found = [
            (end.messages, row.is_tip(end), number, row, end)
            for number, row in enumerate(self.rows)
            for end in row.ends
            if len(keys) > end.messages
            and list(row.conversation.tools) == list(spec.tools)
            and all(one.matches(other) for one, other in zip(row.keys[: end.messages], keys, strict=False))
        ]
        if not found:
            return None
        return max(found, key=lambda one: one[:3])[3:]

    def begin(self, place: Continuation) -> AgentRow:
        """Adds the messages of a request. Returns the row in which its turn will be sampled."""
        if place.row is not None:
            assert place.suffix is not None
            place.row.conversation.extend(place.suffix)
            place.row.keys = list(place.keys)
            return place.row
        conversation = place.conversation
        if place.suffix is not None:
            conversation = copy(conversation)
            conversation.messages = [*conversation.messages, *place.suffix.messages]
            conversation.refs = [*conversation.refs, *place.suffix.refs]
            conversation.text = place.suffix.text
            conversation.head, conversation.images = place.context, place.images
            conversation.ids, conversation.loss_mask, conversation.logprobs = [], [], []
        row = AgentRow(conversation, list(place.keys), shown=place.shown)
        self.rows.append(row)
        return row

    def branch(self, row: AgentRow) -> AgentRow:
        """Returns a new row that begins with all tokens of a row, for another turn after the same messages."""
        conversation = copy(row.conversation)
        conversation.messages, conversation.refs = list(conversation.messages), list(conversation.refs)
        conversation.head = row.conversation.context
        conversation.ids, conversation.loss_mask, conversation.logprobs = [], [], []
        made = AgentRow(conversation, list(row.keys), shown=len(conversation.messages))
        self.rows.append(made)
        return made

    def finish(
        self, row: AgentRow, reply: Reply, completion: Completion, number: int, noise: int, versions: Sequence[int]
    ) -> TurnRecord:
        """Adds a sampled turn to its row. `number` counts the turns of the trajectory."""
        conversation = row.conversation
        text = conversation.text
        start, stop = conversation.add_turn(completion)
        sent = as_sent(reply)
        conversation.messages = [*conversation.messages, {**sent.message(), "turn": number}]
        row.keys.append(message_key(sent.message()))
        row.ends.append(TurnEnd(reply, len(row.keys), stop, text))
        record = TurnRecord(start, stop, 0.0, reply.finish, reply.calls, reply.parse_error, noise=noise)
        row.turns.append(record)
        row.versions += versions
        row.last = number
        return record

    def drop(self, row: AgentRow) -> None:
        """Removes the messages of a request that was not answered."""
        if not row.ends:
            self.rows.remove(row)
            return
        end = row.ends[-1]
        held = row.held(end)
        row.conversation.ids, row.conversation.loss_mask = held.ids, held.loss_mask
        row.conversation.logprobs = row.conversation.logprobs[: end.ids]
        row.conversation.messages, row.conversation.text = held.messages, held.text
        row.conversation.images, row.conversation.refs = held.images, held.refs
        row.keys = row.keys[: end.messages]

    def merged(self) -> MergedRows:
        """Returns the rows with a turn as one record. The row with the last turn comes last."""
        return MergedRows(sorted((row for row in self.rows if row.ends), key=lambda row: row.last))


class MergedRows(TokenRow):
    """The tokens and messages of all rows of a trajectory. Each message has the number of its `row`, and each sampled
    message the index of its `turn`."""

    tools: Sequence[dict[str, Any]] = ()

    def __init__(self, rows: Sequence[AgentRow]):
        super().__init__(rows[0].conversation.head, rows[0].images(rows[0].ends[-1]))
        for number, row in enumerate(rows):
            if number:
                self.start_row(row.conversation.head, row.images(row.ends[-1]))
            last = row.ends[-1].ids
            self.ids, self.loss_mask = row.conversation.ids[:last], row.conversation.loss_mask[:last]
            self.logprobs = row.conversation.logprobs[:last]
        self.turns = [record for row in rows for record in row.turns]
        self.turn_rows = [number for number, row in enumerate(rows) for _ in row.turns]
        self.versions = [version for row in rows for version in row.versions]
        numbers = iter(range(len(self.turns)))
        # A row shows its messages up to its last turn; messages that an earlier row shows are left out.
        self.messages: list[Message] = [
            {**message, "row": number, **({"turn": next(numbers)} if "turn" in message else {})}
            for number, row in enumerate(rows)
            for message in row.conversation.messages[row.shown : row.ends[-1].messages]
        ]
