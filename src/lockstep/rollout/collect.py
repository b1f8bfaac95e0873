"""Responses, judged: each rank generates its share of the prompts, and has the responses that it generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lockstep.parallel.world import World
from lockstep.rollout.engine import Engine
from lockstep.rollout.native.engine import NativeEngine
from lockstep.rollout.shares import Shares, costs_of
from lockstep.types import (
    ROLLOUT_FUNCTION,
    Completion,
    Failure,
    Prompt,
    Question,
    Request,
    Rollout,
    Sampling,
    Score,
)


class Judge(Protocol):
    """Scores responses, at once or later; `reward/scorer.py` is one."""

    def submit(self, question: Question, text: str) -> Future[Score | Failure]: ...

    def flush(self) -> None: ...


@dataclass(frozen=True)
class Collected:
    """What this rank generated, in the order of prompts and samples, in how many seconds, and how many of the prompts
    were another's at first."""

    rollouts: list[Rollout]
    seconds: float
    taken: int


def _judged(made: dict[str, Any], score: Score | Failure, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    steps = score.steps if isinstance(score, Score) else ()
    earned = tuple((token_at(made["ids"], end, decode), share) for end, share in steps)
    return {**made, "score": score, "earned": earned}


def _submitted(judge: Judge, question: Question, completion: Completion, text: str) -> Future[Score | Failure]:
    """The score to come; of a response that its rollout function failed to make, the failure."""
    if not completion.failure:
        return judge.submit(question, text)
    failed: Future[Score | Failure] = Future()
    failed.set_result(Failure(ROLLOUT_FUNCTION, completion.failure))
    return failed


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
    expected: Sequence[float] | None = None,
    given: Mapping[int, int] | None = None,
) -> Collected:
    """`n` responses to each prompt of this rank's share, which is balanced by the `expected` tokens of a response.
    Of prompts that were asked ahead the rank is `given`.

    A response is handed to the judge as soon as it is finished, so that judging overlaps with the decoding of the rest.
    Of ranks that divide a model and generate together one judges and has the responses, the others have none.
    """
    judged: list[tuple[dict[str, Any], Future[Score | Failure]]] = []
    costs = costs_of(prompts, n, expected or [1.0] * len(prompts))
    with _asked(engine, prompts, keys, n, world, costs, given) as asked:
        with phases("gen"):
            begun = time.perf_counter()
            for completion in asked.generate(sampling):
                index = asked.indices[completion.request]
                asked.answered(index, completion.sample)
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
                    judged.append((made, _submitted(judge, prompts[index].question, completion, text)))
                advance(1)
            seconds = time.perf_counter() - begun
        with phases("reward"):
            judge.flush()
            done = []
            for made, score in judged:
                world.progress(f"the score of {_sample(prompts, made['prompt_index'], made['sample'])}")
                done.append(_judged(made, score.result(), decode))
    done.sort(key=lambda made: (made["prompt_index"], made["sample"]))
    return Collected(
        [Rollout(prompt=prompts[made["prompt_index"]], **made) for made in done], seconds, asked.shares.taken
    )


def _sample(prompts: Sequence[Prompt], index: int, sample: int) -> str:
    """As it is named when it is waited for."""
    return f"sample {sample} of prompt {index} of the step ({prompts[index].question.origin})"


class _OwnShare:
    """What this rank asks its engine: all of its share at once, or as there is room for it (`Further`)."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], keys: Sequence[int], n: int, shares: Shares, world: World
    ):
        self.engine, self.prompts, self.keys, self.n, self.shares = engine, prompts, keys, n, shares
        self.world = world
        self.longest_prompt = max((len(prompt.ids) for prompt in prompts), default=0)
        self.indices: list[int] = []
        """The prompt of each request, in the order they were asked."""
        self._pending: dict[tuple[int, int], None] = {}
        """Prompts and samples that were asked and have not come, in the order they were asked."""

    def generate(self, sampling: Sampling) -> Iterator[Any]:
        return self.engine.generate(self._requests(self.shares.own()), sampling)

    def answered(self, index: int, sample: int) -> None:
        """A sample has come; from now on the one that was asked first of those left is the one that is waited for."""
        del self._pending[index, sample]
        self._tell()

    def _tell(self) -> None:
        first = next(iter(self._pending), None)
        others = f" and {len(self._pending) - 1} more" if len(self._pending) > 1 else ""
        self.world.progress("" if first is None else f"{_sample(self.prompts, *first)}{others}")

    def _requests(self, indices: Sequence[int]) -> list[Request]:
        self.indices += indices
        self._pending |= dict.fromkeys((index, sample) for index in indices for sample in range(self.n))
        if indices:
            self._tell()
        return [Request(self.prompts[i].ids, self.keys[i], self.n, question=self.prompts[i].question) for i in indices]


class _OpenShare(_OwnShare):
    """Prompts are begun when the engine has rows for all their samples, and anybody may begin them."""

    engine: NativeEngine

    def generate(self, sampling: Sampling) -> Iterator[Any]:
        self.engine.further = self
        try:
            yield from self.engine.generate(self._requests(self.shares.begin(self._prompts(self._rows))), sampling)
        finally:
            self.engine.further = None

    def take(self, room: int) -> list[Request]:
        count = self._prompts(room)
        if count < 1:
            return []
        return self._requests(self.shares.begin(count) or self.shares.help(count, idle=room == self._rows))

    @property
    def _rows(self) -> int:
        return self.engine.settings.max_sequences

    def _prompts(self, room: int) -> int:
        # More samples than rows: a prompt at a time, when there is all the room that there will ever be.
        return room // min(self.n, self._rows)


@contextmanager
def _asked(
    engine: Engine,
    prompts: Sequence[Prompt],
    keys: Sequence[int],
    n: int,
    world: World,
    costs: Sequence[float],
    given: Mapping[int, int] | None,
) -> Iterator[_OwnShare]:
    # Which responses are decoded together is a matter of time where ranks take from each other, and with that rounding:
    # a deterministic run leaves each to its share, and so do ranks that divide a model, which all ask the same of it.
    alone = world.size == 1 or world.tensor > 1 or not isinstance(engine, NativeEngine)
    if alone or torch.are_deterministic_algorithms_enabled():
        yield _OwnShare(engine, prompts, keys, n, Shares(costs, world.engine, world.engines, given=given), world)
        return
    *counters, ended = world.counters(world.size + 1)
    yield _OpenShare(engine, prompts, keys, n, Shares(costs, world.rank, world.size, counters), world)
    if ended.take(1) == world.size - 1:  # nobody counts any more
        for counter in (*counters, ended):
            counter.remove()


def everyone(rollouts: Sequence[Rollout], world: World) -> list[Rollout]:
    """The responses of all ranks, in the order of prompts and samples, on each of them."""
    every = [rollout for share in world.gather(list(rollouts)) for rollout in share]
    return sorted(every, key=lambda rollout: (rollout.prompt_index, rollout.sample))
