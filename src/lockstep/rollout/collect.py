"""Collects scored responses: divides the prompts over the ranks by expected length, generates and scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.prompt_rows import check_prompt, encoded_prompt, with_format, with_system
from lockstep.parallel.world import World
from lockstep.recipe.keys_data import Data
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.schema import Recipe
from lockstep.rollout.engine import Engine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.trajectory import Trajectory
from lockstep.types import (
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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Prompts are divided over the ranks by expected response length. An idle rank takes prompts that another rank has not
# started. A response does not depend on the rank that generates it, because its sampling noise depends only on the
# prompt and the sample number.

# Seconds between checks for unstarted prompts of other ranks; each check is a request to the distributed store.
LOOK_SECONDS = 0.05


class ExpectedLengths:
    """Predicts the response length of each prompt: the mean length of its last responses or, for a new prompt, the
    average over all earlier prompts. All ranks predict the same lengths."""

    def __init__(self) -> None:
        self._last: dict[Origin, float] = {}
        self._sum = 0.0

    def learn(self, prompt: Prompt, tokens: float) -> None:
        """Records the mean length of the last responses to a prompt."""
        origin = prompt.question.origin
        self._sum += tokens - self._last.get(origin, 0.0)
        self._last[origin] = tokens

    def of(self, prompts: Sequence[Prompt]) -> list[float]:
        other = self._sum / len(self._last) if self._last else 1.0
        return [self._last.get(prompt.question.origin, other) for prompt in prompts]


def costs_of(prompts: Sequence[Prompt], n: int, expected: Sequence[float]) -> list[float]:
    """Returns the expected number of tokens of each prompt together with its `n` responses."""
    return [len(prompt.ids) + n * tokens for prompt, tokens in zip(prompts, expected, strict=True)]


def balanced(costs: Sequence[float], ranks: int, given: Mapping[int, int] | None = None) -> list[list[int]]:
    """Returns the prompt indices of each rank. The most expensive prompt is assigned first, to the least-loaded rank.
    `given` maps prompts to the rank that already generates their responses. With a single rank, the prompts keep their
    order."""
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


def _request(prompt: Prompt, key: int, n: int) -> Request:
    return Request(prompt.ids, key, n, question=prompt.question, images=prompt.images)


class AskedAhead:
    """Remembers which rank generates the responses to each prompt that was requested before its training step. All
    ranks compute the same assignment of prompts."""

    def __init__(self, rank: int, ranks: int):
        self._rank, self._ranks = rank, ranks
        self._sent_to: dict[tuple[Sampling, int, int], int] = {}

    def ask(
        self, prompts: Sequence[Prompt], keys: Sequence[int], n: int, sampling: Sampling, expected: Sequence[float]
    ) -> list[Request]:
        """Assigns the prompts of a step to the ranks; returns the requests of this rank."""
        shares = balanced(costs_of(prompts, n, expected), self._ranks)
        for rank, share in enumerate(shares):
            self._sent_to |= {(sampling, keys[index], n): rank for index in share}
        return [_request(prompts[index], keys[index], n) for index in shares[self._rank]]

    def take(self, keys: Sequence[int], n: int, sampling: Sampling) -> dict[int, int]:
        """Returns the rank of each prompt that was requested before its step, by prompt index, and forgets these
        requests."""
        ranks = {index: self._sent_to.pop((sampling, key, n), None) for index, key in enumerate(keys)}
        return {index: rank for index, rank in ranks.items() if rank is not None}


class ShareCounter(Protocol):
    """Counts the started prompts among those assigned to one rank. All ranks share the counter
    (`parallel/world.py`)."""

    def take(self, count: int) -> int:
        """Adds `count` to the counter; returns the previous value."""
        ...


class Shares:
    """Divides the prompts of one call over the ranks. Without the counters `begun`, a rank processes only its own
    prompts."""

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
        """Other ranks that may have unstarted prompts."""
        self._ended = False
        self._look_at = 0.0
        self.taken = 0
        """Number of prompts taken from other ranks."""

    def own(self) -> list[int]:
        """Returns all prompts of this rank; used if ranks do not take prompts from each other."""
        return self._shares[self._rank]

    def begin(self, count: int) -> list[int]:
        """Starts and returns up to `count` prompts that are assigned to this rank."""
        if self._ended:
            return []
        some = self._some(self._rank, self._begun[self._rank].take(count), count)
        self._ended = len(some) < count
        return some

    def help(self, count: int, *, idle: bool) -> list[int]:
        """Starts and returns up to `count` prompts of the rank with the most unstarted prompts.

        A rank that has started no prompt yet may have room for all of its prompts. So only an `idle` rank takes prompts
        from a rank that has started none.
        """
        if not self._open or not (idle or time.monotonic() >= self._look_at):
            return []
        first = {other: self._begun[other].take(0) for other in self._open}
        left = {other: len(self._shares[other]) - begun for other, begun in first.items() if idle or begun}
        for other in sorted(left, key=lambda one: -left[one]):
            # Take at most half of the unstarted prompts, because their own rank continues to start prompts too.
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


class Judge(Protocol):
    """Scores responses asynchronously; implemented by `reward/scorer.py`."""

    def submit(
        self, question: Question, text: str, trajectory: Trajectory | None = None
    ) -> Future[Score | Failure]: ...

    def flush(self) -> None: ...


@dataclass(frozen=True)
class Collected:
    """The rollouts of this rank, ordered by prompt and sample, with the generation time and the number of prompts taken
    from other ranks."""

    rollouts: list[Rollout]
    seconds: float
    taken: int


def _with_score(fields: dict[str, Any], score: Score | Failure, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    if not isinstance(score, Score):
        return {**fields, "score": score, "token_rewards": ()}
    ids, trajectory = fields["ids"], fields["trajectory"]

    def token(end: int) -> int:
        if trajectory is None:
            return token_at(ids, end, decode)
        turn, before = trajectory.turn_at(ids, end, decode)
        return int(turn.start) + token_at(ids[turn.start : turn.stop], end - before, decode)

    token_rewards = (*((token(end), share) for end, share in score.steps), *score.tokens)
    return {**fields, "score": score, "token_rewards": token_rewards}


def _submit(judge: Judge, question: Question, completion: Completion, text: str) -> Future[Score | Failure]:
    """Submits a response to the judge, which scores it. If the rollout function or the environment of the response
    failed, the result is a `Failure`."""
    if not completion.failure and completion.trajectory is not None:
        return judge.submit(question, text, completion.trajectory)
    if not completion.failure:
        return judge.submit(question, text)
    failed: Future[Score | Failure] = Future()
    failed.set_result(Failure(completion.failure_key, completion.failure))
    return failed


def token_at(ids: list[int], end: int, decode: Callable[[list[int]], str]) -> int:
    """Returns the index of the first token at which the decoded text has `end` characters, or the last index."""
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
    advance: Callable[[int], None] = lambda scored: None,
    expected: Sequence[float] | None = None,
    given: Mapping[int, int] | None = None,
) -> Collected:
    """Generates and scores `n` responses for each prompt of this rank. The prompts are divided over the ranks by
    `expected` length. `given` maps the prompts that were requested before their step to their rank.

    A finished response is scored while other responses are still decoding. Only the first rank of a tensor-parallel
    group returns responses.
    """
    pending: list[tuple[dict[str, Any], Future[Score | Failure]]] = []
    costs = costs_of(prompts, n, expected or [1.0] * len(prompts))
    with _request_source(engine, prompts, keys, n, world, costs, given) as source:
        with phases("gen"):
            start = time.perf_counter()
            for completion in source.generate(sampling):
                index = source.indices[completion.request]
                source.answered(index, completion.sample)
                text = _text(completion, decode)
                fields = {
                    "prompt_index": index,
                    "key": keys[index],
                    "sample": completion.sample,
                    "ids": completion.ids,
                    "logprobs": completion.logprobs,
                    "stop": completion.stop,
                    "loss_mask": completion.loss_mask,
                    "versions": completion.versions,
                    "text": text,
                    "trajectory": completion.trajectory,
                    "rows": completion.rows,
                    "routes": completion.routes,
                    "prompt": _prompt(prompts[index], completion),
                }
                if world.is_tp_rank0:
                    pending.append((fields, _submit(judge, prompts[index].question, completion, text)))
                advance(1)
            seconds = time.perf_counter() - start
        with phases("reward"):
            judge.flush()
            scored = []
            for fields, score in pending:
                world.progress(f"the score of {_sample(prompts, fields['prompt_index'], fields['sample'])}")
                scored.append(_with_score(fields, score.result(), decode))
    scored.sort(key=lambda fields: (fields["prompt_index"], fields["sample"]))
    return Collected([Rollout(**fields) for fields in scored], seconds, source.shares.taken)


def _text(completion: Completion, decode: Callable[[list[int]], str]) -> str:
    """Returns the text that rewards get. In a conversation with an environment, it is the text of the model alone."""
    if completion.trajectory is None:
        return decode(completion.ids)
    return completion.trajectory.sampled_text(completion.ids, decode)


def _prompt(prompt: Prompt, completion: Completion) -> Prompt:
    """Returns the prompt of a response, which an environment may have written."""
    if completion.prompt_ids is None:
        return prompt
    of_rows = () if completion.trajectory is None else completion.trajectory.images
    images = tuple(one for one in of_rows[0] if one.stop <= len(completion.prompt_ids)) if of_rows else ()
    return replace(prompt, ids=completion.prompt_ids, images=images)


def _sample(prompts: Sequence[Prompt], index: int, sample: int) -> str:
    """Returns the name of a sample for progress messages."""
    return f"sample {sample} of prompt {index} of the step ({prompts[index].question.origin})"


class _OwnShare:
    """Requests the responses to all prompts of this rank from the engine at once."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], keys: Sequence[int], n: int, shares: Shares, world: World
    ):
        self.engine, self.prompts, self.keys, self.n, self.shares = engine, prompts, keys, n, shares
        self.world = world
        self.longest_prompt = max((len(prompt.ids) for prompt in prompts), default=0)
        self.indices: list[int] = []
        """The prompt index of each request."""
        self._pending: dict[tuple[int, int], None] = {}
        """The unfinished samples (prompt index, sample number), in request order."""

    def generate(self, sampling: Sampling) -> Iterator[Any]:
        return self.engine.generate(self._requests(self.shares.own()), sampling)

    def answered(self, index: int, sample: int) -> None:
        """Marks a sample as finished and reports the oldest unfinished sample as progress."""
        del self._pending[index, sample]
        self._log_progress()

    def _log_progress(self) -> None:
        first = next(iter(self._pending), None)
        others = f" and {len(self._pending) - 1} more" if len(self._pending) > 1 else ""
        self.world.progress("" if first is None else f"{_sample(self.prompts, *first)}{others}")

    def _requests(self, indices: Sequence[int]) -> list[Request]:
        self.indices += indices
        self._pending |= dict.fromkeys((index, sample) for index in indices for sample in range(self.n))
        if indices:
            self._log_progress()
        return [_request(self.prompts[i], self.keys[i], self.n) for i in indices]


