"""The reward component `remote`: HTTP endpoints that score batches.

The request is `{"items": [{data_source, prompt, response, ground_truth, extra_info}, ...]}`; the response is
`{"scores": [...]}` or the list alone, with one number per item in the same order. In OpenRLHF's format the request is
`{"query": [...], "prompts": [...], "labels": [...]}`, where a query is the prompt followed by the response, and the
response of the endpoint is `{"rewards": [...]}`. `lockstep serve` of a reward model accepts both formats.

Each endpoint has a circuit breaker: an endpoint that keeps failing is skipped for a while, so that not every batch
waits until its time limit. If all other endpoints are skipped, the last one is skipped only after a batch has used all
its retries. After the pause of a skipped endpoint, one batch tries it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import Problem, refuse_all, with_secrets
from lockstep.http_client import HttpClient, HttpResponse, RequestFailed, ResponseTooLong, short
from lockstep.masking import comparable, conceal, secrets_in
from lockstep.parallel.rendezvous import TELL_SECONDS, say
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.function_worker import number, prompt_text
from lockstep.reward.parts import PartOutcome, RewardPart, promised, settled
from lockstep.types import Failure, Question

# Number of concurrent batches: some are on the network while the endpoints score others.
CONCURRENT_BATCHES = 4
MAX_BYTES = 16 * 2**20
# The bearer key for endpoints that require a key, such as `lockstep serve --api-key`. The bearer key is not a recipe
# key, because recipes are stored and shown.
KEY_VARIABLE = "LOCKSTEP_REWARD_KEY"
MAX_PAUSE = 30.0
TOO_MANY_REQUESTS = 429
SERVER_ERROR = 500
# Number of consecutive failures after which an endpoint is skipped, and the number of seconds for which it is skipped.
MAX_FAILURES = 3
SKIP_SECONDS = 30.0
_ENDING = "the run ended before the response was scored"


@dataclass
class Endpoint:
    """One endpoint and its failures. `retry_at` is the time from which a batch may try a skipped endpoint again, or
    None if the endpoint is not skipped."""

    address: str
    failures: int = 0
    why: str = ""
    retry_at: float | None = None


class Endpoints:
    """Selects endpoints round-robin. Thread-safe."""

    def __init__(self, addresses: list[str], *, skip_seconds: float = SKIP_SECONDS):
        self._endpoints = [Endpoint(address) for address in addresses]
        self._skip_seconds = skip_seconds
        self._turn = 0
        self._lock = threading.Lock()

    def addresses(self) -> list[str]:
        return [endpoint.address for endpoint in self._endpoints]

    def choose(self) -> Endpoint | None:
        """Returns a skipped endpoint whose pause is over, else the next endpoint that is not skipped, or None if all
        endpoints are skipped."""
        with self._lock:
            now = time.monotonic()
            order = self._endpoints[self._turn :] + self._endpoints[: self._turn]
            due = next((e for e in order if e.retry_at is not None and e.retry_at <= now), None)
            chosen = due or next((e for e in order if e.retry_at is None), None)
            if chosen is None:
                return None
            if due is not None:
                # Only this batch tries the skipped endpoint; other batches skip it until the outcome is known.
                due.retry_at = now + self._skip_seconds
            self._turn = (self._endpoints.index(chosen) + 1) % len(self._endpoints)
            return chosen

    def succeeded(self, endpoint: Endpoint) -> None:
        with self._lock:
            endpoint.failures, endpoint.why, endpoint.retry_at = 0, "", None

    def failed(self, endpoint: Endpoint, why: str, *, last_try: bool) -> None:
        """Counts a failure of the endpoint. `last_try` is true if the batch has no retries left."""
        with self._lock:
            endpoint.failures += 1
            endpoint.why = why
            others = any(e.retry_at is None for e in self._endpoints if e is not endpoint)
            if endpoint.retry_at is not None or (endpoint.failures >= MAX_FAILURES and (last_try or others)):
                endpoint.retry_at = time.monotonic() + self._skip_seconds

    def left(self) -> str:
        """Returns a text for messages with the number of endpoints that are not skipped."""
        with self._lock:
            used = sum(e.retry_at is None for e in self._endpoints)
            return f"{used} of {len(self._endpoints)} endpoints left"

    def none_left(self) -> str:
        """Returns a text for messages that says why all endpoints are skipped."""
        with self._lock:
            reasons = [f"{e.address} failed {e.failures} times in a row: {e.why}" for e in self._endpoints]
            return f"0 of {len(reasons)} endpoints left; " + "; ".join(reasons)


@dataclass(frozen=True)
class _Item:
    body: str
    future: Future[PartOutcome]


class _Retry(Exception):
    """A failure that may be temporary. `after` is the number of seconds in the HTTP header Retry-After."""

    def __init__(self, why: str, after: float = 0.0):
        super().__init__(why)
        self.after = after


class _Final(Exception):
    """A failure that a retry would not change."""


class RemotePart(RewardPart):
    """Collects responses into batches in the order of `submit`; a thread with an event loop sends the batches. Every
    future that `submit` returns gets a result: from its batch, from `close`, or when the thread ends.
    """

    name = "remote"
    fields = ("extra_info",)

    def __init__(
        self,
        addresses: str | Sequence[str],
        settings: Reward,
        *,
        first_pause: float = 0.5,
        skip_seconds: float = SKIP_SECONDS,
    ):
        self._endpoints = Endpoints(_checked(addresses), skip_seconds=skip_seconds)
        # Full addresses with secrets, keyed by the masked addresses that messages show.
        self._addresses = {shown: with_secrets(shown, "reward.remote") for shown in self._endpoints.addresses()}
        conceal(os.environ.get(KEY_VARIABLE, ""))
        self._settings = settings
        self._first_pause = first_pause
        # A separate random generator, so that pauses do not change the random numbers of the run.
        self._jitter = random.Random()
        # This lock guards the four attributes that follow it, and ensures that each future gets only one result.
        self._lock = threading.Lock()
        self._gathered: list[_Item] = []
        self._waiting: set[_Item] = set()
        self._logged: set[tuple[str, str]] = set()
        self._closed: str | None = None
        self._loop = asyncio.new_event_loop()
        self._batches: asyncio.Queue[list[_Item]] = asyncio.Queue()
        self._thread = threading.Thread(target=self._serve, name="reward-remote", daemon=True)
        self._thread.start()

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        body = self._body(question, text)
        try:
            item = _Item(json.dumps(body, allow_nan=False), promised())
        except (TypeError, ValueError, RecursionError) as error:
            return settled(Failure(self.name, f"{question.origin} cannot be sent as JSON: {error}"))
        with self._lock:
            if self._closed is not None:
                return settled(Failure(self.name, self._closed))
            self._waiting.add(item)
            self._gathered.append(item)
            if len(self._gathered) == self._settings.remote_batch:
                self._release()
        return item.future

    def _body(self, question: Question, text: str) -> dict[str, Any]:
        if self._settings.remote_form == "openrlhf":
            prompt = prompt_text(question.prompt)
            return {"query": prompt + text, "prompts": prompt, "labels": question.ground_truth}
        return {
            "data_source": question.data_source,
            "prompt": question.prompt,
            "response": text,
            "ground_truth": question.ground_truth,
            "extra_info": question.extra_info,
        }

    def flush(self) -> None:
        with self._lock:
            self._release()

    def close(self) -> None:
        """Fails the waiting responses and cancels the running requests."""
        if self._end(_ENDING):
            with suppress(RuntimeError):  # raised if the thread has just closed its event loop
                self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(MAX_PAUSE)

    def _release(self) -> None:
        if self._gathered and self._closed is None:
            self._loop.call_soon_threadsafe(self._batches.put_nowait, self._gathered)
        self._gathered = []

    def _end(self, why: str) -> bool:
        """Stops accepting responses and fails all waiting responses. Returns False if an earlier call has already
        stopped this component."""
        with self._lock:
            first = self._closed is None
            self._closed = self._closed or why
            waiting = list(self._waiting)
        for item in waiting:
            self._settle(item, Failure(self.name, why))
        return first

    def _settle(self, item: _Item, outcome: PartOutcome) -> None:
        """Sets the outcome of an item. Later outcomes of the same item are ignored, because a batch may finish during
        `close`."""
        with self._lock:
            if item not in self._waiting:
                return
            self._waiting.remove(item)
        item.future.set_result(outcome)

    # In the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        why = "its thread ended"
        try:
            self._loop.run_until_complete(self._send_all())
        except BaseException as error:
            why = f"its thread ended: {_named(error)}"
            raise
        finally:
            self._end(why)
            self._loop.close()

    def _stop(self) -> None:
        """Cancels all tasks repeatedly until the event loop ends, because before Python 3.12 `wait_for` can lose a
        cancellation."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(0.1, self._stop)

    async def _send_all(self) -> None:
        try:
            async with HttpClient(key=os.environ.get(KEY_VARIABLE)) as client:
                await asyncio.gather(*[self._send_batches(client) for _ in range(CONCURRENT_BATCHES)])
        except asyncio.CancelledError:
            return  # closed

    async def _send_batches(self, client: HttpClient) -> None:
        while True:
            batch = await self._batches.get()
            try:
                scores = await self._scored(client, [item.body for item in batch])
                outcomes: list[PartOutcome] = [{self.name: score} for score in scores]
            except _Final as error:
                outcomes = [Failure(self.name, str(error))] * len(batch)
            except Exception as error:  # noqa: BLE001 - without an outcome the run would wait forever
                outcomes = [Failure(self.name, f"the request failed: {_named(error)}")] * len(batch)
            for item, outcome in zip(batch, outcomes, strict=True):
                self._settle(item, outcome)

    async def _scored(self, client: HttpClient, items: list[str]) -> list[float]:
        body, key = self._request(items)
        tries = 1 + self._settings.remote_retries
        pause, begun = self._first_pause, time.monotonic()
        for left in reversed(range(tries)):
            endpoint = self._endpoints.choose()
            if endpoint is None:
                raise _Final(self._endpoints.none_left())
            try:
                return scores_in(await self._response(client, endpoint, body, last_try=left == 0), len(items), key)
            except _Retry as error:
                if left == 0:
                    why = f"{endpoint.address}: {error}; tried {tries} times; {self._endpoints.left()}"
                    raise _Final(why) from error
                self._log_wait(endpoint, str(error), time.monotonic() - begun)
                backoff = min(pause, MAX_PAUSE) * self._jitter.uniform(0.5, 1.5)
                await asyncio.sleep(max(backoff, min(error.after, self._settings.remote_timeout)))
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _log_wait(self, endpoint: Endpoint, why: str, waited: float) -> None:
        """Logs that a batch waits for a failing endpoint, once per reason."""
        if waited >= TELL_SECONDS and (endpoint.address, why) not in self._logged:
            self._logged.add((endpoint.address, why))
            say(f"waiting for reward.remote {endpoint.address} for {waited:.0f} s: {why}; the request is retried")

    def _request(self, items: list[str]) -> tuple[bytes, str]:
        """Returns the body of the request, and the key of the scores in the response."""
        if self._settings.remote_form == "items":
            return f'{{"items": [{", ".join(items)}]}}'.encode(), "scores"
        rows = [json.loads(item) for item in items]
        return json.dumps({key: [row[key] for row in rows] for key in rows[0]}).encode(), "rewards"

    async def _response(self, client: HttpClient, endpoint: Endpoint, body: bytes, *, last_try: bool) -> bytes:
        """Returns the body of the endpoint's response, within `remote_timeout`. Reports success or failure to the
        circuit breaker."""
        try:
            address, limit = self._addresses[endpoint.address], self._settings.remote_timeout
            answer = await client.request("POST", address, body, seconds=limit, max_bytes=MAX_BYTES)
        except RequestFailed as error:
            self._endpoints.failed(endpoint, str(error), last_try=last_try)
            raise _Retry(str(error)) from error
        except ResponseTooLong as error:
            self._endpoints.succeeded(endpoint)
            raise _Final(f"{endpoint.address}: its answer is longer than {MAX_BYTES // 2**20} MiB") from error
        if answer.status >= SERVER_ERROR:
            self._endpoints.failed(endpoint, answer.error(), last_try=last_try)
            raise _Retry(answer.error(), answer.retry_after)
        self._endpoints.succeeded(endpoint)
        if answer.status == TOO_MANY_REQUESTS:
            # Status 429: the endpoint works but is busy, so this is not a failure for the circuit breaker.
            raise _Retry(answer.error(), answer.retry_after)
        if not answer.success:
            raise _Final(f"{endpoint.address}: {_refused(answer)}")
        return answer.body


