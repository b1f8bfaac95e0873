"""HTTP requests to serving engines: one thread sends all requests and combines simultaneous samples into one request.

While a request is pending, `/health` of the server is polled (`HealthCheck`). Because of the health checks, a busy
server has the full time limit to answer, but a request to a dead server fails much earlier.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from lockstep.errors import with_secrets
from lockstep.http_client import HttpClient, HttpResponse, RequestFailed, ResponseTooLong, short
from lockstep.masking import comparable, conceal
from lockstep.parallel.rendezvous import say
from lockstep.rollout.servers.adapter import ServerFailed

# Samples that are requested from a server at the same time are sent as one HTTP request. The response has one line per
# sample, which the server sends when the sample is finished.

# Maximum size of one response line in bytes. A response of 100,000 tokens with its log-probs has about 3 MB.
MAX_BYTES = 256 * 2**20


class _Waiting(NamedTuple):
    body: Mapping[str, Any]
    answer: asyncio.Future[Any]


# A function that posts a body to an address within a time limit and passes each chunk of the response to a callback.
Post = Callable[[str, Mapping[str, Any], float, Callable[[bytes], None]], Awaitable[None]]


class RequestBatcher:
    """Combines samples that are requested at the same moment into one HTTP request. All calls must come from one event
    loop."""

    def __init__(self, post: Post):
        self._post = post
        self._waiting: dict[tuple[str, float], list[_Waiting]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    async def submit(self, address: str, body: Mapping[str, Any], seconds: float) -> Any:
        """Returns the answer to one sample. Samples submitted in the same event-loop iteration are sent together."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        others = self._waiting.setdefault((address, seconds), [])
        if not others:
            loop.call_soon(self._send, address, seconds)
        others.append(_Waiting(body, answer))
        return await answer

    def _send(self, address: str, seconds: float) -> None:
        batch = [one for one in self._waiting.pop((address, seconds)) if not one.answer.done()]
        if not batch:
            return
        task = asyncio.get_running_loop().create_task(self._exchange(address, batch, seconds))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

        def answered(answer: asyncio.Future[Any]) -> None:
            # If all samples of the batch are cancelled, close the connection, so that the server drops these samples.
            if answer.cancelled() and all(one.answer.done() for one in batch):
                task.cancel()

        for one in batch:
            one.answer.add_done_callback(answered)

    async def _exchange(self, address: str, batch: list[_Waiting], seconds: float) -> None:
        lines = _AnswerLines(batch)
        failed = ServerFailed("the response ended before all samples were answered", lost=True)
        try:
            await self._post(address, _one_request([one.body for one in batch]), seconds, lines.add)
        except ServerFailed as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - every waiting sample needs an outcome
            failed = ServerFailed(f"{type(error).__name__}: {error}")
        # A malformed answer does not mark the server as lost, because a retry on another server would not help.
        failed = lines.wrong or failed
        for one in batch:
            if not one.answer.done():
                one.answer.set_exception(
                    ServerFailed(str(failed), lost=failed.lost, status=failed.status, gone=failed.gone)
                )


