"""The OpenAI API of a language model: chat completions, completions and the list of models.

Replies can contain token ids, as in vLLM's API.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.http_server.http_api import (
    ApiError,
    Handler,
    HttpReply,
    HttpRequest,
    HttpSite,
    as_events,
    as_json,
    check_caller,
)
from lockstep.rollout.native.online_engine import DrawnToken
from lockstep.serve.api_request import ApiRequest, ServedModel, chat_request, completion_request
from lockstep.serve.engine_worker import Delta, EngineWorker, PendingRequest


class ModelApp(Protocol):
    """A model with its HTTP routes by (method, path)."""

    routes: Mapping[tuple[str, str], Handler]

    def close(self) -> None: ...


def model_site(app: ModelApp, api_key: str | None) -> HttpSite:
    return HttpSite(app.routes, lambda request: check_caller(request, api_key))


def model_routes(names: tuple[str, ...], max_model_len: int | None) -> dict[tuple[str, str], Handler]:
    """Returns the HTTP routes that list the models in OpenAI's format. The list also has the key `max_model_len` of
    vLLM."""
    model = {"id": names[0], "object": "model", "created": int(time.time()), "owned_by": "lockstep"}
    if max_model_len:
        model["max_model_len"] = max_model_len

    async def models(request: HttpRequest) -> HttpReply:
        return as_json({"object": "list", "data": [model]})

    async def one_model(request: HttpRequest) -> HttpReply:
        return as_json(model)

    return {("GET", "/v1/models"): models, ("GET", f"/v1/models/{names[0]}"): one_model}


def check_running(stopped: str | None) -> None:
    """Rejects a request if the worker has stopped. `stopped` is the reason, or None while the worker runs."""
    if stopped is not None:
        raise ApiError(503, stopped, code="engine_stopped")


class LanguageModelApp:
    """The routes of a language model."""

    def __init__(self, served: ServedModel, worker: EngineWorker):
        self.served, self.worker = served, worker
        # A separate thread tokenizes requests, so that a long prompt does not delay other responses or the engine.
        self._encoder = ThreadPoolExecutor(1, "encoder")
        self.routes: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/chat/completions"): self.chat,
            ("POST", "/v1/completions"): self.complete,
            **model_routes(served.names, served.max_model_len),
            ("GET", "/health"): self.health,
        }

    async def chat(self, request: HttpRequest) -> HttpReply:
        return await self._generate(request, chat_request, chat=True)

    async def complete(self, request: HttpRequest) -> HttpReply:
        return await self._generate(request, completion_request, chat=False)

    async def health(self, request: HttpRequest) -> HttpReply:
        check_running(self.worker.stopped)
        return as_json({"status": "ok", **vars(self.worker.load)})

    async def _generate(self, request: HttpRequest, parse: Callable[..., ApiRequest], *, chat: bool) -> HttpReply:
        check_running(self.worker.stopped)
        loop = asyncio.get_running_loop()
        parsed = await loop.run_in_executor(self._encoder, parse, request.body, self.served)
        response = ApiResponse(parsed, self.served, chat=chat)
        # The request is queued before its stream begins, so that a full queue gives an HTTP error status, not an error
        # event.
        pending = self.worker.submit(parsed.generation)
        if parsed.stream:
            return as_events(response.events(pending), lambda: self.worker.release(pending))
        try:
            return as_json(await response.complete(pending))
        finally:
            self.worker.release(pending)

    def close(self) -> None:
        self.worker.close()
        self._encoder.shutdown()


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass
class _Choice:
    text: str = ""
    tokens: list[DrawnToken] = field(default_factory=list)
    finish: str | None = None


class ApiResponse:
    """The response to one request, complete or streamed. `chat` selects the format of chat completions."""

    def __init__(self, request: ApiRequest, served: ServedModel, *, chat: bool):
        self.request, self.served, self.chat = request, served, chat
        self.created = int(time.time())
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._offsets: dict[int, int] = {}

    async def complete(self, pending: PendingRequest) -> dict[str, Any]:
        choices = [_Choice() for _ in range(self.request.generation.num_sequences)]
        unfinished = len(choices)
        while unfinished:
            delta = await pending.next_delta()
            choice = choices[delta.choice]
            choice.text += delta.text
            choice.tokens += delta.tokens
            choice.finish = delta.finish
            unfinished -= delta.finish is not None
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._body(kind, [self._choice(index, choice) for index, choice in enumerate(choices)])
        if self.chat and self.request.token_ids:
            body["prompt_token_ids"] = list(self.request.generation.prompts[0])
        return {**body, "usage": self._usage(sum(len(choice.tokens) for choice in choices))}

    async def events(self, pending: PendingRequest) -> AsyncIterator[dict[str, Any]]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        unfinished, generated = self.request.generation.num_sequences, 0
        started: set[int] = set()
        while unfinished:
            delta = await pending.next_delta()
            unfinished -= delta.finish is not None
            generated += len(delta.tokens)
            first = delta.choice not in started
            started.add(delta.choice)
            if not first and not self._is_event(delta):
                continue
            chunk = self._body(kind, [self._delta(delta, first=first)])
            if self.chat and self.request.token_ids and first:
                chunk["prompt_token_ids"] = list(self.request.generation.prompts[0])
            yield chunk
        if self.request.usage:
            yield {**self._body(kind, []), "usage": self._usage(generated)}

    def _is_event(self, delta: Delta) -> bool:
        """Returns whether to send an event for `delta`. No event is sent for tokens that do not complete a
        character."""
        return bool(delta.text or delta.finish or self.request.token_ids or self.request.logprobs)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.names[0],
            "choices": choices,
        }

    def _usage(self, generated: int) -> dict[str, int]:
        prompts = sum(len(ids) for ids in self.request.generation.prompts)
        return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}

    def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        # If there are no stop strings, all tokens are decoded together, so that the text does not depend on the
        # decoding steps.
        text = (
            choice.text
            if self.request.generation.stops
            else self.served.decode([token.token for token in choice.tokens])
        )
        content: dict[str, Any] = {"text": text}
        if self.chat:
            content = {"message": {"role": "assistant", "content": text}}
        return {
            "index": index,
            **content,
            "finish_reason": choice.finish,
            **self._extras(index, choice.tokens, first=True),
        }

    def _delta(self, delta: Delta, *, first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"text": delta.text}
        if self.chat:
            content = {"delta": {**({"role": "assistant"} if first else {}), "content": delta.text}}
        extras = self._extras(delta.choice, delta.tokens, first=first)
        return {"index": delta.choice, **content, "finish_reason": delta.finish, **extras}

    def _extras(self, index: int, tokens: Sequence[DrawnToken], *, first: bool) -> dict[str, Any]:
        """Returns log-probabilities and token ids, if the request asks for them."""
        extras: dict[str, Any] = {"logprobs": None}
        if self.request.logprobs:
            extras["logprobs"] = self._chat_logprobs(tokens) if self.chat else self._plain_logprobs(index, tokens)
        if self.request.token_ids:
            extras["token_ids"] = [token.token for token in tokens]
            if not self.chat and first:
                extras["prompt_token_ids"] = list(self.request.generation.prompts[index // self.request.generation.n])
        return extras

    def _chat_logprobs(self, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._token(token_id)
            # If a token is only a part of a character, its text is incomplete, and its bytes are unknown.
            data = None if _REPLACEMENT in text else list(text.encode(errors="replace"))
            return {"token": text, "logprob": logprob, "bytes": data}

        return {
            "content": [
                {**entry(token.token, _logprob(token)), "top_logprobs": [entry(*other) for other in token.likeliest]}
                for token in tokens
            ]
        }

    def _plain_logprobs(self, index: int, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        texts = [self._token(token.token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_logprob(token) for token in tokens],
            # Tokens that are only parts of characters all decode to the same text. For each text, the dict keeps the
            # most likely token.
            "top_logprobs": [
                {self._token(token_id): logprob for token_id, logprob in reversed(token.likeliest)} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        decode: Callable[[list[int]], str] = self.served.tokenizer.decode
        return decode([token_id])


def _logprob(token: DrawnToken) -> float:
    assert token.logprob is not None
    return token.logprob
