"""The part `remote`: an HTTP endpoint that scores batches.

It is sent `{"items": [{data_source, prompt, response, ground_truth, extra_info}, ...]}` and answers
`{"scores": [...]}`, or the list alone, with one number for each item in their order.
"""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from urllib.parse import urlsplit

from lockstep.errors import Refusal
from lockstep.recipe.online import Reward
from lockstep.reward.parts import Outcome, promised, settled
from lockstep.reward.worker import number
from lockstep.types import Failure, Question

# Batches under way at once: enough to keep an endpoint busy while another batch travels.
AT_ONCE = 4
LONGEST_PAUSE = 30.0
TOO_MANY_REQUESTS = 429
# Trouble of the moment: the same request may succeed a little later.
_PASSING = (OSError, http.client.HTTPException)
_ENDING = "the run was ending before it was scored"


@dataclass(frozen=True)
class _Item:
    body: str
    future: Future[Outcome]


class _Again(Exception):
    """A try that failed in a way that may pass."""


class _Final(Exception):
    """An answer that another try would not change."""


class RemotePart:
    """Gathers responses to batches in the order they come; threads send them."""

    name = "remote"

    def __init__(self, address: str, settings: Reward, *, first_pause: float = 0.5):
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Refusal.at("reward.remote", f"{address!r} is not an HTTP address", "write http://host:port/path")
        self._address = address
        self._settings = settings
        self._first_pause = first_pause
        # Its own generator: pauses must not move the run's random numbers.
        self._jitter = random.Random()
        self._lock = threading.Lock()
        self._gathered: list[_Item] = []
        self._batches: queue.Queue[list[_Item] | None] = queue.Queue()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._send_all, daemon=True) for _ in range(AT_ONCE)]
        for thread in self._threads:
            thread.start()

    def submit(self, question: Question, text: str) -> Future[Outcome]:
        body = {
            "data_source": question.data_source,
            "prompt": question.prompt,
            "response": text,
            "ground_truth": question.ground_truth,
            "extra_info": question.extra_info,
        }
        try:
            item = _Item(json.dumps(body, allow_nan=False), promised())
        except (TypeError, ValueError) as error:
            return settled(Failure(self.name, f"{question.origin} cannot be sent as JSON: {error}"))
        with self._lock:
            if self._closing.is_set():
                return settled(Failure(self.name, _ENDING))
            self._gathered.append(item)
            if len(self._gathered) == self._settings.remote_batch:
                self._release()
        return item.future

    def flush(self) -> None:
        with self._lock:
            self._release()

    def close(self) -> None:
        """Requests under way are left to end by themselves; nobody waits for them."""
        with self._lock:
            self._closing.set()
            self._release()
        for _ in self._threads:
            self._batches.put(None)

    def _release(self) -> None:
        if self._gathered:
            self._batches.put(self._gathered)
            self._gathered = []

    def _send_all(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                scores = self._scored([item.body for item in batch])
            except _Final as error:
                for item in batch:
                    item.future.set_result(Failure(self.name, str(error)))
            else:
                for item, score in zip(batch, scores, strict=True):
                    item.future.set_result({self.name: score})

    def _scored(self, items: list[str]) -> list[float]:
        body = f'{{"items": [{", ".join(items)}]}}'.encode()
        tries = 1 + self._settings.remote_retries
        pause = self._first_pause
        for left in reversed(range(tries)):
            try:
                return scores_in(self._post(body), len(items))
            except _Again as error:
                if left == 0:
                    raise _Final(f"{self._address}: {error}; tried {tries} times") from error
            if self._closing.wait(min(pause, LONGEST_PAUSE) * self._jitter.uniform(0.5, 1.5)):
                break
            pause *= 2
        raise _Final(_ENDING)

    def _post(self, body: bytes) -> bytes:
        """The endpoint's answer within `remote_timeout`, however slowly it drips."""
        if self._closing.is_set():
            raise _Final(_ENDING)
        limit = self._settings.remote_timeout
        deadline = time.monotonic() + limit
        request = urllib.request.Request(self._address, body, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=limit) as response:
                pieces = []
                while piece := response.read1(2**16):
                    pieces.append(piece)
                    if time.monotonic() > deadline:
                        raise TimeoutError
                if response.length:
                    raise http.client.IncompleteRead(b"", response.length)
                return b"".join(pieces)
        except urllib.error.HTTPError as error:
            with error:
                why = f"answered {error.code} {error.reason}: {error.read(200).decode(errors='replace').strip()}"
            if error.code == TOO_MANY_REQUESTS or error.code >= http.client.INTERNAL_SERVER_ERROR:
                raise _Again(why) from error
            raise _Final(f"{self._address}: {why}") from error
        except _PASSING as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):
                raise _Again(f"gave no answer in {limit:g} s") from error
            raise _Again(str(cause) or type(cause).__name__) from error


def scores_in(answer: bytes, count: int) -> list[float]:
    """The scores of an answer; anything but `count` finite numbers is refused whole."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise _Final(f"the endpoint's answer is not JSON: {error}") from error
    scores = value.get("scores") if isinstance(value, dict) else value
    if not isinstance(scores, list):
        raise _Final('the endpoint\'s answer is neither {"scores": [...]} nor a list')
    if len(scores) != count:
        raise _Final(f"the endpoint gave {len(scores)} scores for {count} responses")
    numbers = [number(score) for score in scores]
    for place, plain in enumerate(numbers):
        if plain is None:
            raise _Final(f"the endpoint's score {place} is {scores[place]!r}, which is not a finite number")
    return [plain for plain in numbers if plain is not None]
