"""The run viewer, `lockstep view`: a local page with the curves, samples and recipes of runs.

The viewer never changes a run. Three measures keep other web pages and other users from reading the runs. The server
listens only on the loopback address. Every path begins with a random token, which is compared in constant time. The
Host header of a request must be 127.0.0.1, localhost or [::1]. Without the check of the Host header, a web site could
let its own host name resolve to 127.0.0.1 and then read the replies.
"""

from __future__ import annotations

import hmac
import json
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
from urllib.parse import parse_qs

from lockstep.http_server.http_api import ApiError, HttpReply, HttpRequest, HttpSite, ServeLimits
from lockstep.page import resource, script_of, style_of
from lockstep.run.folder import RunFolder
from lockstep.serve.viewer_curves import Curves
from lockstep.serve.viewer_log import (
    Missing,
    SampleFilter,
    open_inside,
    samples_of_all_steps,
    samples_of_step,
    single_sample,
)
from lockstep.serve.viewer_runs import RunList, file_locks, recipe_of, setup_difference, summary

ADDRESS = "127.0.0.1"
HOST_NAMES = ("127.0.0.1", "localhost", "[::1]")
LIMITS = ServeLimits(body_bytes=2**16, idle_seconds=60.0)
Query = dict[str, list[str]]
MAX_CACHED_CURVES = 12
"""The maximum number of runs whose curves are kept in memory. The curves of the least recently used run are dropped
first."""
MAX_RUNS = 8
MAX_METRICS = 64
MAX_BUCKETS = 2_000
MAX_STEP = 2**53
MAX_FIELDS = 200
IMAGE_NAME = re.compile(r"[0-9a-f]{32}\.png")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The report of a comparison has an inline script, and other users may have written it. The sandbox gives the report a
# separate origin, which has no access to the viewer page or its data.
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


class RunViewer:
    """Serves the runs of `folder`. With port 0, the server uses any free port."""

    def __init__(self, folder: Path, port: int = 0):
        from lockstep.http_server import asgi  # the import is slow, and needs the extra `serve`

        self._server = asgi
        self._sockets = asgi.bind(ADDRESS, port, f"--port {port}")
        self.port = asgi.listen(self._sockets)
        self.data = RunData(folder)
        self.token = secrets.token_urlsafe(24)
        # The script of a report can read the address of the report. For this reason, the token of reports differs from
        # the token of the page.
        self.report_token = secrets.token_urlsafe(24)
        self.assets: dict[str, tuple[str, bytes]] = {
            "": ("text/html", resource("viewer.html").encode()),
            "app.js": ("text/javascript", script_of("viewer").encode()),
            "style.css": ("text/css", style_of("viewer").encode()),
        }
        self.site = HttpSite({("GET", "/{path:path}"): self.reply}, _check_host, _error)

    @property
    def link(self) -> str:
        return f"http://{ADDRESS}:{self.port}/{self.token}/"

    def run(self) -> None:
        """Serves until SIGINT or SIGTERM."""
        self._server.run_site(self.site, LIMITS, self._sockets)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        with self._server.site_in_thread(self.site, LIMITS, self._sockets):
            yield

    def reply(self, request: HttpRequest) -> HttpReply:
        if request.method != "GET":
            raise ApiError(405, HTTPStatus.METHOD_NOT_ALLOWED.phrase)
        token, slash, path = request.path.removeprefix("/").partition("/")
        try:
            if slash and _equal_tokens(token, self.report_token) and path == "report":
                return self._report(request.query)
            if slash and _equal_tokens(token, self.token):
                return self._page(path, request.query)
        except (Missing, ValueError) as error:
            raise ApiError(404, str(error)) from error
        except OSError as error:
            raise ApiError(404, f"cannot be read: {error.strerror}") from error
        raise ApiError(403, "the link has no valid token: use the link that `lockstep view` printed")

    def _page(self, path: str, query: str) -> HttpReply:
        if path in self.assets:
            kind, content = self.assets[path]
            return _reply(content, kind)
        if path == "api/image":
            with self.data.image(_parsed(query)) as file:
                return _reply(file.read(), "image/png")
        endpoint = self.data.endpoints.get(path.removeprefix("api/")) if path.startswith("api/") else None
        if endpoint is None:
            raise ApiError(404, "the run viewer has no page with this address")
        data = endpoint(_parsed(query))
        if path == "api/runs":
            data = {**data, "reports": f"/{self.report_token}/report"}
        return _reply(_as_json(data), "application/json")

    def _report(self, query: str) -> HttpReply:
        with self.data.report(_parsed(query)) as file:
            return _reply(file.read(), "text/html", policy=REPORT_POLICY)


def _check_host(request: HttpRequest) -> None:
    host = request.headers.get("host", "")
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
    if name.lower() not in HOST_NAMES:
        raise ApiError(403, "use the host name 127.0.0.1 or localhost")


def _reply(content: bytes, kind: str, status: int = 200, policy: str = POLICY) -> HttpReply:
    headers = {"Content-Security-Policy": policy, **HEADERS}
    return HttpReply(content, status, f"{kind}; charset=utf-8", headers)


def _error(error: ApiError) -> HttpReply:
    return _reply(_as_json({"error": str(error)}), "application/json", error.status)


def _parsed(query: str) -> Query:
    return parse_qs(query, keep_blank_values=True, max_num_fields=MAX_FIELDS)


