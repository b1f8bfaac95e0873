"""The part `remote`: HTTP endpoints that score batches.

One is sent `{"items": [{data_source, prompt, response, ground_truth, extra_info}, ...]}` and answers
`{"scores": [...]}`, or the list alone, with one number for each item in their order. In OpenRLHF's form it is sent
`{"query": [...], "prompts": [...], "labels": [...]}`, a query being prompt and response, and answers
`{"rewards": [...]}`. `lockstep serve` of a reward model is such an endpoint, in both forms.
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
from lockstep.masking import comparable, conceal, secrets_in
from lockstep.parallel.rendezvous import TELL_SECONDS, say
from lockstep.recipe.keys_online import Reward
from lockstep.reward.endpoints import LEFT_OUT, Endpoint, Endpoints
from lockstep.reward.exchange import MOST_BYTES, HttpAnswer, TooLong, Trouble, open_client, post, short
from lockstep.reward.function_worker import number, prompt_text
from lockstep.reward.parts import PartOutcome, RewardPart, promised, settled
from lockstep.types import Failure, Question

# Batches under way at once: enough to keep an endpoint busy while another batch travels.
AT_ONCE = 4
# What endpoints are to be brought that ask for a key, as `lockstep serve --api-key` does.
KEY_VARIABLE = "LOCKSTEP_REWARD_KEY"
LONGEST_PAUSE = 30.0
TOO_MANY_REQUESTS = 429
SERVER_ERROR = 500
_ENDING = "the run was ending before it was scored"


@dataclass(frozen=True)
class _Item:
    body: str
    future: Future[PartOutcome]


class _Again(Exception):
    """A try that failed in a way that may pass. `after`: seconds that the endpoint asks to be left alone."""

    def __init__(self, why: str, after: float = 0.0):
        super().__init__(why)
        self.after = after


class _Final(Exception):
    """An answer that another try would not change."""


class RemotePart(RewardPart):
    """Gathers responses to batches in the order they come; a thread with an event loop sends them.

    Every future that was handed out is settled: by its batch, by `close`, or by the end of the thread.
    """

    name = "remote"

    def __init__(
        self,
        addresses: str | Sequence[str],
        settings: Reward,
        *,
        first_pause: float = 0.5,
        left_out: float = LEFT_OUT,
    ):
        self._endpoints = Endpoints(_checked(addresses), left_out=left_out)
        # The addresses with their secrets, by those that are shown.
        self._addresses = {shown: with_secrets(shown, "reward.remote") for shown in self._endpoints.addresses()}
        conceal(os.environ.get(KEY_VARIABLE, ""))
        self._settings = settings
        self._first_pause = first_pause
        # Its own generator: pauses must not move the run's random numbers.
        self._jitter = random.Random()
        # Guards what follows it; also that a future is settled once.
        self._lock = threading.Lock()
        self._gathered: list[_Item] = []
        self._waiting: set[_Item] = set()
        self._told: set[tuple[str, str]] = set()
        self._over: str | None = None
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
            if self._over is not None:
                return settled(Failure(self.name, self._over))
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
        """Answers what waits and cancels the requests under way."""
        if self._end(_ENDING):
            with suppress(RuntimeError):  # the thread has just ended by itself
                self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(LONGEST_PAUSE)

    def _release(self) -> None:
        if self._gathered and self._over is None:
            self._loop.call_soon_threadsafe(self._batches.put_nowait, self._gathered)
        self._gathered = []

    def _end(self, why: str) -> bool:
        """Take nothing more and answer all that waits; False where that was done before."""
        with self._lock:
            first = self._over is None
            self._over = self._over or why
            waiting = list(self._waiting)
        for item in waiting:
            self._settle(item, Failure(self.name, why))
        return first

    def _settle(self, item: _Item, outcome: PartOutcome) -> None:
        """The first outcome counts: a batch may come in while the part is closed."""
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
        """Cancel until the loop ends: before Python 3.12 `wait_for` can lose a cancellation."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(0.1, self._stop)

    async def _send_all(self) -> None:
        try:
            # Not a key of the recipe: that is kept and shown.
            async with open_client(key=os.environ.get(KEY_VARIABLE)) as client:
                await asyncio.gather(*[self._send_batches(client) for _ in range(AT_ONCE)])
        except asyncio.CancelledError:
            return  # closed

    async def _send_batches(self, client: Any) -> None:
        while True:
            batch = await self._batches.get()
            try:
                scores = await self._scored(client, [item.body for item in batch])
                outcomes: list[PartOutcome] = [{self.name: score} for score in scores]
            except _Final as error:
                outcomes = [Failure(self.name, str(error))] * len(batch)
            except Exception as error:  # noqa: BLE001 - a batch that nobody answers would hold up the run for ever
                outcomes = [Failure(self.name, f"the request failed: {_named(error)}")] * len(batch)
            for item, outcome in zip(batch, outcomes, strict=True):
                self._settle(item, outcome)

    async def _scored(self, client: Any, items: list[str]) -> list[float]:
        body, key = self._request(items)
        tries = 1 + self._settings.remote_retries
        pause, begun = self._first_pause, time.monotonic()
        for left in reversed(range(tries)):
            endpoint = self._endpoints.choose()
            if endpoint is None:
                raise _Final(self._endpoints.none_left())
            try:
                return scores_in(await self._asked(client, endpoint, body, last_try=left == 0), len(items), key)
            except _Again as error:
                if left == 0:
                    told = f"{endpoint.address}: {error}; tried {tries} times; {self._endpoints.left()}"
                    raise _Final(told) from error
                self._tell(endpoint, str(error), time.monotonic() - begun)
                own = min(pause, LONGEST_PAUSE) * self._jitter.uniform(0.5, 1.5)
                await asyncio.sleep(max(own, min(error.after, self._settings.remote_timeout)))
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _tell(self, endpoint: Endpoint, why: str, waited: float) -> None:
        """That a batch waits for an endpoint that fails: once for each reason."""
        if waited >= TELL_SECONDS and (endpoint.address, why) not in self._told:
            self._told.add((endpoint.address, why))
            say(f"waiting for reward.remote {endpoint.address} for {waited:.0f} s: {why}; it is tried again")

    def _request(self, items: list[str]) -> tuple[bytes, str]:
        """What is sent, and under which name the numbers come back."""
        if self._settings.remote_form == "items":
            return f'{{"items": [{", ".join(items)}]}}'.encode(), "scores"
        rows = [json.loads(item) for item in items]
        return json.dumps({key: [row[key] for row in rows] for key in rows[0]}).encode(), "rewards"

    async def _asked(self, client: Any, endpoint: Endpoint, body: bytes, *, last_try: bool) -> bytes:
        """What the endpoint answers, within `remote_timeout`; its breaker is told how it went."""
        try:
            answer = await post(client, self._addresses[endpoint.address], body, self._settings.remote_timeout)
        except Trouble as error:
            self._endpoints.failed(endpoint, str(error), last_try=last_try)
            raise _Again(str(error)) from error
        except TooLong as error:
            self._endpoints.answered(endpoint)
            raise _Final(f"{endpoint.address}: its answer is longer than {MOST_BYTES // 2**20} MiB") from error
        if answer.status >= SERVER_ERROR:
            self._endpoints.failed(endpoint, answer.told(), last_try=last_try)
            raise _Again(answer.told(), answer.retry_after)
        self._endpoints.answered(endpoint)
        if answer.status == TOO_MANY_REQUESTS:
            # It is alive, only busy.
            raise _Again(answer.told(), answer.retry_after)
        if not answer.success:
            raise _Final(f"{endpoint.address}: {_refused(answer)}")
        return answer.body


def scores_in(answer: bytes, count: int, key: str = "scores") -> list[float]:
    """The scores of an answer; anything but `count` finite numbers is refused whole."""
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


def _refused(answer: HttpAnswer) -> str:
    if 300 <= answer.status < 400:
        location = answer.headers.get("location")
        return short(f"answered {answer.status} {answer.reason}: redirects of a POST are not followed") + (
            f"; write the address that it leads to, {short(location)!r}" if location else ""
        )
    return answer.told()


def _checked(addresses: str | Sequence[str]) -> list[str]:
    found = list(dict.fromkeys([addresses] if isinstance(addresses, str) else addresses))
    problems = [
        Problem("reward.remote", f"{address!r} is not an HTTP address", "write http://host:port/path")
        for address in found
        if not _is_http(address)
    ]
    if not found:
        problems.append(Problem("reward.remote", "names no endpoint", "write http://host:port/path"))
    problems += [Problem("reward.remote", why, remedy) for _, why, remedy in secrets_in(found, "reward.remote")]
    refuse_all(problems)
    return found


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(comparable(address))
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a broken IPv6 address
        return False


def _named(error: BaseException) -> str:
    return short(f"{type(error).__name__}: {error}")
