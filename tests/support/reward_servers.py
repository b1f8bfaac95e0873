"""A real HTTP server of rewards on this machine, and who asks it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from lockstep.recipe.keys_reward import Reward
from lockstep.reward.remote import RemotePart
from lockstep.types import Origin, Question

# Seconds after which something hangs: nothing here takes so long on any machine.
GUARD = 120


Reply = Callable[[int, list[dict]], tuple[int, bytes]]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, reply: Reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.requests: list[list[dict]] = []
        self.heard: list[tuple[str, str]] = []
        """Path and authorization of each request."""
        self.extra_headers: dict[str, str] = {}
        self.asked = threading.Event()
        self.over = threading.Event()
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
            self.server.heard.append((self.path, self.headers.get("Authorization", "")))
            number = len(self.server.requests)
        self.server.asked.set()
        code, body = self.server.reply(number, items)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        for name, value in self.server.extra_headers.items():
            self.send_header(name, value)
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
        server.over.set()
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
    return [future.result(GUARD) for future in futures]
