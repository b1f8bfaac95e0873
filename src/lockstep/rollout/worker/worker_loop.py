"""The main loop of the rollout worker process: receives weights and requests, and generates responses.

When a message from the run arrives, the engine pauses after the current decoding step. After a pause with new weights,
unfinished responses continue with these weights: the prompt and the generated tokens are prefilled again. The sampling
noise of a token depends only on its position. An engine that cannot pause (`hf`) finishes its running responses with
the old weights. Environments run next to the worker; a trajectory keeps its environment over a pause. A worker can give
up unfinished samples, which the worker of another rank then continues (`prompt_exchange.py`).
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from lockstep.data.encode.chat_template import with_template
from lockstep.device.select import select
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.running import Pausing, Running
from lockstep.errors import Refusal
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.parallel.world import World
from lockstep.recipe.loader import resolved
from lockstep.recipe.registry import import_plugins
from lockstep.rollout.generator import Generator
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.worker.worker_protocol import (
    Answered,
    Ask,
    Begun,
    Failed,
    GivenUp,
    HandOver,
    Idle,
    Meeting,
    Opening,
    Place,
    Probed,
    WeightGroup,
    WeightMemory,
    Withdraw,
    Working,
    probe,
)
from lockstep.types import PAUSED, PartialResponse, Request, Sampling

# The worker sends a heartbeat if it has sent no message for this many seconds.
HEARTBEAT_SECONDS = 5.0


def work(connection: int) -> None:
    """Runs the worker until the training process closes the connection."""
    pipe, memory = _accept(connection)
    try:
        _Worker(pipe, pipe.recv(), memory).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the run is over
    except Refusal as refusal:
        first = refusal.problems[0]
        pipe.send(Failed(f"{first.where}: {first.why}", first.remedy, first.code))
        raise
    except Exception as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}", refused=False))
        raise


def _accept(connection: int) -> tuple[Connection, list[int]]:
    """Returns the connection to the training process, and the descriptor of the shared memory, if any."""
    with socket.socket(fileno=connection) as sock:
        _, memory, _, _ = socket.recv_fds(sock, 1, 1)
        return Connection(sock.detach()), memory


def _channel(transport: Sequence[Place] | Meeting, memory: list[int]) -> WeightMemory | WeightGroup:
    if isinstance(transport, Meeting):
        return WeightGroup.met(transport.collective, transport.port, transport.seconds)
    return WeightMemory(memory[0], transport)


@dataclass
class _Unfinished:
    """A request with its unfinished samples."""

    number: int
    request: Request
    sampling: Sampling
    first: bool
    begun: dict[int, Begun]

    @classmethod
    def of(cls, number: int, request: Request, ask: Ask) -> _Unfinished:
        samples = range(request.first, request.first + request.n)
        begun = ask.begun.get(number) or {sample: Begun() for sample in samples}
        return cls(number, request, ask.sampling, ask.first, dict(begun))


class _Worker:
    def __init__(self, pipe: Connection, opening: Opening, memory: list[int]):
        recipe, self.pipe = opening.recipe, pipe
        torch.set_num_threads(opening.threads)
        import_plugins(resolved(recipe))
        device = select(recipe.device)
        if recipe.run.deterministic:
            device.deterministic(True)
        device.use(opening.device)
        self.device = device.torch_device(opening.device)
        self.policy = load_policy(recipe.model, self.device, device.attention, recipe.run.seed)
        path, settings = recipe.model.path, recipe.rollout
        tokenizer = with_template(load_tokenizer(path), recipe.data)
        alone, ends, limit = World(local_rank=opening.device), opening.end_tokens, opening.prompt_limit
        generator = Generator(self.policy, tokenizer, settings, device, alone, path, ends, opening.logs, limit)
        self.engine = generator.responder
        if isinstance(generator.engine, NativeEngine):
            generator.engine.pause = self._paused
        self.channel = _channel(opening.weights, memory)
        self.version = -1
        self.jobs: list[_Unfinished] = []
        self._conversing = self._withdrawn = False
        """Whether trajectories are being generated, and whether the run waits for requests that they give up."""
        self._last_sent = time.monotonic()

    def run(self) -> None:
        while True:
            while not self.jobs or self.pipe.poll():
                self._handle(self.pipe.recv())
            self._generate(self._same_sampling())
            if not self.jobs:
                self._send(Idle())

    def _handle(self, message: Any) -> None:
        if isinstance(message, HandOver):
            self.channel.read_into(self.policy.kept())
            self.version = message.version
            self._send(Probed(message.version, probe(self.policy, self.device).tolist()))
            if message.ask is not None:
                self._take(message.ask)
        elif isinstance(message, Withdraw):
            self._withdrawn = True
            if not self._conversing:
                self._give_up(self.jobs)
        else:
            self._take(message)

    def _take(self, ask: Ask) -> None:
        jobs = [_Unfinished.of(number, request, ask) for number, request in ask.requests.items()]
        # The sort is stable: requests stay in order of arrival, with the `first` requests before the others.
        self.jobs = sorted([*self.jobs, *jobs], key=lambda job: not job.first)

    def _give_up(self, jobs: Sequence[_Unfinished]) -> set[int]:
        """Gives up half of the unfinished samples, of these jobs only: the last ones, which have the fewest tokens.
        An environment needs all samples of a request. Returns the numbers of the requests that have no sample left."""
        whole = isinstance(self.engine, EnvironmentEngine)
        units = [(job, [*job.begun]) for job in jobs] if whole else [(job, [one]) for job in jobs for one in job.begun]
        most = sum(len(job.begun) for job in self.jobs) // 2
        given: dict[int, dict[int, Begun]] = {}
        for job, samples in reversed(units):
            if len(samples) > most:
                break
            most -= len(samples)
            given.setdefault(job.number, {}).update({sample: job.begun.pop(sample) for sample in samples})
        self._withdrawn = False
        self.jobs = [job for job in self.jobs if job.begun]
        self._send(GivenUp(given))
        return {job.number for job in jobs if not job.begun}

    def _same_sampling(self) -> list[_Unfinished]:
        """Returns the jobs that have the same sampling parameters as the first job."""
        return [job for job in self.jobs if job.sampling == self.jobs[0].sampling]

    def _generate(self, jobs: list[_Unfinished]) -> None:
        if isinstance(self.engine, EnvironmentEngine):
            self._generate_trajectories(self.engine, jobs)
            return
        requests = [
            replace(job.request, partial_responses={sample: one.response for sample, one in job.begun.items()})
            for job in jobs
        ]
        for completion in self.engine.generate(requests, jobs[0].sampling):
            job, sample = jobs[completion.request], completion.sample
            before = job.begun[sample].versions
            versions = (*before, *[self.version] * (len(completion.ids) - len(before)))
            if completion.stop == PAUSED:
                response = PartialResponse(completion.ids, completion.logprobs, completion.routes)
                job.begun[sample] = Begun(response, versions)
            else:
                self._send(Answered(job.number, replace(completion, request=0, versions=versions)))
                del job.begun[sample]
        self.jobs = [job for job in self.jobs if job.begun]

    def _generate_trajectories(self, engine: EnvironmentEngine, jobs: list[_Unfinished]) -> None:
        """Generates trajectories. Environments keep running during a pause. New weights and requests are handled
        between two turns, in the same call of the engine."""
        sampling = jobs[0].sampling

        def between() -> list[tuple[Request, bool]]:
            known = set(map(id, jobs))  # a request that was given up may come back with its number
            while self.pipe.poll():
                self._handle(self.pipe.recv())
            added = [job for job in self.jobs if id(job) not in known and job.sampling == sampling]
            jobs.extend(added)
            return [(job.request, job.first) for job in added]

        def unstarted(waiting: list[Running]) -> list[Running]:
            if not self._withdrawn:
                return waiting
            counts = Counter(one.number for one in waiting)
            given = self._give_up([jobs[at] for at, count in sorted(counts.items()) if count == jobs[at].request.n])
            return [one for one in waiting if jobs[one.number].number not in given]

        engine.pausing = Pausing(self._paused, between, lambda: self.version, unstarted)
        self._conversing = True
        for completion in engine.generate([job.request for job in jobs], sampling):
            job = jobs[completion.request]
            self._send(Answered(job.number, replace(completion, request=0)))
            del job.begun[completion.sample]
        self._conversing = False
        self.jobs = [job for job in self.jobs if job.begun]
        if self._withdrawn:  # all trajectories ended before the next pause
            self._give_up(self.jobs)

    def _paused(self) -> bool:
        if time.monotonic() - self._last_sent > HEARTBEAT_SECONDS:
            self._send(Working())
        return self.pipe.poll()

    def _send(self, message: Any) -> None:
        self._last_sent = time.monotonic()
        self.pipe.send(message)
