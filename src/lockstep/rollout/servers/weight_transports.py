"""The weight transports to a server: files, broadcast in a process group, or shared memory."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
from lockstep.rollout.servers.plugin.lockstep_group import RUN, bit_sum, joined, left
from lockstep.rollout.servers.plugin.lockstep_shared import TensorPlace, device_place, host_places
from lockstep.rollout.servers.server_client import ServerClient
from lockstep.rollout.servers.weight_check import fingerprint
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


def write_weights(folder: Path, weights: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> PushedWeights:
    """Writes all weights of a model in `dtype`. The weights are converted one tensor at a time, to save device
    memory."""
    shapes = {name: tensor.shape for name, tensor in weights}
    _refuse_no_room(folder, sum(shape.numel() for shape in shapes.values()) * dtype.itemsize)
    tensors = dict(weights)
    sums: dict[str, int] = {}

    def with_checksum(name: str) -> torch.Tensor:
        tensor = tensors[name].detach().to(dtype)
        sums[name] = int(bit_sum(tensor))
        return tensor

    try:
        write_model(folder, shapes, dtype, with_checksum)
    except OSError as error:
        raise unwritten(folder, error, f"name another {FOLDER_KEY}") from error
    return PushedWeights(sorted(folder.glob("*.safetensors")), list(shapes), [sums[name] for name in shapes])


def write_adapter(folder: Path, model: Any) -> None:
    """Writes the LoRA adapter as a PEFT folder."""
    try:
        save_adapter(model, folder, plain=True)
    except OSError as error:
        raise unwritten(folder, error, f"name another {FOLDER_KEY}") from error


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


# Transport by broadcast: the run and all workers of one server form a process group.
#
# The HTTP request and the run's broadcast run on separate threads, because a broadcast cannot be interrupted. The run
# stops waiting when one of the two threads fails or exceeds the time limit.

KEY = "rollout.weight_sync"
REMEDY = f"set {KEY}=files"
# Maximum time limit of the rendezvous, in seconds.
MEETING_SECONDS = 600.0
# The run waits this many seconds longer than the time limit of a collective. If the run's part of a collective has
# failed, the run waits this many seconds for the error message of the server.
_GRACE_SECONDS = 10.0
_MARGIN_SECONDS = 60.0
_LOOK_SECONDS = 1.0

Weights = Sequence[tuple[str, torch.Tensor]]


class WeightLink:
    """The process group of the run and the workers of one server. A link that has failed cannot be reused: call `close`
    and create a new link."""

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
        """Creates the process group with all workers of the server."""
        meeting = self.meeting
        # The timeout of the process group is longer than our own time limit, because backends react differently to a
        # timeout.
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
        """Broadcasts all weights, bucket by bucket. The run copies only one tensor at a time."""
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
            # `wait` may return before the tensor is sent, and the memory of `sent` must not be reused before the tensor
            # is sent.
            self.device.synchronise()

    def _run_both(self, theirs: Callable[[], None], ours: Callable[[], Any], server_name: str, limit: float) -> Any:
        """Runs the HTTP request to the server (`theirs`) and the run's part of the collective (`ours`) concurrently;
        returns the result of `ours`."""
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
        """Destroys the group. With `notify`, first asks the server to leave the group."""
        if notify and self._group is not None:
            with suppress(ServerFailed):
                self.server_adapter.leave(self.client, self.meeting.name)
        if self._group is not None:
            left(self._group)
        self._group = None


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


def _buckets(weights: Weights, dtype: torch.dtype, max_bytes: int | None) -> Iterator[Weights]:
    """Divides the weights into buckets of at most `max_bytes`. A tensor larger than `max_bytes` is a bucket by itself.
    If `max_bytes` is None, there is one bucket."""
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
        sums = list(fingerprint(weights))
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