def _as_json(data: dict[str, Any]) -> bytes:
    """Returns ASCII JSON, because samples may contain lone surrogates."""
    try:
        return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        # A number beyond the range of floats, such as 1e999, was parsed as infinity, which JSON cannot represent.
        return json.dumps(_finite(data), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _equal_tokens(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


class RunData:
    """Computes the JSON replies for the viewer page: runs, curves, samples and recipes."""

    def __init__(self, folder: Path):
        self.runs = RunList(folder)
        self._curves: OrderedDict[Path, Curves] = OrderedDict()
        self._lock = Lock()
        self.endpoints: dict[str, Callable[[Query], dict[str, Any]]] = {
            "runs": lambda query: self.runs.listed(),
            "run": self.run,
            "curves": self.curves,
            "samples": self.samples,
            "sample": self.sample,
            "recipe": self.recipe,
            "difference": self.difference,
        }

    def run(self, query: Query) -> dict[str, Any]:
        """Returns the summary of a run, the names of its metrics, and the fraction of metrics.jsonl that was read so
        far."""
        name = _text(query, "run")
        path = self.runs.path(name)
        run = summary(self.runs.root, name, path, file_locks())
        if not RunFolder(path).metrics.is_file():
            return {**run, "metrics": [], "read": 1.0, "version": "", "range": None, "damaged": 0}
        curves = self._curves_of(path)
        curves.read_more()
        return {
            **run,
            "metrics": curves.names(),
            "read": curves.read_share,
            "version": curves.version,
            "range": curves.range(),
            "damaged": curves.damaged,
        }

    def curves(self, query: Query) -> dict[str, Any]:
        """Returns the curves of the requested metrics and runs between two steps. The default range covers all steps of
        the requested runs."""
        names = query.get("run", [])[:MAX_RUNS]
        metrics = query.get("metric", [])[:MAX_METRICS]
        buckets = _integer(query, "buckets", 300, 1, MAX_BUCKETS)
        half = _integer(query, "half", 0, 0, 10**6)
        by_run = {name: self._curves_of(self.runs.path(name)) for name in names}
        ranges = [steps for curves in by_run.values() if (steps := curves.range()) is not None]
        if not ranges:
            return {"domain": None, "curves": {}}
        first = _integer(query, "first", min(low for low, _ in ranges), -MAX_STEP, MAX_STEP)
        last = _integer(query, "last", max(high for _, high in ranges), -MAX_STEP, MAX_STEP)
        if last < first:
            raise Missing(f"the range of steps is empty: the last step {last} is before the first step {first}")
        shown = {
            metric: {
                name: points
                for name, curves in by_run.items()
                if (points := curves.shown(metric, (first, last), buckets, half)) is not None
            }
            for metric in metrics
        }
        return {"domain": [first, last], "curves": shown}

    def samples(self, query: Query) -> dict[str, Any]:
        """Returns the samples that match the filter. The query key `step` is a step number, `last` or `all`."""
        selection = SampleFilter(
            kind=_text(query, "kind", ""),
            ended=_text(query, "ended", ""),
            least=_number(query, "least"),
            most=_number(query, "most"),
            text=_text(query, "text", ""),
        )
        step = _text(query, "step", "all")
        start = _integer(query, "from", 0, 0, MAX_STEP) if "from" in query else None
        with self._samples_of(query) as file:
            if step == "all":
                return samples_of_all_steps(file, selection, start or 0)
            at = None if step == "last" else _integer(query, "step", 0, -MAX_STEP, MAX_STEP)
            return samples_of_step(file, selection, at, start)

    def sample(self, query: Query) -> dict[str, Any]:
        with self._samples_of(query) as file:
            return single_sample(file, _integer(query, "offset", 0, 0, MAX_STEP))

    def image(self, query: Query) -> BinaryIO:
        """Opens an image of a sample."""
        name = _text(query, "file")
        if not IMAGE_NAME.fullmatch(name):
            raise Missing("an image of a sample has no such name")
        return open_inside(self.runs.root, RunFolder(self.runs.path(_text(query, "run"))).images / name)

    def recipe(self, query: Query) -> dict[str, Any]:
        return recipe_of(self.runs.root, self.runs.path(_text(query, "run")))

    def difference(self, query: Query) -> dict[str, Any]:
        """Returns the differences between the setups of two runs."""
        run, other = (self.runs.path(_text(query, name)) for name in ("run", "against"))
        return setup_difference(self.runs.root, run, other)

    def report(self, query: Query) -> BinaryIO:
        """Opens the HTML report of the last comparison of a run."""
        return open_inside(self.runs.root, self.runs.path(_text(query, "run")) / "report.html")

    def _samples_of(self, query: Query) -> BinaryIO:
        return open_inside(self.runs.root, RunFolder(self.runs.path(_text(query, "run"))).samples)

    def _curves_of(self, path: Path) -> Curves:
        with self._lock:
            curves = self._curves.pop(path, None) or Curves(
                lambda: open_inside(self.runs.root, RunFolder(path).metrics)
            )
            self._curves[path] = curves
            while len(self._curves) > MAX_CACHED_CURVES:
                self._curves.popitem(last=False)
            return curves


def _text(query: Query, name: str, default: str | None = None) -> str:
    if name in query:
        return query[name][0]
    if default is None:
        raise Missing(f"the request has no parameter {name}")
    return default


def _integer(query: Query, name: str, default: int, low: int, high: int) -> int:
    text = _text(query, name, str(default))
    # Only up to 20 digits are accepted, because int() accepts other number formats and is slow for very long numbers.
    if len(text) > 20 or not text.removeprefix("-").isdecimal():
        raise Missing(f"{name}={text[:40]} is not an integer")
    return min(high, max(low, int(text)))


def _number(query: Query, name: str) -> float | None:
    text = _text(query, name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise Missing(f"{name}={text[:40]} is not a number")
    return value
