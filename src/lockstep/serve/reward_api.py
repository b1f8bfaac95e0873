"""The HTTP API of a reward model, for runs on other machines.

`/v1/rewards` accepts the requests that a run with `reward.remote` sends: `{"items": [{prompt, response, ...}, ...]}`.
The reply is `{"scores": [...]}`. `/v1/rewards` also accepts requests in the format of OpenRLHF's `serve_rm`: `{"query":
[...], ...}`. The reply to an OpenRLHF request is `{"rewards": [...]}`. The path `/get_reward`, which OpenRLHF uses, is
the same as `/v1/rewards`.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from lockstep.errors import first_line
from lockstep.http_server.http_api import ApiError, Handler, HttpReply, HttpRequest, ServeLimits, as_json, settle
from lockstep.http_server.request_body import BodyReader, bad_value, check_model, valid_text
from lockstep.reward.model import RewardModel
from lockstep.run.output import write
from lockstep.serve.openai_api import check_running, model_routes
from lockstep.types import Origin, Question

# The maximum number of sequences that the model scores in one batch.
MAX_BATCH_ROWS = 256


@dataclass(eq=False)
class _Batch:
    """The token sequences of one request, and the future that receives their scores."""

    rows: Sequence[Sequence[int]]
    loop: asyncio.AbstractEventLoop
    scores: asyncio.Future[list[float]]


@dataclass(frozen=True)
class RewardEncoder:
    """Tokenizes requests. Queries in OpenRLHF's format are truncated to `max_length`, as in OpenRLHF's `serve_rm`.
    Sequences that are longer than the model's context are rejected. With `append_eos`, EOS and padding tokens at both
    ends of a query in OpenRLHF's format are removed and one EOS token is appended, as in OpenRLHF 0.7."""

    model: RewardModel
    names: tuple[str, ...]
    max_length: int | None = None
    append_eos: bool = False

    def encoded(self, body: bytes) -> tuple[str, list[list[int]]]:
        """Returns the key that the scores have in the reply, and the token ids of each sequence to score."""
        fields = BodyReader(body)
        check_model(fields, self.names)
        items = fields.take("items", None)
        key, rows = ("rewards", self._queries(fields)) if items is None else ("scores", self._items(items))
        if not rows:
            raise bad_value("items" if items is not None else "query", "is empty")
        context = self.model.context
        for number, row in enumerate(rows):
            if not row:
                raise ApiError(400, f"response {number} has no tokens")
            if context is not None and len(row) > context:
                raise ApiError(
                    400,
                    f"response {number} has {len(row)} tokens, over the model's context of {context}",
                    code="context_length_exceeded",
                )
        return key, rows

    def _items(self, items: Any) -> list[list[int]]:
        if not isinstance(items, list):
            raise bad_value("items", "is not a list")
        return [self._item(item, f"items[{number}]") for number, item in enumerate(items)]

    def _item(self, item: Any, where: str) -> list[int]:
        prompt, response = (item.get("prompt"), item.get("response")) if isinstance(item, dict) else (None, None)
        if not isinstance(response, str):
            raise bad_value(f"{where}.response", "is not text")
        if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
            raise bad_value(f"{where}.prompt", "is not a list of messages")
        # The content must be text. A chat template would convert other types to text, and the model would score that
        # text.
        for number, message in enumerate(prompt):
            content = message.get("content")
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise bad_value(f"{where}.prompt[{number}].content", "is not text")
        try:
            return self.model.encode(
                Question("", prompt, "", Origin(where, 0)), valid_text(response, f"{where}.response")
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            why = f"the chat template does not accept this chat: {first_line(error)}"
            raise bad_value(f"{where}.prompt", why) from error

    def _queries(self, fields: BodyReader) -> list[list[int]]:
        queries = fields.take("query", None)
        if queries is None:
            raise ApiError(400, 'the body has neither "items" nor "query"')
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise bad_value("query", "is not a list of texts")
        texts = [valid_text(self._with_eos(query) if self.append_eos else query, "query") for query in queries]
        rows = self.model.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [list(row[: self.max_length]) for row in rows]

    def _with_eos(self, query: str) -> str:
        tokenizer = self.model.tokenizer
        marks = "|".join(re.escape(str(token)) for token in (tokenizer.eos_token, tokenizer.pad_token) if token)
        return re.sub(f"^({marks})+|({marks})+$", "", query) + str(tokenizer.eos_token or "") if marks else query


@dataclass
class RewardWorker:
    """The thread that runs the reward model. The thread scores the sequences of all waiting requests in one batch, up
    to a limit."""

    model: RewardModel
    limits: ServeLimits
    stopped: str | None = None
    """The reason why the worker has stopped, or None while it runs."""
    _rows: int = 0
    _waiting: list[_Batch] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="rewards", daemon=True)
        self._thread.start()

    async def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        loop = asyncio.get_running_loop()
        batch = _Batch(rows, loop, loop.create_future())
        with self._changed:
            if self.stopped is not None:
                raise ApiError(503, self.stopped, code="engine_stopped")
            if self._rows and self._rows + len(rows) > self.limits.queue:
                why = f"{self._rows} responses wait, and {len(rows)} more are over the limit of {self.limits.queue}"
                raise ApiError(429, f"{why} (--queue)", code="queue_full", headers={"Retry-After": "1"})
            self._rows += len(rows)
            self._waiting.append(batch)
            self._changed.notify()
        try:
            return await asyncio.wait_for(batch.scores, self.limits.seconds)
        except asyncio.TimeoutError as error:
            why = f"no scores within {self.limits.seconds:g} s (--request-seconds)"
            raise ApiError(504, why, code="timeout") from error
        finally:
            with self._changed:
                self._rows -= len(rows)
                # If the request has timed out or was cancelled, it is removed from the queue, so that it is not scored.
                if batch in self._waiting:
                    self._waiting.remove(batch)

    @property
    def waiting(self) -> int:
        return self._rows

    def close(self) -> None:
        with self._changed:
            self.stopped = self.stopped or "the server is shutting down"
            self._changed.notify()
        self._thread.join()

    def _serve(self) -> None:
        while batches := self._next_batch():
            try:
                scores = self.model.score([row for batch in batches for row in batch.rows])
            except Exception as error:  # noqa: BLE001 - after any error, waiting requests must end
                write("".join(traceback.format_exception(error)), error=True)
                with self._changed:
                    self.stopped = f"the model failed: {type(error).__name__}: {first_line(error)}"
                self._fail(batches)
                break
            start = 0
            for batch in batches:
                self._settle(batch, scores[start : start + len(batch.rows)])
                start += len(batch.rows)
        self._fail(self._waiting)

    def _next_batch(self) -> list[_Batch]:
        """Waits for requests, and returns requests with up to `MAX_BATCH_ROWS` sequences. Returns an empty list after
        the worker stopped."""
        with self._changed:
            while not (self._waiting or self.stopped):
                self._changed.wait()
            if self.stopped:
                return []
            batches: list[_Batch] = []
            rows = 0
            while self._waiting and (not batches or rows + len(self._waiting[0].rows) <= MAX_BATCH_ROWS):
                batches.append(self._waiting.pop(0))
                rows += len(batches[-1].rows)
            return batches

    def _fail(self, batches: Sequence[_Batch]) -> None:
        why = ApiError(503, self.stopped or "", code="engine_stopped")
        for batch in list(batches):
            self._settle(batch, why)

    def _settle(self, batch: _Batch, outcome: list[float] | ApiError) -> None:
        settle(batch.loop, batch.scores, outcome)


