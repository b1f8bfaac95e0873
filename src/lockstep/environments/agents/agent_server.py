"""The HTTP server of agents: each trajectory has its own base URL, with OpenAI's chat completions and responses API.
The server runs in a thread; the thread of the engine answers the requests."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from lockstep.environments.agents.agent_replies import (
    AgentAnswer,
    as_sent,
    chat_body,
    chat_events,
    response_body,
    response_events,
)
from lockstep.environments.agents.agent_requests import TurnSpec, chat_turn, responses_turn
from lockstep.environments.return_values import checked_result
from lockstep.http_server.http_api import (
    ApiError,
    Handler,
    HttpReply,
    HttpRequest,
    HttpSite,
    ServeLimits,
    as_events,
    as_json,
    settle,
)
from lockstep.types import Message

MODEL = "policy"
# The engine and the time limits of a run limit requests, so the server itself waits for a day.
_LIMITS = ServeLimits(body_bytes=64 * 2**20, seconds=86_400.0, idle_seconds=600.0, connections=16_384)


@dataclass(eq=False)
class AgentSession:
    """A trajectory as its agent sees it. Only the server's thread uses `responses`."""

    token: str
    post: Callable[[AgentRequest], None]
    """Passes a request to the thread of the engine."""
    reward: dict[str, Any] | None = None
    """What the agent posted as its reward, if it did."""
    responses: dict[str, list[Message]] = field(default_factory=dict)


@dataclass(eq=False)
class AgentRequest:
    """A request that waits for its answer. `gone` says that the agent has disconnected, so that nobody gets the
    answer."""

    session: AgentSession
    spec: TurnSpec
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[AgentAnswer]
    gone: bool = False
    """Whether the agent has disconnected. The server then posts the request again."""
    seen: bool = False
    """Whether the loop has handled the request. The agent may disconnect earlier."""
    received: float = field(default_factory=time.monotonic)

    def answer(self, answer: AgentAnswer | ApiError) -> None:
        """Answers the request from another thread."""
        settle(self.loop, self.future, answer)


class AgentServer:
    """Serves the open trajectories of one process on `host`, on any free port."""

    def __init__(self, host: str, where: str):
        """`where` names the recipe key in messages. Raises `Refusal` if the server cannot start."""
        from lockstep.http_server import asgi  # imported here, because it needs the extra `serve`

        self._host, self._sessions = host, dict[str, AgentSession]()
        self._lock = threading.Lock()
        sockets: list[socket.socket] = asgi.bind(host, 0, f"{where} {host}")
        self._port = asgi.listen(sockets)
        routes: dict[tuple[str, str], Handler] = {
            ("POST", "/{token}/v1/chat/completions"): self._chat,
            ("POST", "/{token}/v1/responses"): self._response,
            ("GET", "/{token}/v1/models"): self._models,
            ("GET", "/{token}/v1/models/{name:path}"): self._models,
            ("POST", "/{token}/v1/reward"): self._reward,
        }
        self._stack = ExitStack()
        self._stack.enter_context(asgi.site_in_thread(_AgentSite(routes, self._check), _LIMITS, sockets))

    def open(self, post: Callable[[AgentRequest], None]) -> AgentSession:
        """Opens the base URL of a trajectory. `post` gets its requests, in the server's thread."""
        session = AgentSession(secrets.token_urlsafe(16), post)
        with self._lock:
            self._sessions[session.token] = session
        return session

    def url(self, session: AgentSession) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/{session.token}/v1"

    def end(self, session: AgentSession) -> None:
        """Closes the base URL of a trajectory that has ended."""
        with self._lock:
            self._sessions.pop(session.token, None)

    def close(self) -> None:
        self._stack.close()

    # Methods of the server's thread ---------------------------------------------------------------------------------

    def _check(self, request: HttpRequest) -> None:
        self._session(request)

    def _session(self, request: HttpRequest) -> AgentSession:
        token = request.path.lstrip("/").partition("/")[0]
        session = self._sessions.get(token)
        if session is None:
            raise ApiError(404, "this base URL belongs to no running trajectory", code="trajectory_ended")
        return session

    async def _chat(self, request: HttpRequest) -> HttpReply:
        session = self._session(request)
        spec = chat_turn(request.body)
        answer = await self._asked(session, spec)
        if spec.stream:
            return as_events(_each(chat_events(spec, answer)), lambda: None)
        return as_json(chat_body(spec, answer))

    async def _response(self, request: HttpRequest) -> HttpReply:
        session = self._session(request)
        spec = responses_turn(request.body, session.responses)
        answer = await self._asked(session, spec)
        messages = list(spec.messages[1:] if spec.instructions else spec.messages)
        body = response_body(spec, answer)
        session.responses[body["id"]] = [*messages, as_sent(answer.replies[0]).message()]
        if spec.stream:
            return HttpReply(_typed_events(response_events(spec, answer)), content_type="text/event-stream")
        return as_json(body)

    async def _asked(self, session: AgentSession, spec: TurnSpec) -> AgentAnswer:
        loop = asyncio.get_running_loop()
        request = AgentRequest(session, spec, loop, loop.create_future())
        session.post(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            request.gone = True
            session.post(request)
            raise

    async def _models(self, request: HttpRequest) -> HttpReply:
        named = request.path.partition("/v1/models/")[2]
        model = {"id": named or MODEL, "object": "model", "created": 0, "owned_by": "lockstep"}
        return as_json(model if named else {"object": "list", "data": [model]})

    async def _reward(self, request: HttpRequest) -> HttpReply:
        session = self._session(request)
        try:
            result = checked_result(json.loads(request.body))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the reward {error}", code="invalid_reward") from error
        if result is None:
            raise ApiError(400, "the reward is null", code="invalid_reward")
        if session.reward is not None:
            raise ApiError(409, "this trajectory already has a reward", code="second_reward")
        session.reward = result
        return as_json({"status": "ok"})


class _AgentSite(HttpSite):
    """The routes of agents. An error about an unknown route does not show the URLs of other trajectories."""

    def no_route(self, path: str) -> ApiError:
        known = "/chat/completions, /responses, /models and /reward"
        return ApiError(404, f"a base URL of an agent has the routes {known}", code="not_found")


async def _each(events: Iterable[Any]) -> AsyncIterator[Any]:
    for event in events:
        yield event


async def _typed_events(events: Iterable[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Returns the events of the responses API, whose lines also have the type of the event."""
    for event in events:
        data = json.dumps(event, ensure_ascii=False).encode(errors="replace")
        yield b"event: " + event["type"].encode() + b"\ndata: " + data + b"\n\n"
