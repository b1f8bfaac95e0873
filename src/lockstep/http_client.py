"""The HTTP client of remote rewards and of serving engines. The client limits the time and the size of every response.

The client uses the HTTP package that huggingface_hub installs: httpx for huggingface_hub 1, and httpx2, which has the
same interface, from version 2 on. The HTTP package has time limits only for single reads, not for a whole response.
Requests are therefore asynchronous, so that the client can cancel a request that takes too long in total.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

try:
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[import-not-found,no-redef]

from lockstep.masking import masked

MAX_REASON = 300
# Maximum number of bytes that are read from the body of an error response.
_ERROR_BYTES = 2**16
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}


class RequestFailed(Exception):
    """No complete response was received."""


class ResponseTooLong(Exception):
    """The response is longer than the limit of the request."""


@dataclass
class HttpResponse:
    """An HTTP response. The body of an error response may be incomplete."""

    status: int
    reason: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def retry_after(self) -> float:
        """Number of seconds in the header Retry-After. 0 if the header is missing or contains a date."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0

    def error(self) -> str:
        """Returns the status and the beginning of the response body, on one line."""
        text = self.body.decode(errors="replace").strip()[:200]
        return short(f"answered {self.status} {self.reason}".rstrip() + (f": {text}" if text else ""))


class HttpClient:
    """Sends HTTP requests in one event loop. The client follows no redirects and keeps no cookies. The client does not
    keep connections alive, because a request fails on a connection that the server has closed in the meantime.

    `direct_to_loopback` makes requests to this machine bypass the proxies of the environment variables. `key` is sent
    as a bearer token."""

    def __init__(self, *, direct_to_loopback: bool = False, key: str | None = None):
        loopback: dict[str, Any] = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            mounts=loopback if direct_to_loopback else None,
            verify=_tls(),
            timeout=None,
            limits=httpx.Limits(max_keepalive_connections=0),
            follow_redirects=False,
            event_hooks={"response": [_record_status]},
        )

    async def __aenter__(self) -> HttpClient:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(*error)

    def set_header(self, name: str, value: str) -> None:
        """Sends the header with every later request."""
        self._client.headers[name] = value

    async def request(
        self,
        method: str,
        address: str,
        body: bytes,
        *,
        seconds: float,
        max_bytes: int,
        on_chunk: Callable[[bytes], None] | None = None,
        on_headers: Callable[[HttpResponse], None] | None = None,
    ) -> HttpResponse:
        """Sends a request and returns the response. `seconds` limits the time from name resolution to the last byte.
        If `on_chunk` is given, it receives the body of a successful response in chunks, and the returned body is
        empty. `on_headers` receives a successful response before its body."""
        responses: list[HttpResponse] = []
        cause: Exception
        try:
            await asyncio.wait_for(
                self._exchange(method, address, body, responses, max_bytes, on_chunk, on_headers), seconds
            )
        except ResponseTooLong:
            raise
        except asyncio.TimeoutError as error:
            why, cause = f"gave no answer in {seconds:g} s", error
        except Exception as error:  # noqa: BLE001 - whatever the library raises, there is no response
            why, cause = _root_cause(error), error
        else:
            return responses[0]
        if responses and not responses[0].success:
            # An error response is returned even if its body is incomplete, because the body would only give the reason.
            return responses[0]
        raise RequestFailed(why) from cause

    async def status(self, address: str, seconds: float) -> int | None:
        """Returns the HTTP status of a GET request. Returns None if the server does not answer within twice `seconds`,
        for example because it is busy. Raises `RequestFailed` if there is no connection."""
        timeout = httpx.Timeout(None, connect=seconds)
        request = self._client.build_request(
            "GET", address, headers=_HEADERS, timeout=timeout, extensions={"responses": []}
        )
        try:
            response = await asyncio.wait_for(self._client.send(request, stream=True), 2 * seconds)
        except asyncio.TimeoutError:
            return None
        except Exception as error:
            raise RequestFailed(_root_cause(error)) from error
        await response.aclose()
        return int(response.status_code)

    async def _exchange(
        self,
        method: str,
        address: str,
        body: bytes,
        responses: list[HttpResponse],
        max_bytes: int,
        on_chunk: Callable[[bytes], None] | None,
        on_headers: Callable[[HttpResponse], None] | None,
    ) -> None:
        # Clears the cookies, because cookies of one response would be sent with the requests of other batches.
        self._client.cookies.clear()
        request = self._client.build_request(
            method, address, content=body, headers=_HEADERS, extensions={"responses": responses}
        )
        response = await self._client.send(request, stream=True)
        found = responses[0]
        if on_headers is not None and found.success:
            on_headers(found)
        try:
            chunks: list[bytes] = []
            size = 0
            async for chunk in response.aiter_raw():
                if on_chunk is not None and found.success:
                    on_chunk(chunk)
                    continue
                chunks.append(chunk)
                size += len(chunk)
                if not found.success:
                    found.body = b"".join(chunks)
                    if size > _ERROR_BYTES:
                        return
                elif size > max_bytes:
                    raise ResponseTooLong
            found.body = b"".join(chunks)
        finally:
            await response.aclose()


@cache
def _tls() -> Any:
    """Returns the TLS context that all clients share, because loading the system's certificates is slow."""
    return httpx.create_ssl_context()


async def _record_status(response: Any) -> None:
    """Records the status of a response before the library parses the target of a redirect, which may be malformed."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    found = HttpResponse(response.status_code, response.reason_phrase, headers)
    response.request.extensions["responses"].append(found)


def _root_cause(error: BaseException) -> str:
    """Returns the message of the innermost exception (of the operating system or the parser). The outer exceptions only
    repeat that message."""
    root = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
    # An exception group has one error for each address of the host. The last error is used.
    root = getattr(root, "exceptions", [root])[-1]
    number = getattr(root, "errno", None)
    if isinstance(root, OSError) and isinstance(number, int) and number > 0:
        return os.strerror(number)
    return short(str(error) or type(error).__name__)


def short(text: str) -> str:
    """Returns the text on one line, cut to the maximum length, with secrets masked."""
    text = masked(" ".join(text.split()))
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."
