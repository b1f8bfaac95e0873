"""The servers of a run. Requests go to the least-loaded server; if a server fails, its requests are retried."""

from __future__ import annotations

import asyncio
import queue
import sys
import time
from collections.abc import Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.rollout.servers.adapter import Answer, ServerAdapter, ServerFailed, WantedSample, checked_answer
from lockstep.rollout.servers.server_client import ClientThread, ServerClient
from lockstep.rollout.servers.server_process import ServerProcess

# Maximum number of requests for one sample, if servers fail.
TRIES = 6
# Maximum number of concurrent samples per server, if each sample is a separate HTTP request. If one request contains
# many samples, there is no limit, because the server queues the samples.
AT_ONCE = 1024
_HEALTH_SECONDS, _HEALTH_PAUSE = 30.0, 1.0
_POLL_SECONDS = 1.0


@dataclass(eq=False)
class Server:
    """One server. Only the event loop changes `busy`. The thread that calls the engine sets `up`, and a failed request
    clears `up`."""

    client: ServerClient
    process: ServerProcess | None = None
    up: bool = False
    asleep: bool = False
    busy: int = 0
    why: str = ""
    """Why the server is not up."""
    since: float = 0.0
    """Time at which the server was lost or last started."""
    starts: int = 0
    """Number of restarts since the last successful transfer of weights."""
    left_out: bool = False
    """Whether the server is excluded because its settings do not fit the run."""
    logged_at: float = 0.0
    """Time of the last log message about waiting for this server."""

    def describe(self) -> str:
        return f"{self.client.address}: {self.why}" if self.why else self.client.address


@dataclass(frozen=True)
class Done:
    """Event: sample `number` is complete and was generated with the expected weight version."""

    number: int
    answer: Answer


@dataclass(frozen=True)
class Lost:
    server: Server


@dataclass(frozen=True)
class Back:
    """Event: a server that was lost or restarted responds again."""

    server: Server


ServerEvent = Done | Lost | Back | ServerFailed


class Arrivals(Protocol):
    """A source of requests. `poll_seconds` is the time after which it is asked again if nothing happens."""

    poll_seconds: float

    @property
    def more(self) -> bool:
        """Whether requests may follow, after a call has returned none."""
        ...

    def __call__(self, pending: int) -> Sequence[WantedSample]:
        """Returns the requests that have arrived, while `pending` earlier ones are unfinished."""
        ...


