"""Weights by a collective: the run's end of a group with all workers of one server.

Whatever waits for the other side does so on a thread of its own, since a collective cannot be interrupted: the run
looks at what the server answers over HTTP and at its own end, and gives up when either fails or takes too long.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES
from lockstep.rollout.servers.adapter import Announced, GroupMeeting, ServerAdapter, ServerFailed
from lockstep.rollout.servers.plugin.lockstep_group import RUN, bit_sum, joined, left
from lockstep.rollout.servers.server_client import ServerClient

KEY = "rollout.hand_over"
REMEDY = f"set {KEY}=files"
# The most that one side waits for the other to come, or to take one tensor.
MEETING_SECONDS = 600.0
# For one side to have its say after the other one has had it.
_WORDS_SECONDS = 10.0
_ROOM_SECONDS = 60.0
_LOOK_SECONDS = 1.0

Weights = Sequence[tuple[str, torch.Tensor]]


class WeightLink:
    """One server. A link that has failed is of no use any more: `close` it and make another."""

    def __init__(
        self,
        server_adapter: ServerAdapter,
        client: ServerClient,
        device: Device,
        index: int,
        answer_limit: float,
        progress: Callable[[str], None],
    ):
        self.server_adapter, self.client, self.device, self.index = server_adapter, client, device, index
        self._limit, self._progress = answer_limit, progress
        seconds = min(answer_limit, MEETING_SECONDS)
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.meeting = GroupMeeting(
            own_address(client.address),
            int(self._store.port),
            f"lockstep-weights-{secrets.token_hex(8)}",
            device.collective,
            1 + server_adapter.workers(client),
            seconds,
        )
        self._group: dist.ProcessGroup | None = None

    def join(self) -> None:
        """Meet all workers of the server."""
        told = self.meeting
        # Longer than we wait: what becomes of a collective that runs into its own limit differs between backends.
        limit = 2 * told.seconds + _ROOM_SECONDS

        def ours() -> dist.ProcessGroup:
            self.device.use(self.index)
            return joined(told.backend, self._store, told.name, RUN, told.size, limit)

        self._group = self._together(
            lambda: self.server_adapter.join(self.client, told),
            ours,
            f"the {told.size - 1} workers of the server",
            told.seconds,
        )

    def give(self, weights: Weights, dtype: torch.dtype) -> None:
        """Announce and send all of them, a bucket at a time; of each no more than one tensor is copied."""
        self.server_adapter.begin(self.client)
        for bucket in _buckets(weights, dtype, self.server_adapter.bucket_bytes):
            announced = Announced(
                [name for name, _ in bucket],
                [list(tensor.shape) for _, tensor in bucket],
                [int(bit_sum(tensor.detach().to(dtype))) for _, tensor in bucket],
                str(dtype).removeprefix("torch."),
            )
            self._together(
                lambda told=announced: self.server_adapter.receive(self.client, self.meeting.name, told),  # type: ignore[misc]
                lambda sent=bucket: self._send(sent, dtype),  # type: ignore[misc]
                "the server's end of the broadcast",
                self._limit,
            )
        self.server_adapter.finish(self.client)

    def _send(self, weights: Weights, dtype: torch.dtype) -> None:
        assert self._group is not None
        self.device.use(self.index)
        for _, tensor in weights:
            sent = tensor.detach().to(dtype).contiguous()
            self._group.broadcast(sent, RUN).wait()
            # Where a wait only puts it in order, the next copy must not be made before this one has gone.
            self.device.synchronise()

    def _together(self, theirs: Callable[[], None], ours: Callable[[], Any], who: str, limit: float) -> Any:
        """What server and run do at the same time."""
        asked, done = _begun(theirs), _begun(ours)
        given_up = time.monotonic() + limit + _WORDS_SECONDS
        while True:
            finished, missing = wait((asked, done), timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            if asked in finished:
                asked.result()
            if done in finished and (error := done.exception()) is not None:
                if asked in missing and wait((asked,), timeout=_WORDS_SECONDS).done:
                    asked.result()
                raise ServerFailed(
                    f"{self.client.address}: weights did not come through by {self.meeting.backend}: {error}", lost=True
                )
            if not missing:
                return done.result()
            if time.monotonic() > given_up:
                late = who if asked in missing else f"the run's own end of {self.meeting.backend}"
                raise ServerFailed(f"{self.client.address}: {late} did not come in {limit:g} s", lost=True)
            self._progress(f"{self.meeting.backend} with {self.client.address}")

    def close(self, *, told: bool = True) -> None:
        """`told`: the server is there to hear it."""
        if told and self._group is not None:
            with suppress(ServerFailed):
                self.server_adapter.leave(self.client, self.meeting.name)
        if self._group is not None:
            left(self._group)
        self._group = None


def _begun(work: Callable[[], Any]) -> Future[Any]:
    """On a thread that nobody has to wait for, not even the end of the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - told by the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weights").start()
    return future


def _buckets(weights: Weights, dtype: torch.dtype, most: int | None) -> Iterator[Weights]:
    """Of `most` bytes, or of one tensor that is larger; all at once where the engine itself takes one by one."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        more = tensor.numel() * dtype.itemsize
        if bucket and most is not None and size + more > most:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += more
    if bucket:
        yield bucket


def own_address(server: str) -> str:
    """The address of this machine under which the server sees it."""
    parts = urlsplit(server)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as client:
            client.connect(where)  # sends nothing
            return str(client.getsockname()[0])
    except OSError as error:
        raise ServerFailed(f"{server}: no way from it to this machine is known ({error}): {REMEDY}") from error


def by_collective(settings: RolloutSettings) -> bool:
    """`auto` is files: they work wherever both sides see a folder."""
    return ENGINES[settings.engine].served and settings.hand_over == "collective"


def refuse_shared_device(settings: RolloutSettings, device: Device) -> None:
    """A server of ours on the device of rank 0, whose collective does not join two processes on one device. Of other
    servers only the collective itself can tell."""
    if not by_collective(settings) or settings.url is not None or device.meets_itself:
        return
    own = first_visible(device)
    theirs = settings.server.devices
    if theirs is None or own in theirs:
        raise Refusal.at(
            KEY,
            f"{device.collective} does not join two processes on one {device.name} device, and run and engine share "
            f"device {own}",
            f"{REMEDY}, or name other devices by rollout.server.devices",
        )


def first_visible(device: Device) -> int | None:
    """The number of rank 0's device on this machine; None where it goes by another name."""
    seen = os.environ.get(device.visible_variable or "", "")
    first = seen.partition(",")[0].strip()
    return 0 if not seen else int(first) if first.isdigit() else None
