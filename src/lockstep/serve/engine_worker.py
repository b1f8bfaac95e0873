"""The thread that runs the engine: it admits requests between two decoding steps, and returns tokens after each."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.errors import first_line
from lockstep.rollout.native.online_engine import DrawnToken, LiveEngine, LiveSample
from lockstep.run.output import write
from lockstep.serve.http_api import ApiError, ServeLimits
from lockstep.serve.text_stream import TextStream
from lockstep.types import Sampling

# The key of the first reply of `lockstep generate`: the same seed gives the same answer.
NOISE_KEY = 1


@dataclass(frozen=True)
class GenerationRequest:
    """Prompts as token ids, the number `n` of continuations of each, and how to sample them; `likeliest` as in
    `LiveSample`."""

    prompts: Sequence[Sequence[int]]
    n: int
    samplings: Sequence[Sampling]
    """One per prompt: their limits of new tokens differ."""
    stops: tuple[str, ...] = ()
    likeliest: int | None = None

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True)
class Piece:
    """New tokens and text of the choice with number `choice`. `finish` is its end (`stop` or `length`), or None."""

    choice: int
    text: str
    tokens: Sequence[DrawnToken]
    finish: str | None = None


@dataclass(eq=False)
class Ticket:
    """A request under way. The event loop puts its pieces into `inbox`, or an error that ends it."""

    request: GenerationRequest
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Piece | ApiError] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None

    async def piece(self) -> Piece:
        found = await self.inbox.get()
        if isinstance(found, ApiError):
            raise found
        return found

    def deliver(self, found: Iterable[Piece | ApiError]) -> None:
        """Called in the event loop."""
        for one in found:
            self.inbox.put_nowait(one)


@dataclass(eq=False)
class _Running:
    """A sequence under way: its request, its choice and its text."""

    ticket: Ticket
    choice: int
    text: TextStream


@dataclass(frozen=True)
class Load:
    """Sequences in the engine, and blocks of the key/value cache."""

    running: int
    waiting: int
    blocks: int
    free_blocks: int


class EngineWorker:
    """`decode` returns the text of token ids without special tokens."""

    def __init__(self, engine: LiveEngine, decode: Callable[[list[int]], str], limits: ServeLimits):
        self._engine, self._decode, self._limits = engine, decode, limits
        # Guards the next five attributes; only the thread uses the engine.
        self._changed = threading.Condition()
        self._new: list[Ticket] = []
        self._released: list[Ticket] = []
        self._sequences = 0
        self._stopped: str | None = None
        self._responses: dict[LiveSample, _Running] = {}
        self._samples: dict[Ticket, list[LiveSample]] = {}
        self._load = Load(0, 0, engine.blocks, engine.free)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> str | None:
        """Why the engine has stopped; None while it runs."""
        return self._stopped

    @property
    def load(self) -> Load:
        """After the last decoding step, with the requests that came since."""
        with self._changed:
            new = sum(ticket.request.sequences for ticket in self._new)
            last = self._load
        return Load(last.running, last.waiting + new, last.blocks, last.free_blocks)

    def submit(self, request: GenerationRequest) -> Ticket:
        """Queue a request of the running event loop. The caller must `release` the ticket.

        A full queue is an error. The time limit ends the request with an error.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(request, loop)
        with self._changed:
            if self._stopped is not None:
                raise ApiError(503, self._stopped, code="engine_stopped")
            if request.sequences > self._limits.queue:
                why = f"{request.sequences} sequences are over the limit of {self._limits.queue} (--queue)"
                raise ApiError(400, why, code="too_many_sequences")
            if self._sequences + request.sequences > self._limits.queue:
                raise ApiError(
                    429,
                    f"{self._sequences} sequences wait or run, and {request.sequences} more are over the limit of "
                    f"{self._limits.queue} (--queue)",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            self._sequences += request.sequences
            self._new.append(ticket)
            self._changed.notify()
        late = ApiError(
            504, f"no complete answer within {self._limits.seconds:g} s (--request-seconds)", code="timeout"
        )
        ticket.timer = loop.call_later(self._limits.seconds, ticket.deliver, [late])
        return ticket

    def release(self, ticket: Ticket) -> None:
        """End a request, finished or not. The engine drops it before its next step and frees its blocks."""
        if ticket.timer is not None:
            ticket.timer.cancel()
        with self._changed:
            self._sequences -= ticket.request.sequences
            self._released.append(ticket)
            self._changed.notify()

    def close(self) -> None:
        """End the thread; requests under way end with an error."""
        self._end("the server is shutting down")
        self._thread.join()

    # In the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._admit_waiting():
                if self._engine.busy:
                    self._step()
                self._note_load()
        except Exception as error:  # noqa: BLE001 - waiting requests must end, and a broken device stays broken
            write("".join(traceback.format_exception(error)), error=True)
            self._end(f"the engine stopped: {type(error).__name__}: {first_line(error)}")
        why = ApiError(503, self._stopped or "", code="engine_stopped")
        with self._changed:
            left = [*self._samples, *self._new]
            self._new = []
        for ticket in left:
            self._post({ticket: [why]})

    def _end(self, why: str) -> None:
        with self._changed:
            self._stopped = self._stopped or why
            self._changed.notify()

    def _admit_waiting(self) -> bool:
        """Admit new requests and drop released ones; wait while there is no work. False once the worker stops."""
        with self._changed:
            while not (self._new or self._released or self._engine.busy or self._stopped):
                self._changed.wait()
            new, released = self._new, self._released
            self._new, self._released = [], []
            if self._stopped is not None:
                self._new = new
                return False
        dropped = set(released)
        for ticket in new:
            if ticket not in dropped:
                self._admit(ticket)
        for ticket in released:
            for sample in self._samples.pop(ticket, ()):
                self._engine.cancel(sample)
                self._responses.pop(sample, None)
        return True

    def _admit(self, ticket: Ticket) -> None:
        request = ticket.request
        admitted = self._samples[ticket] = []
        for number, (ids, sampling) in enumerate(zip(request.prompts, request.samplings, strict=True)):
            samples = self._engine.add(ids, request.n, sampling, key=NOISE_KEY, likeliest=request.likeliest)
            for sample in samples:
                text = TextStream(self._decode, request.stops)
                self._responses[sample] = _Running(ticket, number * request.n + sample.number, text)
            admitted += samples

    def _step(self) -> None:
        pieces: dict[Ticket, list[Piece]] = {}
        for sample, drawn in self._engine.step():
            response = self._responses[sample]
            piece = self._piece(sample, response, drawn)
            pieces.setdefault(response.ticket, []).append(piece)
            if piece.finish is not None:
                del self._responses[sample]
        self._post(pieces)

    def _piece(self, sample: LiveSample, response: _Running, drawn: list[DrawnToken]) -> Piece:
        """The text of the step's tokens, up to the token that completes a stop string."""
        text, stream = "", response.text
        for number, one in enumerate(drawn, 1):
            text += stream.push(one.token)
            if stream.stopped is not None:
                self._engine.cancel(sample)
                return Piece(response.choice, text, drawn[:number], "stop")
        if sample.stop:
            text += stream.end()
            length = sample.stop == "length" and stream.stopped is None
            return Piece(response.choice, text, drawn, "length" if length else "stop")
        return Piece(response.choice, text, drawn)

    def _post(self, found: Mapping[Ticket, Sequence[Piece | ApiError]]) -> None:
        """One call into the event loop for all tickets: waking the loop is the slow part."""
        loops = {ticket.loop for ticket in found}
        for loop in loops:
            local = [(ticket, pieces) for ticket, pieces in found.items() if ticket.loop is loop]
            with suppress(RuntimeError):  # the loop is closed: no request waits there
                loop.call_soon_threadsafe(_deliver, local)

    def _note_load(self) -> None:
        scheduler = self._engine.scheduler
        load = Load(len(scheduler.running), len(scheduler.waiting), self._engine.blocks, self._engine.free)
        with self._changed:
            self._load = load


def _deliver(found: Sequence[tuple[Ticket, Sequence[Piece | ApiError]]]) -> None:
    for ticket, pieces in found:
        ticket.deliver(pieces)
