"""The HTTP server: a starlette application on uvicorn with limits for everything that a client can send.

A request is cancelled when its client disconnects. A client that has closed its end of the connection is treated as
disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from http import HTTPStatus
from typing import Any, cast

from lockstep.errors import Refusal, missing_extra
from lockstep.http_server.http_api import ApiError, Handler, HttpReply, HttpRequest, HttpSite, ServeLimits
from lockstep.run.output import write

try:
    import h11
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    # The packages h11, starlette and uvicorn are in the extra `serve`. Only servers import this module, when they
    # start.
    package = (error.name or "").partition(".")[0]
    if package not in ("h11", "starlette", "uvicorn"):
        raise
    raise missing_extra(package, "serve", "`lockstep serve`, `lockstep view` and `rollout.agent`") from error

HEAD_BYTES = 2**16
# The time to read and drop the rest of a rejected request. If the server closed the connection with unread data, TCP
# would reset it, and the client might not receive the error.
LINGER_SECONDS = 2.0
# After SIGINT or SIGTERM, running requests get this many seconds to finish.
SHUTDOWN_SECONDS = 5
# Headers that a request may contain only once, because a proxy and this server could use different values.
_SINGLE_HEADERS = ("host", "origin", "authorization", "content-length", "transfer-encoding")


def run_site(site: HttpSite, limits: ServeLimits, sockets: list[socket.socket]) -> None:
    """Serves on listening sockets until SIGINT or SIGTERM."""
    asyncio.run(_Server(_config(site, limits)).serve(sockets))


@contextlib.contextmanager
def site_in_thread(site: HttpSite, limits: ServeLimits, sockets: list[socket.socket]) -> Iterator[None]:
    """Serves on listening sockets while the context is open."""
    server = _Server(_config(site, limits))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets)), name="http-server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def bind(host: str, port: int, where: str) -> list[socket.socket]:
    """Returns one socket per address of the host. The sockets are bound to the port, but do not listen yet. `where`
    names the command line option in the error message."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            # All sockets use the port of the first socket. With port 0, the first socket gets a free port.
            actual_port = sockets[0].getsockname()[1] if sockets else port
            sockets.append(socket.socket(family, kind, protocol))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sockets[-1].bind((address[0], actual_port))
    except OSError as error:
        for opened in sockets:
            opened.close()
        remedy = "choose another port; port 0 selects any free port"
        raise Refusal.at(where, f"cannot listen: {error.strerror}", remedy, code="port-unavailable") from error
    return sockets


def listen(sockets: list[socket.socket]) -> int:
    """Makes the sockets listen. Returns the port."""
    for bound in sockets:
        bound.listen(1024)
    return int(sockets[0].getsockname()[1])


