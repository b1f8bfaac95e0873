"""Reward functions of OpenRLHF's form: `reward_func(queries, prompts, labels)` over a batch, asked for one response."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.reward.awaited import awaited

if TYPE_CHECKING:
    from lockstep.types import Message

BATCH_CALL = ("queries", "prompts", "labels")


class BatchFunction:
    """Calls the function with lists of one. A query is the prompt's text and the response; no chat template is in it.

    It returns a list, array or tensor of one number, or a dict of these: `rewards` is the score, the rest is logged.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, prompt: str, solution_str: str, ground_truth: str, **unread: Any) -> dict[str, Any]:
        value = awaited(self._function(queries=[prompt + solution_str], prompts=[prompt], labels=[ground_truth]))
        if not isinstance(value, dict):
            return {"score": _only(value)}
        if "rewards" not in value:
            raise ValueError(f"the dict returned has no rewards, only {', '.join(map(str, value))}")
        logged = value.get("extra_logs")
        more = {key: _only(entry) for key, entry in logged.items()} if isinstance(logged, dict) else {}
        return {**more, "score": _only(value["rewards"])}


def prompt_text(prompt: list[Message]) -> str:
    """The contents of a chat, a line break after each."""
    return "".join(f"{message.get('content')}\n" for message in prompt)


def _only(value: Any) -> Any:
    """The one entry of a list, array or tensor; a plain number is itself."""
    entries = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(entries, list | tuple):
        if len(entries) != 1:
            raise ValueError(f"gave {len(entries)} rewards for one response")
        entries = entries[0]
    return entries
