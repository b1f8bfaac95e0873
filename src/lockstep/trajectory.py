"""The record of a trajectory: a finished conversation between the model and an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lockstep.vision.spans import ImageSpan

if TYPE_CHECKING:
    import numpy as np

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
# The names of the metrics of stop reasons begin with STOP. A metric of the environment that has the name of a metric of
# the run is reported with OWN before its name.
STOP, OWN = "stop/", "own/"
# Between the turns of the model in the text that rewards get.
TURN_BREAK = "\n\n"


def with_own(metrics: Mapping[str, float], reported: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of the run with those that the environment or a tool reports. None replaces another one."""
    named = dict(metrics)
    for name, value in reported.items():
        key = f"{OWN}{name}" if name in metrics or name.startswith(STOP) else name
        named[key] = named.get(key, 0.0) + value
    return named


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
    anchor: str | None = None
    """The text that identifies the state in which the turn starts: the `anchor` of the environment's previous answer,
    or of its start."""
    noise: int | None = None
    """The number of the turn for the sampling noise (`turn_key`). None: the index of the turn."""


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
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the environment's attribute `state` contains at the end, for reward functions, if it is a dict of JSON
    values."""
    images: Sequence[tuple[ImageSpan, ...]] = ()
    """The images of each row of the trajectory, in the order of their placeholders. `start` counts the tokens of the
    prompt and of the row. Empty if conversations have no images."""

    @property
    def reward(self) -> float:
        """The sum of the rewards of the turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def model_text(self) -> str:
        """The text of the model alone, one turn per paragraph."""
        return "\n\n".join(str(one.get("content") or "") for one in self.messages if one.get("role") == "assistant")

    def sampled_text(self, ids: list[int], decode: Callable[[list[int]], str]) -> str:
        """Returns the text that the model generated, without the text of the environment. `ids` are the tokens of the
        trajectory."""
        return TURN_BREAK.join(decode(ids[turn.start : turn.stop]) for turn in self.turns)

    def turn_at(self, ids: list[int], end: int, decode: Callable[[list[int]], str]) -> tuple[TurnRecord, int]:
        """Returns the turn that contains character `end` of `sampled_text`, and the number of characters before the
        turn."""
        before = 0
        for turn in self.turns:
            length = len(decode(ids[turn.start : turn.stop])) + len(TURN_BREAK)
            if end <= before + length or turn is self.turns[-1]:
                return turn, before
            before += length
        raise ValueError("the trajectory has no turn")

    def as_dict(self) -> dict[str, Any]:
        """Returns the trajectory without its images as a dict of JSON values, for tapes and logs."""
        values = asdict(replace(self, images=()))
        del values["images"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trajectory:
        """Returns the trajectory that `as_dict` returned as a dict."""
        turns = [
            TurnRecord(**{**turn, "calls": tuple(ToolCall(**call) for call in turn["calls"])})
            for turn in values["turns"]
        ]
        return cls(**{**values, "turns": turns})

    def named_metrics(self) -> dict[str, float]:
        """Returns the metrics by their names in a run: `environment/NAME`, and the stop reason as
        `environment/stop/REASON`."""
        named = {f"environment/{name}": float(value) for name, value in self.metrics.items()}
        return named | {f"environment/{STOP}{self.stop}": 1.0}


@dataclass(frozen=True)
class TrajectoryRow:
    """A row of a trajectory that has several rows, because the chat template changed earlier turns. The tokens of every
    row follow the prompt of the trajectory. A turn is trained in the row in which it was sampled."""

    ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    routes: np.ndarray | None = field(default=None, compare=False)
    """The experts of the first tokens of the prompt and the row (`Completion.routes`)."""


def full_mask(loss_mask: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Returns the mask with one entry per token. An empty mask means that the policy generated every token."""
    if loss_mask and len(loss_mask) != len(ids):
        raise ValueError(f"the loss mask has {len(loss_mask)} entries for {len(ids)} tokens")
    return list(loss_mask) or [1] * len(ids)


def check_rows(rows: Sequence[TrajectoryRow], ids: Sequence[int]) -> None:
    """Raises ValueError if `ids` are not the concatenated ids of the rows."""
    if rows and [token for row in rows for token in row.ids] != list(ids):
        raise ValueError("the ids of the rows are not the ids of the trajectory")


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens that all come from the policy, or all from the environment."""

    policy: bool
    ids: list[int]


def token_runs(ids: Sequence[int], loss_mask: Sequence[int]) -> list[TokenRun]:
    """Splits the tokens of a response into turns of the policy (mask 1) and of the environment (mask 0)."""
    turns: list[TokenRun] = []
    for token, mask in zip(ids, loss_mask, strict=True):
        if not turns or turns[-1].policy != bool(mask):
            turns.append(TokenRun(bool(mask), []))
        turns[-1].ids.append(token)
    return turns
