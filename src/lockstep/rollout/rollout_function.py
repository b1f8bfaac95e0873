"""Rollout functions of the user: multi-turn responses with turns of the policy and of an environment.

`rollout(prompt, generate)` is called once per response and returns `(ids, trained)`: the tokens of the response and a
loss mask, 1 for tokens of the policy and 0 for tokens of the environment. `generate(ids)` continues token ids with the
policy. Functions run concurrently in threads, and waiting turns are generated as one batch. The noise of a turn depends
only on prompt, sample and turn, so thread timing has no effect.

A response is truncated (stop reason `length`) when it reached `rollout.max_tokens`, or when the function returns
`(ids, trained, True)`. A smaller `max_tokens` of one `generate` call does not make it truncated. A function that
raises, stalls or returns something invalid fails only its response.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch

from lockstep.errors import Problem, Refusal
from lockstep.functions import UserFunction, load_user_function
from lockstep.rollout.engine import Engine, SharedWeights
from lockstep.types import FAILED, ROLLOUT_FUNCTION, Completion, Origin, Prompt, Request, Sampling

KEY = ROLLOUT_FUNCTION
CALL = ("prompt", "generate")
RETURN = (
    "return (ids, trained): the response's token ids, and for each 1 (the policy wrote it) or 0 (it did not); "
    "optionally a third value, True where the response is truncated"
)
# Maximum number of concurrent functions.
SIDE_BY_SIDE = 256


@dataclass(frozen=True)
class Written:
    """One turn of the policy. Empty with `stop` "length" if the response has no tokens left."""

    ids: list[int]
    logprobs: list[float]
    text: str
    stop: str


class _Over(BaseException):
    """Ends a function whose response is no longer needed. A BaseException, so `except Exception` does not catch it."""


@dataclass
class _Turn:
    """A pending turn of a function."""

    response: _Response
    request: Request
    answered: threading.Event = field(default_factory=threading.Event)
    completion: Completion | None = None


@dataclass
class _Done:
    """A function that has returned, or failed."""

    response: _Response
    returned: Any = None
    error: BaseException | None = None


class Generate:
    """The `generate` argument of a rollout function, with `encode` and `decode` of the tokenizer."""

    def __init__(self, response: _Response, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]):
        self._response = response
        self.encode, self.decode = encode, decode

    def __call__(self, ids: Sequence[int], *, max_tokens: int | None = None) -> Written:
        """Continues `ids`, which start with the prompt, by at most `max_tokens` and the remaining length."""
        completion = self._response.ask(list(ids), max_tokens)
        text = self.decode(completion.ids)
        return Written(list(completion.ids), list(completion.logprobs), text, completion.stop)


class _Response:
    """One running response with its generated turns."""

    def __init__(self, number: int, request: Request, sample: int, limit: int, inbox: queue.SimpleQueue[Any]):
        assert request.question is not None
        self.number, self.request, self.sample, self.limit = number, request, sample, limit
        self.prompt = Prompt(request.question, request.ids)
        self.turns: list[tuple[list[int], Completion]] = []
        self._inbox, self._over, self._lock = inbox, False, threading.Lock()

    @property
    def order(self) -> tuple[int, int]:
        """Position among all responses, independent of threads."""
        return self.number, self.sample

    def end(self) -> None:
        """Cancels the response: the next call of `generate` ends the function."""
        with self._lock:
            self._over = True

    def ask(self, ids: list[int], max_tokens: int | None) -> Completion:
        before = list(self.request.ids)
        if ids[: len(before)] != before:
            raise ValueError("generate was called with token ids that do not start with the prompt (prompt.ids)")
        room = self.limit - (len(ids) - len(before))
        room = room if max_tokens is None else min(room, max_tokens)
        if room <= 0:
            return Completion(0, self.sample, [], [], "length")
        key = _turn_key(self.request.key, len(self.turns))
        ask = _Turn(self, Request(ids, key, first=self.sample, max_tokens=room))
        with self._lock:
            if self._over:
                raise _Over
            self._inbox.put(ask)
        ask.answered.wait()
        if ask.completion is None:
            raise _Over
        self.turns.append((ids, ask.completion))
        return ask.completion

    def run(self, function: UserFunction, generate: Generate) -> None:
        try:
            self._inbox.put(_Done(self, function(self.prompt, generate)))
        except BaseException as error:  # noqa: BLE001 - reported by the consumer
            self._inbox.put(_Done(self, error=error))


class FunctionEngine:
    """An engine that calls a rollout function per response; `inner` generates the turns of the policy.

    A request without a question (from an engine check) goes directly to `inner`. If the function fails, the completion
    has the reason in `failure`; with `tolerant` False the first failure raises.
    """

    def __init__(
        self,
        inner: Engine,
        function_path: str,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        vocabulary: int,
        seconds: float,
        *,
        tolerant: bool = True,
    ):
        self.tolerant = tolerant
        self.inner, self.vocabulary, self.instead, self.seconds = inner, vocabulary, inner.instead, seconds
        self.function = load_user_function(function_path, KEY, CALL)
        self._encode, self._decode = encode, decode

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.inner.sync(weights)

    def release_memory(self) -> None:
        self.inner.release_memory()

    def close(self) -> None:
        self.inner.close()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        if any(request.question is None for request in requests):
            yield from self.inner.generate(requests, sampling)
            return
        inbox: queue.SimpleQueue[_Turn | _Done] = queue.SimpleQueue()
        waiting = [
            _Response(number, request, sample, sampling.max_tokens, inbox)
            for number, request in enumerate(requests)
            for sample in range(request.first, request.first + request.n)
        ]
        running: list[_Response] = []
        turns_waiting: list[_Turn] = []
        try:
            while waiting or running:
                while waiting and len(running) < SIDE_BY_SIDE:
                    running.append(self._start(waiting.pop(0)))
                # Wait until every function is finished or waits for the policy, then generate one batch.
                while len(turns_waiting) < len(running):
                    message = self._next(inbox)
                    if message is None:
                        for response in _stalled(running, turns_waiting):
                            response.end()
                            running.remove(response)
                            yield self._failed(response, self._timed_out(response))
                    elif isinstance(message, _Turn) and message.response in running:
                        turns_waiting.append(message)
                    elif isinstance(message, _Turn):
                        message.answered.set()  # a cancelled response: this ends its function
                    elif message.response in running:
                        running.remove(message.response)
                        yield self._completion(message)
                if turns_waiting:
                    # A fixed order makes the batch, and therefore the rounding, reproducible.
                    self._answer(sorted(turns_waiting, key=lambda turn: turn.response.order), sampling)
                    turns_waiting = []
        finally:
            for response in running:
                response.end()
            while not inbox.empty():
                message = inbox.get()
                turns_waiting += [message] if isinstance(message, _Turn) else []
            for turn in turns_waiting:
                turn.answered.set()

    def _next(self, inbox: queue.SimpleQueue[_Turn | _Done]) -> _Turn | _Done | None:
        """The next message of a function; None after `seconds` without any."""
        try:
            return inbox.get(timeout=self.seconds)
        except queue.Empty:
            return None

    def _timed_out(self, response: _Response) -> Refusal:
        return self.function.refuse(
            f"did not respond for {self.seconds:g} s, for {response.prompt.question.origin}",
            "add a timeout to it, or raise rollout.function_timeout; the last checkpoint is untouched",
        )

    def _start(self, response: _Response) -> _Response:
        generate = Generate(response, self._encode, self._decode)
        threading.Thread(target=response.run, args=(self.function, generate), daemon=True).start()
        return response

    def _answer(self, turns: Sequence[_Turn], sampling: Sampling) -> None:
        for completion in self.inner.generate([turn.request for turn in turns], sampling):
            turns[completion.request].completion = completion
        for turn in turns:
            turn.answered.set()

    def _completion(self, done: _Done) -> Completion:
        """The completion of a function, or its failure."""
        response = done.response
        origin = response.prompt.question.origin
        if done.error is not None:
            return self._failed(response, self._raised(done.error, origin))
        try:
            ids, trained, truncated = _checked(done.returned, response.limit, self.vocabulary)
            logprobs, stop = _provenance(ids, trained, response)
        except ValueError as error:
            return self._failed(response, self.function.refuse(f"{error}, for {origin}", RETURN))
        if truncated is None:
            truncated = len(ids) >= response.limit and stop not in ("token", "string")
        stop = "length" if truncated else "environment" if stop == "length" else stop
        return Completion(response.number, response.sample, ids, logprobs, stop, trained)

    def _raised(self, error: BaseException, origin: Origin) -> Refusal:
        """The exception of the function with the row. `UserFunction` adds file and line."""
        if not isinstance(error, Refusal):
            return self.function.refuse(f"raised {type(error).__name__}: {error}, for {origin}", "fix the function")
        problem = error.problems[0]
        return Refusal([Problem(problem.where, f"{problem.why}, for {origin}", problem.remedy)])

    def _failed(self, response: _Response, refusal: Refusal) -> Completion:
        if not self.tolerant:
            raise refusal
        # The report adds the row.
        why = refusal.problems[0].why.removesuffix(f", for {response.prompt.question.origin}")
        return Completion(response.number, response.sample, [], [], FAILED, failure=why)


def _stalled(running: Sequence[_Response], turns: Sequence[_Turn]) -> list[_Response]:
    """Responses whose function neither waits for the policy nor has returned."""
    asking = {turn.response.order for turn in turns}
    return [response for response in running if response.order not in asking]


def _turn_key(key: int, turn: int) -> int:
    """The noise key of a turn. The first turn uses the key of the request, as without a function."""
    if not turn:
        return key
    return int.from_bytes(sha256(f"{key}:{turn}".encode()).digest()[:7], "big")


def _checked(returned: Any, limit: int, vocabulary: int) -> tuple[list[int], list[int], bool | None]:
    """Validates the return value: token ids, mask, and the truncation flag if given."""
    if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
        what = f"{len(returned)} things" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
        raise ValueError(f"returned {what}, not two")
    ids, trained = (_whole_numbers(part, name) for part, name in zip(returned, ("ids", "trained"), strict=False))
    truncated = returned[2] if len(returned) == 3 else None
    if not isinstance(truncated, bool | None):
        raise ValueError(f"returned {truncated!r} as third value, which is neither True nor False")
    if len(ids) != len(trained):
        raise ValueError(f"returned {len(ids)} ids and {len(trained)} entries of the mask")
    if set(trained) - {0, 1}:
        raise ValueError(f"returned a mask with {sorted(set(trained) - {0, 1})[0]} in it")
    if not any(trained):
        raise ValueError("returned no token that the policy wrote: there is nothing to train")
    if len(ids) > limit:
        raise ValueError(f"returned {len(ids)} tokens, over rollout.max_tokens={limit}")
    strange = [token for token in ids if not 0 <= token < vocabulary]
    if strange:
        raise ValueError(f"returned the token {strange[0]}, and the model has {vocabulary}")
    return ids, trained, truncated


def _whole_numbers(part: Any, name: str) -> list[int]:
    try:
        numbers = [number.item() if hasattr(number, "item") else number for number in part]
    except TypeError:
        raise ValueError(f"returned {name} as a {type(part).__name__}, not a list") from None
    wrong = [number for number in numbers if not isinstance(number, int)]
    if wrong:
        raise ValueError(f"returned {name} with {wrong[0]!r} in it, which is no whole number")
    return [int(number) for number in numbers]


def _provenance(ids: Sequence[int], trained: Sequence[int], response: _Response) -> tuple[list[float], str]:
    """The engine's log-prob of each policy token, 0 for other tokens; and the stop reason.

    A token belongs to the policy only if the policy generated it after exactly the preceding tokens; otherwise its
    log-prob would be wrong.
    """
    prompt = list(response.request.ids)
    logprobs, stop, position = [0.0] * len(ids), "environment", 0
    while position < len(ids):
        if not trained[position]:
            position, stop = position + 1, "environment"
            continue
        here = prompt + list(ids[:position])
        drawn = [
            turn for context, turn in response.turns if context == here and turn.ids and turn.ids[0] == ids[position]
        ]
        if not drawn:
            raise ValueError(
                f"marks token {position} of the response as the policy's, but generate never returned it after the "
                "preceding tokens"
            )
        length, turn = max(
            ((_shared(turn.ids, ids[position:], trained[position:]), turn) for turn in drawn), key=_first
        )
        logprobs[position : position + length] = turn.logprobs[:length]
        position += length
        stop = turn.stop if length == len(turn.ids) else "environment"
    return logprobs, stop


def _first(pair: tuple[int, Completion]) -> int:
    return pair[0]


def _shared(written: Sequence[int], ids: Sequence[int], trained: Sequence[int]) -> int:
    """How many leading tokens of a turn are kept and marked as the policy's."""
    length = 0
    for one, other, marked in zip(written, ids, trained, strict=False):
        if one != other or not marked:
            break
        length += 1
    return length


class Canned(SharedWeights):
    """An engine without a model for dry runs: every turn has the same tokens."""

    instead = ""

    def __init__(self, ids: Sequence[int]):
        self.ids = list(ids)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for number, request in enumerate(requests):
            ids = self.ids[: request.max_tokens or sampling.max_tokens]
            for sample in range(request.first, request.first + request.n):
                stop = "token" if len(ids) == len(self.ids) else "length"
                yield Completion(number, sample, ids, [-1.0] * len(ids), stop)


def try_function(
    function_path: str,
    prompt: Prompt,
    limit: int,
    turn: Sequence[int],
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    vocabulary: int,
    seconds: float,
) -> str:
    """Calls the function once with a stub policy that always returns `turn`; returns a summary line."""
    engine = FunctionEngine(Canned(turn), function_path, encode, decode, vocabulary, seconds, tolerant=False)
    (made,) = engine.generate([Request(prompt.ids, 0, question=prompt.question)], Sampling(limit))
    seen = len(made.ids) - sum(made.loss_mask)
    counts = f"{sum(made.loss_mask)} tokens of the policy and {seen} of the environment"
    return f"{KEY} {function_path}: {counts}, tried on a stand-in"
