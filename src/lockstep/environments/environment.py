"""The interface of environments: what an environment receives and returns. `lockstep/trajectory.py` has the record of a
finished conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.trajectory import ToolCall
from lockstep.types import Message


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


@dataclass(frozen=True)
class Start:
    """The start of a trajectory, which `reset` returns."""

    messages: Sequence[Message]
    """The messages of the prompt. The chat template renders them."""
    tools: Sequence[dict[str, Any]] = ()
    """The JSON schemas of the tools that the model may call."""
    stop: Sequence[str] = ()
    """Strings that end the first turn of the model."""
    anchor: str | None = None
    """A text that identifies the state at the start, as in `Turn`."""


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to a turn of the model, which `step` returns."""

    messages: Sequence[Message] = ()
    """The next messages for the model, such as the results of its tool calls. Empty if the trajectory ends."""
    reward: float = 0.0
    """The reward of the model's turn. The reward of a trajectory is the sum over its turns."""
    done: bool = False
    stop: Sequence[str] | None = None
    """Strings that end the next turn of the model. None keeps the previous strings."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the run averages over the trajectories of a step."""
    anchor: str | None = None
    """A text that identifies the state that the model sees next. The estimator `gigpo` compares the turns that start in
    states with the same text, among the trajectories of one prompt. None: the state is compared with no other state."""


class Environment(Protocol):
    """One object is one trajectory. Every method may be a coroutine.

    An environment may also have `close()`, which is called at the end, `score(trajectory)`, which returns a reward or
    named rewards of the finished trajectory, and the class method `score_group(trajectories)`, which returns one reward
    for each trajectory of a prompt.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Start | Awaitable[Start]:
        """Starts the trajectory. `row` has the columns of the dataset row. `seed` depends on the run's seed, the row
        and the number of the sample."""
        ...

    def step(self, reply: Reply) -> Turn | Awaitable[Turn]:
        """Returns the answer to a turn of the model."""
        ...


@dataclass(frozen=True)
class TokenTurn:
    """The observation of an environment that works with token ids."""

    ids: Sequence[int] = ()
    """The token ids that follow the last turn of the model. At the start: the prompt."""
    reward: float = 0.0
    done: bool = False
    stop_ids: Sequence[int] | None = None
    """Token ids that end the next turn of the model. None keeps the previous ones."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    anchor: str | None = None
    """A text that identifies the state that the model sees next, as in `Turn`."""


@dataclass(frozen=True)
class TextTurn:
    """The observation of an environment that writes raw text: the run's tokenizer encodes it, without a chat template
    and without special tokens of its own. The text itself has the marks of the template, such as `<|im_start|>`."""

    text: str = ""
    """The text that follows the last turn of the model. At the start: the prompt."""
    reward: float = 0.0
    done: bool = False
    stop: Sequence[str] | None = None
    """Strings that end the next turn of the model. None keeps the previous strings."""
    stop_ids: Sequence[int] | None = None
    """Token ids that end the next turn of the model. None keeps the previous ones."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    anchor: str | None = None
    """A text that identifies the state that the model sees next, as in `Turn`."""


class TextEnvironment(Protocol):
    """An environment below the level of messages that writes raw text. `row["prompt_text"]` is the rendered prompt of
    the row. `reply.text` is the model's turn without the token that ended it."""

    def reset_text(self, row: Mapping[str, Any], seed: int) -> TextTurn | Awaitable[TextTurn]: ...

    def step_text(self, reply: Reply) -> TextTurn | Awaitable[TextTurn]: ...


class TokenEnvironment(Protocol):
    """An environment below the level of messages: it receives the sampled token ids and returns token ids."""

    def reset_tokens(self, row: Mapping[str, Any], seed: int) -> TokenTurn | Awaitable[TokenTurn]: ...

    def step_tokens(self, ids: Sequence[int]) -> TokenTurn | Awaitable[TokenTurn]: ...
