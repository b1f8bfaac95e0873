"""HTTP to the servers: many requests under way at once, each bounded in time and size, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lockstep.errors import with_secrets
from lockstep.masking import comparable
from lockstep.reward.exchange import HttpAnswer, TooLong, Trouble, exchanged, open_client, short
from lockstep.rollout.server.failed import ServerFailed
from lockstep.rollout.server.together import MOST_BYTES, Together

T = TypeVar("T")
# For a verb that only turns a switch.
SWITCH_SECONDS = 120.0
# For a word of goodbye, which nobody needs an answer to.
LEAVE_SECONDS = 10.0
_JOIN_SECONDS = 30.0


class Lines:
    """The thread that all requests of a run go through."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over: asyncio.Event | None = None
        self._client: Any = None
        self.together = Together(self._post_for_lines)
        self._thread = threading.Thread(target=self._serve, name="rollout-server", daemon=True)
        self._thread.start()
        self._ready.wait()

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
        return self.lines.start(self.asked("GET", path, None, seconds or SWITCH_SECONDS)).result()

    def post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any:
        return self.lines.start(self.asked("POST", path, body, seconds or self.seconds)).result()

    async def asked(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        return await self._told(path, self.lines.exchange(method, self._reached + path, body, seconds))

    async def sampled(self, path: str, body: Mapping[str, Any], seconds: float) -> Any:
        """One sample, by a route that takes many."""
        return await self._told(path, self.lines.together.ask(self._reached + path, body, seconds))

    async def _told(self, path: str, work: Awaitable[T]) -> T:
        try:
            return await work
        except ServerFailed as error:
            told = f"{self.address}{path.partition('?')[0]}: {error}"
            raise ServerFailed(told, lost=error.lost, status=error.status) from error


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
