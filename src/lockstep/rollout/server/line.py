"""HTTP to the servers: many requests under way at once, each bounded in time and size, on a thread of its own.

While a request is under way the server is looked at (`Pulse`): a busy one may take its time, one that is gone ends the
request long before its limit.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lockstep.errors import with_secrets
from lockstep.masking import comparable, conceal
from lockstep.parallel.rendezvous import say
from lockstep.reward.exchange import HttpAnswer, TooLong, Trouble, answers, exchanged, open_client, short
from lockstep.rollout.server.failed import ServerFailed
from lockstep.rollout.server.together import MOST_BYTES, Together

T = TypeVar("T")
# What the servers ask for: of those that lockstep starts it is made up, unless this is set. Not a key of the recipe,
# which is kept and shown.
KEY_VARIABLE = "LOCKSTEP_SERVER_KEY"
# vLLM's own variable for the key of its /v1 routes.
ENGINE_KEY = "VLLM_API_KEY"
# A second header for the key, because a user and password in an address replace the first.
KEY_HEADER = "X-Lockstep-Key"
# For a verb that only turns a switch.
SWITCH_SECONDS = 120.0
# For a word of goodbye, which nobody needs an answer to.
LEAVE_SECONDS = 10.0
_JOIN_SECONDS = 30.0
# How often a server is looked at while it is waited for, and how long a look may take.
LOOK_SECONDS = 5.0
# A wait is told after so long. A server that nobody finds for so long is gone: a minute at most after it went.
TELL_SECONDS, GONE_SECONDS = 10.0, 35.0


@dataclass(eq=False)
class Pulse:
    """Whether one server is there, as all requests to it see it. Used on the event loop alone."""

    address: str
    gone_statuses: tuple[int, ...] = ()
    """Of `/health`: its engine is dead, or the server behind a proxy is."""
    ended: Callable[[], str | None] = lambda: None
    """How the process has ended, where it is one of ours."""
    why: str = ""
    """Why it looks gone; empty where it does not."""
    _since: float = 0.0
    _looked: float = 0.0
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _told: set[str] = field(default_factory=set)

    async def look(self, client: Any) -> str | None:
        """Why the server is gone, once that is certain."""
        async with self._looking:
            missed = time.monotonic() - self._looked
            if missed > GONE_SECONDS:
                self.why = ""  # nobody has looked for long: what was found then says nothing of now
            if missed >= LOOK_SECONDS / 2:
                await self._look(client)
                self._looked = time.monotonic()
        if (ended := self.ended()) is not None:
            return f"the server {ended}"
        missed = time.monotonic() - self._since
        if not self.why or missed < GONE_SECONDS:
            return None
        return f"the server is gone: {self.why} for {missed:.0f} s"

    async def _look(self, client: Any) -> None:
        try:
            status = await answers(client, f"{with_secrets(self.address, 'rollout.url')}/health", LOOK_SECONDS)
            why = f"/health answers {status}" if status in self.gone_statuses else ""
        except Trouble as error:
            why = str(error)
        if why and not self.why:
            self._since = time.monotonic()
            self._told.discard("gone")
        self.why = why

    def tell(self, path: str, waited: float) -> None:
        """That a wait is long: of each path once as long as the server is there, and once when it no longer is."""
        what = "gone" if self.why else path
        if what in self._told:
            return
        self._told.add(what)
        state = f"{self.why}; it is given up after {GONE_SECONDS:g} s" if self.why else "the server is there"
        say(f"waiting for {self.address}{path} for {waited:.0f} s: {state}")


class Lines:
    """The thread that all requests of a run go through."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over: asyncio.Event | None = None
        self._client: Any = None
        self.pulses: dict[str, Pulse] = {}
        """Of each server by its address."""
        self.together = Together(self._post_for_lines)
        self._thread = threading.Thread(target=self._serve, name="rollout-server", daemon=True)
        self._thread.start()
        self._ready.wait()
        self.authorize(os.environ.get(KEY_VARIABLE))

    def authorize(self, key: str | None) -> None:
        """Every request from here on brings the key."""
        if key:
            conceal(key)
            for name, value in (("Authorization", f"Bearer {key}"), (KEY_HEADER, key)):
                self._loop.call_soon_threadsafe(self._client.headers.__setitem__, name, value)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin something on the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def exchange(self, method: str, address: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """The JSON of a successful answer; None of an empty one."""
        answer = await self._exchanged(method, address, body, seconds)
        if not answer.body.strip():
            return None
        try:
            return json.loads(answer.body)
        except ValueError:
            # Some routes answer with a sentence.
            return answer.body.decode(errors="replace")

    async def _post_for_lines(
        self, address: str, body: Mapping[str, Any], seconds: float, piece: Callable[[bytes], None]
    ) -> None:
        await self._exchanged("POST", address, body, seconds, piece)

    async def _exchanged(
        self,
        method: str,
        address: str,
        body: Mapping[str, Any] | None,
        seconds: float,
        piece: Callable[[bytes], None] | None = None,
    ) -> HttpAnswer:
        """A successful answer."""
        data = b"" if body is None else json.dumps(body).encode()
        try:
            answer = await exchanged(self._client, method, address, data, seconds, MOST_BYTES, piece)
        except Trouble as error:
            raise ServerFailed(str(error), lost=True) from error
        except TooLong as error:
            raise ServerFailed(f"its answer is longer than {MOST_BYTES // 2**20} MiB") from error
        if not answer.success:
            raise ServerFailed(_told(answer), lost=answer.status >= 500, status=answer.status)
        return answer

    async def watched(self, address: str, path: str, work: Coroutine[Any, Any, T], *, tells: bool) -> T:
        """What the work returns, as long as the server is there; `tells` that it takes long."""
        pulse = self.pulses.setdefault(address, Pulse(address))
        task = asyncio.ensure_future(work)
        begun = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                gone = await pulse.look(self._client)
                waited = time.monotonic() - begun
                if waited >= TELL_SECONDS and (tells or pulse.why):
                    pulse.tell(path.partition("?")[0], waited)
                if gone is not None and not task.done():
                    raise ServerFailed(gone, lost=True, gone=True)
            return task.result()
        finally:
            task.cancel()

    def close(self) -> None:
        if self._over is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_JOIN_SECONDS)

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._until_over())
        finally:
            self._ready.set()
            self._loop.close()

    async def _until_over(self) -> None:
        self._over = asyncio.Event()
        async with open_client(direct_to_loopback=True) as self._client:
            self._ready.set()
            await self._over.wait()
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


