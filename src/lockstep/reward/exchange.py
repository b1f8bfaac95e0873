"""One request to an endpoint and its answer, bounded in time and in size whatever the other side does.

The client is the one that huggingface_hub brings, and that differs: httpx up to its version 1, httpx2 from 2 on. Both
have the same interface. The asynchronous client is used because its limits of time are for single reads; a limit for
the whole exchange needs something that can be cancelled anywhere.
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

MOST_BYTES = 16 * 2**20
LONGEST_WHY = 300
# Of a body that says why a request was refused.
_REASON_BYTES = 2**16
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}


class Trouble(Exception):
    """There is no whole answer."""


class TooLong(Exception):
    """The answer is longer than it may be."""


@dataclass
class HttpAnswer:
    """What came back. An answer that is no success may have lost the end of its body."""

    status: int
    reason: str
    headers: dict[str, str]
    body: bytes = b""

    @property
    def success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def retry_after(self) -> float:
        """Seconds that the endpoint asks to be left alone; 0 where it does not say, or says a date."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0

    def told(self) -> str:
        text = self.body.decode(errors="replace").strip()[:200]
        return short(f"answered {self.status} {self.reason}".rstrip() + (f": {text}" if text else ""))


def open_client(*, direct_to_loopback: bool = False, key: str | None = None) -> Any:
    """Redirects are not followed, connections not kept: one that the endpoint closed meanwhile would cost a try.

    `direct_to_loopback`: a proxy of the environment is not asked for this machine itself. `key`: sent along with each
    request, as endpoints ask for it that are open to others."""
    loopback: dict[str, Any] = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else None,
        mounts=loopback if direct_to_loopback else None,
        verify=_tls(),
        timeout=None,
        limits=httpx.Limits(max_keepalive_connections=0),
        follow_redirects=False,
        event_hooks={"response": [_hear]},
    )


@cache
def _tls() -> Any:
    """Reading the system's certificates takes long; they serve every client."""
    return httpx.create_ssl_context()


async def _hear(response: Any) -> None:
    """Note the status before the client looks at where a redirect leads: that may be malformed."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    answer = HttpAnswer(response.status_code, response.reason_phrase, headers)
    response.request.extensions["heard"].append(answer)


async def post(client: Any, address: str, body: bytes, seconds: float) -> HttpAnswer:
    """The answer to a POST, from the look-up of the name to the last byte within `seconds`."""
    return await exchanged(client, "POST", address, body, seconds, MOST_BYTES)


async def exchanged(
    client: Any,
    method: str,
    address: str,
    body: bytes,
    seconds: float,
    most: int,
    piece: Callable[[bytes], None] | None = None,
) -> HttpAnswer:
    """The answer to a request, of at most `most` bytes, within `seconds`. `piece` is given each part of a successful
    answer as it comes, in the place of its body."""
    heard: list[HttpAnswer] = []
    cause: Exception
    try:
        await asyncio.wait_for(_exchange(client, method, address, body, heard, most, piece), seconds)
    except TooLong:
        raise
    except asyncio.TimeoutError as error:
        why, cause = f"gave no answer in {seconds:g} s", error
    except Exception as error:  # noqa: BLE001 - whatever a client finds wrong with an answer, there is none
        why, cause = _root_cause(error), error
    else:
        return heard[0]
    if heard and not heard[0].success:
        # The status is known and decides; the body would only have said why.
        return heard[0]
    raise Trouble(why) from cause


async def answers(client: Any, address: str, seconds: float) -> int | None:
    """The status of a GET: a look whether anybody is there. None where the connection was taken and nothing came within
    `seconds`, as of a program that is busy. `Trouble` where there is no connection to be had."""
    heard: list[HttpAnswer] = []
    timeout = httpx.Timeout(None, connect=seconds)
    request = client.build_request("GET", address, headers=_HEADERS, timeout=timeout, extensions={"heard": heard})
    try:
        response = await asyncio.wait_for(client.send(request, stream=True), 2 * seconds)
    except asyncio.TimeoutError:
        return None
    except Exception as error:
        raise Trouble(_root_cause(error)) from error
    await response.aclose()
    return int(response.status_code)


async def _exchange(
    client: Any,
    method: str,
    address: str,
    body: bytes,
    heard: list[HttpAnswer],
    most: int,
    given: Callable[[bytes], None] | None,
) -> None:
    # What an endpoint asks to remember would go along with the requests of other batches.
    client.cookies.clear()
    request = client.build_request(method, address, content=body, headers=_HEADERS, extensions={"heard": heard})
    response = await client.send(request, stream=True)
    answer = heard[0]
    try:
        pieces: list[bytes] = []
        size = 0
        async for piece in response.aiter_raw():
            if given is not None and answer.success:
                given(piece)
                continue
            pieces.append(piece)
            size += len(piece)
            if not answer.success:
                answer.body = b"".join(pieces)
                if size > _REASON_BYTES:
                    return
            elif size > most:
                raise TooLong
        answer.body = b"".join(pieces)
    finally:
        await response.aclose()


def _root_cause(error: BaseException) -> str:
    """What the system or the parser said; the layers between repeat it in other words."""
    root = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
    # One for each address that the name has.
    root = getattr(root, "exceptions", [root])[-1]
    number = getattr(root, "errno", None)
    if isinstance(root, OSError) and isinstance(number, int) and number > 0:
        return os.strerror(number)
    return short(str(error) or type(error).__name__)


def short(text: str) -> str:
    """On one line, and no longer than a reason needs to be."""
    text = masked(" ".join(text.split()))
    return text if len(text) <= LONGEST_WHY else text[:LONGEST_WHY] + "..."
