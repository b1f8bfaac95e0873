"""A real endpoint in this process, on a port of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hang import HANG
from lockstep.device.cpu import Cpu
from lockstep.parallel.world import World
from lockstep.serve.app import App, routed
from lockstep.serve.http import HttpServer
from lockstep.serve.limits import Address, Limits
from lockstep.serve.start import Serving, opened


def opened_app(folder: Path, limits: Limits | None = None, **settings) -> App:
    return opened(Serving(str(folder), device="cpu", **settings), limits or Limits(), Cpu(), World(0, 1, 0, None))


@contextmanager
def endpoint(app: App, limits: Limits | None = None, api_key: str | None = None) -> Iterator[str]:
    """The address of the app while it is served. The app is closed by whoever opened it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="endpoint", daemon=True)
    thread.start()
    server = HttpServer(routed(app, Address(port=0, api_key=api_key)), limits or Limits())
    try:
        port = asyncio.run_coroutine_threadsafe(server.listen("127.0.0.1", 0), loop).result(HANG)
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(HANG)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(HANG)
        loop.close()
