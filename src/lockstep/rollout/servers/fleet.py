"""The servers of a run: samples are shared among those that are up, and asked again where one is lost."""

from __future__ import annotations

import asyncio
import queue
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lockstep.rollout.servers.adapter import Answer, ServerAdapter, ServerFailed, WantedSample, checked_answer
from lockstep.rollout.servers.server_client import ClientThread, ServerClient
from lockstep.rollout.servers.server_process import ServerProcess

# Of one sample, on servers that are lost under it.
TRIES = 6
# Samples under way at one server that has a socket for each. Where many go in one request the server queues them.
AT_ONCE = 1024
_HEALTH_SECONDS, _HEALTH_PAUSE = 30.0, 1.0
_LISTEN_SECONDS = 1.0


@dataclass(eq=False)
class Server:
    """One server. Only the event loop changes `busy`; `up` is set by the run and cleared by whoever finds it gone."""

    client: ServerClient
    process: ServerProcess | None = None
    up: bool = False
    asleep: bool = False
    busy: int = 0
    why: str = ""
    """Why it is not up."""
    since: float = 0.0
    """When it was lost, or started."""
    starts: int = 0
    """Restarts since it last had weights."""
    left_out: bool = False
    """It answers and does not fit the run: it is not asked for anything."""
    told_at: float = 0.0
    """When its silence was last told."""

    def describe(self) -> str:
        return f"{self.client.address}: {self.why}" if self.why else self.client.address


@dataclass(frozen=True)
class Done:
    """Sample `number` is answered, with weights of the version that was asked for."""

    number: int
    answer: Answer


@dataclass(frozen=True)
class Lost:
    server: Server


@dataclass(frozen=True)
class Back:
    """A server that was lost, or has been started, answers."""

    server: Server


ServerEvent = Done | Lost | Back | ServerFailed


class Fleet:
    def __init__(
        self,
        server_adapter: ServerAdapter,
        clients: ClientThread,
        servers: Sequence[Server],
        answer_limit: float,
        vocabulary: int,
    ):
        self.server_adapter, self.clients, self.servers = server_adapter, clients, list(servers)
        self._answer_limit, self._vocabulary = answer_limit, vocabulary
        self.version = ""
        """Of the weights that a sample must be drawn by."""
        self._heard: queue.SimpleQueue[ServerEvent] = queue.SimpleQueue()
        self._watches: set[asyncio.Task[None]] = set()

    def up(self) -> list[Server]:
        return [server for server in self.servers if server.up]

    def events(self, asked: Sequence[WantedSample]) -> Generator[ServerEvent | None, None, None]:
        """What happens until all are answered; None now and then, so that the caller can look at the clock.

        On `Lost` and `Back` it is the caller's to bring the server up again. Closing it drops what is under way.
        """
        heard = self._heard = queue.SimpleQueue()
        job = self.clients.start(self._all(asked, heard))
        left = len(asked)
        try:
            while left:
                try:
                    event = heard.get(timeout=_LISTEN_SECONDS)
                except queue.Empty:
                    yield None
                    continue
                left -= isinstance(event, Done)
                yield event
        finally:
            job.cancel()

    def watch(self, server: Server) -> None:
        """Say `Back` once the server answers: in the middle of `events`."""
        self.clients.start(self._watch(server, self._heard))

    # -- on the event loop

    async def _all(self, asked: Sequence[WantedSample], heard: queue.SimpleQueue[ServerEvent]) -> None:
        lost = [server for server in self.servers if not (server.up or server.left_out)]
        self._watches = {asyncio.create_task(self._watch(server, heard)) for server in lost}
        tasks = [asyncio.create_task(self._one(number, wanted, heard)) for number, wanted in enumerate(asked)]
        try:
            await asyncio.gather(*tasks)
        except Exception as error:  # noqa: BLE001 - whoever waits for answers must hear that there are none
            heard.put(error if isinstance(error, ServerFailed) else ServerFailed(f"{type(error).__name__}: {error}"))
        finally:
            for task in (*tasks, *self._watches):
                task.cancel()

    async def _one(self, number: int, wanted: WantedSample, heard: queue.SimpleQueue[ServerEvent]) -> None:
        why = ""
        for _ in range(TRIES):
            server = await self._least_busy()
            server.busy += 1
            try:
                answer = await self.sampled(server, wanted)
            except ServerFailed as error:
                if not error.lost:
                    heard.put(error)
                    return
                why = str(error)
                self._lose(server, why, heard)
                continue
            finally:
                server.busy -= 1
            if answer.ended == "aborted":
                why = f"{server.client.address}: a response was aborted"
                # It may be on its way out; the next look at its health tells.
                await asyncio.sleep(_HEALTH_PAUSE)
                continue
            if answer.version is not None and answer.version != self.version:
                why = f"its weights are those of version {answer.version}, not {self.version}: it was started again"
                self._lose(server, why, heard)
                continue
            heard.put(Done(number, answer))
            return
        heard.put(ServerFailed(f"a response was asked for {TRIES} times in vain, the last time: {why}", lost=True))

    async def sampled(self, server: Server, wanted: WantedSample) -> Answer:
        """Ask one server, once. An answer that is no response to what was asked is refused."""
        path, body = self.server_adapter.ask(wanted)
        if self.server_adapter.samples_together:
            said = await server.client.sample(path, body, self._answer_limit)
        else:
            said = await server.client.send("POST", path, body, self._answer_limit)
        try:
            return checked_answer(self.server_adapter.read(said, wanted), wanted, self._vocabulary)
        except ServerFailed as error:
            raise ServerFailed(f"{server.client.address}{path}: {error}", lost=error.lost) from error

    async def _least_busy(self) -> Server:
        while True:
            most = sys.maxsize if self.server_adapter.samples_together else AT_ONCE
            free = [server for server in self.servers if server.up and server.busy < most]
            if free:
                return min(free, key=lambda server: server.busy)
            await asyncio.sleep(0.02)

    def _lose(self, server: Server, why: str, heard: queue.SimpleQueue[ServerEvent]) -> None:
        """Once for all the samples that find it gone."""
        if not server.up:
            return
        server.up, server.why, server.since = False, why, time.monotonic()
        heard.put(Lost(server))
        self._watches.add(asyncio.create_task(self._watch(server, heard)))

    async def _watch(self, server: Server, heard: queue.SimpleQueue[ServerEvent]) -> None:
        """Until the server answers; the run then gives it the weights."""
        await asyncio.sleep(_HEALTH_PAUSE)
        while not server.up:
            with suppress(ServerFailed):
                await asyncio.get_running_loop().run_in_executor(None, self._health, server)
                heard.put(Back(server))
                return
            await asyncio.sleep(_HEALTH_PAUSE)

    def _health(self, server: Server) -> None:
        self.server_adapter.healthy(server.client)
