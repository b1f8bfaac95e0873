"""The protocol of the part `remote` under attack: a real server that misbehaves at every byte of its answer.

Whatever it does, every future is settled: with the scores that were sent, or with a failure that says why.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

from hang import HANG
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.remote import RemotePart
from lockstep.types import Failure, Origin, Question

CASES = 500
SCORES = [0.25, -1.5]
MISDEEDS = ("stall", "cut", "reset", "flood", "redirect")
PLACES = ("/", "http://[::1", "http://host:port/", "//", "http://127.0.0.1:1/", "\x00", "x" * 70_000)


@dataclass(frozen=True)
class Case:
    """The answer, how many of its bytes come as they should, and what the server does then."""

    answer: bytes
    good: int
    misdeed: str
    reads: bool
    seed: int

    @property
    def sound(self) -> bool:
        """The scores are all there and the client can know it: what the server does then does not matter."""
        ends = self.misdeed == "cut" or (self.misdeed == "stall" and b"Connection: close" not in self.answer)
        return self.reads and ends and self.good == len(self.answer) and self.answer.startswith(b"HTTP/1.1 200")


def case_of(seed: int) -> Case:
    """Every misdeed at every byte: the seeds count through both, the rest is drawn."""
    draw = random.Random(seed)
    answer = answer_of(draw, success=draw.random() < 0.5)
    misdeed, turn = MISDEEDS[seed % len(MISDEEDS)], seed // len(MISDEEDS)
    # Answers are shorter than CASES / len(MISDEEDS) bytes; the last turns send all of them.
    return Case(answer, min(turn, len(answer)), misdeed, reads=draw.random() < 0.9, seed=seed)


def answer_of(draw: random.Random, *, success: bool) -> bytes:
    body = b'{"scores": [0.25, -1.5]}' if draw.random() < 0.5 else b"[0.25, -1.5]"
    status = b"200 OK" if success else draw.choice([b"500 No", b"503 No", b"429 No", b"400 No", b"302 No", b"204 No"])
    framing = draw.choice(["length", "chunked", "end"])
    head = b"HTTP/1.1 " + status + b"\r\n"
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if framing == "chunked":
        return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    return head + b"Connection: close\r\n\r\n" + body


def misbehave(connection: socket.socket, case: Case) -> None:
    draw = random.Random(case.seed)
    if case.reads:
        received = b""
        while not received.endswith(b"]}"):
            piece = connection.recv(65536)
            if not piece:
                return  # the client gave up before its request was here
            received += piece
    connection.sendall(case.answer[: case.good])
    if case.misdeed == "stall":
        while connection.recv(65536):
            pass
    elif case.misdeed == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    elif case.misdeed == "flood":
        piece = draw.choice(
            [b"\0" * 65536, b"A: b\r\n" * 9999, b"1\r\n1\r\n" * 9999, draw.randbytes(65536), b"[" * 65536]
        )
        while True:
            connection.sendall(piece)
    elif case.misdeed == "redirect":
        place = draw.choice(PLACES).encode()
        connection.sendall(b"HTTP/1.1 307 Moved\r\nLocation: " + place + b"\r\nContent-Length: 0\r\n\r\n")


@contextmanager
def misbehaving(case: Case) -> Iterator[str]:
    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            misbehave(connection, case)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/score"
        finally:
            # Closing alone would leave the other thread in `accept`.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def outcomes_of(case: Case) -> list:
    # A server that does its work gets all the time it needs: the machine may be busy.
    seconds = HANG if case.sound else 0.15
    settings = Reward(remote_timeout=seconds, remote_retries=1, remote_batch=2)
    with misbehaving(case) as address:
        part = RemotePart(address, settings, first_pause=0.01)
        try:
            futures = [part.submit(question(), text) for text in ("a", "b", "c")]
            part.flush()
            return [future.result(HANG) for future in futures]
        finally:
            part.close()


def question() -> Question:
    return Question("sums", [{"role": "user", "content": "9+9?"}], "18", Origin("rows.jsonl", 3), {})


def check(seeds: range) -> None:
    with ThreadPoolExecutor(8) as several:
        found = dict(zip(seeds, several.map(lambda seed: outcomes_of(case_of(seed)), seeds), strict=True))
    assert any(case_of(seed).sound for seed in seeds)
    for seed, (first, second, alone) in found.items():
        case = case_of(seed)
        for outcome, score in ((first, SCORES[0]), (second, SCORES[1])):
            if isinstance(outcome, Failure):
                assert outcome.part == "remote", case
                assert outcome.why, case
                assert len(outcome.why) < 1000, case
            else:
                assert outcome == {"remote": score}, case
        # Two scores for one response are never right.
        assert isinstance(alone, Failure), case
        assert isinstance(first, dict) or not case.sound, case
    assert not [thread for thread in threading.enumerate() if thread.name == "reward-remote"]


def test_misdeeds_at_some_bytes_of_an_answer() -> None:
    """46 of the cases, from the first byte to the last, the five misdeeds in turn."""
    check(range(0, CASES, 11))


@pytest.mark.slow
def test_every_misdeed_at_every_byte_of_an_answer() -> None:
    assert max(len(case_of(seed).answer) for seed in range(CASES)) < CASES // len(MISDEEDS)
    check(range(CASES))
