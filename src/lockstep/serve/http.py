"""A small HTTP/1.1 server on asyncio, bounded in everything a client can send.

It knows when a client has gone: what was being done for it is cancelled at once. Whoever closes its side of the
connection counts as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from lockstep.run.output import write
from lockstep.serve.limits import ServeLimits
from lockstep.serve.replies import ApiError, HttpReply, of_error

HEAD_BYTES = 2**16
# After an answer to a request that was not read to its end: what still comes is read, so that the answer arrives.
LINGER_SECONDS = 2.0
# Said twice, two readers of a request may each believe another one.
_ONCE = ("host", "origin", "authorization", "content-length", "transfer-encoding")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")


@dataclass(frozen=True)
class HttpRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


class _Connection(asyncio.StreamReaderProtocol):
    """A stream that says when the other side has gone."""

    def __init__(self, serve: Callable[[_Connection], Awaitable[None]]):
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=HEAD_BYTES, loop=loop)
        self.gone = asyncio.Event()
        self.writer: asyncio.StreamWriter
        self._serve_this = serve
        super().__init__(self.reader, self._connected, loop=loop)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
        self.writer = writer
        return self._serve_this(self)

    def eof_received(self) -> bool | None:
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone.set()
        super().connection_lost(exc)


class HttpServer:
    """`handle` answers one request; it is cancelled when its client goes away. `check` looks at a request before its
    body is read, and raises where there is no need to."""

    def __init__(self, handle: Handler, limits: ServeLimits, check: Callable[[HttpRequest], None]):
        self.handle, self.limits, self.check = handle, limits, check
        self.connections: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Take connections; the port that it listens on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self._serve), host, port, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no more, and cancel what is under way."""
        if self._server is not None:
            self._server.close()
        for task in list(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    async def _serve(self, connection: _Connection) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            if len(self.connections) > self.limits.connections:
                busy = ApiError(503, "there are too many connections", code="too_many_connections")
                await self._send(connection, of_error(busy), keep=False, headless=False)
                return
            while await self._exchange(connection):
                pass
        except (ConnectionError, asyncio.CancelledError):
            pass  # gone, closing, or too slow to take its answer: there is nobody to tell
        finally:
            self.connections.discard(task)
            connection.writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError, asyncio.TimeoutError):
                await asyncio.wait_for(connection.writer.wait_closed(), LINGER_SECONDS)

    async def _exchange(self, connection: _Connection) -> bool:
        """One request and its answer; whether another may follow."""
        try:
            with _closed_after(connection, self.limits.idle_seconds):
                request = await self._read(connection)
        except ApiError as error:
            await self._send(connection, of_error(error), keep=False, headless=False)
            await _linger(connection)
            return False
        if request is None:
            return False
        reply = await self._answered(connection, request)
        if reply is None:
            return False
        said = request.headers.get("connection", "").lower()
        keep = "close" not in [word.strip() for word in said.split(",")]
        try:
            await self._send(connection, reply, keep=keep, headless=request.method == "HEAD")
        finally:
            reply.done()
        return keep and not connection.gone.is_set()

    async def _answered(self, connection: _Connection, request: HttpRequest) -> HttpReply | None:
        """None where the client has gone."""

        async def handled() -> HttpReply:
            try:
                return await self.handle(request)
            except ApiError as error:
                return of_error(error)
            except Exception as error:  # noqa: BLE001 - a defect of ours must not look like a lost connection
                write("".join(traceback.format_exception(error)), error=True)
                return of_error(ApiError(500, f"the server failed: {type(error).__name__}: {error}"))

        return await _unless_gone(connection, handled())

    async def _send(self, connection: _Connection, reply: HttpReply, *, keep: bool, headless: bool) -> None:
        # An answer has had its time when it comes here whole; one that is streamed ends by itself in that time.
        with _closed_after(connection, self.limits.seconds + self.limits.idle_seconds):
            await self._written(connection, reply, keep=keep, headless=headless)

    async def _written(self, connection: _Connection, reply: HttpReply, *, keep: bool, headless: bool) -> None:
        writer = connection.writer
        whole = reply.body if isinstance(reply.body, bytes) else None
        length = "Transfer-Encoding: chunked" if whole is None else f"Content-Length: {len(whole)}"
        lines = [
            f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
            f"Content-Type: {reply.kind}",
            length,
            f"Connection: {'keep-alive' if keep else 'close'}",
            *[f"{name}: {value}" for name, value in reply.headers.items()],
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if not isinstance(reply.body, bytes):
            await self._send_pieces(connection, reply.body)
        else:
            if not headless:
                writer.write(reply.body)
            await writer.drain()

    async def _send_pieces(self, connection: _Connection, pieces: AsyncIterator[bytes]) -> None:
        """Each as it comes, until the last or until the client has gone."""
        writer = connection.writer

        async def copied() -> bool:
            async for piece in pieces:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            return True

        if await _unless_gone(connection, copied()) is None:
            raise ConnectionResetError

    # -- reading

    async def _read(self, connection: _Connection) -> HttpRequest | None:
        """The next request; None where the client has closed the connection instead."""
        reader = connection.reader
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError as error:
            raise ApiError(431, f"the head of the request is longer than {HEAD_BYTES} bytes") from error
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        words = first.split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise ApiError(400, "this is no HTTP/1.1 request")
        headers = _headers(lines)
        if words[2] == "HTTP/1.0":
            headers["connection"] = "close"
        path = words[1].partition("?")[0]
        self.check(HttpRequest(words[0], path, headers))
        if headers.get("expect", "").lower() == "100-continue" and self._fits(headers):
            connection.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            body = await self._body(reader, headers)
        except asyncio.IncompleteReadError:
            return None
        return HttpRequest(words[0], path, headers, body)

    def _fits(self, headers: dict[str, str]) -> bool:
        length = headers.get("content-length", "0")
        return length.isascii() and length.isdigit() and int(length) <= self.limits.body_bytes

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if coding.lower() != "chunked" or length is not None:
                raise ApiError(400, "a body is sent with a Content-Length, or chunked")
            return await self._chunks(reader)
        if length is None:
            return b""
        if not (length.isascii() and length.isdigit() and len(length) < 20):
            raise ApiError(400, "the Content-Length is no number")
        if int(length) > self.limits.body_bytes:
            raise self._too_long()
        return await reader.readexactly(int(length))

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        pieces, size = [], 0
        while True:
            try:
                line = (await reader.readuntil(b"\r\n")).partition(b";")[0].strip()
            except asyncio.LimitOverrunError as error:
                raise ApiError(400, "the chunks of the body cannot be read") from error
            if not _CHUNK_SIZE.fullmatch(line):
                raise ApiError(400, "the chunks of the body cannot be read")
            count = int(line, 16)
            size += count
            if size > self.limits.body_bytes:
                raise self._too_long()
            pieces.append(await reader.readexactly(count))
            # The line break of the chunk; behind the last one, trailers up to an empty line.
            while await reader.readuntil(b"\r\n") != b"\r\n":
                if count:
                    raise ApiError(400, "the chunks of the body cannot be read")
            if not count:
                return b"".join(pieces)

    def _too_long(self) -> ApiError:
        most = self.limits.body_bytes / 2**20
        return ApiError(413, f"the body is over the limit of {most:g} MiB (--max-body)", code="body_too_large")


async def _unless_gone(connection: _Connection, work: Any) -> Any:
    """What `work` comes to; None, and `work` cancelled, where the client goes away first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(connection.gone.wait())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await working


@contextlib.contextmanager
def _closed_after(connection: _Connection, seconds: float) -> Iterator[None]:
    """The connection is closed under whoever still reads or writes then. Unlike `wait_for`, this loses no cancellation
    on Python 3.10 and 3.11."""
    timer = asyncio.get_running_loop().call_later(seconds, connection.writer.transport.abort)
    try:
        yield
    finally:
        timer.cancel()


async def _linger(connection: _Connection) -> None:
    async def rest() -> None:
        while await connection.reader.read(2**16):
            pass

    with contextlib.suppress(OSError, asyncio.TimeoutError):
        if connection.writer.can_write_eof():
            connection.writer.write_eof()
        await asyncio.wait_for(rest(), LINGER_SECONDS)


def _headers(lines: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in map(_header, lines):
        if name in found and name in _ONCE:
            raise ApiError(400, f"the header {name} is there twice")
        found[name] = value
    return found


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name != name.strip():
        raise ApiError(400, f"the header line {line[:80]!r} cannot be read")
    return name.lower(), value.strip()
