"""The messages and weights that the training process and its rollout worker exchange."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.data.batching import micro_batch, to_device
from lockstep.errors import Refusal
from lockstep.kernels.rotary import fixed_length
from lockstep.model.policy import Policy, Scoring, evaluating
from lockstep.model.text_model import text_config
from lockstep.recipe import Recipe
from lockstep.rollout.servers.plugin.lockstep_group import RUN, joined, left
from lockstep.types import Completion, Example, Origin, PartialResponse, Request, Sampling

# The code below sends weights to the rollout worker by shared memory or broadcast, and checks the worker's weights.

HERE = "127.0.0.1"
WORKER = 1
_LOOK_SECONDS = 0.5


class BroadcastFailed(RuntimeError):
    """Raised if a weight broadcast fails, because the other process has ended or does not respond."""


class WeightGroup:
    """Sends weights by broadcast in a process group of two ranks: the training process and the rollout worker. The
    group is created at the first weight sync. `seconds` is the timeout of every operation."""

    def __init__(self, rank: int, backend: str, store: dist.TCPStore, seconds: float):
        self.rank, self.backend, self.store = rank, backend, store
        self._seconds = seconds
        self._joined: dist.ProcessGroup | None = None
        self.ended: Callable[[], bool] = lambda: False
        """A function that returns whether the worker has ended. The training process sets this function."""

    @classmethod
    def opened(cls, backend: str, seconds: float) -> WeightGroup:
        """Creates the endpoint in the training process, which hosts the TCPStore."""
        return cls(RUN, backend, dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False), seconds)

    @classmethod
    def met(cls, backend: str, port: int, seconds: float) -> WeightGroup:
        """Creates the endpoint in the worker, which connects to the TCPStore of the training process."""
        return cls(WORKER, backend, dist.TCPStore(HERE, port, is_master=False), seconds)

    @property
    def port(self) -> int:
        return int(self.store.port)

    def give(self, parameters: Iterable[tuple[str, torch.Tensor]], notify: Callable[[], None]) -> None:
        """Notifies the worker and broadcasts the weights."""
        notify()
        if self._joined is None:
            self._meet()
        for _, parameter in parameters:
            self._broadcast(parameter.detach().contiguous())

    @torch.no_grad()
    def read_into(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, parameter in parameters:
            if parameter.is_contiguous():
                self._broadcast(parameter.detach())
            else:
                parameter.copy_(self._broadcast(torch.empty_like(parameter, memory_format=torch.contiguous_format)))

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            self._group().broadcast(tensor, RUN).wait()
        except RuntimeError as error:
            raise BroadcastFailed(str(error)) from error
        return tensor

    def _meet(self) -> None:
        """Joins the process group on a thread, because the join would block until its timeout if the worker has
        ended."""
        failed: list[BaseException] = []

        def join() -> None:
            try:
                self._group()
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises the error
                failed.append(error)

        thread = threading.Thread(target=join, daemon=True, name="weights")
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            if thread.is_alive() and self.ended():
                raise BroadcastFailed("the worker has ended")
        if failed:
            raise BroadcastFailed(str(failed[0])) from failed[0]

    def _group(self) -> dist.ProcessGroup:
        if self._joined is None:
            # A process may train several times with different workers. The port makes the group name unique.
            name = f"lockstep/weights/{self.port}"
            self._joined = joined(self.backend, self.store, name, self.rank, 2, self._seconds)
        return self._joined

    def close(self) -> None:
        if self._joined is not None:
            left(self._joined)
        self._joined = None


# Alignment of tensors in shared memory, for every dtype.
ALIGNED = 64


@dataclass(frozen=True)
class Place:
    """The location of a parameter in shared memory."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def places_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[Place]:
    """Returns the locations of the parameters, one after the other, in the shared memory."""
    places, start = [], 0
    for name, parameter in parameters:
        places.append(Place(name, start, tuple(parameter.shape), parameter.dtype))
        size = math.prod(parameter.shape) * parameter.dtype.itemsize  # the unsharded size
        start += -(-size // ALIGNED) * ALIGNED
    return places


class WeightMemory:
    """Sends weights through shared memory. `file` is the descriptor of the shared memory, which `close` closes."""

    def __init__(self, file: int, places: Sequence[Place]):
        self.file, self.places = file, places
        self._mapped = mmap.mmap(file, _size(places))
        self.weights: dict[str, torch.Tensor] = {
            place.name: torch.frombuffer(
                self._mapped, dtype=place.dtype, count=math.prod(place.shape), offset=place.start
            ).view(place.shape)
            for place in places
        }

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, torch.Tensor]]) -> WeightMemory:
        """Allocates shared memory for the parameters."""
        places = places_of(parameters)
        file = _nameless()
        os.ftruncate(file, _size(places))
        return cls(file, places)

    def give(self, parameters: Iterable[tuple[str, torch.Tensor]], notify: Callable[[], None]) -> None:
        """Writes the weights and notifies the worker."""
        self.write(parameters)
        notify()

    @torch.no_grad()
    def write(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in parameters:
            self.weights[name].copy_(parameter)

    @torch.no_grad()
    def read_into(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in parameters:
            parameter.copy_(self.weights[name])

    def close(self) -> None:
        """Closes the descriptor. The kernel frees the shared memory when every process has closed its descriptor."""
        self.weights.clear()
        os.close(self.file)


def _size(places: Sequence[Place]) -> int:
    last = places[-1]
    return last.start + max(1, math.prod(last.shape)) * last.dtype.itemsize


def _nameless() -> int:
    """Creates an anonymous memory file, which disappears when the processes end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("lockstep-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# Weight check: after each weight sync, the training process and the worker compute log-probs of the same tokens.
ROWS, LENGTH = 3, 16
# Maximum difference between the log-probs of the two processes, by dtype. The allowed differences are small, because
# both processes run the same kernels on the same shapes.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}


@torch.no_grad()
def probe(policy: Policy, device: torch.device) -> torch.Tensor:
    """Returns the policy's log-probs of fixed token ids, and the normalised features of a fixed image if the policy has
    a vision tower."""
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    length = min(LENGTH, fixed_length(text_config(policy.causal_lm.config)) or LENGTH)
    rows = [[(7 * row + 5 * i + 2) % vocabulary for i in range(length)] for row in range(ROWS)]
    examples = [Example(ids, [1] * length, Origin("probe", number)) for number, ids in enumerate(rows)]
    scoring, policy.scoring = policy.scoring, Scoring()
    try:
        with evaluating(policy):
            found = policy(to_device(micro_batch(examples, packed=True, pad_id=0), device)).logprobs_K.float().cpu()
            images = policy.decoder.images
            if images is None:
                return found
            features = images.features([], device).float().flatten().cpu()
            return torch.cat([found, torch.nn.functional.normalize(features, dim=0)])
    finally:
        policy.scoring = scoring


def refuse_other_weights(
    version: int, worker_K: torch.Tensor, trainer_K: torch.Tensor, before_K: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """Raises if the log-probs of the worker differ from those of the trainer. `before_K` are the log-probs of the
    trainer at the previous weight sync. An update may change log-probs by less than the allowed difference, so the
    log-probs of the worker must also be closer to the current log-probs of the trainer than to `before_K`."""
    off_K = (worker_K - trainer_K).abs()
    bound = TOLERANCE[dtype]
    if not bool((off_K <= bound).all()):
        at = int(off_K.nan_to_num(nan=torch.inf).argmax())
        why = (
            f"differs by up to {off_K[at].item():.3g} (the bound is {bound:g}): log-prob {worker_K[at].item():.6g} in "
            f"the worker, {trainer_K[at].item():.6g} in the trainer"
        )
    elif before_K is not None and off_K.sum() > (worker_K - before_K).abs().sum():
        why = "matches the weights before the last update"
    else:
        return
    raise Refusal.at(
        "rollout.max_staleness",
        f"the rollout worker does not have the weights after {version} steps: its result of the weight check {why}",
        "the last checkpoint is unchanged; remove rollout.max_staleness to generate without a worker process",
        code="weights-differ",
    )


def weight_channel(
    policy: Policy, collective: str | None, seconds: float
) -> tuple[WeightMemory | WeightGroup, Sequence[Place] | Meeting, list[int]]:
    """Returns the weight transport, its description for the worker, and the file descriptors to pass to the worker."""
    if collective is None:
        memory = WeightMemory.of(policy.kept())
        return memory, memory.places, [memory.file]
    group = WeightGroup.opened(collective, seconds)
    return group, Meeting(group.port, collective, seconds), []


# Messages between the training process and its rollout worker. The first message is `Opening`; weights and requests
# follow.


@dataclass(frozen=True)
class Meeting:
    """What the worker needs to join the process group for weight broadcasts (TCPStore port, backend and timeout)."""

    port: int
    collective: str
    seconds: float


@dataclass(frozen=True)
class Opening:
    """The first message to the worker. `end_tokens` are the end-of-sequence tokens of `Generator`. `device` is the
    worker's device index. The training process and the worker use the same number of CPU `threads`, so that sums are
    computed in the same order. `prompt_limit` and `logs` are those of `Generator`."""

    recipe: Recipe
    end_tokens: Sequence[int]
    weights: Sequence[Place] | Meeting
    """How the weights are sent: the locations in shared memory, or the data needed to join the process group."""
    device: int
    threads: int
    prompt_limit: int | None = None
    logs: Path | None = None


@dataclass(frozen=True)
class Begun:
    """The tokens of an unfinished sample, and for each token the version of the weights that generated it."""

    response: PartialResponse = field(default_factory=PartialResponse)
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ask:
    """Sends requests, by number. With `first`, the worker processes the requests of this message before all other
    requests. `begun` has the samples of a request that the worker generates, with their tokens so far; without an
    entry, the worker generates all samples of the request."""

    requests: dict[int, Request]
    sampling: Sampling
    first: bool = False
    begun: dict[int, dict[int, Begun]] = field(default_factory=dict)


@dataclass(frozen=True)
class Withdraw:
    """Asks the worker to give up half of its unfinished samples, which another worker generates."""


@dataclass(frozen=True)
class GivenUp:
    """The answer to `Withdraw`: the samples of each request that the worker no longer generates."""

    begun: dict[int, dict[int, Begun]]


@dataclass(frozen=True)
class HandOver:
    """Announces the weights after `version` steps, which are in the shared memory or follow by broadcast. The worker
    generates the responses to the requests in `ask` with the announced weights or later weights."""

    version: int
    ask: Ask | None


@dataclass(frozen=True)
class Probed:
    """The log-probs that the worker has computed for the check of the weights of `version`."""

    version: int
    logprobs: list[float]


@dataclass(frozen=True)
class Answered:
    """A finished response to request `number`."""

    number: int
    completion: Completion


@dataclass(frozen=True)
class Idle:
    """Reports that all requests are finished."""


@dataclass(frozen=True)
class Working:
    """A heartbeat, sent if the worker has sent no other message for a few seconds."""


@dataclass(frozen=True)
class Failed:
    """The last message of a worker that fails: the reason of the failure."""

    why: str
    remedy: str = field(default="")
    code: str = "worker-lost"
    refused: bool = True
    """`refused` is true if the settings are invalid, and false after an internal error that may not occur again after a
    restart."""