class RewardModelApp:
    """The routes of a reward model."""

    def __init__(self, encoder: RewardEncoder, worker: RewardWorker):
        self.encoder, self.worker = encoder, worker
        self._executor = ThreadPoolExecutor(1, "encoder")
        self.routes: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/rewards"): self.rewards,
            ("POST", "/get_reward"): self.rewards,
            **model_routes(encoder.names, encoder.model.context),
            ("GET", "/health"): self.health,
        }

    async def rewards(self, request: HttpRequest) -> HttpReply:
        check_running(self.worker.stopped)
        loop = asyncio.get_running_loop()
        key, rows = await loop.run_in_executor(self._executor, self.encoder.encoded, request.body)
        scores = await self.worker.score(rows)
        for number, score in enumerate(scores):
            if not math.isfinite(score):
                raise ApiError(500, f"the score of response {number} is {score}", code="score_not_finite")
        if key == "rewards":
            # Clients of OpenRLHF read the keys `rewards`, `scores` and `extra_logs`.
            return as_json({"rewards": scores, "scores": scores, "extra_logs": {}})
        return as_json({key: scores})

    async def health(self, request: HttpRequest) -> HttpReply:
        check_running(self.worker.stopped)
        return as_json({"status": "ok", "waiting": self.worker.waiting})

    def close(self) -> None:
        self.worker.close()
        self._executor.shutdown()
