"""The record of a trajectory: a finished conversation between the model and an environment. Imports no other module of
lockstep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
# The stop reasons of trajectories that a limit cut. The keys of `algorithm.overlong` for truncated responses apply to
# such trajectories.
TRUNCATED = frozenset({MAX_TURNS, MAX_TOOL_CALLS, MAX_TOKENS, CONTEXT_OVERFLOW, TIMEOUT})


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model. `arguments` has the types of the tool's JSON schema, unless `error` is set."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""
    """Why the call cannot run: an unknown tool, or arguments that do not match the schema. A text for the model."""

    def message(self) -> dict[str, Any]:
        """Returns the call as an entry of the field `tool_calls` of an assistant message."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


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

    messages: Sequence[dict[str, Any]]
    """All messages, from the system message on. The model's turns have the role `assistant`."""
    turns: Sequence[TurnRecord]
    stop: str
    """The stop reason: one of `STOP_REASONS`."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The rewards that the environment returned for the finished trajectory, by name: `score` and its parts
    (`score/NAME`), and `group`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The counts of turns, tool calls and parse errors, the seconds in the environment, and the numbers that the
    environment reports."""
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

    def named_metrics(self) -> dict[str, float]:
        """Returns the metrics by their names in a run: `environment/NAME`, and the stop reason as
        `environment/stop/REASON`."""
        named = {f"environment/{name}": float(value) for name, value in self.metrics.items()}
        return named | {f"environment/stop/{self.stop}": 1.0}


@dataclass(frozen=True)
class TrajectoryRow:
    """A row of a trajectory that has several rows, because the chat template changed earlier turns. The tokens of every
    row follow the prompt of the trajectory. A turn is trained in the row in which it was sampled."""

    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
