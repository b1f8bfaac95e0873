"""Collects scored responses: each rank generates its part of the prompts, balanced by expected length."""

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
from lockstep.types import (
    ROLLOUT_FUNCTION,
    Completion,
    Failure,
    Origin,
    Prompt,
    Question,
    Request,
    Rollout,
    Sampling,
    Score,
)

# Who generates what: the prompts are divided over the ranks by how long their responses are expected to be, and a
# rank that runs dry takes prompts that another has not begun. What a response says depends on neither: its noise is
# its own.

# Between two looks at the others' shares while nothing of them can be taken: each is a question to the store.
LOOK_SECONDS = 0.05


class ExpectedLengths:
    """Tokens of a response to each prompt: as many as the last ones to it had, or those to other prompts on average.

    Every rank learns the same.
    """

    def __init__(self) -> None:
        self._last: dict[Origin, float] = {}
        self._sum = 0.0

    def learn(self, prompt: Prompt, tokens: float) -> None:
        """The mean over the last responses to a prompt."""
        origin = prompt.question.origin
        self._sum += tokens - self._last.get(origin, 0.0)
        self._last[origin] = tokens

    def of(self, prompts: Sequence[Prompt]) -> list[float]:
        other = self._sum / len(self._last) if self._last else 1.0
        return [self._last.get(prompt.question.origin, other) for prompt in prompts]


def costs_of(prompts: Sequence[Prompt], n: int, expected: Sequence[float]) -> list[float]:
    """Tokens of each prompt and of its `n` responses, which are `expected` to have so many each."""
    return [len(prompt.ids) + n * tokens for prompt, tokens in zip(prompts, expected, strict=True)]


def balanced(costs: Sequence[float], ranks: int, given: Mapping[int, int] | None = None) -> list[list[int]]:
    """For each rank what it generates, the longest first: each goes to the rank that has the least so far. A rank alone
    takes them as they come. Those that are `given` to a rank already stay with it."""
    if ranks == 1:
        return [list(range(len(costs)))]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0.0] * ranks
    given = given or {}
    for index, rank in given.items():
        shares[rank].append(index)
        work[rank] += costs[index]
    for index in sorted(set(range(len(costs))) - given.keys(), key=lambda i: (-costs[i], i)):
        least = work.index(min(work))
        shares[least].append(index)
        work[least] += costs[index]
    return shares


class AskedAhead:
    """Which rank was asked for a response before its step came. Every rank knows it of all, by the same reckoning."""

    def __init__(self, rank: int, ranks: int):
        self._rank, self._ranks = rank, ranks
        self._asked: dict[tuple[Sampling, int, int], int] = {}

    def ask(
        self, prompts: Sequence[Prompt], keys: Sequence[int], n: int, sampling: Sampling, expected: Sequence[float]
    ) -> list[Request]:
        """Divide the prompts of a step; returns what this rank asks its engine."""
        shares = balanced(costs_of(prompts, n, expected), self._ranks)
        for rank, share in enumerate(shares):
            self._asked |= {(sampling, keys[index], n): rank for index in share}
        return [Request(prompts[index].ids, keys[index], n) for index in shares[self._rank]]

    def take(self, keys: Sequence[int], n: int, sampling: Sampling) -> dict[int, int]:
        """Their step has come: the rank that was asked for each prompt, by its place; not of those nobody was."""
        found = {index: self._asked.pop((sampling, key, n), None) for index, key in enumerate(keys)}
        return {index: rank for index, rank in found.items() if rank is not None}


class ShareCounter(Protocol):
    """How far a share is begun, by whomever (`parallel/world.py`)."""

    def take(self, count: int) -> int:
        """Begin so many more; returns how many were begun before."""
        ...


class Shares:
    """The prompts of one call, as one rank sees them. Without counters a share is a rank's own, and nobody else's."""

    def __init__(
        self,
        costs: Sequence[float],
        rank: int,
        ranks: int,
        begun: Sequence[ShareCounter] = (),
        given: Mapping[int, int] | None = None,
    ):
        self._shares, self._rank, self._begun = balanced(costs, ranks, given), rank, begun
        self._open = {other for other, share in enumerate(self._shares) if share and other != rank}
        """Other ranks whose share may have something left, as far as this one knows."""
        self._ended = False
        self._look_at = 0.0
        self.taken = 0
        """Prompts of other ranks' shares that this one has begun."""

    def own(self) -> list[int]:
        """The whole share of this rank, where nobody takes of another's."""
        return self._shares[self._rank]

    def begin(self, count: int) -> list[int]:
        """Up to `count` prompts of this rank's share."""
        if self._ended:
            return []
        some = self._some(self._rank, self._begun[self._rank].take(count), count)
        self._ended = len(some) < count
        return some

    def help(self, count: int, *, idle: bool) -> list[int]:
        """Up to `count` prompts of another rank's share, of the one with the most left.

        What a rank has not begun of its share is more than it has room for, unless it has not come yet: then it is left
        alone by all who still have something to do (who are not `idle`).
        """
        if not self._open or not (idle or time.monotonic() >= self._look_at):
            return []
        first = {other: self._begun[other].take(0) for other in self._open}
        left = {other: len(self._shares[other]) - begun for other, begun in first.items() if idle or begun}
        for other in sorted(left, key=lambda one: -left[one]):
            # Half of what is left at most: its owner is at work on it too.
            most = min(count, -(-left[other] // 2))
            some = self._some(other, self._begun[other].take(most), most) if most > 0 else []
            if some:
                self.taken += len(some)
                return some
            self._open.discard(other)
        self._look_at = time.monotonic() + LOOK_SECONDS
        return []

    def _some(self, rank: int, first: int, count: int) -> list[int]:
        return self._shares[rank][first : first + count]


# Responses, judged: each rank generates its share of the prompts, and has the responses that it generated.


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
                if world.is_tp_rank0:
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
