"""The interface of environments: what an environment receives and returns, and the record of a trajectory."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.environments.messages import Reply, ToolCall
from lockstep.types import Message

# The reasons for which a trajectory ends.
COMPLETED = "completed"
MAX_TURNS = "max_turns"
MAX_TOOL_CALLS = "max_tool_calls"
MAX_TOKENS = "max_tokens"
CONTEXT_OVERFLOW = "context_overflow"
TOOL_ERROR = "tool_error"
TIMEOUT = "timeout"
PARSE_ERROR = "parse_error"
STOP_REASONS = (
    COMPLETED,
    MAX_TURNS,
    MAX_TOOL_CALLS,
    MAX_TOKENS,
    CONTEXT_OVERFLOW,
    TOOL_ERROR,
    TIMEOUT,
    PARSE_ERROR,
)


@dataclass(frozen=True)
class Start:
    """The start of a trajectory, which `reset` returns."""

    messages: Sequence[Message]
    """The messages of the prompt. The chat template renders them."""
    tools: Sequence[dict[str, Any]] = ()
    """The JSON schemas of the tools that the model may call."""
    stop: Sequence[str] = ()
    """Strings that end the first turn of the model."""


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


class Environment(Protocol):
    """One object is one trajectory. Every method may be a coroutine.

    An environment may also have `close()`, which is always called, `score(trajectory)`, which returns a reward or named
    rewards of the finished trajectory, and the class method `score_group(trajectories)`, which returns one reward for
    each trajectory of a prompt.
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


class TokenEnvironment(Protocol):
    """An environment below the level of messages: it receives the sampled token ids and returns token ids."""

    def reset_tokens(self, row: Mapping[str, Any], seed: int) -> TokenTurn | Awaitable[TokenTurn]: ...

    def step_tokens(self, ids: Sequence[int]) -> TokenTurn | Awaitable[TokenTurn]: ...


@dataclass(frozen=True)
class TurnRecord:
    """One turn of the model in a trajectory, with the environment's answer to it."""

    start: int
    """The index of the first sampled token of the turn in `Rollout.ids`."""
    stop: int
    """The index after the last sampled token of the turn."""
    reward: float = 0.0
    finish: str = "stop"
    """`stop` if the model ended the turn, `length` if a token limit cut it."""
    calls: tuple[ToolCall, ...] = ()
    parse_error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """A finished conversation between the model and an environment."""

    messages: Sequence[Message]
    """All messages, from the system message on. The model's turns have the role `assistant`."""
    turns: Sequence[TurnRecord]
    stop: str
    """The stop reason: one of `STOP_REASONS`."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The rewards that the environment returned for the finished trajectory, by name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the environment's attribute `info` contains at the end, for reward functions. The values are JSON."""

    @property
    def reward(self) -> float:
        """The sum of the rewards of the turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def model_text(self) -> str:
        """The text of the model alone, one turn per paragraph."""
        return "\n\n".join(str(one.get("content") or "") for one in self.messages if one.get("role") == "assistant")
