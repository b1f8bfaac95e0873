"""The worker of a served reward model, with a model that needs no weights: batches, limits, failures and the end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from hang import HANG, wait_until
from lockstep.http_server.http_api import ApiError, HttpRequest, ServeLimits
from lockstep.serve.reward_api import MAX_BATCH_ROWS, RewardModelApp, RewardWorker

Row = Sequence[int]


class Model:
    """The score of a row is its sum. The model waits for `free` before it scores; a negative token is a failure."""

    context = 8

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.batches: list[list[Row]] = []

    def score(self, rows: list[Row]) -> list[float]:
        self.batches.append(rows)
        assert self.free.wait(HANG)
        if any(token < 0 for row in rows for token in row):
            raise RuntimeError("the device is gone")
        return [float("nan") if row == [0] else float(sum(row)) for row in rows]


@contextmanager
def started(**limits: Any) -> Iterator[tuple[Model, RewardWorker]]:
    model = Model()
    worker = RewardWorker(model, ServeLimits(**limits))  # type: ignore[arg-type]
    yield model, worker
    model.free.set()
    worker.close()


def run(work: Awaitable[Any]) -> Any:
    async def waiting() -> Any:
        return await asyncio.wait_for(work, HANG)

    return asyncio.run(waiting())


async def pause_until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_waiting_requests_are_scored_in_one_batch_and_get_their_scores() -> None:
    async def work(model: Model, worker: RewardWorker) -> list[list[float]]:
        model.free.clear()
        first = asyncio.ensure_future(worker.score([[1]]))
        await pause_until(lambda: model.batches)
        others = [asyncio.ensure_future(worker.score([[n], [n, n]])) for n in (2, 3, 4)]
        await pause_until(lambda: worker.waiting == 7)
        model.free.set()
        return await asyncio.gather(first, *others)

    with started() as (model, worker):
        assert run(work(model, worker)) == [[1.0], [2.0, 4.0], [3.0, 6.0], [4.0, 8.0]]
        assert [len(rows) for rows in model.batches] == [1, 6]
        assert worker.waiting == 0


def test_a_batch_has_a_limit_of_rows_and_a_large_request_is_alone() -> None:
    async def work(model: Model, worker: RewardWorker) -> None:
        model.free.clear()
        requests = [asyncio.ensure_future(worker.score([[1]]))]
        await pause_until(lambda: model.batches)
        for rows in (200, 50, 10, 2 * MAX_BATCH_ROWS):
            requests.append(asyncio.ensure_future(worker.score([[1]] * rows)))
            await asyncio.sleep(0)
        model.free.set()
        await asyncio.gather(*requests)

    with started(queue=10_000) as (model, worker):
        run(work(model, worker))
        assert [len(rows) for rows in model.batches] == [1, 250, 10, 512]


def test_a_full_queue_is_rejected_and_a_large_request_on_an_idle_server_is_not() -> None:
    async def work(model: Model, worker: RewardWorker) -> None:
        assert len(await worker.score([[1]] * 9)) == 9
        model.free.clear()
        first = asyncio.ensure_future(worker.score([[1]] * 3))
        await pause_until(lambda: len(model.batches) == 2)
        with pytest.raises(ApiError, match="--queue") as full:
            await worker.score([[1]])
        assert (full.value.status, full.value.code, full.value.headers) == (429, "queue_full", {"Retry-After": "1"})
        model.free.set()
        await first
        assert await worker.score([[5]]) == [5.0]

    with started(queue=3) as (model, worker):
        run(work(model, worker))


def test_a_request_that_takes_too_long_or_is_cancelled_is_not_scored() -> None:
    async def work(model: Model, worker: RewardWorker) -> None:
        model.free.clear()
        first = asyncio.ensure_future(worker.score([[1]]))
        await pause_until(lambda: model.batches)
        cancelled = asyncio.ensure_future(worker.score([[2]]))
        await pause_until(lambda: worker.waiting == 2)
        cancelled.cancel()
        with pytest.raises(ApiError, match="--request-seconds") as late:
            await worker.score([[3]])
        assert (late.value.status, late.value.code) == (504, "timeout")
        with pytest.raises(ApiError):
            await first
        assert worker.waiting == 0
        model.free.set()
        assert await worker.score([[4]]) == [4.0]

    with started(seconds=0.2) as (model, worker):
        run(work(model, worker))
        assert [row for rows in model.batches for row in rows] == [[1], [4]]


def test_a_failure_ends_every_waiting_request_and_every_later_one(capfd: pytest.CaptureFixture[str]) -> None:
    async def work(model: Model, worker: RewardWorker) -> None:
        model.free.clear()
        requests = [asyncio.ensure_future(worker.score([[-1]]))]
        await pause_until(lambda: model.batches)
        requests.append(asyncio.ensure_future(worker.score([[2]])))
        await pause_until(lambda: worker.waiting == 2)
        model.free.set()
        for outcome in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(outcome, ApiError)
            assert (outcome.status, outcome.code) == (503, "engine_stopped")
            assert "the device is gone" in str(outcome)
        with pytest.raises(ApiError, match="the device is gone"):
            await worker.score([[1]])

    with started() as (model, worker):
        run(work(model, worker))
    assert "RuntimeError: the device is gone" in capfd.readouterr().err


def test_closing_ends_waiting_requests() -> None:
    async def work(model: Model, worker: RewardWorker) -> None:
        model.free.clear()
        first = asyncio.ensure_future(worker.score([[1]]))
        await pause_until(lambda: model.batches)
        second = asyncio.ensure_future(worker.score([[2]]))
        await pause_until(lambda: worker.waiting == 2)
        closing = threading.Thread(target=worker.close)
        closing.start()
        wait_until(lambda: worker.stopped is not None)
        model.free.set()
        assert await first == [1.0]  # it was being scored
        with pytest.raises(ApiError, match="shutting down") as refused:
            await second
        assert refused.value.status == 503
        closing.join(HANG)

    with started() as (model, worker):
        run(work(model, worker))


class Encoder:
    """Reads the rows of the body as they are."""

    names = ("rm",)

    def __init__(self, model: Model):
        self.model = model

    def encoded(self, body: bytes) -> tuple[str, list[list[int]]]:
        value = json.loads(body)
        return value["key"], value["rows"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"key": "scores", "rows": [[1, 2], [3]]}, {"scores": [3.0, 3.0]}),
        ({"key": "rewards", "rows": [[4]]}, {"rewards": [4.0], "scores": [4.0], "extra_logs": {}}),
    ],
)
def test_the_reply_has_the_keys_of_its_client(body: dict[str, Any], expected: dict[str, Any]) -> None:
    with started() as (model, worker):
        app = RewardModelApp(Encoder(model), worker)  # type: ignore[arg-type]
        reply = run(app.rewards(HttpRequest("POST", "/v1/rewards", {}, body=json.dumps(body).encode())))
        assert json.loads(reply.body) == expected
        assert json.loads(run(app.health(HttpRequest("GET", "/health", {}))).body) == {"status": "ok", "waiting": 0}


def test_a_score_that_is_no_number_and_a_stopped_server_are_errors() -> None:
    request = HttpRequest("POST", "/v1/rewards", {}, body=b'{"key": "scores", "rows": [[1], [0]]}')
    with started() as (model, worker):
        app = RewardModelApp(Encoder(model), worker)  # type: ignore[arg-type]
        with pytest.raises(ApiError, match="response 1 is nan") as broken:
            run(app.rewards(request))
        assert (broken.value.status, broken.value.code) == (500, "score_not_finite")
        app.close()
        for work in (app.rewards(request), app.health(HttpRequest("GET", "/health", {}))):
            with pytest.raises(ApiError, match="shutting down") as stopped:
                run(work)
            assert stopped.value.status == 503
