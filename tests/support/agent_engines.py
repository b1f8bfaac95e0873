"""Agents in tests without a model: an engine that writes given texts, and its rows as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import agent_functions
from lockstep.environments.agents.agent_loop import AgentEngine
from lockstep.environments.agents.agent_setup import open_agents
from lockstep.environments.setup import TrajectoryEngineSetup
from lockstep.launch.supervisor import NOBODY, descendants
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Origin, Question, Request, Sampling, TrajectoryRow
from scripted_engine import Say, Scripted

FILE = agent_functions.__file__
END = 257  # the end token of a turn
LAST = re.compile(r"<\|im_start\|>(?:user|tool)\n([^<]*)<\|im_end\|>\n<\|im_start\|>assistant\n$")


def question(truth: str, extra: dict[str, Any] | None = None) -> Question:
    return Question("sums", [{"role": "user", "content": "2+3?"}], truth, Origin("rows.jsonl", 0), extra or {})


def engine_of(tokenizer: Any, agent: str, say: Say, **keys: Any) -> AgentEngine:
    name = agent if ":" in agent else f"{FILE}:{agent}"
    settings = RolloutSettings(agent=name, **{"environment_workers": 1, **keys})
    return open_agents(
        TrajectoryEngineSetup(Scripted(tokenizer, say), settings, tokenizer, frozenset({END}), len(tokenizer))
    )


def run(engine: AgentEngine, truths: Sequence[str] = ("5",), extra: Any = None, **sampling: Any) -> list[Completion]:
    requests = [Request([1], 100 + row, question=question(truth, extra)) for row, truth in enumerate(truths)]
    made = engine.generate(requests, Sampling(**{"max_tokens": 2000, "stop_ids": (END,), "seed": 5, **sampling}))
    return sorted(made, key=lambda one: one.request)


def repeats(tokenizer: Any) -> Say:
    """Answers with `re` and the last message."""

    def say(request: Request, turn: int) -> str:
        found = LAST.search(tokenizer.decode(list(request.ids)))
        assert found is not None
        return f"re {found.group(1)}"

    return say


def whole(made: Completion) -> list[TrajectoryRow]:
    """The rows with their prompt."""
    start = list(made.prompt_ids or ())
    rows = made.rows or [TrajectoryRow(made.ids, list(made.loss_mask), made.logprobs)]
    return [
        TrajectoryRow(start + row.ids, [0] * len(start) + row.loss_mask, [0.0] * len(start) + row.logprobs)
        for row in rows
    ]


def marked(tokenizer: Any, row: TrajectoryRow) -> str:
    """The text of a row, with brackets around the trained tokens."""
    text, before = "", 0
    for token, mask in zip(row.ids, row.loss_mask, strict=True):
        text += ("[" if mask > before else "]" if mask < before else "") + tokenizer.decode([token])
        before = mask
    return (text + ("]" if before else "")).replace("<|im_start|>", "<").replace("<|im_end|>", ">")


class Watched:
    """Remembers the host processes of an engine."""

    def __init__(self, engine: AgentEngine):
        self.hosts, self.marks = engine.hosts, [host._mark for host in engine.hosts.hosts]
        start = engine.hosts._start

        def started() -> Any:
            host = start()
            self.marks.append(host._mark)
            return host

        engine.hosts._start = started  # type: ignore[method-assign]

    def left(self) -> list[int]:
        return [pid for mark in self.marks for pid in descendants(NOBODY, mark)]
