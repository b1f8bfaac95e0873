"""The reward component `function`: calls a user's function in worker processes that can be killed."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # before Python 3.11, it is not the built-in class
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import LostProcess, Refusal, with_secrets
from lockstep.functions import LOAD_SECONDS, Unloadable, local_callable, locate
from lockstep.launch.process_pool import PoolWorker, ProcessPool, ReplyTimeout, WorkerEnded, running_future
from lockstep.recipe.keys_online import Reward
from lockstep.reward.function_worker import (
    CALL,
    HEADER,
    LOADING,
    LONGEST_LINE,
    Given,
    Loaded,
    Raised,
    Reply,
    Unusable,
    answer,
    as_reward_function,
    prompt_text,
    read_line,
)
from lockstep.reward.parts import PartOutcome, RewardPart, promised
from lockstep.types import Failure, Question


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


class FunctionWorker(PoolWorker[dict[str, Any], Given | Raised]):
    """A worker process that calls the user function of a `Target`."""

    def __init__(self, target: Target, index: int):
        arguments = (target.path, target.name, int(target.memory_limit_gb * 2**30), target.extra)
        super().__init__("lockstep.reward.function_worker:serve", arguments, target.log(index), LONGEST_LINE)
        self._target, self._index = target, index
        self._calls = LOADING

    def wait_loaded(self) -> None:
        reply = self._reply(LOAD_SECONDS, "the time for loading")
        if isinstance(reply, Loaded):
            return
        if not isinstance(reply, Unusable):
            reply = Unusable(f"could not be loaded: {reply.why if isinstance(reply, Raised) else reply}")
        where = f"{self._target.key} {self._target.path}:{self._target.name}"
        if self.lost:
            remedy = "find out what killed or stopped the worker process, for example a lack of memory; then try again"
            raise LostProcess.at(where, reply.why, remedy, code=reply.code)
        raise Refusal.at(where, reply.why, reply.remedy, code=reply.code)

    def call(self, call: dict[str, Any]) -> Given | Raised:
        try:
            pickled = pickle.dumps(call)
        except Exception as error:  # noqa: BLE001 - whatever the objects of the row raise is the reason
            return self._target.failed(self._index, f"the row cannot be sent to the process of the function: {error}")
        self._calls += 1
        message = HEADER.pack(self._calls, len(pickled)) + pickled
        reply = self._reply(self._target.time_limit, "reward.time_limit", message)
        if isinstance(reply, Given):
            return reply
        raised = reply if isinstance(reply, Raised) else _INVALID
        self.spent = raised.spent
        return replace(raised, log=self._target.shown_log(self._index))

    def _reply(self, seconds: float, limit: str, message: bytes = b"") -> Reply:
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
            return Raised(f"gave nothing in {seconds:g} s ({limit})", spent=True)
        except WorkerEnded as how:
            return Raised(f"its process {how} before it gave a score", spent=True)
        except ValueError:
            return _INVALID


def reward_pool(target: Target, workers: int) -> ProcessPool[dict[str, Any], Given | Raised]:
    """Returns a pool of processes that call the function of the target. Raises `Refusal` if the function cannot be
    loaded or called."""
    return ProcessPool(
        lambda index: FunctionWorker(target, index), workers, name="reward", failed=target.failed, closed=_CLOSED
    )


@dataclass(frozen=True)
class _Job:
    call: dict[str, Any]
    future: Future[Given | Raised]


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

    def submit(self, call: dict[str, Any]) -> Future[Given | Raised]:
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

    def _answer(self, call: dict[str, Any]) -> Given | Raised:
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
            return Raised(f"gave nothing in {self._seconds:g} s (reward.time_limit)")

    def _run(self, calls: queue.SimpleQueue[_Job | None]) -> None:
        while (job := calls.get()) is not None:
            job.future.set_result(self._called(job.call))

    def _called(self, call: dict[str, Any]) -> Given | Raised:
        try:
            # The function gets a copy of the row, as in another process, so that it cannot change the row.
            copied = pickle.dumps(call)
        except Exception as error:  # noqa: BLE001 - whatever the objects of the row raise is the reason
            return Raised(f"the row cannot be copied for the function: {error}")
        return answer(self._function, copied, self._path)


_CLOSED = Raised("the run ended before the response was scored")
_INVALID = Raised("wrote something other than its score to the connection of its process", spent=True)


class FunctionPart(RewardPart):
    """Calls the user's `f(data_source=, solution_str=, ground_truth=, extra_info=)` for each response in worker
    processes. A function with the signature `f(queries=, prompts=, labels=)` is called with lists of one entry.

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
        function = local_callable(reference)
        self._pool: ProcessPool[dict[str, Any], Given | Raised] | LocalCalls
        if function is not None:
            self._pool = _local_calls(function, reference, key, settings, tuple(arguments))
            self.note = (
                f"reward {name}: {reference} is defined in this script or notebook and runs in its process. It has no "
                "memory limit, and a call over reward.time_limit fails but keeps its thread. A function in a separate "
                "file has both limits"
            )
            return
        path, word = locate(reference, key)
        target = Target(str(path), word, settings.time_limit, settings.memory_limit_gb, output, key, tuple(arguments))
        self._pool = reward_pool(target, settings.workers)

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        call = {
            "prompt": prompt_text(question.prompt),
            "data_source": question.data_source,
            "solution_str": text,
            "ground_truth": question.ground_truth,
            "extra_info": question.extra_info,
            **self._arguments,
        }
        future = promised()
        self._pool.submit(call).add_done_callback(lambda done: future.set_result(self._outcome(done.result())))
        return future

    def close(self) -> None:
        self._pool.close()

    def _outcome(self, answer: Given | Raised) -> PartOutcome:
        if isinstance(answer, Raised):
            return Failure(self.name, answer.why, answer.log)
        return {self.name: answer.score, **{f"{self.name}/{key}": value for key, value in answer.more.items()}}


def _local_calls(
    function: Callable[..., Any], reference: str, key: str, settings: Reward, extra: tuple[str, ...]
) -> LocalCalls:
    file, _, name = reference.rpartition(":")
    try:
        usable = as_reward_function(function, name, (*CALL, *extra))
    except Unloadable as error:
        raise Refusal.at(f"{key} {reference}", error.why, error.remedy, code=error.code) from error
    return LocalCalls(usable, file, settings.time_limit)
