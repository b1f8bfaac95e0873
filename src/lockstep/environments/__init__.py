"""Environments: conversations of the policy with tools and games. `rollout`, `reward`, `methods`, `train` and higher
layers may import this package. It does not import `rollout`."""

from lockstep.environments.environment import (
    Environment,
    Reply,
    Start,
    TextEnvironment,
    TextTurn,
    TokenEnvironment,
    TokenTurn,
    Turn,
)
from lockstep.trajectory import ToolCall, Trajectory, TurnRecord

__all__ = [
    "Environment",
    "Reply",
    "Start",
    "TextEnvironment",
    "TextTurn",
    "TokenEnvironment",
    "TokenTurn",
    "ToolCall",
    "Trajectory",
    "Turn",
    "TurnRecord",
]
