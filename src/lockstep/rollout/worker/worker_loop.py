"""The rollout worker's own side: takes weights and requests as they come, and generates in between.

Whatever comes pauses the engine after a round. Responses that are under way go on afterwards, under the new weights
where there are some: prompt and tokens so far are prefilled again, and the noise of a token depends on its place alone.
An engine that cannot pause (`hf`) finishes them under the old ones.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.parallel.world import World
from lockstep.recipe.loader import resolved
from lockstep.recipe.registry import import_plugins
from lockstep.rollout.generator import Generator
from lockstep.rollout.native.engine import NativeEngine
from lockstep.rollout.worker.messages import Answered, Ask, Failed, HandOver, Idle, Meeting, Opening, Probed, Working
from lockstep.rollout.worker.worker_weights import Place, WeightGroup, WeightMemory, probe
from lockstep.types import PAUSED, Begun, Completion, Request, Sampling

# Between two words to the run while no response is finished.
WORD_SECONDS = 5.0


def work(connection: int) -> None:
    """Until the run closes the connection."""
    line, memory = _received(connection)
    try:
        _Worker(line, line.recv(), memory).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the run is over
    except Refusal as refusal:
        first = refusal.problems[0]
        line.send(Failed(f"{first.where}: {first.why}", first.remedy))
        raise
    except Exception as error:
        line.send(Failed(f"{type(error).__name__}: {error}", refused=False))
        raise


def _received(connection: int) -> tuple[Connection, list[int]]:
    """The connection, and the descriptor of the memory, if there is one, which comes first on it."""
    with socket.socket(fileno=connection) as line:
        _, memory, _, _ = socket.recv_fds(line, 1, 1)
        return Connection(line.detach()), memory


def _channel(told: Sequence[Place] | Meeting, memory: list[int]) -> WeightMemory | WeightGroup:
    if isinstance(told, Meeting):
        return WeightGroup.met(told.collective, told.port, told.seconds)
    return WeightMemory(memory[0], told)


@dataclass
class _Unfinished:
    """A request, the samples of it that are left, and which weights drew their tokens so far."""

    number: int
    request: Request
    sampling: Sampling
    first: bool
    begun: dict[int, Begun]
    versions: dict[int, list[int]]

    @classmethod
    def of(cls, number: int, request: Request, ask: Ask) -> _Unfinished:
        samples = range(request.first, request.first + request.n)
        begun = {sample: Begun() for sample in samples}
        return cls(number, request, ask.sampling, ask.first, begun, {sample: [] for sample in samples})


class _Worker:
    def __init__(self, line: Connection, opening: Opening, memory: list[int]):
        recipe, self.line = opening.recipe, line
        torch.set_num_threads(opening.threads)
        import_plugins(resolved(recipe))
        device = select(recipe.device)
        if recipe.run.deterministic:
            device.deterministic(True)
        device.use(opening.device)
        self.device = device.torch_device(opening.device)
        self.policy = load_policy(recipe.model, self.device, device.attention, recipe.run.seed)
        tokenizer, path = load_tokenizer(recipe.model.path), recipe.model.path
        alone = World(local_rank=opening.device)
        generator = Generator(
            self.policy, tokenizer, recipe.rollout, device, alone, path, end_tokens=opening.end_tokens
        )
        self.engine = generator.engine
        if isinstance(self.engine, NativeEngine):
            self.engine.pause = self._paused
        self.channel = _channel(opening.weights, memory)
        self.version = -1
        self.jobs: list[_Unfinished] = []
        self._spoke = time.monotonic()

    def run(self) -> None:
        while True:
            while not self.jobs or self.line.poll():
                self._hear(self.line.recv())
            self._generate(self._together())
            if not self.jobs:
                self._say(Idle())

    def _hear(self, said: Any) -> None:
        if isinstance(said, HandOver):
            self.channel.read_into(self.policy.trainable())
            self.version = said.version
            self._say(Probed(said.version, probe(self.policy, self.device).tolist()))
            if said.ask is not None:
                self._take(said.ask)
        else:
            self._take(said)

    def _take(self, ask: Ask) -> None:
        jobs = [_Unfinished.of(number, request, ask) for number, request in ask.requests.items()]
        # A stable sort: who came first is served first, among those that are waited for and among the others.
        self.jobs = sorted([*self.jobs, *jobs], key=lambda job: not job.first)

    def _together(self) -> list[_Unfinished]:
        """Those that are sampled like the first one."""
        return [job for job in self.jobs if job.sampling == self.jobs[0].sampling]

    def _generate(self, jobs: list[_Unfinished]) -> None:
        requests = [replace(job.request, begun=dict(job.begun)) for job in jobs]
        for completion in self.engine.generate(requests, jobs[0].sampling):
            job, sample = jobs[completion.request], completion.sample
            versions = job.versions[sample]
            versions += [self.version] * (len(completion.ids) - len(versions))
            if completion.stop == PAUSED:
                job.begun[sample] = Begun(completion.ids, completion.logprobs)
            else:
                self._say(Answered(job.number, _versioned(completion, versions)))
                del job.begun[sample]
        self.jobs = [job for job in self.jobs if job.begun]

    def _paused(self) -> bool:
        if time.monotonic() - self._spoke > WORD_SECONDS:
            self._say(Working())
        return self.line.poll()

    def _say(self, said: Any) -> None:
        self._spoke = time.monotonic()
        self.line.send(said)


def _versioned(completion: Completion, versions: list[int]) -> Completion:
    return replace(completion, request=0, versions=tuple(versions))
