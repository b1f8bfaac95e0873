"""The reward component `function`: calls a user's function in worker processes that can be killed."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # before Python 3.11, not the built-in TimeoutError
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from lockstep.errors import LostProcess, Refusal, with_secrets
from lockstep.functions import LOAD_SECONDS, Unloadable, local_callable, locate
from lockstep.launch.process_pool import PoolWorker, ProcessPool, ReplyTimeout, WorkerEnded, running_future
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.function_worker import (
    CALL,
    HEADER,
    LOADING,
    LONGEST_LINE,
    Given,
    GivenAll,
    Loaded,
    Raised,
    Unusable,
    WorkerReply,
    answer,
    as_reward_function,
    prompt_text,
    read_line,
)
from lockstep.reward.parts import PartOutcome, RewardPart, promised
from lockstep.reward.trl_signature import TrlFunction, batch_call
from lockstep.types import Failure, Question

FunctionReply = Given | GivenAll | Raised
# A call of a function with TRL's signature scores at most this many responses, but always all responses to a prompt.
BATCH_RESPONSES = 64


@dataclass(frozen=True)
class Target:
    """The user function that the workers call, and the limits of a call. `key` is the recipe key of the function."""

    path: str
    name: str
    time_limit: float
    memory_limit_gb: float
    output: Path | None = None
    """OUTPUT-N.log keeps the last output lines of worker N; with None the output is dropped."""
    key: str = "reward.function"
    extra: tuple[str, ...] = ()
    """Names of the additional arguments from `reward.arguments`."""

    def log(self, index: int) -> Path | None:
        return None if self.output is None else self.output.with_name(f"{self.output.name}-{index}.log")

    def shown_log(self, index: int) -> str | None:
        """Returns the log path that a failure message shows, or None if the run folder does not exist."""
        log = self.log(index)
        return str(log) if log is not None and log.parent.parent.is_dir() else None

    def failed(self, index: int, why: str) -> Raised:
        """Returns the reply for a call that could not be sent to worker `index`."""
        return Raised(why, log=self.shown_log(index))


class FunctionWorker(PoolWorker[dict[str, Any], FunctionReply]):
    """A worker process that calls the user function of a `Target`."""

    def __init__(self, target: Target, index: int, on_loaded: Callable[[Loaded], None] = lambda loaded: None):
        arguments = (target.path, target.name, int(target.memory_limit_gb * 2**30), target.extra)
        super().__init__("lockstep.reward.function_worker:serve", arguments, target.log(index), LONGEST_LINE)
        self._target, self._index, self._on_loaded = target, index, on_loaded
        self._calls = LOADING

    def wait_loaded(self) -> None:
        reply = self._reply(LOAD_SECONDS, "the time for loading")
        if isinstance(reply, Loaded):
            self._on_loaded(reply)
            return
        if not isinstance(reply, Unusable):
            reply = Unusable(f"could not be loaded: {reply.why if isinstance(reply, Raised) else reply}")
        where = f"{self._target.key} {self._target.path}:{self._target.name}"
        if self.lost:
            remedy = "find out what killed or stopped the worker process, for example a lack of memory; then try again"
            raise LostProcess.at(where, reply.why, remedy, code=reply.code)
        raise Refusal.at(where, reply.why, reply.remedy, code=reply.code)

    def call(self, call: dict[str, Any]) -> FunctionReply:
        try:
            pickled = pickle.dumps(call)
        except Exception as error:  # noqa: BLE001 - objects in the row may raise any exception when they are pickled
            return self._target.failed(self._index, f"the row cannot be sent to the process of the function: {error}")
        self._calls += 1
        message = HEADER.pack(self._calls, len(pickled)) + pickled
        reply = self._reply(self._target.time_limit, "reward.time_limit", message)
        if isinstance(reply, Given | GivenAll):
            return reply
        raised = reply if isinstance(reply, Raised) else _INVALID
        self.spent = raised.spent
        return replace(raised, log=self._target.shown_log(self._index))

    def _reply(self, seconds: float, limit: str, message: bytes = b"") -> WorkerReply:
        """Waits for the reply to the current call. Ignores replies to earlier calls, which a forked copy of the worker
        may send."""
        deadline = time.monotonic() + seconds
        try:
            self.send(message, deadline)
            while True:
                number, reply = read_line(self.read_line(deadline))
                if number == self._calls:
                    return reply
                if number > self._calls:
                    return _INVALID
        except ReplyTimeout:
            return Raised(f"did not answer within {seconds:g} s ({limit})", spent=True)
        except WorkerEnded as how:
            return Raised(f"its process {how} before it gave a score", spent=True)
        except ValueError:
            return _INVALID


def reward_pool(
    target: Target, workers: int, on_loaded: Callable[[Loaded], None] = lambda loaded: None
) -> ProcessPool[dict[str, Any], FunctionReply]:
    """Returns a pool of processes that call the function of the target. Raises `Refusal` if the function cannot be
    loaded or called. `on_loaded` gets the reply of each process that has loaded the function."""
    return ProcessPool(
        lambda index: FunctionWorker(target, index, on_loaded),
        workers,
        name="reward",
        failed=target.failed,
        closed=_CLOSED,
    )


@dataclass(frozen=True)
class _Job:
    call: dict[str, Any]
    future: Future[FunctionReply]


class LocalCalls:
    """Calls a function that exists only in this process, with the interface of a process pool. Calls run one by one in
    a thread. A thread that exceeds the time limit cannot be killed: it is abandoned, and the next call gets a new
    thread."""

    def __init__(self, function: Callable[..., Any], path: str, seconds: float):
        self._function, self._path, self._seconds = function, path, seconds
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._submit_lock, self._closing = threading.Lock(), False
        self._calls: queue.SimpleQueue[_Job | None] | None = None
        """Queue of calls for the thread that runs the function; an entry None ends the thread."""
        self._supervisor = threading.Thread(target=self._supervise, name="reward-calls", daemon=True)
        self._supervisor.start()

    def submit(self, call: dict[str, Any]) -> Future[FunctionReply]:
        """Queues a call and returns its future at once. The future never raises and cannot be cancelled."""
        job = _Job(call, running_future())
        with self._submit_lock:
            if not self._closing:
                self._jobs.put(job)
                return job.future
        job.future.set_result(_CLOSED)
        return job.future

    def close(self) -> None:
        """Fails the waiting calls, and waits until the running call ends or reaches its time limit."""
        with self._submit_lock:
            self._closing = True
            self._jobs.put(None)
        self._supervisor.join()

    def _supervise(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.future.set_result(_CLOSED if self._closing else self._answer(job.call))
        if self._calls is not None:
            self._calls.put(None)

    def _answer(self, call: dict[str, Any]) -> FunctionReply:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._calls,), name="reward-function", daemon=True).start()
        job = _Job(call, running_future())
        self._calls.put(job)
        try:
            return job.future.result(self._seconds)
        except FutureTimeout:
            self._calls.put(None)
            self._calls = None
            return Raised(f"did not answer within {self._seconds:g} s (reward.time_limit)")

    def _run(self, calls: queue.SimpleQueue[_Job | None]) -> None:
        while (job := calls.get()) is not None:
            job.future.set_result(self._called(job.call))

    def _called(self, call: dict[str, Any]) -> FunctionReply:
        try:
            # The function gets a copy of the row, as in another process, so that it cannot change the row.
            copied = pickle.dumps(call)
        except Exception as error:  # noqa: BLE001 - objects in the row may raise any exception when they are pickled
            return Raised(f"the row cannot be copied for the function: {error}")
        return answer(self._function, copied, self._path)


_CLOSED = Raised("the run ended before the response was scored")
_INVALID = Raised("the function wrote something other than its score to the connection of its process", spent=True)


class FunctionPart(RewardPart):
    """Calls the user's `f(data_source=, solution_str=, ground_truth=, extra_info=)` for each response in worker
    processes. The images of the prompt are PIL images in `extra_info["images"]`. A function with the signature
    `f(queries=, prompts=, labels=)` is called with lists of one entry. A function with TRL's signature,
    `f(completions=, ...)`, is called with batches when `flush` is called.

    `name` is the name of the component in scores and failures. `reference` is `path/to/file.py:name` from the recipe
    key `key`. The file `output`-N.log keeps the last output lines of worker N, if its parent folder exists. If no other
    process can load the function (`local_callable`), it is called in this process.
    """

    def __init__(
        self,
        reference: str,
        settings: Reward,
        *,
        name: str = "function",
        key: str = "reward.function",
        output: Path | None = None,
    ):
        self.name = name
        # `reward.arguments` of the recipe are passed to the user's function, not to built-in rules.
        arguments = settings.arguments if key == "reward.function" else {}
        self._arguments = {
            name: with_secrets(value, f"reward.arguments.{name}") if isinstance(value, str) else value
            for name, value in arguments.items()
        }
        self._batched = False
        self.fields = ("extra_info",) if key == "reward.function" else ()
        self._reads_images = key == "reward.function"
        self._waiting: list[_WaitingResponse] = []
        self._lock = threading.Lock()
        function = local_callable(reference)
        self._pool: ProcessPool[dict[str, Any], FunctionReply] | LocalCalls
        if function is not None:
            usable = _usable(function, reference, key, tuple(arguments))
            self._loaded(Loaded(isinstance(usable, TrlFunction)))
            self._pool = LocalCalls(usable, reference.rpartition(":")[0], settings.time_limit)
            self.note = (
                f"reward {name}: {reference} is defined in this script or notebook and runs in the same process, so "
                "it has no memory limit. A call over reward.time_limit fails, but its thread continues to run. For "
                "a function in a separate file, lockstep enforces the memory limit and the time limit"
            )
            return
        path, word = locate(reference, key)
        target = Target(str(path), word, settings.time_limit, settings.memory_limit_gb, output, key, tuple(arguments))
        self._pool = reward_pool(target, settings.workers, self._loaded)

    def _loaded(self, loaded: Loaded) -> None:
        self._batched = loaded.batched
        self.fields = ("columns",) if loaded.batched else self.fields

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        if self._batched:
            response = _WaitingResponse(question, text, promised())
            with self._lock:
                self._waiting.append(response)
            return response.future
        call = {
            "prompt": prompt_text(question.prompt),
            "data_source": question.data_source,
            "solution_str": text,
            "ground_truth": question.ground_truth,
            "extra_info": question.extra_info,
            **({"images": question.images} if question.images and self._reads_images else {}),
            **self._arguments,
        }
        future = promised()
        self._pool.submit(call).add_done_callback(lambda done: future.set_result(self._outcome(done.result())))
        return future

    def flush(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for batch in _batches(waiting):
            call = batch_call([(one.question, one.text) for one in batch], self.progress, self._arguments)
            self._pool.submit(call).add_done_callback(partial(self._settle, batch))

    def _settle(self, batch: Sequence[_WaitingResponse], done: Future[FunctionReply]) -> None:
        answer = done.result()
        scores = answer.scores if isinstance(answer, GivenAll) else [None] * len(batch)
        for response, score in zip(batch, scores, strict=True):
            if not isinstance(answer, GivenAll):
                response.future.set_result(self._outcome(answer))
            elif isinstance(score, str):
                response.future.set_result(Failure(self.name, score))
            else:
                response.future.set_result({} if score is None else {self.name: float(score)})

    def close(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for response in waiting:
            response.future.set_result(self._outcome(_CLOSED))
        self._pool.close()

    def _outcome(self, answer: FunctionReply) -> PartOutcome:
        if isinstance(answer, GivenAll):
            answer = _INVALID
        if isinstance(answer, Raised):
            return Failure(self.name, answer.why, answer.log)
        return {self.name: answer.score, **{f"{self.name}/{key}": value for key, value in answer.more.items()}}


@dataclass(frozen=True)
class _WaitingResponse:
    """A response that waits for its batch."""

    question: Question
    text: str
    future: Future[PartOutcome]


def _batches(waiting: Sequence[_WaitingResponse]) -> Iterator[list[_WaitingResponse]]:
    """Divides responses into the batches of calls. The responses to a prompt are adjacent and in one batch, as in TRL.
    The order of the responses does not depend on the time at which they were finished."""
    ordered = sorted(waiting, key=lambda one: (one.question.origin.file, one.question.origin.row, one.text))
    batch: list[_WaitingResponse] = []
    for _, members in groupby(ordered, key=lambda one: one.question.origin):
        group = list(members)
        if batch and len(batch) + len(group) > BATCH_RESPONSES:
            yield batch
            batch = []
        batch += group
    if batch:
        yield batch


def _usable(function: Callable[..., Any], reference: str, key: str, extra: tuple[str, ...]) -> Callable[..., Any]:
    try:
        return as_reward_function(function, reference.rpartition(":")[2], (*CALL, *extra))
    except Unloadable as error:
        raise Refusal.at(f"{key} {reference}", error.why, error.remedy, code=error.code) from error
