"""The rollout worker as the run sees it: an engine whose requests can be asked before their responses are taken."""

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
from lockstep.launch.worker_process import FunctionProcess
from lockstep.model.policy import Policy
from lockstep.parallel.rendezvous import TELL_AGAIN_SECONDS, TELL_SECONDS, say
from lockstep.parallel.sharding import reshard, whole_on
from lockstep.recipe import Recipe
from lockstep.rollout.worker.messages import Answered, Ask, Failed, HandOver, Idle, Meeting, Opening, Probed
from lockstep.rollout.worker.worker_weights import (
    BroadcastFailed,
    Place,
    WeightGroup,
    WeightMemory,
    probe,
    refuse_other_weights,
)
from lockstep.types import Completion, Request, Sampling

KEY = "rollout.max_staleness"
# A worker that says nothing for so long has hung; it speaks every few seconds, but for the time it loads a model.
SILENT_SECONDS = 900.0
# For the line to say that the worker has ended, after a collective has failed.
ENDED_SECONDS = 10.0
# Of what it printed last, when it has died.
LAST_LINES = 15

_Asked = tuple[Sampling, int, int]


class WorkerEngine:
    """Starts the worker and does not wait for it. Only the thread that made it calls it.

    `policy` is the one that is trained, and `device` where its passes run; `own` is the number of the worker's device.
    `log` keeps the last lines that the worker prints. Weights travel through the collective of that name, or without
    one through shared memory. Of several ranks each has a worker: hand-overs are collectives then.
    """

    instead = "remove rollout.max_staleness: generation and training then take turns"

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        recipe: Recipe,
        end_tokens: Sequence[int],
        log: Path,
        collective: str | None = None,
        own: int = 0,
    ):
        self.policy, self.device, self.log, self.collective = policy, device, log, collective
        self.waited = 0.0
        """Seconds that the run has waited for responses and hand-overs."""
        self._numbers = count()
        self._asked: dict[_Asked, tuple[int, Request]] = {}
        self._changed = threading.Condition()
        self._answers: dict[int, list[Completion]] = {}
        self._probed: Probed | None = None
        self._failed: Failed | None = None
        self._ended = False
        self._heard = time.monotonic()
        self._said_before: torch.Tensor | None = None
        self._busy = 0.0
        self._busy_since: float | None = None
        self.channel, how, files = _channel(policy, collective)
        if isinstance(self.channel, WeightGroup):
            self.channel.ended = lambda: self._ended
        self.process = FunctionProcess("lockstep.rollout.worker.entry:serve", (), log)
        self._line = _connection(self.process.connection, files)
        threading.Thread(target=self._listen, daemon=True, name="rollout worker").start()
        try:
            self._send(Opening(recipe, list(end_tokens), how, own, torch.get_num_threads()))
        except BaseException:
            self.close()
            raise

    # -- what the run asks

    def hand_over(self, version: int, requests: Sequence[Request], sampling: Sampling) -> None:
        """Give the worker the policy's weights as they are now, after `version` updates, and requests to go on with.

        Returns when the worker has shown that it has these weights.
        """
        self._probed = None
        ask = self._ask(requests, sampling) if requests else None
        with self._refusing_a_failed_hand_over():
            self.channel.give(self._whole_weights(), lambda: self._send(HandOver(version, ask)))
        said_K = probe(self.policy, self.device)
        reshard(self.policy)
        self._wait(lambda: self._probed is not None)
        assert self._probed is not None
        assert self._probed.version == version
        dtype = next(self.policy.parameters()).dtype
        refuse_other_weights(version, torch.tensor(self._probed.logprobs), said_K, self._said_before, dtype)
        self._said_before = said_K

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Responses that were asked before, as they come, and those to the other requests, which are asked now."""
        missing = [request for request in requests if _asked(request, sampling) not in self._asked]
        if missing:
            self._send(self._ask(missing, sampling, first=True))
        index = {}
        for place, request in enumerate(requests):
            number, before = self._asked.pop(_asked(request, sampling))
            assert list(before.ids) == list(request.ids), "a prompt's key stands for the prompt"
            index[number] = place
        left = dict.fromkeys(index, 0)
        wanted = {number: requests[place].n for number, place in index.items()}
        while left:
            self._wait(lambda: any(self._answers.get(number) for number in left))
            with self._changed:
                come = [(number, self._answers.pop(number)) for number in left if self._answers.get(number)]
            for number, completions in come:
                for completion in completions:
                    yield replace(completion, request=index[number])
                left[number] += len(completions)
                if left[number] == wanted[number]:
                    del left[number]

    def busy(self) -> float:
        """Seconds in which the worker had something to do."""
        with self._changed:
            running = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
            return self._busy + running

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing to do: weights are handed over once a step, with the requests they are for."""

    def release_memory(self) -> None:
        """The worker gives its cache back by itself."""

    def close(self) -> None:
        self.process.kill()
        self._line.close()
        self.channel.close()

    def _whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The trained weights one by one, gathered where ranks have slices of them: never all of them together."""
        reshard(self.policy)
        for name, parameter in self.policy.trainable():
            yield name, whole_on(parameter.detach(), self.device)

    # -- the two ends of the line

    def _ask(self, requests: Sequence[Request], sampling: Sampling, *, first: bool = False) -> Ask:
        numbered = {next(self._numbers): replace(request, question=None) for request in requests}
        for number, request in numbered.items():
            self._asked[_asked(request, sampling)] = number, request
        with self._changed:
            if self._busy_since is None:
                self._busy_since = time.monotonic()
        return Ask(numbered, sampling, first)

    def _send(self, said: Any) -> None:
        try:
            self._line.send(said)
        except BlockingIOError:
            raise self._silent() from None
        except OSError:
            self._wait(lambda: False)  # it has ended, and why is told there

    def _listen(self) -> None:
        try:
            while True:
                said = self._line.recv()
                with self._changed:
                    self._hear(said)
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _hear(self, said: Any) -> None:
        self._heard = time.monotonic()
        if isinstance(said, Answered):
            self._answers.setdefault(said.number, []).append(said.completion)
        elif isinstance(said, Probed):
            self._probed = said
        elif isinstance(said, Failed):
            self._failed = said
        elif isinstance(said, Idle) and self._busy_since is not None:
            self._busy += self._heard - self._busy_since
            self._busy_since = None

    def _wait(self, come: Callable[[], bool]) -> None:
        """Until it has come; a worker that has ended or hung ends the run."""
        begun, tell_at = time.monotonic(), TELL_SECONDS
        try:
            with self._changed:
                while not come():
                    if self._ended:
                        raise self._refusal()
                    silent = time.monotonic() - max(self._heard, begun)
                    if silent >= SILENT_SECONDS:
                        raise self._silent()
                    if silent >= tell_at:
                        say(f"waiting for the rollout worker for {silent:.0f} s: its process runs; log {self.log}")
                        tell_at = silent + TELL_AGAIN_SECONDS
                    self._changed.wait(min(SILENT_SECONDS, tell_at) - silent)
        finally:
            self.waited += time.monotonic() - begun

    @contextmanager
    def _refusing_a_failed_hand_over(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        except BroadcastFailed as error:
            with self._changed:
                # A collective notices at once that its other side has gone, often before the line does.
                if self._changed.wait_for(lambda: self._ended, ENDED_SECONDS):
                    raise self._refusal() from error
            why = f"weights did not come through to the rollout worker by {self.collective}: {error}"
            remedy = "set rollout.hand_over=memory; the last checkpoint is untouched"
            # A way that has worked before may work again.
            kind = Refusal if self._said_before is None else LostProcess
            raise kind.at("rollout.hand_over", why, remedy) from error
        finally:
            if self.collective is not None:
                self.waited += time.monotonic() - begun

    def _silent(self) -> LostProcess:
        return LostProcess.at(
            KEY,
            f"the rollout worker has said nothing for {SILENT_SECONDS:g} s{self._last_lines()}",
            "it hangs: the same command goes on from the last checkpoint",
        )

    def _refusal(self) -> Refusal:
        how = self.process.ended()
        if self._failed is not None:
            kind = Refusal if self._failed.refused else LostProcess
            return kind.at("rollout worker", self._failed.why, self._failed.remedy)
        return LostProcess.at(
            "rollout worker",
            f"the process that generates {how}{self._last_lines()}",
            "the same command goes on from the last checkpoint; where memory ran out, lower rollout.cache_gb",
        )

    def _last_lines(self) -> str:
        if not self.log.is_file():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return f"; the last lines of {self.log}:\n" + "\n".join(lines)


def _asked(request: Request, sampling: Sampling) -> _Asked:
    return sampling, request.key, request.n


def _channel(
    policy: Policy, collective: str | None
) -> tuple[WeightMemory | WeightGroup, Sequence[Place] | Meeting, list[int]]:
    """How weights travel, what the worker is told of it, and the files that it is handed for it."""
    if collective is None:
        memory = WeightMemory.of(policy.trainable())
        return memory, memory.places, [memory.file]
    group = WeightGroup.opened(collective, SILENT_SECONDS)
    return group, Meeting(group.port, collective, SILENT_SECONDS), []


def _connection(ours: socket.socket, memory: Sequence[int]) -> Connection:
    """The line to the worker, on which the memory has been handed to it, if there is one."""
    socket.send_fds(ours, [b"."], memory)
    # A worker that does not read must not hold the run for ever.
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SILENT_SECONDS), 0))
    return Connection(os.dup(ours.fileno()))
