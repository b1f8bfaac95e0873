"""A real HTTP server on this machine, in all its moods."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from lockstep.errors import Refusal
from lockstep.recipe.online import Reward
from lockstep.reward.remote import RemotePart
from lockstep.types import Failure, Origin, Question

Reply = Callable[[int, list[dict]], tuple[int, bytes]]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, reply: Reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.requests: list[list[dict]] = []
        self.times: list[float] = []
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"

    def handle_error(self, request, client_address) -> None:
        """A client that gave up is what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["items"]
        with self.server.lock:
            self.server.requests.append(items)
            self.server.times.append(time.monotonic())
            number = len(self.server.requests)
        code, body = self.server.reply(number, items)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Quiet."""


@contextmanager
def serving(reply: Reply) -> Iterator[Server]:
    server = Server(reply)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def opened(address: str, **values) -> Iterator[RemotePart]:
    settings = Reward(**{"remote_timeout": 5.0, "remote_retries": 3, "remote_batch": 4, **values})
    part = RemotePart(address, settings, first_pause=0.02)
    try:
        yield part
    finally:
        part.close()


def by_length(number: int, items: list[dict]) -> tuple[int, bytes]:
    return 200, json.dumps({"scores": [len(item["response"]) for item in items]}).encode()


def question(truth: str = "18", **extra) -> Question:
    return Question("sums", [{"role": "user", "content": "9+9?"}], truth, Origin("rows.jsonl", 3), extra)


def asked(part: RemotePart, texts: list[str]) -> list:
    futures = [part.submit(question(index=1), text) for text in texts]
    part.flush()
    return [future.result(20) for future in futures]


def test_batches_what_is_sent_and_the_order_of_scores() -> None:
    texts = ["x" * length for length in (5, 1, 4, 2, 3, 9, 7, 8, 6, 0)]
    with serving(by_length) as server, opened(server.address) as part:
        futures = [part.submit(question(index=1), text) for text in texts]
        # Full batches go out without being asked for; the rest waits.
        assert [future.result(20) for future in futures[:8]] == [{"remote": float(len(text))} for text in texts[:8]]
        time.sleep(0.05)
        assert not futures[8].done()
        part.flush()
        assert [future.result(20) for future in futures[8:]] == [{"remote": 6.0}, {"remote": 0.0}]
        assert sorted(len(request) for request in server.requests) == [2, 4, 4]
        assert server.requests[-1][0] == {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": "9+9?"}],
            "response": "x" * 6,
            "ground_truth": "18",
            "extra_info": {"index": 1},
        }


def test_a_bare_list_will_do() -> None:
    with serving(lambda number, items: (200, b"[0.5, true]")) as server, opened(server.address) as part:
        assert asked(part, ["a", "b"]) == [{"remote": 0.5}, {"remote": 1.0}]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_passing_trouble_is_tried_again_with_growing_pauses(code) -> None:
    def flaky(number: int, items: list[dict]) -> tuple[int, bytes]:
        return by_length(number, items) if number == 4 else (code, b"busy")

    with serving(flaky) as server, opened(server.address) as part:
        assert asked(part, ["abc"]) == [{"remote": 3.0}]
        first, second, third = (b - a for a, b in zip(server.times, server.times[1:], strict=False))
        # Pauses of 0.02, 0.04 and 0.08 s, each between half and one and a half of that.
        assert first >= 0.01
        assert second >= 0.02
        assert third >= 0.04


def test_it_gives_up_after_the_last_try() -> None:
    with serving(lambda number, items: (503, b"out of order")) as server, opened(server.address) as part:
        (failure,) = asked(part, ["abc"])
        assert failure == Failure(
            "remote", f"{server.address}: answered 503 Service Unavailable: out of order; tried 4 times"
        )
        assert len(server.requests) == 4


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_a_refused_request_is_not_tried_again(code) -> None:
    with serving(lambda number, items: (code, b"no such model")) as server, opened(server.address) as part:
        (failure,) = asked(part, ["abc"])
        assert f"answered {code}" in failure.why
        assert "no such model" in failure.why
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"scores": [1.0]}', "gave 1 scores for 2 responses"),
        (b'{"scores": [1.0, 2.0, 3.0]}', "gave 3 scores for 2 responses"),
        (b'{"scores": [1.0, NaN]}', "score 1 is nan, which is not a finite number"),
        (b'{"scores": [Infinity, 1]}', "score 0 is inf"),
        (b'{"scores": [1.0, null]}', "score 1 is None"),
        (b'{"scores": ["1", 1]}', "score 0 is '1'"),
        (b'{"score": 1.0}', 'neither {"scores": [...]} nor a list'),
        (b"<html>", "is not JSON"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b"", "is not JSON"),
    ],
)
def test_a_wrong_answer_fails_its_batch_with_the_reason(body, why) -> None:
    with serving(lambda number, items: (200, body)) as server, opened(server.address) as part:
        outcomes = asked(part, ["a", "b"])
        assert [outcome.part for outcome in outcomes] == ["remote", "remote"]
        assert all(why in outcome.why for outcome in outcomes)
        assert len(server.requests) == 1


def test_only_the_batch_that_failed_fails() -> None:
    def second_bad(number: int, items: list[dict]) -> tuple[int, bytes]:
        return (200, b"[]") if items[0]["response"] == "bad" else by_length(number, items)

    with serving(second_bad) as server, opened(server.address, remote_batch=2) as part:
        outcomes = asked(part, ["a", "bb", "bad", "b", "ccc", "d"])
        assert [isinstance(outcome, Failure) for outcome in outcomes] == [False, False, True, True, False, False]
        assert outcomes[4] == {"remote": 3.0}


def test_a_slow_answer_is_tried_again() -> None:
    def slow_once(number: int, items: list[dict]) -> tuple[int, bytes]:
        if number == 1:
            time.sleep(1.5)
        return by_length(number, items)

    with serving(slow_once) as server, opened(server.address, remote_timeout=0.5) as part:
        assert asked(part, ["ab"]) == [{"remote": 2.0}]
        assert len(server.requests) == 2


def test_an_endpoint_that_never_answers() -> None:
    with serving(lambda number, items: (time.sleep(3), (200, b"[1]"))[1]) as server:  # noqa: SIM117
        with opened(server.address, remote_timeout=0.2, remote_retries=1) as part:
            (failure,) = asked(part, ["ab"])
            assert "gave no answer in 0.2 s; tried 2 times" in failure.why


def test_an_answer_that_drips_is_a_slow_answer() -> None:
    """Each byte comes in time, the whole does not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(100):
                    time.sleep(0.05)
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        threading.Thread(target=drip, daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with opened(address, remote_timeout=0.4, remote_retries=0) as part:
            started = time.monotonic()
            (failure,) = asked(part, ["ab"])
            assert "gave no answer in 0.4 s" in failure.why
            assert time.monotonic() - started < 3


def test_an_answer_that_breaks_off_is_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def break_off_once() -> None:
            for body in (b"[1", b"[1]"):
                connection, _ = listener.accept()
                with connection:
                    received = b""
                    while not received.endswith(b"]}"):
                        received += connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n" + body)

        threading.Thread(target=break_off_once, daemon=True).start()
        with opened(f"http://127.0.0.1:{listener.getsockname()[1]}/") as part:
            assert asked(part, ["ab"]) == [{"remote": 1.0}]


def test_a_dead_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with opened(f"http://127.0.0.1:{port}/", remote_retries=2) as part:
        (failure,) = asked(part, ["ab"])
        assert "Connection refused; tried 3 times" in failure.why


def test_a_row_that_is_no_json_fails_alone() -> None:
    with serving(by_length) as server, opened(server.address) as part:
        bad = part.submit(question(when=object()), "a")
        assert "rows.jsonl row 3 cannot be sent as JSON" in bad.result(0).why
        assert asked(part, ["ab"]) == [{"remote": 2.0}]


def test_closing_answers_what_waits() -> None:
    with serving(lambda number, items: (503, b"")) as server:
        part = RemotePart(server.address, Reward(remote_batch=2), first_pause=20.0)
        futures = [part.submit(question(), "x") for _ in range(3)]
        time.sleep(0.1)
        part.close()
        assert [future.result(5).why for future in futures] == ["the run was ending before it was scored"] * 3
        assert isinstance(part.submit(question(), "x").result(0), Failure)


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host/", "http://", "/score"])
def test_what_is_no_address_is_refused(address) -> None:
    with pytest.raises(Refusal, match=r"reward\.remote"):
        RemotePart(address, Reward())
