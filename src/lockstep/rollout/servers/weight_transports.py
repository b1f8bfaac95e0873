"""The weight transports to a server: files, broadcast in a process group, or shared memory."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from lockstep.device.base import Device
from lockstep.errors import Refusal, unwritten
from lockstep.model.adapters.peft_folder import save_adapter
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES
from lockstep.rollout.servers.adapter import Announced, GroupMeeting, Placed, PushedWeights, ServerAdapter, ServerFailed
from lockstep.rollout.servers.plugin.lockstep_group import RUN, bit_sum, flat_bucket, joined, left
from lockstep.rollout.servers.plugin.lockstep_shared import TensorPlace, device_place, host_places
from lockstep.rollout.servers.server_client import ServerClient
from lockstep.rollout.servers.weight_source import WeightSource, bucket_counts
from lockstep.run.tensor_file import write_model

# Transport by files: the run writes safetensors files to /dev/shm or a shared folder, one tensor at a time.

FOLDER_KEY = "rollout.server.folder"
SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "lockstep-weights-"


@contextmanager
def transfer_folder(parent: str | None) -> Iterator[Path]:
    """Creates a folder that the run and the server can access, and removes the folder at the end of the `with`
    block."""
    where = Path(parent) if parent is not None else _default_parent()
    try:
        _remove_stale(where)
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where))
    except OSError as error:
        raise unwritten(where, error, f"name another {FOLDER_KEY}") from error
    try:
        if parent is not None:
            folder.chmod(0o755)  # the server may run as another user
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_weights(folder: Path, weights: WeightSource, dtype: torch.dtype) -> PushedWeights:
    """Writes all weights of a model in `dtype`. The weights are gathered and converted one tensor at a time, to save
    memory."""
    shapes = weights.shapes
    _refuse_no_room(folder, weights.bytes_in(dtype))
    tensors = iter(weights)
    sums: dict[str, int] = {}

    def with_checksum(wanted: str) -> torch.Tensor:
        name, tensor = next(tensors)
        assert name == wanted
        tensor = tensor.detach().to(dtype)
        sums[name] = int(bit_sum(tensor))
        # On a CPU a file is written from the tensor's memory as a numpy array. Torch then refuses to free the storage,
        # which FSDP does with the weights that it has gathered.
        return tensor.clone() if tensor.device.type == "cpu" and not weights.gathers else tensor

    try:
        write_model(folder, shapes, dtype, with_checksum)
    except OSError as error:
        raise unwritten(folder, error, f"name another {FOLDER_KEY}") from error
    finally:
        if weights.gathers:
            # After an error the other ranks still wait in the remaining gathers.
            deque(tensors, maxlen=0)
    files = sorted(folder.glob("*.safetensors"))
    return PushedWeights(files, list(shapes), [sums[name] for name in shapes], weights.bytes_in(dtype))


class KeptFiles:
    """The files of the last push, for further servers and for a server that restarts during generation: the ranks can
    gather sharded weights only at the start of a step."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.pushed = PushedWeights([], [], [])
        self._folder = ExitStack()

    def write(self, version: str, folder: AbstractContextManager[Path], write: Callable[[Path], PushedWeights]) -> None:
        """Replaces the files by those of a later version."""
        self.remove()
        self.pushed = write(self._folder.enter_context(folder))
        self.version = version

    def remove(self) -> None:
        self.version = None
        self._folder.close()


def write_adapter(folder: Path, model: Any, weights: WeightSource) -> PushedWeights:
    """Writes the LoRA adapter as a PEFT folder. `weights` are those of the adapter."""
    state = {name: tensor.detach().cpu() for name, tensor in weights}
    try:
        save_adapter(model, folder, plain=True, state=state)
    except OSError as error:
        raise unwritten(folder, error, f"name another {FOLDER_KEY}") from error
    return PushedWeights(
        sorted(folder.glob("*.safetensors")), list(state), [], sum(one.nbytes for one in state.values())
    )


def _default_parent() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _refuse_no_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise Refusal.at(
            FOLDER_KEY,
            f"{folder.parent} has {free / 2**30:.1f} GiB free; the weights need {size / 2**30:.1f} GiB",
            "give the path of a folder with more free space that the run and the engine can access",
            code="disk-full",
        )


