"""Weight transport by a collective: one process group of the run and all workers of one server.

Both sides run on separate threads, because a collective cannot be interrupted. The run watches the HTTP request and its
side of the collective, and stops waiting when either fails or exceeds the time limit.
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

KEY = "rollout.weight_sync"
REMEDY = f"set {KEY}=files"
# Time limit of the rendezvous, and of one tensor.
MEETING_SECONDS = 600.0
# Extra time for one side to report its error after the other has failed.
_GRACE_SECONDS = 10.0
_MARGIN_SECONDS = 60.0
_LOOK_SECONDS = 1.0

Weights = Sequence[tuple[str, torch.Tensor]]


class WeightLink:
    """The group with one server. A link that has failed cannot be reused: `close` it and create another."""

    def __init__(
        self,
        server_adapter: ServerAdapter,
        client: ServerClient,
        device: Device,
        index: int,
        request_timeout: float,
        progress: Callable[[str], None],
    ):
        self.server_adapter, self.client, self.device, self.index = server_adapter, client, device, index
        self._limit, self._progress = request_timeout, progress
        seconds = min(request_timeout, MEETING_SECONDS)
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
        """Creates the group with all workers of the server."""
        meeting = self.meeting
        # Longer than our own limit: backends react differently when a collective times out.
        limit = 2 * meeting.seconds + _MARGIN_SECONDS

        def ours() -> dist.ProcessGroup:
            self.device.use(self.index)
            return joined(meeting.backend, self._store, meeting.name, RUN, meeting.size, limit)

        self._group = self._run_both(
            lambda: self.server_adapter.join(self.client, meeting),
            ours,
            f"the {meeting.size - 1} workers of the server",
            meeting.seconds,
        )

    def give(self, weights: Weights, dtype: torch.dtype) -> None:
        """Broadcasts all weights, bucket by bucket; at most one tensor is copied at a time."""
        self.server_adapter.begin(self.client)
        for bucket in _buckets(weights, dtype, self.server_adapter.bucket_bytes):
            announced = Announced(
                [name for name, _ in bucket],
                [list(tensor.shape) for _, tensor in bucket],
                [int(bit_sum(tensor.detach().to(dtype))) for _, tensor in bucket],
                str(dtype).removeprefix("torch."),
            )
            self._run_both(
                lambda tensors=announced: self.server_adapter.receive(self.client, self.meeting.name, tensors),  # type: ignore[misc]
                lambda sent=bucket: self._send(sent, dtype),  # type: ignore[misc]
                "the server's side of the broadcast",
                self._limit,
            )
        self.server_adapter.finish(self.client)

    def _send(self, weights: Weights, dtype: torch.dtype) -> None:
        assert self._group is not None
        self.device.use(self.index)
        for _, tensor in weights:
            sent = tensor.detach().to(dtype).contiguous()
            self._group.broadcast(sent, RUN).wait()
            # `wait` may only order the streams: do not overwrite the copy before it is sent.
            self.device.synchronise()

    def _run_both(self, theirs: Callable[[], None], ours: Callable[[], Any], server_name: str, limit: float) -> Any:
        """Runs the request to the server and our side of the collective concurrently."""
        server_side, run_side = _start_thread(theirs), _start_thread(ours)
        deadline = time.monotonic() + limit + _GRACE_SECONDS
        while True:
            finished, missing = wait((server_side, run_side), timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            if server_side in finished:
                server_side.result()
            if run_side in finished and (error := run_side.exception()) is not None:
                if server_side in missing and wait((server_side,), timeout=_GRACE_SECONDS).done:
                    server_side.result()
                raise ServerFailed(
                    f"{self.client.address}: the weights were not transferred by {self.meeting.backend}: {error}",
                    lost=True,
                )
            if not missing:
                return run_side.result()
            if time.monotonic() > deadline:
                late = server_name if server_side in missing else f"the run's side of {self.meeting.backend}"
                raise ServerFailed(f"{self.client.address}: {late} did not complete within {limit:g} s", lost=True)
            self._progress(f"{self.meeting.backend} with {self.client.address}")

    def close(self, *, notify: bool = True) -> None:
        """`notify`: the server is still running and must leave the group."""
        if notify and self._group is not None:
            with suppress(ServerFailed):
                self.server_adapter.leave(self.client, self.meeting.name)
        if self._group is not None:
            left(self._group)
        self._group = None


def _start_thread(work: Callable[[], Any]) -> Future[Any]:
    """Runs the work on a daemon thread: the process can exit without it."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed on by the future
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weights").start()
    return future


def _buckets(weights: Weights, dtype: torch.dtype, max_bytes: int | None) -> Iterator[Weights]:
    """Buckets of up to `max_bytes`, or of one larger tensor; a single bucket without a limit."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        tensor_bytes = tensor.numel() * dtype.itemsize
        if bucket and max_bytes is not None and size + tensor_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor_bytes
    if bucket:
        yield bucket


def own_address(server: str) -> str:
    """The address of this machine as seen from the server."""
    parts = urlsplit(server)
    try:
        addresses = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ServerFailed(f"{server}: no route from it to this machine ({error}): {REMEDY}") from error


def by_collective(settings: RolloutSettings) -> bool:
    """Whether weights go by a collective; `auto` never selects it."""
    return ENGINES[settings.engine].served and settings.weight_sync == "collective"


def refuse_shared_device(settings: RolloutSettings, device: Device) -> None:
    """Refuses a server on the device of rank 0 if the collective cannot join two processes on one device. For servers
    at `rollout.url` only the collective itself can detect it."""
    if not by_collective(settings) or settings.url is not None or device.meets_itself:
        return
    run_device = first_visible(device)
    server_devices = settings.server.devices
    if server_devices is None or run_device in server_devices:
        raise Refusal.at(
            KEY,
            f"{device.collective} cannot connect two processes on one {device.name} device; run and engine share "
            f"device {run_device}",
            f"{REMEDY}, or name other devices by rollout.server.devices",
            code="device-in-use",
        )


def first_visible(device: Device) -> int | None:
    """The index of rank 0's device on this machine; None if the variable does not hold indices."""
    visible = os.environ.get(device.visible_variable or "", "")
    first = visible.partition(",")[0].strip()
    return 0 if not visible else int(first) if first.isdigit() else None
