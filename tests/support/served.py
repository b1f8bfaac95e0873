"""A real endpoint in this process, on a free port."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from hang import HANG
from lockstep.device.cpu import Cpu
from lockstep.http_server import asgi
from lockstep.http_server.http_api import ServeLimits
from lockstep.parallel.world import World
from lockstep.serve.model_server import ServeSettings, load_app
from lockstep.serve.openai_api import ModelApp, model_site


def opened_app(folder: Path, limits: ServeLimits | None = None, **settings) -> ModelApp:
    return load_app(
        ServeSettings(str(folder), device="cpu", **settings), limits or ServeLimits(), Cpu(), World(0, 1, 0, None)
    )


@contextmanager
def endpoint(app: ModelApp, limits: ServeLimits | None = None, api_key: str | None = None) -> Iterator[str]:
    """The address of the app while it is served. The app is closed by whoever opened it."""
    sockets = asgi.bind("127.0.0.1", 0, "--port")
    port = asgi.listen(sockets)
    with asgi.site_in_thread(model_site(app, api_key), limits or ServeLimits(), sockets):
        yield f"http://127.0.0.1:{port}"


def chat(words: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": words}]


async def talk(address: str, expected: dict[str, str], requests: int) -> None:
    """`requests` at once: every third goes away after its first tokens, every fifth is streamed, one is cancelled
    before it is answered at all. All others must have the text of `generate`."""

    async def one(number: int, words: str) -> None:
        request = {"model": "tiny", "messages": chat(words), "temperature": 0}
        if number % 3 == 0:
            stream = await client.chat.completions.create(**request, max_tokens=200, stream=True)
            async for _ in stream:
                break
            await stream.close()
        elif number % 7 == 0:
            task = asyncio.ensure_future(client.chat.completions.create(**request, max_tokens=200))
            await asyncio.sleep(0.01 * (number % 10))
            task.cancel()
        elif number % 5 == 0:
            stream = await client.chat.completions.create(**request, max_tokens=24, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == expected[words], words
        else:
            answer = await client.chat.completions.create(**request, max_tokens=24)
            assert answer.choices[0].message.content == expected[words], words

    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=HANG) as client:
        words = list(expected)
        await asyncio.gather(*[one(number, words[number % len(words)]) for number in range(requests)])
