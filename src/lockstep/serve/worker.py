"""The one thread that runs the engine: orders come in between rounds, pieces of answers go out after each."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lockstep.errors import first_line
from lockstep.rollout.native.online_engine import DrawnToken, LiveEngine, LiveSample
from lockstep.run.output import write
from lockstep.serve.limits import ServeLimits
from lockstep.serve.replies import ApiError
from lockstep.serve.text import TextStream
from lockstep.serve.tickets import NOISE_KEY, GenerationOrder, Piece, Ticket


@dataclass(eq=False)
class _Underway:
    """A sequence under way: for whom, as which choice, and its text."""

    ticket: Ticket
    choice: int
    text: TextStream


@dataclass(frozen=True)
class Load:
    """How full the engine is."""

    running: int
    waiting: int
    blocks: int
    free_blocks: int


class EngineWorker:
    """`decode` turns tokens into text without marks such as the end of a turn."""

    def __init__(self, engine: LiveEngine, decode: Callable[[list[int]], str], limits: ServeLimits):
        self._engine, self._decode, self._limits = engine, decode, limits
        # Guards what follows it; the engine itself belongs to the thread.
        self._changed = threading.Condition()
        self._new: list[Ticket] = []
        self._given_up: list[Ticket] = []
        self._sequences = 0
        self._over: str | None = None
        self._responses: dict[LiveSample, _Underway] = {}
        self._samples: dict[Ticket, list[LiveSample]] = {}
        self._load = Load(0, 0, engine.blocks, engine.free)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def over(self) -> str | None:
        """Why nothing more is generated; None while something is."""
        return self._over

    @property
    def load(self) -> Load:
        """As of the last round, with what came after it."""
        with self._changed:
            new = sum(ticket.order.sequences for ticket in self._new)
            last = self._load
        return Load(last.running, last.waiting + new, last.blocks, last.free_blocks)

    def order(self, order: GenerationOrder) -> Ticket:
        """The order under way, in the running event loop; whoever asks for it must `leave` it.

        Refused where the queue is full; ends with an error where it takes too long.
        """
        loop = asyncio.get_running_loop()
        ticket = Ticket(order, loop)
        with self._changed:
            if self._over is not None:
                raise ApiError(503, self._over, code="engine_stopped")
            if order.sequences > self._limits.queue:
                why = f"{order.sequences} sequences are over the limit of {self._limits.queue} (--queue)"
                raise ApiError(400, why, code="too_many_sequences")
            if self._sequences + order.sequences > self._limits.queue:
                raise ApiError(
                    429,
                    f"{self._sequences} sequences wait or run, and {order.sequences} more are over the limit of "
                    f"{self._limits.queue} (--queue)",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            self._sequences += order.sequences
            self._new.append(ticket)
            self._changed.notify()
        late = ApiError(504, f"no whole answer within {self._limits.seconds:g} s (--request-seconds)", code="timeout")
        ticket.timer = loop.call_later(self._limits.seconds, ticket.deliver, [late])
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Nobody waits for the order any more, whether it is finished or not. The engine's next round is without it,
        and its blocks of the cache are free."""
        if ticket.timer is not None:
            ticket.timer.cancel()
        with self._changed:
            self._sequences -= ticket.order.sequences
            self._given_up.append(ticket)
            self._changed.notify()

    def close(self) -> None:
        """Take nothing more and end the thread; orders under way end with an error."""
        self._end("the server is shutting down")
        self._thread.join()

    # In the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._taken():
                if self._engine.busy:
                    self._round()
                self._note_load()
        except Exception as error:  # noqa: BLE001 - whoever waits must be told, and a broken device stays broken
            write("".join(traceback.format_exception(error)), error=True)
            self._end(f"the engine stopped: {type(error).__name__}: {first_line(error)}")
        why = ApiError(503, self._over or "", code="engine_stopped")
        with self._changed:
            left = [*self._samples, *self._new]
            self._new = []
        for ticket in left:
            self._post({ticket: [why]})

    def _end(self, why: str) -> None:
        with self._changed:
            self._over = self._over or why
            self._changed.notify()

    def _taken(self) -> bool:
        """Let newcomers in and those who gave up out; waits where there is nothing to do. False when it is over."""
        with self._changed:
            while not (self._new or self._given_up or self._engine.busy or self._over):
                self._changed.wait()
            new, given_up = self._new, self._given_up
            self._new, self._given_up = [], []
            if self._over is not None:
                self._new = new
                return False
        gone = set(given_up)
        for ticket in new:
            if ticket not in gone:
                self._admit(ticket)
        for ticket in given_up:
            for sample in self._samples.pop(ticket, ()):
                self._engine.cancel(sample)
                self._responses.pop(sample, None)
        return True

    def _admit(self, ticket: Ticket) -> None:
        order = ticket.order
        held = self._samples[ticket] = []
        for number, (ids, sampling) in enumerate(zip(order.prompts, order.samplings, strict=True)):
            samples = self._engine.add(ids, order.n, sampling, key=NOISE_KEY, likeliest=order.likeliest)
            for sample in samples:
                text = TextStream(self._decode, order.stops)
                self._responses[sample] = _Underway(ticket, number * order.n + sample.number, text)
            held += samples

    def _round(self) -> None:
        pieces: dict[Ticket, list[Piece]] = {}
        for sample, told in self._engine.step():
            response = self._responses[sample]
            piece = self._piece(sample, response, told)
            pieces.setdefault(response.ticket, []).append(piece)
            if piece.finish is not None:
                del self._responses[sample]
        self._post(pieces)

    def _piece(self, sample: LiveSample, response: _Underway, told: list[DrawnToken]) -> Piece:
        """The text of the round's tokens, up to one that completes a text which ends the response."""
        text, stream = "", response.text
        for number, one in enumerate(told, 1):
            text += stream.push(one.token)
            if stream.stopped is not None:
                self._engine.cancel(sample)
                return Piece(response.choice, text, told[:number], "stop")
        if sample.stop:
            text += stream.end()
            length = sample.stop == "length" and stream.stopped is None
            return Piece(response.choice, text, told, "length" if length else "stop")
        return Piece(response.choice, text, told)

    def _post(self, found: Mapping[Ticket, Sequence[Piece | ApiError]]) -> None:
        """One call into the event loop for all: waking it takes longer than what it does then."""
        loops = {ticket.loop for ticket in found}
        for loop in loops:
            own = [(ticket, pieces) for ticket, pieces in found.items() if ticket.loop is loop]
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits there any more
                loop.call_soon_threadsafe(_deliver, own)

    def _note_load(self) -> None:
        scheduler = self._engine.scheduler
        load = Load(len(scheduler.running), len(scheduler.waiting), self._engine.blocks, self._engine.free)
        with self._changed:
            self._load = load


def _deliver(found: Sequence[tuple[Ticket, Sequence[Piece | ApiError]]]) -> None:
    for ticket, pieces in found:
        ticket.deliver(pieces)
