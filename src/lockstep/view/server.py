"""The server of the page: on this machine alone, for whoever has the link, and for reading only.

Three things keep other pages and other users out. It listens on the loopback address. Every path begins with a random
token, which is compared in constant time. And it answers only to the names of the loopback address, because a page from
elsewhere can make its own name point to 127.0.0.1, and would otherwise read what is served here.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from lockstep.page import resource, script_of, style_of
from lockstep.view.answers import PageAnswers, Query
from lockstep.view.files import Missing

HERE = "lockstep.view"
ADDRESS = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "[::1]")
SCRIPTS = ("state.js", "chart.js", "curves.js", "tokens.js", "samples.js", "recipe.js", "runs.js", "page.js")
Answer = TypeVar("Answer")
BLOCK = 1 << 18
IDLE_SECONDS = 60.0

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; frame-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The page of a comparison holds its own script, and comes from a folder that anybody may have written: it runs as a
# stranger to this page, and can ask for nothing.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """Serves the runs of `folder`; `port` 0 takes any that is free."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0):
        super().__init__((ADDRESS, port), _Handler)
        self.answers = PageAnswers(folder)
        self.token = secrets.token_urlsafe(24)
        # A report knows its own address. With a token of its own it does not know that of the page.
        self.report_token = secrets.token_urlsafe(24)
        self.assets: dict[str, tuple[str, bytes]] = {
            "": ("text/html", resource(HERE, "index.html").encode()),
            "app.js": ("text/javascript", script_of(HERE, SCRIPTS).encode()),
            "style.css": ("text/css", style_of(HERE, ["page.css"]).encode()),
        }

    @property
    def link(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that goes away in the middle of an answer is no event. Anything else is told on stderr."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "lockstep", ""
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if name.lower() not in NAMES:
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 and localhost only")
            return
        parts = urlsplit(self.path)
        token, slash, path = parts.path.removeprefix("/").partition("/")
        if slash and _same(token, self.server.report_token) and path == "report":
            self._report(parts.query)
        elif slash and _same(token, self.server.token):
            self._page(path, parts.query)
        else:
            self._refuse(HTTPStatus.FORBIDDEN, "the link lacks its token: use the one that `lockstep view` printed")

    def _page(self, path: str, query: str) -> None:
        if path in self.server.assets:
            kind, content = self.server.assets[path]
            self._send(HTTPStatus.OK, kind, content)
        elif (question := self.server.answers.questions.get(path.removeprefix("api/"))) and path.startswith("api/"):
            answer = self._asked(lambda told: _written(self._with_report(path, question(told))), query)
            if answer is not None:
                self._send(HTTPStatus.OK, "application/json", answer)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _with_report(self, path: str, answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "reports": f"/{self.server.report_token}/report"} if path == "api/runs" else answer

    def _asked(self, question: Callable[[Query], Answer], query: str) -> Answer | None:
        """The answer to a question, or None where there is none and that has been told."""
        try:
            return question(parse_qs(query, keep_blank_values=True, max_num_fields=200))
        except (Missing, ValueError) as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
        except OSError as error:
            self._refuse(HTTPStatus.NOT_FOUND, f"cannot be read: {error.strerror}")
        except Exception as error:  # noqa: BLE001 - a defect of ours must not look like a lost connection
            self.server.handle_error(self.request, self.client_address)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"this page failed: {type(error).__name__}: {error}")
        return None

    def _report(self, query: str) -> None:
        file = self._asked(self.server.answers.report, query)
        if file is None:
            return
        with file:
            self._begin(HTTPStatus.OK, "text/html", None, REPORT_POLICY)
            while block := file.read(BLOCK):
                self.wfile.write(block)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        # What else the client sent with it is not read, so nothing may follow.
        self.close_connection = True
        self._json(status, {"error": why})

    def _json(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        self._send(status, "application/json", _written(answer))

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._begin(status, kind, len(content), POLICY)
        self.wfile.write(content)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None, policy: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", policy)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if length is None:
            self.close_connection = True
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Of requests that cannot be read, and of methods that are not here, which are all but GET."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._refuse(status, status.phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal has the link, and should keep it in view."""


def _written(answer: dict[str, Any]) -> bytes:
    """As JSON, in ASCII: halves of surrogate pairs, which a response may hold, stay what they are."""
    try:
        return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        # A number beyond all that JSON's readers know, 1e999, was read as infinite.
        return json.dumps(_finite(answer), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _same(told: str, token: str) -> bool:
    return hmac.compare_digest(told.encode(errors="replace"), token.encode())
