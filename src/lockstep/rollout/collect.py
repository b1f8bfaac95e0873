"""Responses of all ranks, judged: each rank generates its share of the prompts, then everybody has everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lockstep.parallel.world import World
from lockstep.rollout.engine import Engine
from lockstep.types import Failure, Prompt, Question, Request, Rollout, Sampling, Score


class Judge(Protocol):
    """Scores responses, at once or later; `reward/scorer.py` is one."""

    def submit(self, question: Question, text: str) -> Future[Score | Failure]: ...

    def flush(self) -> None: ...


def _judged(made: dict[str, Any], score: Score | Failure, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    steps = score.steps if isinstance(score, Score) else ()
    earned = tuple((token_at(made["ids"], end, decode), share) for end, share in steps)
    return {**made, "score": score, "earned": earned}


def token_at(ids: list[int], end: int, decode: Callable[[list[int]], str]) -> int:
    """The token with which the text reaches `end` characters (the last one if it never does)."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(decode(ids[: middle + 1])) >= end else (middle + 1, high)
    return low


def collect(
    engine: Engine,
    judge: Judge,
    prompts: Sequence[Prompt],
    keys: Sequence[int],
    n: int,
    sampling: Sampling,
    world: World,
    decode: Callable[[list[int]], str],
    phases: Callable[[str], AbstractContextManager[None]],
    advance: Callable[[int], None] = lambda done: None,
) -> list[Rollout]:
    """`n` responses to each prompt, in the order of prompts and samples, the same on every rank.

    A response is handed to the judge as soon as it is finished, so that judging overlaps with the decoding of the rest.
    Of ranks that divide a model and generate together one judges, and the others take its word.
    """
    mine = list(range(world.engine, len(prompts), world.engines))
    requests = [Request(prompts[index].ids, keys[index], n, question=prompts[index].question) for index in mine]
    judged: list[tuple[dict[str, Any], Future[Score | Failure]]] = []
    with phases("gen"):
        for completion in engine.generate(requests, sampling):
            index = mine[completion.request]
            text = decode(completion.ids)
            made = {
                "prompt_index": index,
                "sample": completion.sample,
                "ids": completion.ids,
                "logprobs": completion.logprobs,
                "stop": completion.stop,
                "trained": completion.trained,
                "versions": completion.versions,
                "text": text,
            }
            if world.speaks:
                judged.append((made, judge.submit(prompts[index].question, text)))
            advance(1)
            world.progress()
    with phases("reward"):
        judge.flush()
        done = []
        for made, score in judged:
            world.progress(f"the score of sample {made['sample']} of prompt {made['prompt_index']} of the step")
            done.append(_judged(made, score.result(), decode))
        everyone = [made for share in world.gather(done) for made in share]
    everyone.sort(key=lambda made: (made["prompt_index"], made["sample"]))
    return [Rollout(prompt=prompts[made["prompt_index"]], **made) for made in everyone]
