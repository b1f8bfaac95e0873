"""A hub of models on this machine: the few routes that a push and a download take, as `huggingface_hub` speaks them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "a" * 40
TOKEN = "hf_of_the_test"


class Hub(ThreadingHTTPServer):
    """`files` are those of each repository by name; `messages` the commits' summaries."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    serving = threading.Thread(target=hub.serve_forever, daemon=True)
    serving.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None: ...

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._send(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            if found[1] not in self.server.files:
                self._json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
                return
            names = [{"rfilename": name} for name in self.server.files[found[1]]]
            self._json({"_id": "1", "id": found[1], "sha": SHA, "siblings": names})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            files = self.server.files[found[1]].items()
            facts = [(name, len(content), hashlib.sha1(content).hexdigest()) for name, content in files]
            self._json([{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in facts])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.server.files.get(found[1], {}).get(found[2])
            if content is None:
                self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=SHA)
                return
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._send(200, content, ETag=etag, X_Repo_Commit=SHA, Content_Type="application/octet-stream")
        else:
            self._json({"error": f"no route {path}"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = self._chunks()
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json({"error": "Invalid user token"}, 401)
        elif path == "/api/repos/create":
            told = json.loads(content)
            name = "/".join(filter(None, (told.get("organization"), told["name"])))
            self.server.files.setdefault(name, {})
            self._json({"url": f"{self.server.endpoint}/{name}", "name": name})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/main", path):
            asked = json.loads(content)["files"]
            kinds = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            self._json({"files": kinds})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "header":
                    self.server.messages.append(line["value"]["summary"])
                if line["key"] == "file":
                    self.server.files[found[1]][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.endpoint}/{found[1]}/commit/{SHA}"
            self._json({"success": True, "commitOid": SHA, "commitUrl": url, "hookOutput": ""})
        else:
            self._json({"error": f"no route {path}"}, 404)

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)
