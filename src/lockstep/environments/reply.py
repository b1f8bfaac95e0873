"""The reply of the model in a conversation: its text, and the tool calls that a parser found in it."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.trajectory import ToolCall
from lockstep.types import Message

__all__ = ["Reply", "ToolCall"]


@dataclass(frozen=True)
class Reply:
    """One turn of the model."""

    text: str
    """The turn as sampled, without the tokens that end a turn."""
    content: str = ""
    """The text for the user: without reasoning and without tool calls."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """The calls in the order of the text, also those with an error. Calls that could not be read are not in it."""
    parse_error: str = ""
    """All errors of the turn, as a text for the model. Empty if the turn is valid."""
    finish: str = "stop"
    """`stop` if the model ended the turn, `length` if a token limit cut it."""
    ids: tuple[int, ...] = ()
    """The sampled token ids."""

    @property
    def valid_calls(self) -> tuple[ToolCall, ...]:
        """The calls that can run."""
        return tuple(call for call in self.calls if not call.error)

    def message(self) -> Message:
        """Returns the turn as an assistant message, with the fields that chat templates read."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.message() for call in self.calls]
        return message