@dataclass(frozen=True)
class ServerLine:
    """One server; `seconds` are those of `rollout.server.answer_limit`, for what may take long."""

    lines: Lines
    address: str
    """As it is shown: with references in the place of secrets."""
    seconds: float

    @cached_property
    def _reached(self) -> str:
        return with_secrets(self.address, "rollout.url")

    def get(self, path: str, seconds: float | None = None) -> Any:
        work = self.asked("GET", path, None, seconds or SWITCH_SECONDS, tells=True)
        return self.lines.start(work).result()

    def post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any:
        work = self.asked("POST", path, body, seconds or self.seconds, tells=True)
        return self.lines.start(work).result()

    async def asked(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float, *, tells: bool = False
    ) -> Any:
        return await self._told(path, self.lines.exchange(method, self._reached + path, body, seconds), tells=tells)

    async def sampled(self, path: str, body: Mapping[str, Any], seconds: float) -> Any:
        """One sample, by a route that takes many."""
        return await self._told(path, self.lines.together.ask(self._reached + path, body, seconds))

    async def _told(self, path: str, work: Coroutine[Any, Any, T], *, tells: bool = False) -> T:
        try:
            return await self.lines.watched(self.address, path, work, tells=tells)
        except ServerFailed as error:
            told = f"{self.address}{path.partition('?')[0]}: {error}"
            raise ServerFailed(told, lost=error.lost, status=error.status, gone=error.gone) from error


def is_address(text: str) -> bool:
    """http://host:port, with nothing behind it but a path that all routes share."""
    try:
        parts = urlsplit(comparable(text))
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:
        return False


def _told(answer: HttpAnswer) -> str:
    """Servers wrap their reasons in JSON of their own; the text inside is what a reader needs."""
    try:
        said = json.loads(answer.body)
    except ValueError:
        return answer.told()
    for key in ("error", "detail", "message"):
        while isinstance(said, dict) and key in said:
            said = said[key]
    return short(f"answered {answer.status} {answer.reason}: {said if isinstance(said, str) else json.dumps(said)}")
