"""The HTTP server of `serve` and `view`: limits, errors and disconnected clients, with handlers that need no model."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection

import pytest

from hang import HANG, wait_until
from lockstep.errors import Refusal
from lockstep.http_server import asgi
from lockstep.http_server.http_api import ApiError, HttpReply, HttpRequest, HttpSite, ServeLimits, as_events, as_json


@pytest.fixture(autouse=True, scope="module")
def short_waits() -> Iterator[None]:
    """The server waits less for rejected clients and at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asgi, "LINGER_SECONDS", 0.3)
        patch.setattr(asgi, "SHUTDOWN_SECONDS", 1)
        yield


class Handlers:
    """Handlers that record what happens to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.site = HttpSite(
            {
                ("POST", "/echo"): self.echo,
                ("GET", "/thread"): self.thread,
                ("GET", "/wait"): self.wait,
                ("GET", "/stream"): self.stream,
                ("GET", "/broken"): self.broken,
            },
            self.check,
        )

    def check(self, request: HttpRequest) -> None:
        if "forbidden" in request.headers:
            raise ApiError(403, "not for you")

    async def echo(self, request: HttpRequest) -> HttpReply:
        return as_json({"size": len(request.body), "query": request.query})

    def thread(self, request: HttpRequest) -> HttpReply:
        return as_json({"thread": threading.current_thread().name})

    async def wait(self, request: HttpRequest) -> HttpReply:
        self.events.append("begun")
        try:
            await asyncio.sleep(HANG)
        finally:
            self.events.append("ended")
        return as_json({})

    async def stream(self, request: HttpRequest) -> HttpReply:
        async def endless() -> AsyncIterator[dict[str, int]]:
            number = 0
            while True:
                yield {"number": (number := number + 1)}
                await asyncio.sleep(0.01)

        return as_events(endless(), lambda: self.events.append("done"))

    async def broken(self, request: HttpRequest) -> HttpReply:
        raise RuntimeError("a defect")


@contextmanager
def served(limits: ServeLimits | None = None) -> Iterator[tuple[Handlers, int]]:
    handlers = Handlers()
    sockets = asgi.bind("127.0.0.1", 0, "--port")
    port = asgi.listen(sockets)
    with asgi.site_in_thread(handlers.site, limits or ServeLimits(), sockets):
        yield handlers, port


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Handlers, int]]:
    with served(ServeLimits(body_bytes=1000)) as found:
        yield found


def reply_to(port: int, data: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), HANG) as peer:
        peer.sendall(data)
        reply = b""
        while block := peer.recv(65536):
            reply += block
        return reply


def status_of(reply: bytes) -> int:
    return int(reply.split()[1])


def request(line: str, *headers: str, close: bool = True) -> bytes:
    lines = [line, "Host: localhost", *headers, *(["Connection: close"] if close else [])]
    return "\r\n".join([*lines, "", ""]).encode()


def test_a_body_over_the_limit_is_rejected_and_the_connection_stays_usable(server: tuple[Handlers, int]) -> None:
    connection = HTTPConnection("127.0.0.1", server[1], timeout=HANG)
    for size, status in ((1000, 200), (1001, 413), (500_000, 413), (10, 200)):
        connection.request("POST", "/echo?a=b", b"x" * size)
        reply = connection.getresponse()
        found = json.loads(reply.read())
        assert reply.status == status, size
        if status == 200:
            assert found == {"size": size, "query": "a=b"}
        else:
            assert found["error"]["code"] == "body_too_large"
            assert "--max-body" in found["error"]["message"]
    connection.close()


def test_a_chunked_body_is_counted_too(server: tuple[Handlers, int]) -> None:
    head = request("POST /echo HTTP/1.1", "Transfer-Encoding: chunked")
    chunk = b"190\r\n" + b"x" * 400 + b"\r\n"
    assert status_of(reply_to(server[1], head + 2 * chunk + b"0\r\n\r\n")) == 200
    assert status_of(reply_to(server[1], head + 3 * chunk + b"0\r\n\r\n")) == 413


@pytest.mark.parametrize(("size", "lines"), [(10, [100, 200]), (2000, [413])])
def test_a_client_that_waits_may_send_only_a_body_that_fits(
    server: tuple[Handlers, int], size: int, lines: list[int]
) -> None:
    with socket.create_connection(("127.0.0.1", server[1]), HANG) as peer:
        peer.sendall(request("POST /echo HTTP/1.1", f"Content-Length: {size}", "Expect: 100-continue"))
        first = peer.recv(65536)
        assert status_of(first) == lines[0]
        if lines[0] == 100:
            peer.sendall(b"x" * size)
            assert status_of(peer.recv(65536)) == lines[1]


def test_a_rejected_request_need_not_send_its_body(server: tuple[Handlers, int]) -> None:
    for headers in (("Forbidden: yes", "Content-Length: 900"), ("Content-Length: 5", "Transfer-Encoding: chunked")):
        with socket.create_connection(("127.0.0.1", server[1]), HANG) as peer:
            peer.sendall(request("POST /echo HTTP/1.1", *headers))
            assert status_of(peer.recv(65536)) in (400, 403)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Origin: http://localhost", "Origin: http://localhost"), 400),
        (("Content-Length: 2", "Transfer-Encoding: chunked"), 400),
        (("X: " + "y" * 70_000,), 431),
    ],
    ids=["repeated header", "two lengths", "long head"],
)
def test_the_connection_is_closed_after_a_framing_error(headers: tuple[str, ...], status: int) -> None:
    """Otherwise the rest of the bad request could be read as the next one."""
    with served(ServeLimits(idle_seconds=20)) as (_, port):
        reply = reply_to(port, request("POST /echo HTTP/1.1", *headers, close=False))
        assert status_of(reply) == status
        assert b"connection: close" in reply.lower()


def test_unknown_paths_and_methods(server: tuple[Handlers, int]) -> None:
    missing = reply_to(server[1], request("GET /none HTTP/1.1"))
    assert status_of(missing) == 404
    assert b"/echo" in missing
    assert status_of(reply_to(server[1], request("GET /echo HTTP/1.1"))) == 405
    assert status_of(reply_to(server[1], request("GET /thread/ HTTP/1.1"))) == 200
    head = reply_to(server[1], request("HEAD /thread HTTP/1.1"))
    assert status_of(head) == 200
    assert head.endswith(b"\r\n\r\n")


def test_a_handler_that_is_no_coroutine_runs_outside_the_event_loop(server: tuple[Handlers, int]) -> None:
    assert b"http-server" not in reply_to(server[1], request("GET /thread HTTP/1.1"))


def test_a_defect_is_a_500_and_the_server_continues(
    server: tuple[Handlers, int], capfd: pytest.CaptureFixture[str]
) -> None:
    reply = reply_to(server[1], request("GET /broken HTTP/1.1"))
    assert status_of(reply) == 500
    assert b"RuntimeError: a defect" in reply
    assert "a defect" in capfd.readouterr().err
    assert status_of(reply_to(server[1], request("GET /thread HTTP/1.1"))) == 200


def test_requests_that_follow_at_once_are_answered_in_order(server: tuple[Handlers, int]) -> None:
    first = request("POST /echo?1 HTTP/1.1", "Content-Length: 2", close=False) + b"ab"
    reply = reply_to(server[1], first + request("POST /echo?2 HTTP/1.1", "Content-Length: 3") + b"abc")
    assert reply.index(b'"query": "1"') < reply.index(b'"query": "2"')


@pytest.mark.parametrize(("path", "event"), [("/wait", "ended"), ("/stream", "done")])
def test_the_work_for_a_client_that_disconnects_is_cancelled(path: str, event: str) -> None:
    with served() as (handlers, port):
        with socket.create_connection(("127.0.0.1", port), HANG) as peer:
            peer.sendall(request(f"GET {path} HTTP/1.1"))
            if path == "/stream":
                assert peer.recv(100)
            else:
                wait_until(lambda: bool(handlers.events))
            assert event not in handlers.events
        wait_until(lambda: event in handlers.events)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /thread HT", request("POST /echo HTTP/1.1", "Content-Length: 9") + b"abc"],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_client_that_sends_too_slowly_is_disconnected(sent: bytes) -> None:
    with served(ServeLimits(idle_seconds=0.3)) as (_, port), socket.create_connection(("127.0.0.1", port)) as peer:
        peer.settimeout(HANG)
        peer.sendall(sent)
        with suppress(ConnectionResetError):
            assert peer.recv(1000) == b""


def test_a_client_that_reads_too_slowly_is_disconnected() -> None:
    with (
        served(ServeLimits(seconds=0.2, idle_seconds=0.3)) as (handlers, port),
        socket.create_connection(("127.0.0.1", port), HANG) as peer,
    ):
        peer.sendall(request("GET /stream HTTP/1.1"))
        wait_until(lambda: "done" in handlers.events)


def test_connections_over_the_limit_get_a_503() -> None:
    with served(ServeLimits(connections=2)) as (_, port):
        held = [socket.create_connection(("127.0.0.1", port), HANG) for _ in range(2)]
        time.sleep(0.1)
        reply = reply_to(port, b"")
        assert status_of(reply) == 503
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for one in held:
            one.close()
        wait_until(lambda: status_of(reply_to(port, request("GET /thread HTTP/1.1"))) == 200)


def test_a_port_in_use_is_reported_with_its_option() -> None:
    sockets = asgi.bind("127.0.0.1", 0, "--port")
    port = asgi.listen(sockets)
    with pytest.raises(Refusal) as refused:
        asgi.bind("127.0.0.1", port, f"--port {port}")
    (problem,) = refused.value.problems
    assert problem.where == f"--port {port}"
    assert "in use" in problem.why
    assert "another port" in problem.remedy
    sockets[0].close()


@pytest.mark.parametrize("package", ["h11", "starlette", "uvicorn"])
def test_a_missing_package_is_reported_with_its_extra(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from lockstep.errors import Refusal\n"
        "try:\n    from lockstep.http_server import asgi\nexcept Refusal as refusal:\n    print(refusal)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"package {package}" in told
    assert '[serve]"' in told


def closing_time(work: Callable[[int], socket.socket]) -> float:
    with served() as (_, port):
        peer = work(port)
        start = time.monotonic()
    peer.close()
    return time.monotonic() - start


@pytest.mark.slow
def test_the_server_ends_in_time_whatever_clients_do() -> None:
    def idle(port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), HANG)

    def streaming(port: int) -> socket.socket:
        peer = idle(port)
        peer.sendall(request("GET /stream HTTP/1.1"))
        assert peer.recv(100)
        return peer

    assert closing_time(idle) < asgi.SHUTDOWN_SECONDS
    assert closing_time(streaming) < 4 * asgi.SHUTDOWN_SECONDS
