"""The engine that generates in a rollout worker process. Requests can be sent before their responses are needed."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import LostProcess, Refusal
from lockstep.launch.process_pool import SupervisedProcess
from lockstep.model.policy import Policy
from lockstep.parallel.rendezvous import TELL_AGAIN_SECONDS, TELL_SECONDS, say
from lockstep.parallel.sharding import reshard, whole_on
from lockstep.recipe import Recipe
from lockstep.rollout.worker.prompt_exchange import MovedPrompt, OpenRequests, PromptExchange
from lockstep.rollout.worker.worker_protocol import (
    Answered,
    Ask,
    BroadcastFailed,
    Failed,
    GivenUp,
    HandOver,
    Idle,
    Opening,
    Probed,
    WeightGroup,
    Withdraw,
    probe,
    refuse_other_weights,
    weight_channel,
)
from lockstep.types import Completion, Request, Sampling

KEY = "rollout.max_staleness"
# If the rollout worker sends no message for this time, the run assumes that the worker hangs. The worker sends
# heartbeats, except while it loads a model.
SILENT_SECONDS = 900.0
# After a failed broadcast, the run waits this long for the worker process to exit.
ENDED_SECONDS = 10.0
# Number of log lines in the error message about a dead worker.
LAST_LINES = 15

# Seconds between looks at the prompts that move between workers; each look is a few requests to the rendezvous store.
LOOK_SECONDS = 0.2

_RequestKey = tuple[Sampling, int, int]


class WorkerEngine:
    """An engine that generates in a worker process. The constructor starts the process without waiting for it. Only one
    thread may use this object.

    `policy` is the trained policy on `device`. `own` is the index of the worker's device. The worker writes its output
    to the file `log`. `collective` is the torch.distributed backend that broadcasts the weights. If `collective` is
    None, the weights are sent through shared memory. Every rank has a worker, and all ranks must call `hand_over`
    together. `prompt_limit` is the longest prompt that an environment may write. With `exchange`, unfinished samples
    move between the workers of the ranks.

    A worker that is lost is started again, with the weights in the shared memory and the requests that are not
    finished. With a staleness of 0 it gets all requests of the interrupted message, because the rounding of log-probs
    depends on the batch."""

    instead = "remove rollout.max_staleness: generation and training then alternate"

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        recipe: Recipe,
        end_tokens: Sequence[int],
        log: Path,
        collective: str | None = None,
        own: int = 0,
        prompt_limit: int | None = None,
        exchange: PromptExchange | None = None,
    ):
        self.policy, self.device, self.log, self.collective = policy, device, log, collective
        self._interactive = recipe.rollout.interactive
        self.waited = 0.0
        """The seconds that the training process has waited for responses and weight syncs."""
        self.restarts = 0
        """How often the worker was started again."""
        self._most_restarts = 0 if collective else recipe.rollout.worker_restarts
        self._numbers = count()
        self._sent: dict[_RequestKey, tuple[int, Request]] = {}
        # `_link` guards the process, its pipe and the shared memory; `_changed` guards all other state. A thread that
        # holds `_changed` does not wait for `_link`.
        self._link, self._changed = threading.RLock(), threading.Condition()
        self._open = OpenRequests(
            0 if exchange is None else exchange.rank,
            exact=not recipe.rollout.max_staleness,
            whole=recipe.rollout.interactive,
        )
        self._version: int | None = None
        self._probed: Probed | None = None
        self._failed: Failed | None = None
        self._error: BaseException | None = None
        """An error of a background thread, which the next wait raises."""
        self._ended = self._closed = False
        self._restarting = False
        """Whether the worker has been lost, and the new one does not generate yet."""
        self._last_message = time.monotonic()
        self._checked: tuple[int, torch.Tensor] | None = None
        """The version of the last weights that were checked, with the log-probs of the trainer."""
        self._busy = 0.0
        self._busy_since: float | None = None
        self.channel, how, self._files = weight_channel(policy, collective, SILENT_SECONDS)
        if isinstance(self.channel, WeightGroup):
            self.channel.ended = lambda: self._ended
        threads, logs = torch.get_num_threads(), log.with_suffix("")
        self._opening = Opening(recipe, list(end_tokens), how, own, threads, prompt_limit, logs)
        self._withdrawing = False
        """Whether another rank waits for prompts that this worker gives up."""
        self._given: list[MovedPrompt] | None = None
        self._start()
        threading.Thread(target=self._listen, daemon=True, name="rollout worker").start()
        self._mover: threading.Thread | None = None
        if exchange is not None:
            self._mover = threading.Thread(target=self._move, args=(exchange,), daemon=True, name="moved prompts")
            self._mover.start()

    def _start(self) -> None:
        """Starts the process of the worker."""
        self.process = SupervisedProcess("lockstep.rollout.worker:serve_worker", (), self.log)
        self._pipe = _connection(self.process.connection, self._files)
        try:
            self._send(self._opening)
        except BaseException:
            self.close()
            raise

    # -- requests

    def hand_over(self, version: int, requests: Sequence[Request], sampling: Sampling) -> None:
        """Sends the current weights (those after `version` steps) and further requests to the worker.

        Returns after the check that the worker has the same weights.
        """
        given = False
        while not given:
            # A worker that starts again still reads the weights of the last version.
            self._wait(lambda: not self._restarting)
            with self._link:
                given = not self._restarting
                if given:
                    self._version = version
                    ask = self._ask(requests, sampling) if requests else None
                    message = HandOver(version, ask)
                    with self._transfer_errors():
                        self.channel.give(self._full_weights(), lambda: self._send(message))  # noqa: B023 - called here
        logprobs_K = probe(self.policy, self.device)
        reshard(self.policy)
        self._wait(lambda: self._probed is not None and self._probed.version == version)
        assert self._probed is not None
        before_K = None if self._checked is None else self._checked[1]
        refuse_other_weights(version, torch.tensor(self._probed.logprobs), logprobs_K, before_K, self._dtype)
        self._checked = version, logprobs_K

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yields responses as they finish. Requests that `hand_over` has not sent yet are sent now."""
        missing = [request for request in requests if _request_key(request, sampling) not in self._sent]
        if missing:
            with self._link:
                ask = self._ask(missing, sampling, first=True)
                if not self._restarting:  # otherwise the new worker gets all unfinished requests
                    self._send(ask)
        index = {}
        for place, request in enumerate(requests):
            number, before = self._sent.pop(_request_key(request, sampling))
            assert list(before.ids) == list(request.ids), "requests with the same key must have the same prompt"
            index[number] = place
        received = dict.fromkeys(index, 0)
        wanted = {number: requests[place].n for number, place in index.items()}
        answers = self._open.answers
        while received:
            self._wait(lambda: any(answers.get(number) for number in received))
            with self._changed:
                arrived = [(number, answers.pop(number)) for number in received if answers.get(number)]
            for number, completions in arrived:
                for completion in completions:
                    yield replace(completion, request=index[number])
                received[number] += len(completions)
                if received[number] == wanted[number]:
                    del received[number]

    @property
    def moved(self) -> int:
        """The number of samples that other workers took over so far."""
        return self._open.moved

    def busy(self) -> float:
        """Returns for how many seconds the worker was busy so far."""
        with self._changed:
            running = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
            return self._busy + running

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Does nothing, because `hand_over` sends the weights once per step."""

    def release_memory(self) -> None:
        """Does nothing: the worker frees its cache itself."""

    def close(self) -> None:
        with self._link:
            self._closed = True
            self.process.kill()
            self._pipe.close()
            self.channel.close()
        if self._mover is not None:
            # A thread inside the store when the interpreter ends would abort the process.
            self._mover.join(ENDED_SECONDS)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.policy.parameters()).dtype

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the full trained weights one at a time. Sharded weights are gathered one by one to save memory."""
        reshard(self.policy)
        for name, parameter in self.policy.kept():
            yield name, whole_on(parameter.detach(), self.device)

    # -- connection

    def _ask(self, requests: Sequence[Request], sampling: Sampling, *, first: bool = False) -> Ask:
        # Only environments need the questions.
        numbered = {
            next(self._numbers): request if self._interactive else replace(request, question=None)
            for request in requests
        }
        for number, request in numbered.items():
            self._sent[_request_key(request, sampling)] = number, request
        ask = Ask(numbered, sampling, first)
        with self._changed:
            self._open.add(ask, self._version or 0)
            self._begin_busy()
        return ask

    def _begin_busy(self) -> None:
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except BlockingIOError:
            self._end_hung()
        except OSError:
            pass  # the worker has ended: `_listen` starts a new one, or the next wait raises the reason

    def _listen(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                if self._restart():
                    continue
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                return
            with self._changed:
                self._handle(message)
                self._changed.notify_all()
            if isinstance(message, Probed) and self._restarting:
                self._resume(message)

    def _handle(self, message: Any) -> None:
        self._last_message = time.monotonic()
        if isinstance(message, Answered):
            self._open.answer(message.number, message.completion)
        elif isinstance(message, GivenUp):
            self._given, self._withdrawing = self._open.give(message.begun), False
        elif isinstance(message, Probed):
            self._probed = message
        elif isinstance(message, Failed):
            self._failed = message
        elif isinstance(message, Idle) and self._busy_since is not None:
            self._busy += self._last_message - self._busy_since
            self._busy_since = None

    # -- a lost worker

    @property
    def _restartable(self) -> bool:
        refused = self._closed or (self._failed is not None and self._failed.refused)
        return not refused and self._version is not None and self.restarts < self._most_restarts

    def _restart(self) -> bool:
        """Starts the worker again after it was lost. Returns False if it must not be started again."""
        if not self._restartable:  # a thread that holds the link may wait for this answer
            return False
        with self._link:
            if not self._restartable:
                return False
            how = self.process.ended()
            why = how if self._failed is None else f"failed: {self._failed.why}"
            with self._changed:
                self.restarts += 1
                self._failed, self._restarting, self._last_message = None, True, time.monotonic()
                samples = self._open.here
            say(
                f"the rollout worker {why}; it starts again (restart {self.restarts} of {self._most_restarts}) with "
                f"{samples} unfinished responses; see {self.log}"
            )
            self._pipe.close()
            try:
                self._start()
            except OSError as error:
                self._error = error
                return False
            assert self._version is not None
            self._send(HandOver(self._version, None))
            return True

    def _resume(self, probed: Probed) -> None:
        """Sends the unfinished requests to a worker that was started again and has the weights."""
        with self._link:
            if self._checked is not None and self._checked[0] == probed.version:
                try:
                    found_K = torch.tensor(probed.logprobs)
                    refuse_other_weights(probed.version, found_K, self._checked[1], None, self._dtype)
                except Refusal as refusal:
                    self._error = refusal
            with self._changed:
                messages: list[Any] = [*self._open.again()]
                if self._withdrawing:
                    messages.append(Withdraw())
                self._restarting = False
                self._changed.notify_all()
            for message in messages:
                self._send(message)

    # -- prompts that move between workers

    def _move(self, exchange: PromptExchange) -> None:
        """Exchanges unfinished samples with the other ranks; runs in a thread."""
        ticket: int | None = None
        held: list[MovedPrompt] = []
        nothing_at = -1
        """How many requests there were when the worker had nothing to give up: a pause costs it a prefill."""
        try:
            while not self._closed:
                time.sleep(LOOK_SECONDS)
                with self._changed:
                    finished, self._open.for_others = self._open.for_others, []
                    samples, added = self._open.here, self._open.added
                    ready = self._version is not None and not self._restarting
                for rank, number, completion in finished:
                    exchange.give_back(rank, number, completion)
                returned = exchange.returned()
                with self._changed:
                    for number, completion in returned:
                        self._open.answer(number, completion)
                    self._changed.notify_all()
                exchange.want(ready and samples == 0 and not held)
                held = self._accept([*held, *exchange.received()])
                if ticket is None and ((self._restarting and samples) or (samples > 1 and added > nothing_at)):
                    ticket = exchange.claim()
                    if ticket is not None:
                        self._withdraw()
                if ticket is not None and (given := self._take_given()) is not None:
                    exchange.fill(ticket, given)
                    ticket, nothing_at = None, nothing_at if given else added
        except Exception as error:  # noqa: BLE001 - the thread that waits for responses raises the error
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _withdraw(self) -> None:
        with self._link:
            with self._changed:
                self._withdrawing, self._given = True, None
            if not self._restarting:
                self._send(Withdraw())

    def _take_given(self) -> list[MovedPrompt] | None:
        """Returns the prompts that the worker gave up, or None if it has not yet. A worker that starts again gives up
        all of them."""
        with self._changed:
            if self._withdrawing and self._restarting:
                self._given, self._withdrawing = self._open.give_all(), False
            given, self._given = self._given, None
            return given

    def _accept(self, prompts: list[MovedPrompt]) -> list[MovedPrompt]:
        """Sends prompts of other ranks to the worker. Returns those for which the worker's weights are too old."""
        if not prompts:
            return []
        with self._link:
            version = -1 if self._version is None else self._version
            for prompt in [one for one in prompts if one.version <= version]:
                with self._changed:
                    ask = self._open.take(prompt, next(self._numbers))
                    self._begin_busy()
                if not self._restarting:
                    self._send(ask)
            return [one for one in prompts if one.version > version]

    # -- waits and errors

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()` is true. Raises if the worker has ended or hangs and is not started again."""
        start, tell_at = time.monotonic(), TELL_SECONDS
        try:
            with self._changed:
                while not ready():
                    if self._error is not None:
                        raise self._error
                    if self._ended:
                        raise self._refusal()
                    waited = time.monotonic() - max(self._last_message, start)
                    if waited >= SILENT_SECONDS:
                        self._end_hung()
                        continue
                    if waited >= tell_at:
                        say(
                            f"waiting for the rollout worker for {waited:.0f} s: its process still runs; see {self.log}"
                        )
                        tell_at = waited + TELL_AGAIN_SECONDS
                    self._changed.wait(min(SILENT_SECONDS, tell_at) - waited)
        finally:
            self.waited += time.monotonic() - start

    def _end_hung(self) -> None:
        """Ends a worker that does not respond, so that it is started again. Raises if it must not be started again."""
        if not self._restartable:
            raise self._hung()
        say(f"the rollout worker has not responded for {SILENT_SECONDS:g} s and is ended")
        self._last_message = time.monotonic()
        self.process.kill()

    @contextmanager
    def _transfer_errors(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        except BroadcastFailed as error:
            with self._changed:
                # If the worker has ended, the broadcast often fails before the connection is closed.
                if self._changed.wait_for(lambda: self._ended, ENDED_SECONDS):
                    raise self._refusal() from error
            why = f"the weights were not transferred to the rollout worker by {self.collective}: {error}"
            remedy = "set rollout.weight_sync=memory; the last checkpoint is untouched"
            # If an earlier weight sync succeeded, the error may be temporary, and the run can be resumed.
            kind = Refusal if self._checked is None else LostProcess
            raise kind.at("rollout.weight_sync", why, remedy, code="weight-sync-failed") from error
        finally:
            if self.collective is not None:
                self.waited += time.monotonic() - begun

    def _hung(self) -> LostProcess:
        return LostProcess.at(
            KEY,
            f"the rollout worker has not responded for {SILENT_SECONDS:g} s{self._last_lines()}",
            "the worker hangs: run the same command again to resume from the last checkpoint",
            code="worker-lost",
        )

    def _refusal(self) -> Refusal:
        how = self.process.ended()
        if self._failed is not None:
            kind = Refusal if self._failed.refused else LostProcess
            return kind.at("rollout worker", self._failed.why, self._failed.remedy, code=self._failed.code)
        return LostProcess.at(
            "rollout worker",
            f"the rollout process {how}{self._last_lines()}",
            "run the same command again to resume from the last checkpoint; if memory ran out, lower rollout.cache_gb",
            code="worker-lost",
        )

    def _last_lines(self) -> str:
        if not self.log.is_file():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return f"; the last lines of {self.log}:\n" + "\n".join(lines)


def _request_key(request: Request, sampling: Sampling) -> _RequestKey:
    return sampling, request.key, request.n


def _connection(ours: socket.socket, memory: Sequence[int]) -> Connection:
    """Sends the descriptor of the shared memory, if any, to the worker. Returns the connection to the worker."""
    socket.send_fds(ours, [b"."], memory)
    # With the timeout, a worker that no longer reads cannot block the run.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SILENT_SECONDS), 0))
    return Connection(os.dup(ours.fileno()))
