"""A server that answers as a real engine has answered: what was recorded, over real HTTP, with faults where asked."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lockstep.rollout.servers.adapter import prompt_digest
from lockstep.rollout.servers.server_client import ClientThread, ServerClient
from lockstep.rollout.servers.vllm import SAMPLES

DATA = Path(__file__).parents[1] / "data" / "engines"
_VERSION = re.compile(r"\b([0-9a-f]{8})-(\d+)\b")
_SUMS = re.compile(r"(\\*\"sums\\*\": )\[[^\]]*\]")
_FOLDER = re.compile(r"[^\"\\ ]*/lockstep-weights-[^/\"\\]+")

# What a fault makes of an answer: another status and body, or None to cut the connection.
Fault = Callable[[str, Any, int, Any], "tuple[int, Any] | None"]
# Answers a request that was never recorded, from its path and body; None if it has no answer.
Unrecorded = Callable[[str, Any], Any]


def plain(value: Any) -> str:
    """Without what differs from run to run, or from machine to machine: the run's mark in versions, the folder that
    weights went through, and the sums of their bits, of which the last are the processor's own."""
    text = _SUMS.sub(r"\1[]", json.dumps(value, sort_keys=True))
    return _FOLDER.sub("FOLDER", _VERSION.sub(r"RUN-\2", text))


@contextmanager
def recorded(kept: list[dict[str, Any]]) -> Iterator[None]:
    """Every request of this process to a serving engine, and its answer; of samples that go together, each."""
    exchange, sampled = ClientThread.exchange, ServerClient.sample

    async def keeping(
        self: ClientThread, method: str, address: str, body: Mapping[str, Any] | None, seconds: float
    ) -> Any:
        answer = await exchange(self, method, address, body, seconds)
        path = "/" + address.split("/", 3)[3]
        kept.append(json.loads(plain({"method": method, "path": path, "body": body, "answer": answer})))
        return answer

    async def keeping_samples(self: ServerClient, path: str, body: Mapping[str, Any], seconds: float) -> Any:
        answer = await sampled(self, path, body, seconds)
        kept.append(json.loads(plain({"method": "POST", "path": path, "body": body, "answer": answer})))
        return answer

    ClientThread.exchange, ServerClient.sample = keeping, keeping_samples  # type: ignore[method-assign]
    try:
        yield
    finally:
        ClientThread.exchange, ServerClient.sample = exchange, sampled  # type: ignore[method-assign]


class Replay(ThreadingHTTPServer):
    """`fault` sees path, body, the number of the request and the recorded answer, and may give another."""

    daemon_threads = True

    def __init__(self, kept: list[dict[str, Any]], fault: Fault | None = None, unrecorded: Unrecorded | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.unrecorded = unrecorded
        # The same request has another answer after a push: by what was asked, then by the version that it was asked of.
        self.answers: dict[str, dict[str, Any]] = defaultdict(dict)
        version = ""
        for one in kept:
            self.answers[plain([one["method"], one["path"], one["body"]])][version] = one["answer"]
            version = _new_version(one["path"], one["body"]) or version
        self.fault, self.run, self.version, self.lock = fault, "", "", threading.Lock()
        self.asked: list[tuple[str, Any]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any] | None:
        with self.lock:
            self.asked.append((path, body))
            number = len(self.asked)
            if found := _VERSION.search(json.dumps(body)):
                self.run = found[1]
            known = self.answers.get(plain([method, path, body]))
            if known is None and self.unrecorded is not None:
                answer = self.unrecorded(path, body)
                if answer is not None:
                    return 200, answer
            if known is None:
                return 599, f"never asked of the real server: {plain([method, path, body])[:500]}"
            said = known.get(self.version, next(iter(known.values())))
            self.version = _new_version(path, json.loads(plain(body))) or self.version
        said = json.loads(json.dumps(said).replace("RUN-", f"{self.run}-"))
        if path == SAMPLES and body is not None:
            # The plugin that was recorded did not say yet of which prompt an answer is.
            said = {"prompt": prompt_digest(body["token_ids"]), **said}
        return (200, said) if self.fault is None else self.fault(path, body, number, said)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that is cut is what some tests are about."""


def _new_version(path: str, body: Any) -> str | None:
    return str(body["new_version"]) if path == "/update_weight_version" else None


class _Handler(BaseHTTPRequestHandler):
    server: Replay

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        if self.path == SAMPLES:
            self._samples([{**one, "token_ids": body["prompts"][one["token_ids"]]} for one in body["samples"]])
        else:
            self._reply("POST", body)

    def do_GET(self) -> None:
        self._reply("GET", None)

    def _reply(self, method: str, body: Any) -> None:
        answered = self.server.answer(method, self.path, body)
        if answered is None:
            self.connection.close()
            return
        status, said = answered
        data = b"" if said is None else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _samples(self, wanted: list[Any]) -> None:
        """A line for each, the last one first: which is finished first is nobody's to know."""
        self.send_response(200)
        self.end_headers()
        for number, body in reversed(list(enumerate(wanted))):
            answered = self.server.answer("POST", self.path, body)
            if answered is None:
                self.connection.close()
                return
            status, said = answered
            line = {"answer": said} if status == 200 else {"status": status, "error": said}
            self.wfile.write(json.dumps({"number": number, **line}).encode() + b"\n")

    def log_message(self, *words: object) -> None:
        """Quiet."""


@contextmanager
def replaying(name: str, fault: Fault | None = None, unrecorded: Unrecorded | None = None) -> Iterator[Replay]:
    server = Replay(json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")), fault, unrecorded)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