class _OpenShare(_OwnShare):
    """Gives the engine more requests when it has free rows (`Further`); a rank without prompts takes prompts of other
    ranks."""

    engine: NativeEngine

    def generate(self, sampling: Sampling) -> Iterator[Any]:
        self.engine.further = self
        try:
            yield from self.engine.generate(self._requests(self.shares.begin(self._prompts(self._rows))), sampling)
        finally:
            self.engine.further = None

    def take(self, room: int, wait: bool = False) -> list[Request]:
        # There is nothing to wait for: no prompt becomes available later.
        count = self._prompts(room)
        if count < 1:
            return []
        return self._requests(self.shares.begin(count) or self.shares.help(count, idle=room == self._rows))

    @property
    def _rows(self) -> int:
        return self.engine.settings.max_sequences

    def _prompts(self, room: int) -> int:
        # If a prompt has more samples than the engine has rows, start one prompt at a time, when all rows are free.
        return room // min(self.n, self._rows)


@contextmanager
def _request_source(
    engine: Engine,
    prompts: Sequence[Prompt],
    keys: Sequence[int],
    n: int,
    world: World,
    costs: Sequence[float],
    given: Mapping[int, int] | None,
) -> Iterator[_OwnShare]:
    # If ranks take prompts from each other, the batches, and so the rounding, depend on timing. So ranks keep their own
    # prompts in deterministic runs and with tensor parallelism.
    alone = world.size == 1 or world.tensor > 1 or not isinstance(engine, NativeEngine)
    if alone or torch.are_deterministic_algorithms_enabled():
        yield _OwnShare(engine, prompts, keys, n, Shares(costs, world.engine, world.engines, given=given), world)
        return
    *counters, ended = world.counters(world.size + 1)
    yield _OpenShare(engine, prompts, keys, n, Shares(costs, world.rank, world.size, counters), world)
    if ended.take(1) == world.size - 1:  # this rank is the last one to finish
        for counter in (*counters, ended):
            counter.remove()