def _remove_stale(parent: Path) -> None:
    """Removes transfer folders of runs that were killed during a push."""
    for folder in parent.glob(f"{_PREFIX}*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        # Another run may remove the same folder at the same time.
        with suppress(FileNotFoundError):
            is_ours = folder.stat().st_uid == os.getuid()
            if process.isdigit() and is_ours and not Path(f"/proc/{process}").exists():
                shutil.rmtree(folder, ignore_errors=True)


# Transport by broadcast: the run and all workers of the servers form a process group.
#
# The HTTP requests and the run's broadcast run on separate threads, because a broadcast cannot be interrupted. The run
# stops waiting when one of the threads fails or exceeds the time limit.

KEY = "rollout.weight_sync"
REMEDY = f"set {KEY}=files"
# Maximum time limit of the rendezvous, in seconds.
MEETING_SECONDS = 600.0
# The run waits this many seconds longer than the time limit of a collective. If the run's part of a collective has
# failed, the run waits this many seconds for the error message of the server.
_GRACE_SECONDS = 10.0
_MARGIN_SECONDS = 60.0
_LOOK_SECONDS = 1.0
# A thread of the backend may still read the buffer of a broadcast that has failed, and ends the process if the memory
# is gone. So these buffers are never freed.
_FAILED_BUFFERS: list[torch.Tensor] = []

Weights = Sequence[tuple[str, torch.Tensor]]


class WeightLink:
    """The process group of the run and the workers of one or several servers. A link that has failed cannot be reused:
    call `close` and create a new link."""

    def __init__(
        self,
        server_adapter: ServerAdapter,
        clients: Sequence[ServerClient],
        device: Device,
        index: int,
        request_timeout: float,
        progress: Callable[[str], None],
    ):
        self.server_adapter, self.clients, self.device, self.index = server_adapter, list(clients), device, index
        self._limit, self._progress = request_timeout, progress
        seconds = min(request_timeout, MEETING_SECONDS)
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        workers = [server_adapter.workers(client) for client in clients]
        name = f"lockstep-weights-{secrets.token_hex(8)}"
        self.meetings = [
            GroupMeeting(
                own_address(client.address),
                int(self._store.port),
                name,
                device.collective,
                1 + sum(workers),
                seconds,
                1 + sum(workers[:number]),
            )
            for number, client in enumerate(clients)
        ]
        self.sent_bytes = 0
        """Bytes of the last push, as broadcast once to all servers of the group."""
        self._group: dist.ProcessGroup | None = None
        self._run_side: Future[Any] | None = None

    @property
    def addresses(self) -> str:
        return ", ".join(client.address for client in self.clients)

    def join(self) -> None:
        """Creates the process group with all workers of the servers."""
        meeting = self.meetings[0]
        # The timeout of the process group is longer than our own time limit, because backends react differently to a
        # timeout.
        limit = 2 * meeting.seconds + _MARGIN_SECONDS

        def ours() -> dist.ProcessGroup:
            self.device.use(self.index)
            return joined(meeting.backend, self._store, meeting.name, RUN, meeting.size, limit)

        self._group = self._run_all(
            [partial(self.server_adapter.join, client, one) for client, one in self._meetings()],
            ours,
            f"the {meeting.size - 1} workers of the server",
            meeting.seconds,
        )

    def _meetings(self) -> Iterator[tuple[ServerClient, GroupMeeting]]:
        return zip(self.clients, self.meetings, strict=True)

    def give(self, weights: WeightSource, dtype: torch.dtype) -> None:
        """Broadcasts all weights, bucket by bucket. While a bucket is sent, the next one is gathered."""
        self.sent_bytes = 0
        for client in self.clients:
            self.server_adapter.begin(client)
        names, shapes = list(weights.shapes), [list(shape) for shape in weights.shapes.values()]
        sizes = [shape.numel() * dtype.itemsize for shape in weights.shapes.values()]
        counts = bucket_counts(sizes, self.server_adapter.bucket_bytes)
        told = str(dtype).removeprefix("torch.")
        buckets = _Buckets(weights, counts)
        try:
            if self.server_adapter.receives_all:
                self._send_to_all(Announced(names, shapes, told, counts), lambda: self._send_flat(buckets, dtype))
            else:
                self._give_calls(buckets, dtype)
        except BaseException:
            self._finish_gathering(weights, buckets)
            raise
        for client in self.clients:
            self.server_adapter.finish(client)

    def _give_calls(self, buckets: _Buckets, dtype: torch.dtype) -> None:
        """Broadcasts each bucket with a call of its own."""
        bucket = buckets.take()
        while bucket:
            gathering = _start_thread(buckets.take)
            names, shapes = [name for name, _ in bucket], [list(tensor.shape) for _, tensor in bucket]
            try:
                self._send_to_all(
                    Announced(names, shapes, str(dtype).removeprefix("torch."), [len(bucket)]),
                    partial(self._send, bucket, dtype),
                )
            finally:
                following = gathering.result()
            bucket = following

    def _send_to_all(self, announced: Announced, ours: Callable[[], None]) -> None:
        name = self.meetings[0].name
        theirs = [partial(self.server_adapter.receive, client, name, announced) for client in self.clients]
        self._run_all(theirs, ours, "the server's side of the broadcast", self._limit)

    def _send_flat(self, buckets: _Buckets, dtype: torch.dtype) -> None:
        """Broadcasts each bucket as one buffer."""
        assert self._group is not None
        self.device.use(self.index)
        sending: tuple[torch.Tensor, Any] | None = None
        while bucket := buckets.take():
            buffer = flat_bucket([tensor for _, tensor in bucket], dtype)
            del bucket
            self._wait_for(sending)
            sending = buffer, self._group.broadcast(buffer, RUN)
            self.sent_bytes += buffer.nbytes
        self._wait_for(sending)

    def _wait_for(self, sending: tuple[torch.Tensor, Any] | None) -> None:
        if sending is not None:
            try:
                sending[1].wait()
            except RuntimeError:
                _FAILED_BUFFERS.append(sending[0])
                raise
            # `wait` may return before the buffer is sent, and its memory must not be reused before.
            self.device.synchronise()

    def _send(self, weights: Weights, dtype: torch.dtype) -> None:
        assert self._group is not None
        self.device.use(self.index)
        for _, tensor in weights:
            sent = tensor.detach().to(dtype).contiguous()
            self._wait_for((sent, self._group.broadcast(sent, RUN)))
            self.sent_bytes += sent.nbytes

    def _finish_gathering(self, weights: WeightSource, buckets: _Buckets) -> None:
        """Takes part in the remaining gathers after an error, because the other ranks wait in them."""
        if weights.gathers:
            self.close(notify=False)  # ends a broadcast that waits for a server
            if self._run_side is not None and wait((self._run_side,), timeout=_MARGIN_SECONDS).not_done:
                # The other ranks cannot be told, because they wait in a gather. They end with this rank.
                raise RuntimeError(f"{self.addresses}: a broadcast of weights cannot be ended")
            buckets.take_rest()

    def _run_all(
        self, theirs: Sequence[Callable[[], None]], ours: Callable[[], Any], server_name: str, limit: float
    ) -> Any:
        """Runs the HTTP request to each server (`theirs`) and the run's part of the collective (`ours`) concurrently;
        returns the result of `ours`."""
        server_sides, run_side = [_start_thread(one) for one in theirs], _start_thread(ours)
        self._run_side = run_side
        deadline = time.monotonic() + limit + _GRACE_SECONDS
        while True:
            finished, missing = wait((*server_sides, run_side), timeout=_LOOK_SECONDS, return_when=FIRST_EXCEPTION)
            for one in server_sides:
                if one in finished:
                    one.result()
            backend = self.meetings[0].backend
            if run_side in finished and (error := run_side.exception()) is not None:
                late = [one for one in server_sides if one in missing]
                for one in wait(late, timeout=_GRACE_SECONDS, return_when=FIRST_EXCEPTION).done:
                    one.result()
                raise ServerFailed(
                    f"{self.addresses}: the weights were not transferred by {backend}: {error}", lost=True
                )
            if not missing:
                return run_side.result()
            if time.monotonic() > deadline:
                late_sides = [client for client, one in zip(self.clients, server_sides, strict=True) if one in missing]
                where = ", ".join(client.address for client in late_sides) or self.addresses
                name = server_name if late_sides else f"the run's side of {backend}"
                raise ServerFailed(f"{where}: {name} did not complete within {limit:g} s", lost=True)
            self._progress(f"{backend} with {self.addresses}")

    def close(self, *, notify: bool = True) -> None:
        """Destroys the group. With `notify`, first asks the servers to leave the group."""
        if notify and self._group is not None:
            for client, meeting in self._meetings():
                with suppress(ServerFailed):
                    self.server_adapter.leave(client, meeting.name)
        if self._group is not None:
            left(self._group)
        self._group = None


class _Buckets:
    """The weights as buckets with the given numbers of tensors. Threads may take buckets one after the other."""

    def __init__(self, weights: WeightSource, counts: Sequence[int]):
        self._tensors, self._counts = iter(weights), iter(counts)

    def take(self) -> Weights:
        """Returns the next bucket, or an empty one at the end. A sharded model is gathered meanwhile."""
        return [next(self._tensors) for _ in range(next(self._counts, 0))]

    def take_rest(self) -> None:
        for _ in self._tensors:
            pass


def _start_thread(work: Callable[[], Any]) -> Future[Any]:
    """Runs `work` on a daemon thread, which does not keep the process alive."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the future passes the exception on
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weights").start()
    return future


def own_address(server: str) -> str:
    """Returns the address of this machine as seen from the server."""
    parts = urlsplit(server)
    try:
        addresses = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, where = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ServerFailed(f"{server}: the server cannot reach this machine ({error}): {REMEDY}") from error


def by_collective(settings: RolloutSettings, *, adapter: bool) -> bool:
    """Returns whether weights are sent by broadcast in a process group. With a server, `auto` selects the broadcast
    only for engines on a Ray cluster, which have devices of their own. An adapter is sent by files."""
    auto = settings.weight_sync == "auto" and settings.server.replicas is not None and not adapter
    return ENGINES[settings.engine].served and (auto or settings.weight_sync == "collective")


def refuse_shared_device(settings: RolloutSettings, device: Device) -> None:
    """Raises `Refusal` if the server uses rank 0's device and the backend cannot connect two processes on one device.
    With `rollout.url` the server's device is unknown, so nothing is checked and the broadcast itself may fail. Engines
    on a Ray cluster have devices of their own."""
    own = settings.url is None and settings.server.replicas is None
    if not by_collective(settings, adapter=False) or not own or device.meets_itself:
        return
    run_device = first_visible(device)
    server_devices = settings.server.devices
    if server_devices is None or run_device in server_devices:
        raise Refusal.at(
            KEY,
            f"{device.collective} cannot connect two processes on one {device.name} device; the run and the engine "
            f"share device {run_device}",
            f"{REMEDY}, or choose other devices with rollout.server.devices",
            code="device-in-use",
        )


def first_visible(device: Device) -> int | None:
    """Returns the index of rank 0's device on this machine, or None if the visible-devices variable has no indices."""
    visible = os.environ.get(device.visible_variable or "", "")
    first = visible.partition(",")[0].strip()
    return 0 if not visible else int(first) if first.isdigit() else None


# Transport by shared memory, for a server on the same machine (`plugin/lockstep_shared.py`).


class Unopened(ServerFailed):
    """Raised if the server cannot map the run's memory; the server's weights are then unchanged."""


@dataclass
class SharedMemory:
    """The memory locations of the weights of a run. A location is computed only once, unless the tensor moves in
    memory."""

    device: Device
    _places: dict[str, tuple[int, TensorPlace]] = field(default_factory=dict)

    def placed(self, weights: Weights, dtype: torch.dtype, folder: Path) -> Placed:
        """Returns the locations of the weights. Host tensors are copied to a file in `folder`, which the server
        maps."""
        for name, tensor in weights:
            if why := _why_not_shared(tensor, dtype):
                raise Unopened(f"{name} {why}")
        tensors = [tensor for _, tensor in weights]
        sums = [int(bit_sum(tensor)) for tensor in tensors]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            places = host_places(folder / "weights.bin", tensors, dtype)
        elif self.device.shares_memory:
            places = [self._device_place(name, tensor) for name, tensor in weights]
        else:
            raise Unopened(f"memory of a {self.device.name} device cannot be shared with another process")
        # Wait until all pending writes to these tensors are complete.
        self.device.synchronise()
        shapes = [list(tensor.shape) for tensor in tensors]
        return Placed([name for name, _ in weights], shapes, sums, str(dtype).removeprefix("torch."), places)

    def _device_place(self, name: str, tensor: torch.Tensor) -> TensorPlace:
        address = tensor.data_ptr()
        cached = self._places.get(name)
        if cached is None or cached[0] != address:
            try:
                self._places[name] = cached = address, device_place(tensor)
            except RuntimeError as error:
                raise Unopened(f"{name} cannot be shared: {error}") from error
        return cached[1]


def _why_not_shared(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Returns why a tensor cannot be shared without a copy, or None if it can. Copies are avoided, because the device
    may not have enough memory for them."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return "is sharded over several processes"
    if tensor.dtype != dtype:
        return f"has dtype {tensor.dtype}, and the server computes in {dtype}"
    return None if tensor.is_contiguous() else "is not contiguous"


def by_memory(
    settings: RolloutSettings, server_adapter: ServerAdapter, device: Device, processes: int, *, adapter: bool
) -> bool:
    """Returns whether weights are sent by shared memory. `auto` selects shared memory if a single-process run starts
    the server on its own device, because then no copy is needed."""
    if not ENGINES[settings.engine].served or adapter:
        return False
    if settings.weight_sync != "auto":
        return settings.weight_sync == "memory"
    server = settings.server
    same_device = server.devices is None or server.devices == [first_visible(device)]
    exclusive = (
        settings.url is None
        and server.replicas is None
        and processes == 1
        and server.tensor_parallel == 1
        and same_device
    )
    return server_adapter.opens_memory and device.shares_memory and exclusive
