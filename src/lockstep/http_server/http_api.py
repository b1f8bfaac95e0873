"""Types for HTTP requests, replies, errors and limits, which do not depend on the HTTP server (`asgi.py`)."""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.errors import Refusal

if TYPE_CHECKING:
    import asyncio  # `lockstep view` uses these types and must start fast


def settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], outcome: Any) -> None:
    """Completes a future of the server's event loop from another thread; an `ApiError` becomes its exception."""

    def complete() -> None:
        if future.done():
            return
        if isinstance(outcome, ApiError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(complete)


class ApiError(Exception):
    """An HTTP error reply. `param` is the request key that has a wrong value. `code` is a machine-readable error
    code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Returns the body of the error reply in OpenAI's format."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, usual)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request. `path` is decoded, header names are in lower case, `query` is the text after `?`."""

    method: str
    path: str
    headers: Mapping[str, str]
    query: str = ""
    body: bytes = b""


@dataclass(frozen=True)
class HttpReply:
    """An HTTP reply. `body` is the complete body, or an iterator of chunks. The server calls `done` after it has sent
    the body, also if the client disconnects."""

    body: bytes | AsyncIterator[bytes] | Iterator[bytes]
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    done: Callable[[], None] = lambda: None


def as_json(value: Any, status: int = 200) -> HttpReply:
    return HttpReply(json.dumps(value, ensure_ascii=False).encode(errors="replace"), status)


def as_events(events: AsyncIterator[Any], done: Callable[[], None]) -> HttpReply:
    """Returns server-sent events that end with OpenAI's `[DONE]`. An error that occurs after the HTTP status was sent
    becomes the last event."""
    kind, headers = "text/event-stream; charset=utf-8", {"Cache-Control": "no-cache"}
    return HttpReply(_event_lines(events), content_type=kind, headers=headers, done=done)


async def _event_lines(events: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield _event_line(event)
    except ApiError as error:
        yield _event_line(error.body())
        return
    yield b"data: [DONE]\n\n"


def _event_line(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n\n"


def openai_error(error: ApiError) -> HttpReply:
    plain = as_json(error.body(), error.status)
    return HttpReply(plain.body, error.status, headers=error.headers)


Handler = Callable[[HttpRequest], Awaitable[HttpReply]] | Callable[[HttpRequest], HttpReply]


@dataclass(frozen=True)
class HttpSite:
    """The routes of one server by (method, path). A handler that is not a coroutine function runs in a thread. `check`
    runs before the body of a request is read, and raises `ApiError` to reject the request."""

    routes: Mapping[tuple[str, str], Handler]
    check: Callable[[HttpRequest], None]
    error: Callable[[ApiError], HttpReply] = openai_error

    def no_route(self, path: str) -> ApiError:
        paths = ", ".join(sorted({path for _, path in self.routes}))
        return ApiError(404, f"the server has no route {path[:200]}; its routes are {paths}", code="not_found")


@dataclass(frozen=True)
class ServeLimits:
    """Limits of the HTTP server. `body_bytes` is the maximum size of a request body. `queue` is the maximum number of
    sequences that wait or run. `seconds` is the maximum time from the last byte of a request to the last byte of its
    answer. `idle_seconds` is the maximum time for sending a complete request, and between two requests of a
    connection."""

    body_bytes: int = 16 * 2**20
    queue: int = 256
    seconds: float = 600.0
    idle_seconds: float = 75.0
    connections: int = 1024


@dataclass(frozen=True)
class ListenAddress:
    """The address of the server, and the API key that it requires. With port 0, the server uses any free port."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.loopback and not self.api_key:
            raise Refusal.at(
                "--host",
                f"{self.host} can be reached from other machines, and anyone who reaches it could use the model",
                "set --api-key (or LOCKSTEP_API_KEY), or leave --host at 127.0.0.1",
                code="open-server",
            )

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_caller(request: HttpRequest, api_key: str | None) -> None:
    """Rejects a request without the API key. If the server has no API key, rejects requests whose Host or Origin header
    is not this machine."""
    if api_key is not None:
        if request.method in ("GET", "HEAD") and request.path == "/health":
            return  # Health checks of load balancers have no key.
        # RFC 7235: the name of the scheme is case-insensitive.
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(given.encode(), api_key.encode()):
            raise ApiError(401, "the key is missing or wrong (Authorization: Bearer KEY)", code="invalid_api_key")
        return
    # A web page in a browser can send requests to this server, even under a foreign host name that resolves to this
    # machine.
    for name in ("host", "origin"):
        value = request.headers.get(name)
        if value is not None and not is_loopback(_host_name(value)):
            raise ApiError(403, f"the header {name} {value[:80]!r} names another machine; set --api-key to allow it")


def _host_name(text: str) -> str:
    try:
        return urlsplit(text if "://" in text else f"//{text}").hostname or ""
    except ValueError:
        return ""
