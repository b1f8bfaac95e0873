"""Samples that are asked of a server at the same moment go in one request; the answer to each comes on a line of its
own when that sample is finished."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.reward.exchange import TooLong, short
from lockstep.rollout.server.failed import ServerFailed

# Of one line: a response of 100,000 tokens with its log-probs takes some 3 MB.
MOST_BYTES = 256 * 2**20


class _Waiting(NamedTuple):
    body: Mapping[str, Any]
    answer: asyncio.Future[Any]


# Posts a body to an address within so many seconds, and gives away each piece of a successful answer.
Post = Callable[[str, Mapping[str, Any], float, Callable[[bytes], None]], Awaitable[None]]


class Together:
    """Used on one event loop alone."""

    def __init__(self, post: Post):
        self._post = post
        self._waiting: dict[tuple[str, float], list[_Waiting]] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    async def ask(self, address: str, body: Mapping[str, Any], seconds: float) -> Any:
        """The answer to one of the samples of a request that goes out when all who are about to ask have asked."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        others = self._waiting.setdefault((address, seconds), [])
        if not others:
            loop.call_soon(self._send, address, seconds)
        others.append(_Waiting(body, answer))
        return await answer

    def _send(self, address: str, seconds: float) -> None:
        asked = [one for one in self._waiting.pop((address, seconds)) if not one.answer.done()]
        if not asked:
            return
        task = asyncio.get_running_loop().create_task(self._exchange(address, asked, seconds))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

        def heard(answer: asyncio.Future[Any]) -> None:
            # Nobody wants the rest: the server is to drop it.
            if answer.cancelled() and all(one.answer.done() for one in asked):
                task.cancel()

        for one in asked:
            one.answer.add_done_callback(heard)

    async def _exchange(self, address: str, asked: list[_Waiting], seconds: float) -> None:
        lines = _AnswerLines(asked)
        failed = ServerFailed("its answer ended before every sample had one", lost=True)
        try:
            await self._post(address, _one_request([one.body for one in asked]), seconds, lines.take)
        except ServerFailed as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - whoever waits must hear that there is no answer
            failed = ServerFailed(f"{type(error).__name__}: {error}")
        # What is wrong with an answer is no loss of the server: another one would not help.
        failed = lines.wrong or failed
        for one in asked:
            if not one.answer.done():
                one.answer.set_exception(
                    ServerFailed(str(failed), lost=failed.lost, status=failed.status, gone=failed.gone)
                )


def _one_request(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples of one prompt have its tokens once: `token_ids` is the prompt's number."""
    numbers: dict[tuple[int, ...], int] = {}
    told = [{**sample, "token_ids": numbers.setdefault(tuple(sample["token_ids"]), len(numbers))} for sample in samples]
    return {"prompts": list(numbers), "samples": told}


class _AnswerLines:
    """Pieces of an answer, given to those who wait for its lines."""

    def __init__(self, asked: list[_Waiting]):
        self._asked, self._rest = asked, bytearray()
        self._answered: set[int] = set()
        self.wrong: ServerFailed | None = None
        """Why the answer is none to what was asked."""

    def take(self, piece: bytes) -> None:
        self._rest += piece
        if b"\n" not in piece:
            if len(self._rest) > MOST_BYTES:
                raise TooLong
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            try:
                self._give(json.loads(line))
            except ServerFailed as error:
                self.wrong = error
                raise
            except (ValueError, KeyError, TypeError) as error:
                self.wrong = ServerFailed(f"a line of another form than asked for: {error!r}")
                raise self.wrong from error

    def _give(self, said: Any) -> None:
        number = said["number"]
        if type(number) is not int or not 0 <= number < len(self._asked):
            raise ServerFailed(f"an answer to sample {number!r}, and there are {len(self._asked)}")
        waits = self._asked[number].answer
        if number in self._answered:
            raise ServerFailed(f"a second answer to sample {number}")
        self._answered.add(number)
        if waits.done():
            return  # nobody waits for it any more
        if "answer" in said:
            waits.set_result(said["answer"])
        else:
            status = int(said["status"])
            why = short(f"answered {status}: {said['error']}")
            waits.set_exception(ServerFailed(why, lost=status >= 500, status=status))
