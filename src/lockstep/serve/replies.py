"""What the endpoint answers: JSON, a stream of events, or an error in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class ApiError(Exception):
    """A request that is not answered. `param` is the key of the body that is wrong, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, usual)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class HttpReply:
    """`body` is whole, or comes piece by piece. `done` is called when it was sent, or cannot be."""

    body: bytes | AsyncIterator[bytes]
    status: int = 200
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    done: Callable[[], None] = lambda: None


def as_json(value: Any, status: int = 200) -> HttpReply:
    return HttpReply(json.dumps(value, ensure_ascii=False).encode(errors="replace"), status)


def as_events(events: AsyncIterator[Any], done: Callable[[], None]) -> HttpReply:
    """Server-sent events, with OpenAI's last word. An error that comes too late for a status is the last event."""
    kind, headers = "text/event-stream; charset=utf-8", {"Cache-Control": "no-cache"}
    return HttpReply(_event_lines(events), kind=kind, headers=headers, done=done)


async def _event_lines(events: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield _line(event)
    except ApiError as error:
        yield _line(error.body())
        return
    yield b"data: [DONE]\n\n"


def _line(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode(errors="replace") + b"\n\n"


def of_error(error: ApiError) -> HttpReply:
    plain = as_json(error.body(), error.status)
    return HttpReply(plain.body, error.status, headers=error.headers)
