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
from lockstep.rollout.worker.worker_protocol import (
    Answered,
    Ask,
    BroadcastFailed,
    Failed,
    HandOver,
    Idle,
    Meeting,
    Opening,
    Place,
    Probed,
    WeightGroup,
    WeightMemory,
    probe,
    refuse_other_weights,
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

_RequestKey = tuple[Sampling, int, int]


class WorkerEngine:
    """An engine that generates in a worker process. The constructor starts the process without waiting for it. Only one
    thread may use this object.

    `policy` is the trained policy on `device`. `own` is the index of the worker's device. The worker writes its output
    to the file `log`. `collective` is the torch.distributed backend that broadcasts the weights. If `collective` is
    None, the weights are sent through shared memory. Every rank has a worker, and all ranks must call `hand_over`
    together. `prompt_limit` is the longest prompt that an environment may write."""

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
    ):
        self.policy, self.device, self.log, self.collective = policy, device, log, collective
        self._interactive = recipe.rollout.interactive
        self.waited = 0.0
        """The seconds that the training process has waited for responses and weight syncs."""
        self._numbers = count()
        self._sent: dict[_RequestKey, tuple[int, Request]] = {}
        self._changed = threading.Condition()
        self._answers: dict[int, list[Completion]] = {}
        self._probed: Probed | None = None
        self._failed: Failed | None = None
        self._ended = False
        self._last_message = time.monotonic()
        self._previous_logprobs: torch.Tensor | None = None
        self._busy = 0.0
        self._busy_since: float | None = None
        self.channel, how, files = _channel(policy, collective)
        if isinstance(self.channel, WeightGroup):
            self.channel.ended = lambda: self._ended
        self.process = SupervisedProcess("lockstep.rollout.worker:serve_worker", (), log)
        self._pipe = _connection(self.process.connection, files)
        threading.Thread(target=self._listen, daemon=True, name="rollout worker").start()
        try:
            threads, logs = torch.get_num_threads(), log.with_suffix("")
            self._send(Opening(recipe, list(end_tokens), how, own, threads, prompt_limit, logs))
        except BaseException:
            self.close()
            raise

    # -- requests

    def hand_over(self, version: int, requests: Sequence[Request], sampling: Sampling) -> None:
        """Sends the current weights (those after `version` steps) and further requests to the worker.

        Returns after the check that the worker has the same weights.
        """
        self._probed = None
        ask = self._ask(requests, sampling) if requests else None
        with self._transfer_errors():
            self.channel.give(self._full_weights(), lambda: self._send(HandOver(version, ask)))
        logprobs_K = probe(self.policy, self.device)
        reshard(self.policy)
        self._wait(lambda: self._probed is not None)
        assert self._probed is not None
        assert self._probed.version == version
        dtype = next(self.policy.parameters()).dtype
        refuse_other_weights(version, torch.tensor(self._probed.logprobs), logprobs_K, self._previous_logprobs, dtype)
        self._previous_logprobs = logprobs_K

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yields responses as they finish. Requests that `hand_over` has not sent yet are sent now."""
        missing = [request for request in requests if _request_key(request, sampling) not in self._sent]
        if missing:
            self._send(self._ask(missing, sampling, first=True))
        index = {}
        for place, request in enumerate(requests):
            number, before = self._sent.pop(_request_key(request, sampling))
            assert list(before.ids) == list(request.ids), "requests with the same key must have the same prompt"
            index[number] = place
        received = dict.fromkeys(index, 0)
        wanted = {number: requests[place].n for number, place in index.items()}
        while received:
            self._wait(lambda: any(self._answers.get(number) for number in received))
            with self._changed:
                arrived = [(number, self._answers.pop(number)) for number in received if self._answers.get(number)]
            for number, completions in arrived:
                for completion in completions:
                    yield replace(completion, request=index[number])
                received[number] += len(completions)
                if received[number] == wanted[number]:
                    del received[number]

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
        self.process.kill()
        self._pipe.close()
        self.channel.close()

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
        with self._changed:
            if self._busy_since is None:
                self._busy_since = time.monotonic()
        return Ask(numbered, sampling, first)

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except BlockingIOError:
            raise self._hung() from None
        except OSError:
            self._wait(lambda: False)  # raises an error that says why the worker ended

    def _listen(self) -> None:
        try:
            while True:
                message = self._pipe.recv()
                with self._changed:
                    self._handle(message)
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _handle(self, message: Any) -> None:
        self._last_message = time.monotonic()
        if isinstance(message, Answered):
            self._answers.setdefault(message.number, []).append(message.completion)
        elif isinstance(message, Probed):
            self._probed = message
        elif isinstance(message, Failed):
            self._failed = message
        elif isinstance(message, Idle) and self._busy_since is not None:
            self._busy += self._last_message - self._busy_since
            self._busy_since = None

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()` is true. Raises if the worker has ended or hangs."""
        start, tell_at = time.monotonic(), TELL_SECONDS
        try:
            with self._changed:
                while not ready():
                    if self._ended:
                        raise self._refusal()
                    waited = time.monotonic() - max(self._last_message, start)
                    if waited >= SILENT_SECONDS:
                        raise self._hung()
                    if waited >= tell_at:
                        say(
                            f"waiting for the rollout worker for {waited:.0f} s: its process still runs; see {self.log}"
                        )
                        tell_at = waited + TELL_AGAIN_SECONDS
                    self._changed.wait(min(SILENT_SECONDS, tell_at) - waited)
        finally:
            self.waited += time.monotonic() - start

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
            kind = Refusal if self._previous_logprobs is None else LostProcess
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


def _channel(
    policy: Policy, collective: str | None
) -> tuple[WeightMemory | WeightGroup, Sequence[Place] | Meeting, list[int]]:
    """Returns the weight transport, its description for the worker, and the file descriptors to pass to the worker."""
    if collective is None:
        memory = WeightMemory.of(policy.kept())
        return memory, memory.places, [memory.file]
    group = WeightGroup.opened(collective, SILENT_SECONDS)
    return group, Meeting(group.port, collective, SILENT_SECONDS), []


def _connection(ours: socket.socket, memory: Sequence[int]) -> Connection:
    """Sends the descriptor of the shared memory, if any, to the worker. Returns the connection to the worker."""
    socket.send_fds(ours, [b"."], memory)
    # With the timeout, a worker that no longer reads cannot block the run.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SILENT_SECONDS), 0))
    return Connection(os.dup(ours.fileno()))