def _config(site: HttpSite, limits: ServeLimits) -> uvicorn.Config:
    return uvicorn.Config(
        asgi_app(site, limits),
        http=type("Protocol", (LimitedProtocol,), {"site": site, "limits": limits}),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        # uvicorn logs almost nothing: `_endpoint` prints errors of handlers, and clients receive the errors of their
        # requests.
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=int(limits.idle_seconds) + 1,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: Any) -> None:
        """Ends the server after a signal with exit status 0. uvicorn's own method would raise the signal again."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


# -- requests and replies


def asgi_app(site: HttpSite, limits: ServeLimits) -> ASGIApp:
    """Returns the ASGI application of the site, which calls `site.check` before it handles a request."""
    routes = [
        Route(path, _endpoint(site, handler, limits), methods=[method])
        for (method, path), handler in site.routes.items()
    ]

    async def unrouted(request: Request, error: Exception) -> Any:
        await _drain(request)
        path, method = request.scope["path"], request.method
        wrong = ApiError(405, f"{path[:200]} does not support the method {method[:20]}", code="method_not_allowed")
        unknown = getattr(error, "status_code", 404) == HTTPStatus.NOT_FOUND
        return _response(site.error(site.no_route(path) if unknown else wrong))

    app = Starlette(routes=routes, exception_handlers={HTTPException: unrouted})
    app.router.redirect_slashes = False

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        stripped = scope["path"].rstrip("/")
        if any(stripped == path for _, path in site.routes):
            scope["path"] = stripped
        try:
            _check_framing(scope)
            site.check(_request(scope))
        except ApiError as error:
            await _drain(Request(scope, receive))
            # The connection is closed. After wrong Content-Length headers, the server could misread where the next
            # request begins.
            await _response(site.error(error), close=True)(scope, receive, send)
            return
        await app(scope, receive, send)

    return checked


def _request(scope: Scope, body: bytes = b"") -> HttpRequest:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return HttpRequest(scope["method"], scope["path"], headers, scope["query_string"].decode("latin-1"), body)


def _check_framing(scope: Scope) -> None:
    names = [name.decode("latin-1") for name, _ in scope["headers"]]
    # The HTTP parser limits the size of request heads that arrive in several packets. `_check_framing` limits the size
    # of request heads that arrive in one packet.
    if len(scope["raw_path"]) + sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES:
        raise _head_too_long()
    for name in _SINGLE_HEADERS:
        if names.count(name) > 1:
            raise ApiError(400, f"the header {name} is repeated")
    if "transfer-encoding" in names and "content-length" in names:
        raise ApiError(400, "a body needs either Content-Length or Transfer-Encoding: chunked, not both")


def _head_too_long() -> ApiError:
    return ApiError(431, f"the request head is longer than {HEAD_BYTES} bytes")


def _endpoint(site: HttpSite, handler: Handler, limits: ServeLimits) -> Callable[[Request], Coroutine[Any, Any, Any]]:
    async def answer(request: Request) -> HttpReply:
        parsed = _request(request.scope, await _body(request, limits))
        if inspect.iscoroutinefunction(handler):
            return await _until_disconnected(request, handler(parsed))
        return cast(HttpReply, await run_in_threadpool(handler, parsed))

    async def endpoint(request: Request) -> Any:
        try:
            reply = await answer(request)
        except ClientDisconnect:
            return Response(status_code=499)  # the client has disconnected
        except ApiError as error:
            reply = site.error(error)
        except Exception as error:  # noqa: BLE001 - after a bug, the client must get an error reply
            write("".join(traceback.format_exception(error)), error=True)
            reply = site.error(ApiError(500, f"the server failed: {type(error).__name__}: {error}"))
        return _response(reply)

    return endpoint


def _response(reply: HttpReply, *, close: bool = False) -> ASGIApp:
    """Returns an ASGI application that sends the reply. With `close`, the connection is closed after the reply."""
    headers = {"Content-Type": reply.content_type, **reply.headers, **({"Connection": "close"} if close else {})}
    if isinstance(reply.body, bytes):
        response: Response = Response(reply.body, reply.status, headers)
    else:
        response = StreamingResponse(reply.body, reply.status, headers)

    async def send_reply(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await response(scope, receive, send)
        finally:
            reply.done()

    return send_reply


async def _body(request: Request, limits: ServeLimits) -> bytes:
    limit = limits.body_bytes
    message = f"the body is over the limit of {limit / 2**20:g} MiB (--max-body)"
    too_large = ApiError(413, message, code="body_too_large")
    if int(request.headers.get("content-length", "0")) > limit:
        await _drain(request)
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            await _drain(request)
            raise too_large
    return b"".join(chunks)


async def _drain(request: Request) -> None:
    """Reads and drops a body for up to `LINGER_SECONDS`, so that a client that is still sending receives the error."""
    if "expect" in request.headers:
        return  # reading would make the server reply "100 Continue", and the client would send the body

    async def drop_rest() -> None:
        while (await request.receive()).get("more_body"):
            pass

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drop_rest(), LINGER_SECONDS)


async def _until_disconnected(request: Request, work: Coroutine[Any, Any, HttpReply]) -> HttpReply:
    """Returns the reply of `work`. Cancels `work` if the client disconnects before the reply is ready."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# -- connections


class LimitedProtocol(H11Protocol):
    """HTTP/1.1 protocol with time limits for slow clients, a connection limit, and error replies in the format of the
    site. The package uvicorn creates the instances, so `_config` creates a subclass with the attributes `site` and
    `limits`."""

    site: HttpSite
    limits: ServeLimits

    _deadline: asyncio.TimerHandle | None = None
    _rejected = False
    _answered_cycle: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_after(self.limits.idle_seconds)
        if len(self.connections) > self.limits.connections:
            self._reject(ApiError(503, "there are too many connections", code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._rejected:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and self._answered_cycle is not cycle:
            self._answered_cycle = cycle
            # The handler may take up to `limits.seconds`. A slow client has another `limits.seconds` to receive the
            # answer.
            self._close_after(2 * self.limits.seconds + self.limits.idle_seconds)

    def on_response_complete(self) -> None:
        self._close_after(self.limits.idle_seconds)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Sends an error reply. The package uvicorn calls this method while it handles an exception of the HTTP parser,
        which contains the status and the reason."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self._reject(_head_too_long() if status == 431 else ApiError(status, f"no HTTP/1.1 request: {error}"))

    def _close_after(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _reject(self, error: ApiError) -> None:
        """Sends the error, then drops further data for `LINGER_SECONDS`."""
        self._rejected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_plain_error(self.site.error(error)))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._close_after(LINGER_SECONDS)


def _plain_error(reply: HttpReply) -> bytes:
    assert isinstance(reply.body, bytes)
    headers: Mapping[str, str] = {"Content-Type": reply.content_type, **reply.headers}
    lines = [
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
        f"Content-Length: {len(reply.body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + reply.body
