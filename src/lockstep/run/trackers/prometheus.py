"""`log.prometheus`: serves the newest metrics of the run by HTTP, in Prometheus' text format (version 0.0.4).

The server is the one of Python's standard library, because it answers one small page and needs no package.
"""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lockstep.errors import Refusal
from lockstep.run.console import Console

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "lockstep_"
KEY = "log.prometheus"
# A client that does not send its request within this time is disconnected.
_READ_SECONDS = 10.0
# Metrics of the sink itself, with their descriptions.
_OWN = {
    "lockstep_info": "Method, model and version of the run; the value is always 1",
    "lockstep_step": "Newest logged step",
    "lockstep_last_step_timestamp_seconds": "Unix time at which the newest step was logged",
}


def split_address(value: int | str) -> tuple[str, int]:
    """Returns host and port of `log.prometheus`. A port without a host means the loopback address."""
    host, _, port = str(value).rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


def metric_name(name: str) -> str:
    """Returns the Prometheus name of a metric: lockstep_train_loss for `train/loss`."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name.replace("@", "_at_"))


def _label(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


class PrometheusSink:
    def __init__(self, address: int | str, console: Console):
        self._host, self._port = split_address(address)
        self._console = console
        self._lock = threading.Lock()
        self._run, self._info = "", ""
        self._step, self._at = 0, 0.0
        self._metrics: dict[str, float] = {}
        self._server: _PageServer | None = None

    def check(self) -> None:
        """Raises `Refusal` if this process cannot listen on the address."""
        self._bound().server_close()

    def _bound(self) -> _PageServer:
        try:
            return _PageServer(self._host, self._port, self.page)
        except OSError as error:
            raise Refusal.at(
                KEY,
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}",
                "choose a free port of this machine; port 0 selects any free port",
                code="port-unavailable",
            ) from error

    def start(self, name: str, recipe: dict[str, Any], resumed_at: int) -> None:
        from lockstep.version import package_version

        labels = {"method": recipe["method"], "model": recipe["model"]["path"], "version": package_version()}
        self._run = f"run={_label(name)}"
        self._info = ",".join([self._run, *(f"{key}={_label(str(value))}" for key, value in labels.items())])
        self._step, self._at = resumed_at, time.time()
        self._server = server = self._bound()
        threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._console.say(f"prometheus: metrics are at http://{host}:{server.server_address[1]}/metrics")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            self._step, self._at = step, time.time()
            self._metrics.update(metrics)

    def note(self, text: str) -> None:
        """Notes are text, and Prometheus stores only numbers."""

    def close(self, ok: bool) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def page(self) -> str:
        """Returns all metrics. A metric keeps its value until it is logged again, as validation metrics are not logged
        in every step. The label `metric` has the metric's name in lockstep."""
        with self._lock:
            metrics, step, at = dict(self._metrics), self._step, self._at
        own = {"lockstep_info": (self._info, 1.0), "lockstep_step": (self._run, float(step))}
        own["lockstep_last_step_timestamp_seconds"] = (self._run, at)
        lines: list[str] = []
        for name, (labels, value) in own.items():
            lines += [f"# HELP {name} {_OWN[name]}", f"# TYPE {name} gauge", f"{name}{{{labels}}} {_number(value)}"]
        # Two metrics may differ only in characters that Prometheus does not allow. They are then two series of one
        # name, and the lines of one name must be adjacent.
        families: dict[str, list[str]] = {}
        for name, value in metrics.items():
            series = f"{metric_name(name)}{{{self._run},metric={_label(name)}}} {_number(value)}"
            families.setdefault(metric_name(name), []).append(series)
        for family, series_lines in families.items():
            lines += [f"# TYPE {family} gauge", *series_lines]
        return "\n".join([*lines, ""])


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, page: Any):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = found[0]
        self.page = page
        super().__init__(found[4][:2], _PageHandler)  # type: ignore[arg-type]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects is not an error of the run."""


class _PageHandler(BaseHTTPRequestHandler):
    server: _PageServer
    timeout = _READ_SECONDS

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] == "/metrics"
        body = (self.server.page() if found else "the metrics are at /metrics\n").encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: object) -> None:
        """Requests are not logged."""
