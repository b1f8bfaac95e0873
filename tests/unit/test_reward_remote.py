"""A real HTTP server on this machine, in all its moods."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from lockstep.errors import Refusal
from lockstep.recipe.keys_reward import Reward
from lockstep.reward import remote as remote_module
from lockstep.reward.remote import RemotePart
from lockstep.types import Failure
from reward_servers import GUARD, asked, by_length, opened, question, serving


@contextmanager
def raw_server(talk: Callable[[socket.socket, int], None]) -> Iterator[str]:
    """A server below HTTP: `talk` gets each connection, and which one it is, after the request has come."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket, number: int) -> None:
        with connection, suppress(OSError):
            received = b""
            while not received.endswith(b"]}"):
                received += connection.recv(65536)
            talk(connection, number)

    def accept() -> None:
        number = 0
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                number += 1
                threading.Thread(target=serve, args=(connection, number), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        listener.close()


def until_left(connection: socket.socket) -> None:
    """Say nothing until the client is gone."""
    while connection.recv(65536):
        pass


def drip(connection: socket.socket, piece: bytes) -> None:
    """A piece now and then, until the client is gone."""
    while True:
        time.sleep(0.02)
        connection.sendall(piece)


def test_batches_what_is_sent_and_the_order_of_scores() -> None:
    texts = ["x" * length for length in (5, 1, 4, 2, 3, 9, 7, 8, 6, 0)]
    with serving(by_length) as server, opened(server.address) as part:
        futures = [part.submit(question(index=1), text) for text in texts]
        # Full batches go out without being asked for; the rest waits.
        assert [future.result(GUARD) for future in futures[:8]] == [{"remote": float(len(text))} for text in texts[:8]]
        assert not futures[8].done()
        part.flush()
        assert [future.result(GUARD) for future in futures[8:]] == [{"remote": 6.0}, {"remote": 0.0}]
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


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The pauses between tries, as they were asked for."""
    asked_for: list[float] = []

    async def noted(seconds: float) -> None:
        asked_for.append(seconds)

    sleep = asyncio.sleep
    monkeypatch.setattr("lockstep.reward.remote.asyncio.sleep", lambda s: noted(s) if s else sleep(0))
    return asked_for


@pytest.mark.parametrize("code", [429, 500, 503])
def test_passing_trouble_is_tried_again_with_growing_pauses(code, pauses) -> None:
    def flaky(number: int, items: list[dict]) -> tuple[int, bytes]:
        return by_length(number, items) if number == 4 else (code, b"busy")

    with serving(flaky) as server, opened(server.address) as part:
        assert asked(part, ["abc"]) == [{"remote": 3.0}]
        assert len(server.requests) == 4
    # 0.02, 0.04 and 0.08 s, each between half and one and a half of that.
    for pause, usual in zip(pauses, (0.02, 0.04, 0.08), strict=True):
        assert 0.5 * usual <= pause <= 1.5 * usual


@pytest.mark.parametrize(
    ("said", "pause"), [("2", 2.0), ("3600", 5.0), ("-1", None), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("²", None)]
)
def test_an_endpoint_that_says_when_is_left_alone_until_then_but_not_for_ever(said, pause, pauses) -> None:
    """`Retry-After` in seconds, up to the time limit of a request, which is 5 s here; else the usual pause."""

    def busy_once(number: int, items: list[dict]) -> tuple[int, bytes]:
        return by_length(number, items) if number == 2 else (503, b"loading")

    with serving(busy_once) as server, opened(server.address) as part:
        server.extra_headers = {"Retry-After": said.encode().decode("latin-1")}
        assert asked(part, ["abc"]) == [{"remote": 3.0}]
    assert [round(seconds) for seconds in pauses] == [pause or 0]


def test_it_gives_up_after_the_last_try() -> None:
    with serving(lambda number, items: (503, b"out of order")) as server, opened(server.address) as part:
        (failure,) = asked(part, ["abc"])
        assert failure.part == "remote"
        parts = failure.why.split("; ")
        assert parts[0] == f"{server.address}: answered 503 Service Unavailable: out of order"
        assert "4 times" in parts[1]
        assert "0 of 1" in parts[2]
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
        (b'{"scores": [1.0, NaN]}', "score 1 is nan"),
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
            server.over.wait(GUARD)
        return by_length(number, items)

    with serving(slow_once) as server, opened(server.address, remote_timeout=0.5, remote_retries=50) as part:
        assert asked(part, ["ab"]) == [{"remote": 2.0}]
        assert len(server.requests) >= 2


def test_an_endpoint_that_never_answers() -> None:
    with serving(lambda number, items: (200, b"[1]" if server.over.wait(GUARD) else b"")) as server:  # noqa: SIM117
        with opened(server.address, remote_timeout=0.2, remote_retries=1) as part:
            (failure,) = asked(part, ["ab"])
            assert "gave no answer in 0.2 s; tried 2 times" in failure.why


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"
FAILED_HEAD = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 1000\r\n\r\n"
REFUSED_HEAD = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 1000\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "dripped"),
    [
        (HEAD, b"1"),
        (CHUNKED_HEAD, b"1\r\n1\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        (b"HTTP/1.1 200 O", b"K"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "chunks", "headers", "status", "informational"],
)
def test_an_answer_that_drips_is_a_slow_answer(said, dripped) -> None:
    """Each byte comes in time, the whole does not: the limit is for all of it."""

    def talk(connection: socket.socket, number: int) -> None:
        connection.sendall(said)
        drip(connection, dripped)

    with raw_server(talk) as address, opened(address, remote_timeout=0.4, remote_retries=0) as part:
        (failure,) = asked(part, ["ab"])
        assert "gave no answer in 0.4 s" in failure.why


def test_a_request_that_nobody_reads_is_a_slow_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with opened(address, remote_timeout=0.4, remote_retries=0) as part:
            (failure,) = asked(part, ["x" * 50_000_000])
            assert "gave no answer in 0.4 s" in failure.why


def test_a_name_that_is_not_found_in_time_is_a_slow_answer(monkeypatch) -> None:
    found = threading.Event()

    def look_up(*arguments: object, **options: object) -> list:
        found.wait(GUARD)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        with opened("http://rewards.invalid/", remote_timeout=0.2, remote_retries=0) as part:
            (failure,) = asked(part, ["ab"])
            assert "gave no answer in 0.2 s" in failure.why
    finally:
        found.set()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


@pytest.mark.parametrize("end", [until_left, socket.socket.close, reset], ids=["stalls", "is cut", "is reset"])
@pytest.mark.parametrize(
    ("said", "why", "tries"),
    [
        (FAILED_HEAD + b"out of", "answered 503 Service Unavailable: out of; tried 2 times", 2),
        (REFUSED_HEAD + b"no such", "answered 400 Bad Request: no such", 1),
        (REFUSED_HEAD, "answered 400 Bad Request", 1),
    ],
)
def test_the_body_of_an_error_may_break_off_anywhere(said, why, tries, end) -> None:
    """The status decides what happens; the text only explains. (What a reset throws away cannot be told.)"""
    connections = []

    def talk(connection: socket.socket, number: int) -> None:
        connections.append(number)
        connection.sendall(said)
        end(connection)

    with raw_server(talk) as address, opened(address, remote_timeout=0.5, remote_retries=1) as part:
        (failure,) = asked(part, ["ab"])
        if end is reset:
            assert failure.part == "remote"
        else:
            assert why in failure.why
            assert len(connections) == tries


def test_an_answer_that_breaks_off_is_tried_again() -> None:
    def talk(connection: socket.socket, number: int) -> None:
        body = b"[1" if number == 1 else b"[1]"
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\n" + body)

    with raw_server(talk) as address, opened(address) as part:
        assert asked(part, ["ab"]) == [{"remote": 1.0}]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_refused_wherever_they_lead(code) -> None:
    places = ["http://127.0.0.1:1/", "/elsewhere", "http://[::1", "http://host:port/", "//", ""]
    with serving(lambda number, items: (code, b"moved")) as server, opened(server.address) as part:
        for tried, place in enumerate(places, 1):
            server.extra_headers = {"Location": place}
            (failure,) = asked(part, ["ab"])
            assert f"answered {code}" in failure.why
            assert "redirects of a POST" in failure.why
            assert repr(place) in failure.why or not place
            assert len(server.requests) == tried


@pytest.mark.parametrize("framing", ["length", "chunked", "until the end"])
def test_an_answer_has_a_longest_length(framing, monkeypatch) -> None:
    """The limit is made small, so that the test is; the client must not have taken much more than that."""
    assert remote_module.MAX_BYTES == 16 * 2**20
    monkeypatch.setattr(remote_module, "MAX_BYTES", 2**20)
    sent = []
    piece = b" " * 65536
    heads = {
        "length": (f"Content-Length: {10**12}\r\n".encode(), piece),
        "chunked": (b"Transfer-Encoding: chunked\r\n", b"10000\r\n" + piece + b"\r\n"),
        "until the end": (b"", piece),
    }
    head, part_of_body = heads[framing]

    def talk(connection: socket.socket, number: int) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
        while True:
            connection.sendall(part_of_body)
            sent.append(len(part_of_body))

    with raw_server(talk) as address, opened(address, remote_timeout=GUARD) as part:
        (failure,) = asked(part, ["ab"])
        assert "its answer is longer than" in failure.why
    # What the sockets between hold comes on top.
    assert sum(sent) < 32 * 2**20


def test_the_reason_of_a_failure_is_short_whatever_was_answered() -> None:
    bodies = [json.dumps(["x" * 10**6]), json.dumps([{"y": "z" * 10**6}]), "q" * 10**6]
    for code, body in [(200, body) for body in bodies] + [(400, bodies[2]), (503, bodies[2])]:
        with serving(lambda number, items: (code, body.encode())) as server:  # noqa: B023, SIM117
            with opened(server.address, remote_retries=0) as part:
                (failure,) = asked(part, ["a"])
                assert len(failure.why) < 600


def test_a_batch_that_fails_in_an_unforeseen_way_is_settled_and_the_next_one_is_sent(monkeypatch) -> None:
    def broken(answer: bytes, count: int, key: str) -> list[float]:
        monkeypatch.undo()
        raise ZeroDivisionError("a mistake of ours")

    with serving(by_length) as server, opened(server.address, remote_batch=1) as part:
        monkeypatch.setattr("lockstep.reward.remote.scores_in", broken)
        assert asked(part, ["a"])[0].why == "the request failed: ZeroDivisionError: a mistake of ours"
        assert asked(part, ["abc"]) == [{"remote": 3.0}]


def test_a_client_that_cannot_be_made_settles_everything(monkeypatch) -> None:
    """A proxy of the environment that is no address."""
    monkeypatch.setenv("HTTP_PROXY", "nonsense://nowhere:1")
    monkeypatch.setenv("ALL_PROXY", "nonsense://nowhere:1")
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    with opened("http://127.0.0.1:9/") as part:
        (failure,) = asked(part, ["a"])
        assert failure.part == "remote"
        assert "nonsense" in failure.why


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
    """One batch pauses before its next try, one is under way, one response waits for company."""

    def answer(number: int, items: list[dict]) -> tuple[int, bytes]:
        if items[0]["response"] == "stall":
            server.over.wait(GUARD)
        return 503, b""

    with serving(answer) as server:
        part = RemotePart(server.address, Reward(remote_batch=2), first_pause=1000.0)
        futures = [part.submit(question(), text) for text in ("x", "x", "stall", "x", "x")]
        assert server.asked.wait(GUARD)
        part.close()
        assert all("the run ended" in future.result(0).why for future in futures)
        assert isinstance(part.submit(question(), "x").result(0), Failure)
        part.flush()
        part.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "reward-remote"]


@pytest.mark.parametrize(
    "address",
    ["localhost:8000", "ftp://host/", "http://", "/score", "http://host:port/", "http://[::1/", [], ["http://a/", "b"]],
)
def test_what_is_no_address_is_refused(address) -> None:
    with pytest.raises(Refusal, match=r"reward\.remote"):
        RemotePart(address, Reward())
