"""An HTTP proxy before a real engine server that changes the answers of a run's samples, and leaves all else alone."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from hang import HANG

# Changes an answer of /generate in place, given what was asked and the answers before it.
Fault = Callable[[Any, Any, list[Any]], None]
# Of a run's samples: the probe and the checks before training sample at 0.7 and 1.
TEMPERATURE = 0.9


class FaultyProxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, upstream: str, fault: Fault):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.fault = urlsplit(upstream), fault
        self.before: list[Any] = []
        self.lock = threading.Lock()
        self.changed = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        line = HTTPConnection(self.upstream.hostname or "", self.upstream.port, timeout=HANG)
        line.request(method, path, data, headers)
        said = line.getresponse()
        status, body = said.status, said.read()
        line.close()
        asked = json.loads(data) if data else {}
        if path != "/generate" or status != 200 or asked["sampling_params"]["temperature"] != TEMPERATURE:
            return status, body
        answer = json.loads(body)
        with self.lock:
            kept = copy.deepcopy(answer)
            self.fault(asked, answer, self.before)
            self.before.append(kept)
            self.changed += 1
        return status, json.dumps(answer).encode()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A run that ends leaves requests behind."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultyProxy

    def do_GET(self) -> None:
        self._pass_on("GET")

    def do_POST(self) -> None:
        self._pass_on("POST")

    def _pass_on(self, method: str) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.server.answer(method, self.path, data, {"Content-Type": "application/json"})
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Quiet."""


@contextmanager
def proxying(upstream: str, fault: Fault) -> Iterator[FaultyProxy]:
    server = FaultyProxy(upstream, fault)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


# -- faults


def _logprobs(answer: Any) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def _write(answer: Any, ids: list[int], logprobs: list[float]) -> None:
    answer["output_ids"] = ids
    answer["meta_info"]["output_token_logprobs"] = [[lp, token, None] for lp, token in zip(logprobs, ids, strict=True)]


def rotated_logprobs(asked: Any, answer: Any, before: list[Any]) -> None:
    """Each sample has the log-probs of the one before it."""
    if before:
        others, ids = _logprobs(before[-1]), answer["output_ids"]
        _write(answer, ids, [others[place % len(others)] for place in range(len(ids))])


def shifted_logprobs(asked: Any, answer: Any, before: list[Any]) -> None:
    """Each token has the log-prob of the next."""
    own = _logprobs(answer)
    _write(answer, answer["output_ids"], own[1:] + own[:1])


def scaled_logprobs(asked: Any, answer: Any, before: list[Any]) -> None:
    """As of another temperature."""
    _write(answer, answer["output_ids"], [0.8 * logprob for logprob in _logprobs(answer)])


def other_tokens(asked: Any, answer: Any, before: list[Any]) -> None:
    """The tokens and log-probs of the sample before, with everything else as it should be: of other prompts, mostly."""
    if before:
        other = before[-1]
        _write(answer, list(other["output_ids"]), _logprobs(other))
        answer["meta_info"]["finish_reason"] = other["meta_info"]["finish_reason"]


def three_times_too_long(asked: Any, answer: Any, before: list[Any]) -> None:
    ids, logprobs = answer["output_ids"], _logprobs(answer)
    most = asked["sampling_params"]["max_new_tokens"]
    kept = [token for token in ids if token not in asked["sampling_params"]["stop_token_ids"]] or [1]
    _write(answer, (kept * 3 * most)[: 3 * most], (logprobs * 3 * most)[: 3 * most])
    answer["meta_info"]["finish_reason"] = {"type": "length", "length": 3 * most}


def answer_of_another_prompt(asked: Any, answer: Any, before: list[Any]) -> None:
    own = answer["meta_info"]["id"].partition("-")[0]
    other = next((one for one in before if one["meta_info"]["id"].partition("-")[0] != own), None)
    if other is not None:
        answer.update(copy.deepcopy(other))


def outside_the_vocabulary(asked: Any, answer: Any, before: list[Any]) -> None:
    _write(answer, [100_000, *answer["output_ids"][1:]], _logprobs(answer))


def negative_token(asked: Any, answer: Any, before: list[Any]) -> None:
    _write(answer, [-1, *answer["output_ids"][1:]], _logprobs(answer))


def fractional_token(asked: Any, answer: Any, before: list[Any]) -> None:
    _write(answer, [1.5, *answer["output_ids"][1:]], _logprobs(answer))  # type: ignore[list-item]


def one_logprob_too_few(asked: Any, answer: Any, before: list[Any]) -> None:
    answer["meta_info"]["output_token_logprobs"].pop()


def positive_logprob(asked: Any, answer: Any, before: list[Any]) -> None:
    _write(answer, answer["output_ids"], [2.0, *_logprobs(answer)[1:]])


def infinite_logprob(asked: Any, answer: Any, before: list[Any]) -> None:
    _write(answer, answer["output_ids"], [-float("inf"), *_logprobs(answer)[1:]])


def goes_on_after_its_end(asked: Any, answer: Any, before: list[Any]) -> None:
    end, most = asked["sampling_params"]["stop_token_ids"][0], asked["sampling_params"]["max_new_tokens"]
    _write(answer, [end] * most, [-1.0] * most)
    answer["meta_info"]["finish_reason"] = {"type": "length", "length": most}


def no_token(asked: Any, answer: Any, before: list[Any]) -> None:
    _write(answer, [], [])
    answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": "."}
