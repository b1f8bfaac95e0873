"""The thread that runs the inference engine.

The thread admits requests between decoding steps, and returns tokens after each step.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.errors import first_line
from lockstep.http_server.http_api import ApiError, ServeLimits
from lockstep.rollout.native.online_engine import DrawnToken, LiveEngine, LiveSample
from lockstep.run.output import write
from lockstep.serve.text_stream import TextStream
from lockstep.types import Sampling

# The server uses the same random key as the first reply of `lockstep generate`, so that the same seed gives the same
# answer.
NOISE_KEY = 1


@dataclass(frozen=True)
class GenerationRequest:
    """A generation request. `prompts` are token ids, and `n` is the number of responses per prompt. `top_logprobs` is
    the number of alternatives per token, or None for a reply without log-probs."""

    prompts: Sequence[Sequence[int]]
    n: int
    samplings: Sequence[Sampling]
    """The sampling settings of each prompt, which may differ in the maximum number of new tokens and in the seed."""
    stops: tuple[str, ...] = ()
    top_logprobs: int | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True)
class Delta:
    """New tokens and text of one choice. `finish` is the finish reason of the choice (`stop` or `length`), or None if
    it is not finished."""

    choice: int
    text: str
    tokens: Sequence[DrawnToken]
    finish: str | None = None


@dataclass(eq=False)
class PendingRequest:
    """A request in progress. `inbox` receives the deltas of the request, or the error that ends the request."""

    request: GenerationRequest
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Delta | ApiError] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None

    async def next_delta(self) -> Delta:
        delta = await self.inbox.get()
        if isinstance(delta, ApiError):
            raise delta
        return delta

    def deliver(self, deltas: Iterable[Delta | ApiError]) -> None:
        """Puts the deltas into the inbox. Must be called in the event loop."""
        for delta in deltas:
            self.inbox.put_nowait(delta)


@dataclass(eq=False)
class _RunningSequence:
    """A sequence that is being generated: its request, the index of its choice in the reply, and its text."""

    pending: PendingRequest
    choice: int
    text: TextStream


@dataclass(frozen=True)
class Load:
    """The load of the engine: the number of running and waiting sequences, and of all and free KV cache blocks."""

    running: int
    waiting: int
    blocks: int
    free_blocks: int


class EngineWorker:
    """Runs the inference engine in a thread for all requests. `decode` returns the text of token ids without special
    tokens."""

    def __init__(self, engine: LiveEngine, decode: Callable[[list[int]], str], limits: ServeLimits):
        self._engine, self._decode, self._limits = engine, decode, limits
        # This lock guards the attributes that several threads use. Only the engine thread uses the engine.
        self._changed = threading.Condition()
        self._new: list[PendingRequest] = []
        self._released: list[PendingRequest] = []
        self._sequences = 0
        self._stopped: str | None = None
        self._responses: dict[LiveSample, _RunningSequence] = {}
        self._samples: dict[PendingRequest, list[LiveSample]] = {}
        self._load = Load(0, 0, engine.blocks, engine.free)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> str | None:
        """The reason why the engine has stopped, or None while it runs."""
        return self._stopped

    @property
    def load(self) -> Load:
        """The load after the last decoding step, plus the requests that arrived after that step."""
        with self._changed:
            new = sum(pending.request.num_sequences for pending in self._new)
            last = self._load
        return Load(last.running, last.waiting + new, last.blocks, last.free_blocks)

    def submit(self, request: GenerationRequest) -> PendingRequest:
        """Queues a request. Must be called in an event loop. The caller must call `release` for the returned request.
        Raises `ApiError` if the queue is full. After the time limit, the request ends with an error."""
        loop = asyncio.get_running_loop()
        pending = PendingRequest(request, loop)
        with self._changed:
            if self._stopped is not None:
                raise ApiError(503, self._stopped, code="engine_stopped")
            if request.num_sequences > self._limits.queue:
                why = f"{request.num_sequences} sequences are over the limit of {self._limits.queue} (--queue)"
                raise ApiError(400, why, code="too_many_sequences")
            if self._sequences + request.num_sequences > self._limits.queue:
                raise ApiError(
                    429,
                    f"{self._sequences} sequences wait or run, and {request.num_sequences} more are over the limit of "
                    f"{self._limits.queue} (--queue)",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            self._sequences += request.num_sequences
            self._new.append(pending)
            self._changed.notify()
        late = ApiError(
            504, f"no complete answer within {self._limits.seconds:g} s (--request-seconds)", code="timeout"
        )
        pending.timer = loop.call_later(self._limits.seconds, pending.deliver, [late])
        return pending

    def release(self, pending: PendingRequest) -> None:
        """Ends a finished or unfinished request. Before its next step, the engine drops the request and frees its KV
        cache blocks."""
        if pending.timer is not None:
            pending.timer.cancel()
        with self._changed:
            self._sequences -= pending.request.num_sequences
            self._released.append(pending)
            self._changed.notify()

    def close(self) -> None:
        """Ends the engine thread. Requests in progress end with an error."""
        self._end("the server is shutting down")
        self._thread.join()

    # Methods of the engine thread ---------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._admit_waiting():
                if self._engine.busy:
                    self._step()
                self._note_load()
        except Exception as error:  # noqa: BLE001 - after any error, waiting requests must end
            write("".join(traceback.format_exception(error)), error=True)
            self._end(f"the engine stopped: {type(error).__name__}: {first_line(error)}")
        why = ApiError(503, self._stopped or "", code="engine_stopped")
        with self._changed:
            left = [*self._samples, *self._new]
            self._new = []
        for pending in left:
            self._post({pending: [why]})

    def _end(self, why: str) -> None:
        with self._changed:
            self._stopped = self._stopped or why
            self._changed.notify()

    def _admit_waiting(self) -> bool:
        """Admits new requests and drops released requests. Waits while there is no work. Returns False if the worker
        must stop."""
        with self._changed:
            while not (self._new or self._released or self._engine.busy or self._stopped):
                self._changed.wait()
            new, released = self._new, self._released
            self._new, self._released = [], []
            if self._stopped is not None:
                self._new = new
                return False
        dropped = set(released)
        for pending in new:
            if pending not in dropped:
                self._admit(pending)
        for pending in released:
            for sample in self._samples.pop(pending, ()):
                self._engine.cancel(sample)
                self._responses.pop(sample, None)
        return True

    def _admit(self, pending: PendingRequest) -> None:
        request = pending.request
        admitted = self._samples[pending] = []
        for number, (ids, sampling) in enumerate(zip(request.prompts, request.samplings, strict=True)):
            samples = self._engine.add(ids, request.n, sampling, key=NOISE_KEY, likeliest=request.top_logprobs)
            for sample in samples:
                text = TextStream(self._decode, request.stops)
                self._responses[sample] = _RunningSequence(pending, number * request.n + sample.number, text)
            admitted += samples

    def _step(self) -> None:
        new_deltas: dict[PendingRequest, list[Delta]] = {}
        for sample, drawn in self._engine.step():
            response = self._responses[sample]
            delta = self._delta(sample, response, drawn)
            new_deltas.setdefault(response.pending, []).append(delta)
            if delta.finish is not None:
                del self._responses[sample]
        self._post(new_deltas)

    def _delta(self, sample: LiveSample, response: _RunningSequence, drawn: list[DrawnToken]) -> Delta:
        """Returns the new tokens and text of one sequence, up to the token that completes a stop string."""
        text, stream = "", response.text
        for count, token in enumerate(drawn, 1):
            text += stream.push(token.token)
            if stream.stopped is not None:
                self._engine.cancel(sample)
                return Delta(response.choice, text, drawn[:count], "stop")
        if sample.stop:
            text += stream.end()
            length = sample.stop == "length" and stream.stopped is None
            return Delta(response.choice, text, drawn, "length" if length else "stop")
        return Delta(response.choice, text, drawn)

    def _post(self, deltas: Mapping[PendingRequest, Sequence[Delta | ApiError]]) -> None:
        """Sends all deltas in one call into the event loop, because each call wakes the loop, which is slow."""
        loops = {pending.loop for pending in deltas}
        for loop in loops:
            local = [(pending, new_deltas) for pending, new_deltas in deltas.items() if pending.loop is loop]
            with suppress(RuntimeError):  # the event loop is closed, so no request waits in it
                loop.call_soon_threadsafe(_deliver, local)

    def _note_load(self) -> None:
        scheduler = self._engine.scheduler
        load = Load(len(scheduler.running), len(scheduler.waiting), self._engine.blocks, self._engine.free)
        with self._changed:
            self._load = load


def _deliver(deltas: Sequence[tuple[PendingRequest, Sequence[Delta | ApiError]]]) -> None:
    for pending, new_deltas in deltas:
        pending.deliver(new_deltas)