def everyone(rollouts: Sequence[Rollout], world: World) -> list[Rollout]:
    """All-gathers the rollouts of all ranks, in order of prompts and samples."""
    gathered = [rollout for share in world.gather(list(rollouts)) for rollout in share]
    return sorted(gathered, key=lambda rollout: (rollout.prompt_index, rollout.sample))


# The conversion of validation questions to prompts, and the interface of the object that scores the answers.

# The smallest random key of validation prompts. Training prompts have smaller keys.
FIRST_KEY = 2**40


def validation_keys(count: int) -> list[int]:
    return [FIRST_KEY + index for index in range(count)]


class Examiner(Judge, Protocol):
    """A judge that can also extract the final answer of a response, for majority votes."""

    def answer_of(self, question: Question, text: str) -> str | None: ...

    def set_progress(self, step: int, steps: int) -> None:
        """Sets the number of finished steps and the number of steps of the run."""


def prompt_format(recipe: Recipe) -> Data | None:
    """Returns the data settings that define the prompt format of an online run, or None for an offline run, which uses
    the chat template."""
    return recipe.data if recipe.method in ONLINE else None


def encode_questions(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    system: str | None = None,
    data: Data | None = None,
    images: str | None = None,
) -> list[Prompt]:
    """Encodes questions as prompts. `data` decides whether the chat template is used; with None, the chat template is
    used. `images` is the model folder whose image processor reads the images of the questions."""
    reader = None if images is None else RowImages(images, tokenizer, "")
    for question in questions:
        check_prompt(tokenizer, question, data)
    formatted = [with_format(with_system(question, system), data) for question in questions]
    return [encoded_prompt(tokenizer, question, data, reader) for question in formatted]
