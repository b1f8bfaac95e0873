"""The endpoints of a language model: chats, completions, the list of models, and how full the engine is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol
from urllib.parse import quote

from lockstep.serve.answers import ApiAnswer
from lockstep.serve.gate import check_caller
from lockstep.serve.http import HttpRequest, HttpServer
from lockstep.serve.limits import ListenAddress, ServeLimits
from lockstep.serve.orders import ApiRequest, Served, chat_asked, completion_asked
from lockstep.serve.replies import ApiError, HttpReply, as_events, as_json
from lockstep.serve.worker import EngineWorker

Route = Callable[[HttpRequest], Awaitable[HttpReply]]


class App(Protocol):
    """What a server runs: a table of endpoints, and its end."""

    routes: dict[tuple[str, str], Route]

    def close(self) -> None: ...


def server_of(app: App, address: ListenAddress, limits: ServeLimits) -> HttpServer:
    """One server of all its endpoints. Who may not ask, a wrong path and a wrong method are told before a body is
    read."""

    def route(request: HttpRequest) -> tuple[str, str]:
        method = "GET" if request.method == "HEAD" else request.method
        return method, request.path.rstrip("/") or "/"

    def check(request: HttpRequest) -> None:
        check_caller(request, address)
        _, path = wanted = route(request)
        known = sorted({path for _, path in app.routes})
        if path not in known:
            raise ApiError(404, f"there is no {path[:200]}; there are {', '.join(known)}", code="not_found")
        if wanted not in app.routes:
            raise ApiError(405, f"{path} does not take {request.method[:20]}", code="method_not_allowed")

    async def answer(request: HttpRequest) -> HttpReply:
        return await app.routes[route(request)](request)

    return HttpServer(answer, limits, check)


def model_list(names: tuple[str, ...], longest: int | None) -> dict[str, Any]:
    """As OpenAI lists models, with vLLM's name for the longest sequence."""
    model = {"id": names[0], "object": "model", "created": int(time.time()), "owned_by": "lockstep"}
    return {"object": "list", "data": [{**model, "max_model_len": longest} if longest else model]}


def model_path(names: tuple[str, ...]) -> str:
    return f"/v1/models/{quote(names[0], safe='')}"


class LanguageModelApp:
    def __init__(self, served: Served, worker: EngineWorker):
        self.served, self.worker = served, worker
        self._models = model_list(served.names, served.longest)
        # One thread makes tokens of requests: a long one holds up neither the streams nor the engine.
        self._encoder = ThreadPoolExecutor(1, "encoder")
        self.routes: dict[tuple[str, str], Route] = {
            ("POST", "/v1/chat/completions"): self.chat,
            ("POST", "/v1/completions"): self.complete,
            ("GET", "/v1/models"): self.models,
            ("GET", model_path(served.names)): self.one_model,
            ("GET", "/health"): self.health,
        }

    async def chat(self, request: HttpRequest) -> HttpReply:
        return await self._answered(request, chat_asked, chat=True)

    async def complete(self, request: HttpRequest) -> HttpReply:
        return await self._answered(request, completion_asked, chat=False)

    async def models(self, request: HttpRequest) -> HttpReply:
        return as_json(self._models)

    async def one_model(self, request: HttpRequest) -> HttpReply:
        return as_json(self._models["data"][0])

    async def health(self, request: HttpRequest) -> HttpReply:
        if self.worker.over is not None:
            raise ApiError(503, self.worker.over, code="engine_stopped")
        return as_json({"status": "ok", **vars(self.worker.load)})

    async def _answered(self, request: HttpRequest, understood: Callable[..., ApiRequest], *, chat: bool) -> HttpReply:
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._encoder, understood, request.body, self.served)
        answer = ApiAnswer(asked, self.served, chat=chat)
        # Here also for a stream, so that a full queue is told by a status and not inside it.
        ticket = self.worker.order(asked.order)
        if asked.stream:
            return as_events(answer.events(ticket), lambda: self.worker.leave(ticket))
        try:
            return as_json(await answer.whole(ticket))
        finally:
            self.worker.leave(ticket)

    def close(self) -> None:
        self.worker.close()
        self._encoder.shutdown()
