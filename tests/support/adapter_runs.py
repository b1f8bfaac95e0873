"""Conversations of a scripted engine with environments and tools of other frameworks, in real host processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.data.encode.prompt_rows import prompt_ids
from lockstep.environments.setup import TrajectoryEngineSetup, open_environments
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Origin, Question, Request, Sampling
from scripted_engine import Say, Scripted


def question(content: str = "2 + 3 =", truth: str = "5", extra: Mapping[str, Any] = {}, **columns: Any) -> Question:
    prompt = [{"role": "user", "content": content}]
    return Question("sums", prompt, truth, Origin("rows.jsonl", 1), dict(extra), columns={"level": 1, **columns})


def played(
    tokenizer: Any, say: Say | Sequence[str], questions: Sequence[Question], *, max_tokens: int = 400, **keys: Any
) -> tuple[list[Completion], list[Request]]:
    """Plays one trajectory for each question with the `rollout` keys. `say` has the text of each turn of the model.
    Returns the completions, and all requests of the engine in their order."""
    settings = RolloutSettings(**{"environment_workers": 1, "max_tokens": max_tokens, **keys})
    speak = say if callable(say) else lambda request, turn: say[turn]
    inner = Scripted(tokenizer, speak)
    end = frozenset({tokenizer.eos_token_id})
    engine = open_environments(TrajectoryEngineSetup(inner, settings, tokenizer, end, len(tokenizer)))
    requests = [Request(prompt_ids(tokenizer, one), 100 + row, question=one) for row, one in enumerate(questions)]
    sampling = Sampling(max_tokens=max_tokens, stop_ids=(tokenizer.eos_token_id,), seed=5)
    try:
        made = sorted(engine.generate(requests, sampling), key=lambda one: (one.request, one.sample))
    finally:
        engine.close()
    return made, [request for batch in inner.batches for request in batch]


def trained_text(tokenizer: Any, completion: Completion) -> list[str]:
    """Returns the text of each run of trained tokens."""
    pieces: list[list[int]] = []
    before = 0
    for token, mask in zip(completion.ids, completion.loss_mask or [1] * len(completion.ids), strict=True):
        if mask and not before:
            pieces.append([])
        if mask:
            pieces[-1].append(token)
        before = mask
    return [str(tokenizer.decode(piece)) for piece in pieces]
