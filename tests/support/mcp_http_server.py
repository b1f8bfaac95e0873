"""The tools of `mcp_server` over HTTP, for tests that have no MCP package. The path selects the form of the answers:
`/json`, `/events` (a stream that ends with the answer) and `/open` (a stream that stays open). `/sessions` reports what
the clients sent."""

from __future__ import annotations

import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import mcp_server

seen: dict[str, Any] = {"ended": 0, "keys": [], "without": 0, "versions": [], "answers": 0}
sessions: dict[str, dict[str, Any]] = {}
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words: Any) -> None: ...

    def do_GET(self) -> None:
        self.reply(200, json.dumps(seen).encode())

    def do_DELETE(self) -> None:
        with lock:
            seen["ended"] += sessions.pop(self.headers["mcp-session-id"], None) is not None
        self.reply(200, b"")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path not in ("/json", "/events", "/open"):
            self.reply(404, b"no such path")
            return
        with lock:
            self.note(message)
            session = sessions.get(self.headers["mcp-session-id"] or "")
        if session is None and message.get("method") != "initialize":
            self.reply(400, b"no session")
            return
        if message.get("method") == "notifications/cancelled":
            assert session is not None
            session["cancelled"] += 1
        if "method" not in message or "id" not in message:
            self.reply(202, b"")
            return
        self.answer(message, session)

    def note(self, message: Any) -> None:
        """Records which headers the clients sent. The caller holds the lock."""
        seen["without"] += "mcp-session-id" not in self.headers
        for name, header in (("keys", "x-key"), ("versions", "mcp-protocol-version")):
            if header in self.headers and self.headers[header] not in seen[name]:
                seen[name].append(self.headers[header])
        seen["answers"] += "method" not in message

    def answer(self, message: Any, session: dict[str, Any] | None) -> None:
        headers = {}
        if message["method"] == "initialize":
            headers["mcp-session-id"] = secrets.token_hex(8)
            with lock:
                session = sessions[headers["mcp-session-id"]] = {"count": 0, "cancelled": 0}
        assert session is not None
        tool = message["params"].get("name") if message["method"] == "tools/call" else ""
        if tool == "count":
            session["count"] += 1
            found: dict[str, Any] = {"id": message["id"], "result": {"structuredContent": {"count": session["count"]}}}
        elif tool == "cancelled":
            text = [{"type": "text", "text": str(session["cancelled"])}]
            found = {"id": message["id"], "result": {"content": text}}
        else:
            found = mcp_server.answer_to(message)
        body = json.dumps({"jsonrpc": "2.0", **found}).encode()
        if self.path == "/json":
            if headers:
                with lock:
                    seen["answers"] += 1  # without a stream the server asks nothing
            self.reply(200, body, "application/json", headers)
            return
        asked = [b'{"jsonrpc": "2.0", "id": "ask", "method": "roots/list"}'] if headers else []
        events = b"".join(b"event: message\r\ndata: " + one + b"\r\n\r\n" for one in [b"{}", *asked, body])
        self.reply(200, b": hello\n\n" + events, "text/event-stream", headers, stays=self.path == "/open")

    def reply(self, status: int, body: bytes, kind: str = "", headers: Any = None, stays: bool = False) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), **({"content-type": kind} if kind else {})}.items():
            self.send_header(name, value)
        if not stays:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        if stays:
            time.sleep(10_000)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
