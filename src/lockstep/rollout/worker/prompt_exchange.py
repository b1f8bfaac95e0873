"""The unfinished requests of a rank, and their moves between the rollout workers of the ranks.

A rank whose worker has nothing to generate takes a ticket. A rank whose worker has several unfinished samples fills the
oldest ticket with half of them. The rank that requested a sample keeps waiting for it: the rank that generates the
sample returns the response to it. So the assignment of prompts to ranks does not change. All messages pass through the
rendezvous store.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.parallel.rendezvous import connected_store
from lockstep.rollout.worker.worker_protocol import Ask, Begun
from lockstep.types import Completion, Request, Sampling

# A rank that took a place in a list of the store writes its entry at once, so others wait only shortly for it.
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class MovedPrompt:
    """Samples of a prompt that another worker generates. `number` is the number of the request at `rank`, the rank that
    requested it. The weights that generate further tokens must have at least this `version`."""

    rank: int
    number: int
    request: Request
    sampling: Sampling
    version: int
    begun: dict[int, Begun]


@dataclass
class OpenRequest:
    """A request that is not finished. `left` are the samples whose responses have not arrived, and `here` those of them
    that the worker of this rank generates. `version` is the oldest version of the weights that may generate them.
    `owner` is the rank and the request number of the rank that asked for the samples; None is this rank."""

    request: Request
    sampling: Sampling
    first: bool
    version: int
    left: set[int]
    here: dict[int, Begun]
    owner: tuple[int, int] | None = None


class OpenRequests:
    """The requests whose responses have not all arrived, by number, with the responses that have. With `exact`, a
    worker that starts again gets all requests of an unfinished message. With `whole`, all samples of a request move
    together, because an environment needs them."""

    def __init__(self, rank: int, *, exact: bool, whole: bool):
        self._rank, self._exact, self._whole = rank, exact, whole
        self._open: dict[int, OpenRequest] = {}
        self._messages: list[Ask] = []
        self.answers: dict[int, list[Completion]] = {}
        """The responses that this rank asked for."""
        self.for_others: list[tuple[int, int, Completion]] = []
        """Responses that other ranks asked for: the rank, its number of the request, and the response."""
        self.moved = self.added = 0
        """How many samples other workers took over, and how many requests were added."""

    @property
    def here(self) -> int:
        """The number of samples that the worker of this rank generates."""
        return sum(len(one.here) for one in self._open.values())

    def add(self, ask: Ask, version: int) -> None:
        self.added += len(ask.requests)
        for number, request in ask.requests.items():
            samples = _samples(request)
            here = {sample: Begun() for sample in samples}
            self._open[number] = OpenRequest(request, ask.sampling, ask.first, version, set(samples), here)
        if self._exact:
            self._messages = [one for one in [*self._messages, ask] if self._unfinished(one)]

    def answer(self, number: int, completion: Completion) -> None:
        """Keeps a response. A worker that was started again may generate a response that has already arrived."""
        found, sample = self._open.get(number), completion.sample
        if found is None or sample not in found.left:
            return
        found.left.discard(sample)
        found.here.pop(sample, None)
        if not found.left:
            del self._open[number]
        if found.owner is None:
            self.answers.setdefault(number, []).append(completion)
        else:
            self.for_others.append((*found.owner, completion))

    def again(self) -> list[Ask]:
        """Returns the messages for a worker that was started again."""
        if self._exact:
            return [ask for ask in self._messages if self._unfinished(ask)]
        return [
            # An environment generates all samples of a request; those that have arrived are generated in vain.
            Ask({number: one.request}, one.sampling, one.first, {} if self._whole else {number: dict(one.here)})
            for number, one in self._open.items()
            if one.here
        ]

    def give_all(self) -> list[MovedPrompt]:
        return self.give({number: dict(one.here) for number, one in self._open.items() if one.here})

    def give(self, begun: dict[int, dict[int, Begun]]) -> list[MovedPrompt]:
        """Removes samples from those of this worker. Returns them with their requests."""
        prompts = []
        for number, samples in begun.items():
            found = self._open[number]
            all_samples = _samples(found.request) if self._whole else samples
            moved = {sample: samples.get(sample, Begun()) for sample in all_samples}
            rank, own = found.owner or (self._rank, number)
            prompts.append(MovedPrompt(rank, own, found.request, found.sampling, found.version, moved))
            for sample in samples:
                found.here.pop(sample, None)
            if found.owner is not None:
                # The worker that takes the samples over returns them to their owner.
                found.left -= samples.keys()
                if not found.left:
                    del self._open[number]
            self.moved += len(samples)
        return prompts

    def take(self, prompt: MovedPrompt, new_number: int) -> Ask:
        """Adds samples that another worker gave up. Returns the message to the worker of this rank."""
        self.added, number = self.added + 1, new_number
        if prompt.rank == self._rank:  # samples of this rank that come back
            number, found = prompt.number, self._open[prompt.number]
            found.here |= {sample: begun for sample, begun in prompt.begun.items() if sample in found.left}
        else:
            left, owner = set(prompt.begun), (prompt.rank, prompt.number)
            self._open[number] = OpenRequest(
                prompt.request, prompt.sampling, False, prompt.version, left, dict(prompt.begun), owner
            )
        return Ask({number: prompt.request}, prompt.sampling, begun={number: prompt.begun})

    def _unfinished(self, ask: Ask) -> bool:
        return bool(self._open.keys() & ask.requests.keys())


def _samples(request: Request) -> range:
    return range(request.first, request.first + request.n)


class PromptExchange:
    """The lists of tickets and of returned responses. Only one thread of a rank may use this object."""

    def __init__(self, rank: int, store: dist.Store | None = None):
        # A separate connection: another thread may wait on the connection of the process group.
        self.rank, self._store = rank, connected_store("prompts", TIMEOUT) if store is None else store
        self._ticket: int | None = None
        self._busy = False
        self._read = 0

    def want(self, idle: bool) -> None:
        """Takes a ticket if the worker is idle. If the worker has got requests since, the ticket is marked, so that
        other ranks do not fill it."""
        if self._ticket is None:
            if idle:
                self._ticket, self._busy = self._store.add("wanted", 1) - 1, False
        elif idle == self._busy:
            self._busy = not idle
            if self._busy:
                self._store.set(f"busy/{self._ticket}", "")
            else:
                self._store.delete_key(f"busy/{self._ticket}")

    def received(self) -> list[MovedPrompt]:
        """Returns the prompts with which another rank has filled the ticket of this rank, if any."""
        if self._ticket is None or not self._store.check([f"ticket/{self._ticket}"]):
            return []
        prompts: list[MovedPrompt] = self._pop(f"ticket/{self._ticket}")
        self._store.delete_key(f"busy/{self._ticket}")
        self._ticket = None
        return prompts

    def claim(self) -> int | None:
        """Returns a ticket that this rank must fill, or None if no idle rank waits. Tickets of busy ranks are filled
        with nothing."""
        while (ticket := self._store.add("filled", 0)) < self._store.add("wanted", 0):
            # The key stays in the store: a rank that has read the old count may still come.
            if self._store.add(f"claim/{ticket}", 1) != 1:
                return None  # another rank was faster
            self._store.add("filled", 1)
            if ticket != self._ticket and not self._store.check([f"busy/{ticket}"]):
                return ticket
            self.fill(ticket, [])
        return None

    def fill(self, ticket: int, prompts: list[MovedPrompt]) -> None:
        self._store.set(f"ticket/{ticket}", pickle.dumps(prompts))  # type: ignore[arg-type]  # takes bytes

    def give_back(self, rank: int, number: int, completion: Completion) -> None:
        """Returns a response to the rank that requested it."""
        place = self._store.add(f"returned/{rank}", 1) - 1
        self._store.set(f"returned/{rank}/{place}", pickle.dumps((number, completion)))  # type: ignore[arg-type]

    def returned(self) -> list[tuple[int, Completion]]:
        """Returns the responses that other ranks have generated for this rank since the last call, with the number of
        their request."""
        first, self._read = self._read, self._store.add(f"returned/{self.rank}", 0)
        return [self._pop(f"returned/{self.rank}/{place}") for place in range(first, self._read)]

    def _pop(self, key: str) -> Any:
        value = pickle.loads(self._store.get(key))
        self._store.delete_key(key)
        return value