def scores_in(answer: bytes, count: int, key: str = "scores") -> list[float]:
    """Returns the scores in an endpoint's response. Raises `_Final` if the response does not have exactly `count`
    finite numbers."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise _Final(short(f"the endpoint's answer is not JSON: {error}")) from error
    scores = value.get(key) if isinstance(value, dict) else value
    if not isinstance(scores, list):
        raise _Final(f'the endpoint\'s answer is neither {{"{key}": [...]}} nor a list')
    if len(scores) != count:
        raise _Final(f"the endpoint gave {len(scores)} scores for {count} responses")
    numbers = [number(score) for score in scores]
    for index, plain in enumerate(numbers):
        if plain is None:
            shown = repr(scores[index])
            raise _Final(
                f"the endpoint's score {index} is {shown[:80]}{'...' if len(shown) > 80 else ''}, "
                "which is not a finite number"
            )
    return [plain for plain in numbers if plain is not None]


def _refused(answer: HttpResponse) -> str:
    if 300 <= answer.status < 400:
        location = answer.headers.get("location")
        return short(f"answered {answer.status} {answer.reason}: redirects of a POST are not followed") + (
            f"; set the address of the redirect target, {short(location)!r}" if location else ""
        )
    return answer.error()


def _checked(addresses: str | Sequence[str]) -> list[str]:
    unique = list(dict.fromkeys([addresses] if isinstance(addresses, str) else addresses))
    problems = [
        Problem(
            "reward.remote",
            f"{address!r} is not an HTTP address",
            "write http://host:port/path",
            code="invalid-address",
        )
        for address in unique
        if not _is_http(address)
    ]
    if not unique:
        problems.append(Problem("reward.remote", "has no endpoint", "write http://host:port/path", code="empty-value"))
    problems += [
        Problem("reward.remote", why, remedy, code="secret-in-recipe")
        for _, why, remedy in secrets_in(unique, "reward.remote")
    ]
    refuse_all(problems)
    return unique


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(comparable(address))
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        return False


def _named(error: BaseException) -> str:
    return short(f"{type(error).__name__}: {error}")