def _one_request(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Builds one request body that contains each prompt and each image once. In this body, `token_ids` of a sample is
    the index of its prompt, and `image_order` has the keys of its images in `images`."""
    numbers: dict[tuple[int, ...], int] = {}
    images: dict[str, str] = {}
    indexed = []
    for sample in samples:
        rest = {key: value for key, value in sample.items() if key != "images"}
        images |= sample.get("images", {})
        indexed.append({**rest, "token_ids": numbers.setdefault(tuple(sample["token_ids"]), len(numbers))})
    return {"prompts": list(numbers), "samples": indexed, **({"images": images} if images else {})}


class _AnswerLines:
    """Splits the response of a batch into lines, and passes the answer in each line to its sample."""

    def __init__(self, batch: list[_Waiting]):
        self._batch, self._rest = batch, bytearray()
        self._answered: set[int] = set()
        self.wrong: ServerFailed | None = None
        """Why the response is malformed."""

    def add(self, chunk: bytes) -> None:
        self._rest += chunk
        if b"\n" not in chunk:
            if len(self._rest) > MAX_BYTES:
                raise ResponseTooLong
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            try:
                self._set(json.loads(line))
            except ServerFailed as error:
                self.wrong = error
                raise
            except (ValueError, KeyError, TypeError) as error:
                self.wrong = ServerFailed(f"a malformed line: {error!r}")
                raise self.wrong from error

    def _set(self, line: Any) -> None:
        number = line["number"]
        if type(number) is not int or not 0 <= number < len(self._batch):
            raise ServerFailed(f"the server answered sample {number!r}, but the request has {len(self._batch)} samples")
        waits = self._batch[number].answer
        if number in self._answered:
            raise ServerFailed(f"the server sent a second answer to sample {number}")
        self._answered.add(number)
        if waits.done():
            return  # the sample was cancelled
        if "answer" in line:
            waits.set_result(line["answer"])
        else:
            status = int(line["status"])
            why = short(f"answered {status}: {line['error']}")
            waits.set_exception(ServerFailed(why, lost=status >= 500, status=status))


T = TypeVar("T")
# The environment variable with the API key of the servers. If this variable is not set, servers that lockstep starts
# get a random key. The API key is not a recipe key, because recipes are stored and shown.
KEY_VARIABLE = "LOCKSTEP_SERVER_KEY"
# vLLM's environment variable for the API key of its /v1 routes.
ENGINE_KEY = "VLLM_API_KEY"
# A second HTTP header with the API key, because user and password in an address replace the Authorization header.
KEY_HEADER = "X-Lockstep-Key"
# Time limit in seconds of a request that only changes a setting of the server.
SWITCH_SECONDS = 120.0
# Time limit in seconds of the request at the end of a run that makes the server leave the process group.
LEAVE_SECONDS = 10.0
_JOIN_SECONDS = 30.0
# Interval of health checks during a request, and time limit of one health check, in seconds.
LOOK_SECONDS = 5.0
# A wait is logged after TELL_SECONDS. A server whose health checks fail for GONE_SECONDS is regarded as lost.
TELL_SECONDS, GONE_SECONDS = 10.0, 35.0


@dataclass(eq=False)
class HealthCheck:
    """The health of one server, shared by all requests to this server. Use a `HealthCheck` only in the event loop."""

    address: str
    gone_statuses: tuple[int, ...] = ()
    """HTTP statuses of `/health` that mean a dead engine, or a dead server behind a proxy."""
    ended: Callable[[], str | None] = lambda: None
    """Returns how the process of a server that lockstep started has ended, or None while the process runs."""
    why: str = ""
    """Why the last check failed; empty if it succeeded."""
    _since: float = 0.0
    _looked: float = 0.0
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _logged: set[str] = field(default_factory=set)

    async def check(self, client: HttpClient) -> str | None:
        """Checks the server. Returns the reason if the server is certainly lost, else None."""
        async with self._looking:
            missed = time.monotonic() - self._looked
            if missed > GONE_SECONDS:
                self.why = ""  # the result of the last check is too old
            if missed >= LOOK_SECONDS / 2:
                await self._check(client)
                self._looked = time.monotonic()
        if (ended := self.ended()) is not None:
            return f"the server {ended}"
        missed = time.monotonic() - self._since
        if not self.why or missed < GONE_SECONDS:
            return None
        return f"the server is gone: {self.why} for {missed:.0f} s"

    async def _check(self, client: HttpClient) -> None:
        try:
            status = await client.status(f"{with_secrets(self.address, 'rollout.url')}/health", LOOK_SECONDS)
            why = f"/health answers {status}" if status in self.gone_statuses else ""
        except RequestFailed as error:
            why = str(error)
        if why and not self.why:
            self._since = time.monotonic()
            self._logged.discard("gone")
        self.why = why

    def log_wait(self, path: str, waited: float) -> None:
        """Logs a long wait for a response: once per path while the server is healthy, and once if a health check
        fails."""
        what = "gone" if self.why else path
        if what in self._logged:
            return
        self._logged.add(what)
        state = (
            f"{self.why}; the server is regarded as lost after {GONE_SECONDS:g} s"
            if self.why
            else "the server is healthy"
        )
        say(f"waiting for {self.address}{path} for {waited:.0f} s: {state}")


class ClientThread:
    """A thread whose event loop sends all requests of a run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._over: asyncio.Event | None = None
        self._error: Exception | None = None
        """The error that ended the thread before it could send requests."""
        self._client: HttpClient
        self.health: dict[str, HealthCheck] = {}
        """The health check of each server, keyed by the server's address."""
        self.batcher = RequestBatcher(self._post_for_lines)
        self._thread = threading.Thread(target=self._serve, name="rollout-server", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        self.authorize(os.environ.get(KEY_VARIABLE))

    def authorize(self, key: str | None) -> None:
        """Sends the API key with every later request."""
        if key:
            conceal(key)
            for name, value in (("Authorization", f"Bearer {key}"), (KEY_HEADER, key)):
                self._loop.call_soon_threadsafe(self._client.set_header, name, value)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the event loop of this thread and returns its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def exchange(self, method: str, address: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        """Sends a request; returns the parsed JSON of a successful response, or None if its body is empty."""
        answer = await self._exchanged(method, address, body, seconds)
        if not answer.body.strip():
            return None
        try:
            return json.loads(answer.body)
        except ValueError:
            # Some routes of the servers respond with plain text instead of JSON.
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
    ) -> HttpResponse:
        """Sends a request; returns a successful response, else raises `ServerFailed`."""
        data = b"" if body is None else json.dumps(body).encode()
        try:
            answer = await self._client.request(
                method, address, data, seconds=seconds, max_bytes=MAX_BYTES, on_chunk=piece
            )
        except RequestFailed as error:
            raise ServerFailed(str(error), lost=True) from error
        except ResponseTooLong as error:
            raise ServerFailed(f"the response is longer than {MAX_BYTES // 2**20} MiB") from error
        if not answer.success:
            raise ServerFailed(_error_text(answer), lost=answer.status >= 500, status=answer.status)
        return answer

    async def watched(self, address: str, path: str, work: Coroutine[Any, Any, T], *, logged: bool) -> T:
        """Awaits the coroutine `work` and returns its result; raises `ServerFailed` if the server dies first. With
        `logged`, long waits are logged."""
        health = self.health.setdefault(address, HealthCheck(address))
        task = asyncio.ensure_future(work)
        begun = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                gone = await health.check(self._client)
                waited = time.monotonic() - begun
                if waited >= TELL_SECONDS and (logged or health.why):
                    health.log_wait(path.partition("?")[0], waited)
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
        except Exception as error:
            if self._ready.is_set():
                raise
            self._error = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _until_over(self) -> None:
        self._over = asyncio.Event()
        async with HttpClient(direct_to_loopback=True) as self._client:
            self._ready.set()
            await self._over.wait()
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


@dataclass(frozen=True)
class ServerClient:
    """Sends requests to one server. `seconds` is the time limit of slow requests (`rollout.server.request_timeout`)."""

    thread: ClientThread
    address: str
    """The address as messages show it: it contains references to secrets, not the secrets."""
    seconds: float

    @cached_property
    def _url(self) -> str:
        return with_secrets(self.address, "rollout.url")

    def get(self, path: str, seconds: float | None = None) -> Any:
        work = self.send("GET", path, None, seconds or SWITCH_SECONDS, logged=True)
        return self.thread.start(work).result()

    def post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any:
        work = self.send("POST", path, body, seconds or self.seconds, logged=True)
        return self.thread.start(work).result()

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float, *, logged: bool = False
    ) -> Any:
        return await self._watched(path, self.thread.exchange(method, self._url + path, body, seconds), logged=logged)

    async def sample(self, path: str, body: Mapping[str, Any], seconds: float) -> Any:
        """Requests one sample from a route that accepts many samples per request."""
        return await self._watched(path, self.thread.batcher.submit(self._url + path, body, seconds))

    async def _watched(self, path: str, work: Coroutine[Any, Any, T], *, logged: bool = False) -> T:
        try:
            return await self.thread.watched(self.address, path, work, logged=logged)
        except ServerFailed as error:
            why = f"{self.address}{path.partition('?')[0]}: {error}"
            raise ServerFailed(why, lost=error.lost, status=error.status, gone=error.gone) from error


def is_address(text: str) -> bool:
    """Returns whether the text is http://host:port, optionally with a path prefix for all routes."""
    try:
        parts = urlsplit(comparable(text))
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:
        return False


def _error_text(answer: HttpResponse) -> str:
    """Returns the status of an error response and the reason in its JSON body."""
    try:
        reason = json.loads(answer.body)
    except ValueError:
        return answer.error()
    for key in ("error", "detail", "message"):
        while isinstance(reason, dict) and key in reason:
            reason = reason[key]
    text = reason if isinstance(reason, str) else json.dumps(reason)
    return short(f"answered {answer.status} {answer.reason}: {text}")
