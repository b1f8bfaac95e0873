"""A session with an MCP server over HTTP (the transport `streamable HTTP`): each message is a POST request. The server
answers a request with JSON, or with a stream of events that contains the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lockstep.environments.adapters.mcp_session import END_SECONDS, LONGEST, McpSession
from lockstep.environments.tools import ToolServerLost
from lockstep.http_client import HttpClient, HttpResponse, RequestFailed, ResponseTooLong

# The time limit of a call cancels its request, so the client itself waits for a day.
_SECONDS = 86_400.0
_SESSION, _VERSION = "mcp-session-id", "mcp-protocol-version"


class _Answered(Exception):
    """The answer has arrived, so the rest of the stream is not needed."""


class McpHttp(McpSession):
    """A session with a server at an address."""

    def __init__(self, address: str, client: HttpClient):
        super().__init__(address)
        self._client, self._address = client, address
        self._session, self._lost = "", ""
        self._replies: set[asyncio.Task[None]] = set()

    @classmethod
    async def opened(cls, address: str, headers: Mapping[str, str]) -> McpHttp:
        client = await HttpClient(direct_to_loopback=True).__aenter__()
        client.set_header("Accept", "application/json, text/event-stream")
        for name, value in headers.items():
            client.set_header(name, value)
        session = cls(address, client)
        try:
            await session.start()
        except BaseException:
            await session.close()
            raise
        return session

    @property
    def alive(self) -> bool:
        return not self._lost

    async def close(self) -> None:
        """Ends the session in the server. A server may refuse this."""
        for reply in self._replies:
            reply.cancel()
        try:
            if self._session and self.alive:
                with suppress(RequestFailed, ResponseTooLong):
                    await self._client.request("DELETE", self._address, b"", seconds=END_SECONDS, max_bytes=LONGEST)
        finally:
            await self._client.__aexit__(None, None, None)

    async def _send(self, message: Mapping[str, Any]) -> None:
        """Posts a message. After a request, its answer has arrived."""
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        answer = self._waiting.get(message["id"]) if "method" in message and "id" in message else None
        reader = _AnswerReader()
        if self._version:
            self._client.set_header(_VERSION, self._version)

        def read(chunk: bytes) -> None:
            for one in reader.add(chunk):
                self._take(one)
            if answer is not None and answer.done():
                raise _Answered

        try:
            response = await self._client.request(
                "POST",
                self._address,
                body,
                seconds=_SECONDS,
                max_bytes=LONGEST,
                on_chunk=read,
                on_headers=self._keep_session,
            )
            for one in reader.rest():
                self._take(one)
            why = "" if response.success else response.error()
            if not why and answer is not None and not answer.done():
                why = "did not answer a request"
        except RequestFailed as error:
            why = "" if answer is not None and answer.done() else str(error)
        except ResponseTooLong:
            why = f"wrote a message of over {LONGEST:,} bytes"
        if why:
            self._lost = why
            raise ToolServerLost(f"the MCP server {self._shown} {why}")

    def _take(self, message: Any) -> None:
        if (reply := self._handle(message)) is not None:
            task = asyncio.create_task(self._reply(reply))
            self._replies.add(task)
            task.add_done_callback(self._replies.discard)

    async def _reply(self, reply: Mapping[str, Any]) -> None:
        with suppress(ToolServerLost):  # the next request reports it
            await self._send(reply)

    def _keep_session(self, response: HttpResponse) -> None:
        """Sends the session that the server names with every later request."""
        named = response.headers.get(_SESSION, "")
        if named and not self._session:
            self._session = named
            self._client.set_header(_SESSION, named)


class _AnswerReader:
    """Reads the messages of a response: a JSON document, or events whose data are JSON documents."""

    def __init__(self) -> None:
        self._text, self._size = b"", 0

    def add(self, chunk: bytes) -> list[Any]:
        """Returns the messages that are complete."""
        self._size += len(chunk)
        if self._size > LONGEST:
            raise ResponseTooLong
        self._text = (self._text + chunk).replace(b"\r\n", b"\n")
        if self._text.lstrip()[:1] in (b"{", b"["):
            return []  # JSON is complete at the end of the response
        *events, self._text = self._text.split(b"\n\n")
        return [message for event in events for message in _parsed(_data(event))]

    def rest(self) -> list[Any]:
        """Returns the messages at the end of the response."""
        is_json = self._text.lstrip()[:1] in (b"{", b"[")
        return _parsed(self._text if is_json else _data(self._text))


def _data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


def _parsed(text: bytes) -> list[Any]:
    try:
        found = json.loads(text) if text.strip() else []
    except ValueError:
        return []
    return found if isinstance(found, list) else [found]