class Fleet:
    def __init__(
        self,
        server_adapter: ServerAdapter,
        clients: ClientThread,
        servers: Sequence[Server],
        request_timeout: float,
        vocabulary: int,
    ):
        self.server_adapter, self.clients, self.servers = server_adapter, clients, list(servers)
        self._request_timeout, self._vocabulary = request_timeout, vocabulary
        self.version = ""
        """The weight version that the samples must be generated with."""
        self._events: queue.SimpleQueue[ServerEvent] = queue.SimpleQueue()
        self._watch_tasks: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._homes: dict[int, Server] = {}
        """The server of each trajectory."""

    def up(self) -> list[Server]:
        return [server for server in self.servers if server.up]

    def events(self, arrivals: Arrivals) -> Generator[ServerEvent | None, None, None]:
        """Yields events until all requests are complete and `arrivals` has no more. Also yields None at intervals, so
        that the caller can check time limits.

        On the events `Lost` and `Back` the caller must restart the server and send it the weights. Closing the
        generator cancels running requests.
        """
        events_queue = self._events = queue.SimpleQueue()
        job = self.clients.start(self._request_all(events_queue))
        told, number, pending = time.monotonic(), 0, 0
        try:
            while True:
                requests = arrivals(pending)
                if requests:
                    self.clients.start(self._begin(number, requests, events_queue)).result()
                    number, pending = number + len(requests), pending + len(requests)
                if not pending and not arrivals.more:
                    return
                try:
                    event = events_queue.get(timeout=arrivals.poll_seconds)
                except queue.Empty:
                    if time.monotonic() - told < _POLL_SECONDS:
                        continue
                    event, told = None, time.monotonic()
                pending -= isinstance(event, Done)
                yield event
        finally:
            job.cancel()

    def end_session(self, session: int) -> None:
        """Forgets the server of a trajectory."""
        self._homes.pop(session, None)

    def watch(self, server: Server) -> None:
        """Emits `Back` when the server responds. Call `watch` only while `events` runs."""
        self.clients.start(self._watch(server, self._events))

    # -- on the event loop

    async def _request_all(self, events_queue: queue.SimpleQueue[ServerEvent]) -> None:
        """Watches lost servers until it is cancelled, and then cancels all requests."""
        lost = [server for server in self.servers if not (server.up or server.left_out)]
        self._watch_tasks = {asyncio.create_task(self._watch(server, events_queue)) for server in lost}
        tasks = self._tasks = set()
        try:
            await asyncio.Event().wait()
        finally:
            for task in (*tasks, *self._watch_tasks):
                task.cancel()

    async def _begin(
        self, first: int, requests: Sequence[WantedSample], events_queue: queue.SimpleQueue[ServerEvent]
    ) -> None:
        for number, wanted in enumerate(requests, start=first):
            task = asyncio.create_task(self._guarded(self._request_one(number, wanted, events_queue), events_queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None], events_queue: queue.SimpleQueue[ServerEvent]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the caller of `events` must get the error
            events_queue.put(
                error if isinstance(error, ServerFailed) else ServerFailed(f"{type(error).__name__}: {error}")
            )

    async def _request_one(
        self, number: int, wanted: WantedSample, events_queue: queue.SimpleQueue[ServerEvent]
    ) -> None:
        why = ""
        for _ in range(TRIES):
            server = await self._server_for(wanted)
            server.busy += 1
            try:
                answer = await self.sample(server, wanted)
            except ServerFailed as error:
                why = str(error)
                if not error.lost:
                    # A server that was restarted does not know the adapter.
                    other = "" if wanted.adapter is None else await self._other_version(server)
                    if not other:
                        events_queue.put(error)
                        return
                    why = other
                self._lose(server, why, events_queue)
                continue
            finally:
                server.busy -= 1
            if answer.ended == "aborted":
                why = f"{server.client.address}: a response was aborted"
                # An aborted response may mean that the server is shutting down, which the next health check detects.
                await asyncio.sleep(_HEALTH_PAUSE)
                continue
            if answer.version is not None and answer.version != self.version:
                why = self._restarted(answer.version)
                self._lose(server, why, events_queue)
                continue
            events_queue.put(Done(number, answer))
            return
        events_queue.put(
            ServerFailed(f"a response was requested {TRIES} times without success; last error: {why}", lost=True)
        )

    async def _other_version(self, server: Server) -> str:
        """Returns a message if the server has other weights than those of this run, or an empty string."""
        loop = asyncio.get_running_loop()
        try:
            version = await loop.run_in_executor(None, self.server_adapter.version, server.client)
        except ServerFailed as error:
            return str(error) if error.lost else ""
        return "" if version == self.version else self._restarted(version)

    def _restarted(self, version: str) -> str:
        return f"its weights have version {version}, not {self.version}: the server was restarted"

    async def sample(self, server: Server, wanted: WantedSample) -> Answer:
        """Sends one request to one server and validates the answer."""
        path, body = self.server_adapter.ask(wanted)
        if self.server_adapter.samples_together:
            response = await server.client.sample(path, body, self._request_timeout)
        else:
            response = await server.client.send("POST", path, body, self._request_timeout)
        try:
            return checked_answer(self.server_adapter.read(response, wanted), wanted, self._vocabulary)
        except ServerFailed as error:
            raise ServerFailed(f"{server.client.address}{path}: {error}", lost=error.lost) from error

    async def _server_for(self, wanted: WantedSample) -> Server:
        """Returns the server of the trajectory's turns before, or the least busy server if it has none or it is
        lost."""
        home = None if wanted.session is None else self._homes.get(wanted.session)
        if home is not None and home.up:
            return home
        server = await self._least_busy()
        if wanted.session is not None:
            self._homes[wanted.session] = server
        return server

    async def _least_busy(self) -> Server:
        while True:
            limit = sys.maxsize if self.server_adapter.samples_together else AT_ONCE
            candidates = [server for server in self.servers if server.up and server.busy < limit]
            if candidates:
                return min(candidates, key=lambda server: server.busy)
            await asyncio.sleep(0.02)

    def _lose(self, server: Server, why: str, events_queue: queue.SimpleQueue[ServerEvent]) -> None:
        """Marks the server as lost. Many requests may fail at once, but only the first one emits `Lost`."""
        if not server.up:
            return
        server.up, server.why, server.since = False, why, time.monotonic()
        events_queue.put(Lost(server))
        self._watch_tasks.add(asyncio.create_task(self._watch(server, events_queue)))

    async def _watch(self, server: Server, events_queue: queue.SimpleQueue[ServerEvent]) -> None:
        """Polls the server until it responds, and emits `Back`; the run then sends the weights to the server."""
        await asyncio.sleep(_HEALTH_PAUSE)
        while not server.up:
            with suppress(ServerFailed):
                await asyncio.get_running_loop().run_in_executor(None, self._check_health, server)
                events_queue.put(Back(server))
                return
            await asyncio.sleep(_HEALTH_PAUSE)

    def _check_health(self, server: Server) -> None:
        self.server_adapter.healthy(server.client)
