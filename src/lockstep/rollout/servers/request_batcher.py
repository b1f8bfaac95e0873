"""Batches the samples that are requested of a server at the same moment into one HTTP request. The response has one
line per sample, sent when the sample is finished."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.http_client import ResponseTooLong, short
from lockstep.rollout.servers.adapter import ServerFailed

# Limit of one line: a response of 100,000 tokens with its log-probs has about 3 MB.
MAX_BYTES = 256 * 2**20


class _Waiting(NamedTuple):
    body: Mapping[str, Any]
    answer: asyncio.Future[Any]


# Posts a body to an address within a time limit, and passes on each chunk of a successful response.
Post = Callable[[str, Mapping[str, Any], float, Callable[[bytes], None]], Awaitable[None]]


class RequestBatcher:
    """Used in one event loop only."""

    def __init__(self, post: Post):
        self._post = post
        self._waiting: dict[tuple[str, float], list[_Waiting]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    async def submit(self, address: str, body: Mapping[str, Any], seconds: float) -> Any:
        """The answer to one sample. The request is sent once all samples of this moment are submitted."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        others = self._waiting.setdefault((address, seconds), [])
        if not others:
            loop.call_soon(self._send, address, seconds)
        others.append(_Waiting(body, answer))
        return await answer

    def _send(self, address: str, seconds: float) -> None:
        batch = [one for one in self._waiting.pop((address, seconds)) if not one.answer.done()]
        if not batch:
            return
        task = asyncio.get_running_loop().create_task(self._exchange(address, batch, seconds))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

        def answered(answer: asyncio.Future[Any]) -> None:
            # All samples of the batch are cancelled: close the connection, so that the server drops them.
            if answer.cancelled() and all(one.answer.done() for one in batch):
                task.cancel()

        for one in batch:
            one.answer.add_done_callback(answered)

    async def _exchange(self, address: str, batch: list[_Waiting], seconds: float) -> None:
        lines = _AnswerLines(batch)
        failed = ServerFailed("its answer ended before every sample had one", lost=True)
        try:
            await self._post(address, _one_request([one.body for one in batch]), seconds, lines.add)
        except ServerFailed as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - every waiting sample needs an outcome
            failed = ServerFailed(f"{type(error).__name__}: {error}")
        # A malformed answer does not mean that the server is lost: another server would not help.
        failed = lines.wrong or failed
        for one in batch:
            if not one.answer.done():
                one.answer.set_exception(
                    ServerFailed(str(failed), lost=failed.lost, status=failed.status, gone=failed.gone)
                )


def _one_request(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tokens of a prompt are sent once: `token_ids` of a sample is the index of its prompt."""
    numbers: dict[tuple[int, ...], int] = {}
    indexed = [
        {**sample, "token_ids": numbers.setdefault(tuple(sample["token_ids"]), len(numbers))} for sample in samples
    ]
    return {"prompts": list(numbers), "samples": indexed}


class _AnswerLines:
    """Splits the response into lines, and sets the answer of each sample."""

    def __init__(self, batch: list[_Waiting]):
        self._batch, self._rest = batch, bytearray()
        self._answered: set[int] = set()
        self.wrong: ServerFailed | None = None
        """Why the response is malformed."""

    def add(self, chunk: bytes) -> None:
        self._rest += chunk
        if b"\n" not in chunk:
            if len(self._rest) > MAX_BYTES:
                raise ResponseTooLong
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            try:
                self._set(json.loads(line))
            except ServerFailed as error:
                self.wrong = error
                raise
            except (ValueError, KeyError, TypeError) as error:
                self.wrong = ServerFailed(f"a malformed line: {error!r}")
                raise self.wrong from error

    def _set(self, line: Any) -> None:
        number = line["number"]
        if type(number) is not int or not 0 <= number < len(self._batch):
            raise ServerFailed(f"an answer to sample {number!r}, and there are {len(self._batch)}")
        waits = self._batch[number].answer
        if number in self._answered:
            raise ServerFailed(f"a second answer to sample {number}")
        self._answered.add(number)
        if waits.done():
            return  # it was cancelled
        if "answer" in line:
            waits.set_result(line["answer"])
        else:
            status = int(line["status"])
            why = short(f"answered {status}: {line['error']}")
            waits.set_exception(ServerFailed(why, lost=status >= 500, status=status))
