"""Writes checkpoints in a background thread while training continues, one checkpoint at a time.

The tensors are copied to host memory first, so the next step may change them. The thread writes the copies to a
temporary folder and renames the folder when it is complete. If the process is killed before the rename, the earlier
checkpoints stay intact. With several ranks, each rank writes its shards, and the thread of rank 0 renames the folder
when all ranks are done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from lockstep.device.cpu import host_memory
from lockstep.errors import first_line
from lockstep.parallel.offload import HostRoom
from lockstep.parallel.sharded_files import files_of, writer_of
from lockstep.parallel.world import World
from lockstep.run.checkpoint import (
    SHARDED_VERSION,
    SHARDS,
    STATE,
    State,
    bytes_of,
    folder_of,
    part_prefix,
    require_disk,
    told_of,
    unwritten_checkpoint,
    write,
    write_manifest,
)
from lockstep.run.files import aside_of, cleared_aside, take_name, write_private

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""The tensors of a checkpoint by file name and tensor name."""
# Free host memory that a copy needs, relative to its size. The rest is for the data and the engine of the next steps.
COPY_MARGIN = 1.25


def copy_fits(size: int, free: int) -> bool:
    """Returns whether `free` bytes of host memory are enough for a copy of `size` bytes."""
    return size * COPY_MARGIN <= free


class CheckpointWriter:
    """The thread of a writer. The thread calls `landed` with the folder of each complete checkpoint."""

    def __init__(self, checkpoints: Path, landed: Callable[[Path], None]):
        self.checkpoints, self.landed = checkpoints, landed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether the current checkpoint could not be written. `settle` then raises the reason."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def settle(self) -> None:
        """Waits until the current checkpoint is complete. Raises if the write failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Finishes the current checkpoint after an error, if possible."""
        if self._writing is not None:
            self._writing.exception()
        self._thread.shutdown()


class LocalWriter(CheckpointWriter):
    """Writes the checkpoints of a run of one process. `device` is the device of the tensors. `say` prints a message if
    training has to wait for a write, because host memory is too small for a copy of the tensors. `needed` is the host
    memory that the next step needs beside the copy, in bytes."""

    def __init__(
        self,
        checkpoints: Path,
        device: torch.device,
        landed: Callable[[Path], None],
        say: Callable[[str], None],
        needed: int = 0,
    ):
        super().__init__(checkpoints, landed)
        self._device, self._say, self._needed = device, say, needed
        self._reserving: Thread | None = None
        self._pinned = 0
        """The bytes of pinned memory that torch keeps for the next copy. They are not free memory of the host."""

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocates pinned memory for a copy of tensors of these sizes (in bytes) in the background, because that takes
        seconds. Torch keeps the freed memory for the first checkpoint."""
        if self._device.type != "cpu" and copy_fits(sum(sizes), self._free()):
            self._reserving = Thread(target=self._reserve, args=(sizes,), daemon=True)
            self._reserving.start()

    def _reserve(self, sizes: Sequence[int]) -> None:
        room = HostRoom(self._device)
        # If the memory cannot be pinned, the checkpoint says so.
        with suppress(RuntimeError):
            for size in sizes:
                room.empty(torch.Size([size]), torch.uint8, pinned=True)
            self._pinned = sum(sizes)

    def begin(self, state: State, tensors: Tensors, *, copies: bool) -> None:
        """Waits for the previous checkpoint, copies the tensors and starts to write the copies. Without `copies`, or if
        host memory is too small, the function returns when the checkpoint is complete."""
        self.settle()
        size, target = sum(map(bytes_of, tensors.values())), folder_of(self.checkpoints, state.step)
        require_disk(self.checkpoints, size, "a checkpoint")
        # The values of the state may change in the next step.
        text = json.dumps(asdict(state), indent=2)
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        # Pinned memory that is already there speeds up a write that training waits for, too: one copy of all tensors
        # is much faster than copying block by block.
        copied = self._copied(tensors, size, state.step) if copies or self._pinned >= size else None
        if copied is not None and copies:
            self._writing = self._thread.submit(self._write, target, text, copied)
        else:
            self._write(target, text, tensors if copied is None else copied)

    def _copied(self, tensors: Tensors, size: int, step: int) -> Tensors | None:
        """Returns a copy of the tensors in host memory, or None if host memory is too small."""
        why = f"{self._free() / 2**20:,.0f} MiB of host memory are free"
        if copy_fits(size, self._free()):
            room = HostRoom(self._device)
            try:
                copied = {
                    part: {name: room.copy(one.detach()) for name, one in content.items()}
                    for part, content in tensors.items()
                }
                self._pinned = max(self._pinned, size if self._device.type != "cpu" else 0)
                return copied
            except RuntimeError as error:  # torch has no other error for host memory that cannot be allocated
                why = first_line(error)
        self._say(
            f"training waits for the checkpoint of step {step}, because its {size / 2**20:,.0f} MiB cannot be copied "
            f"to host memory: {why}"
        )
        return None

    def _free(self) -> int:
        return max(0, host_memory().free + self._pinned - self._needed)

    def _write(self, target: Path, state: str, tensors: Tensors) -> None:
        self.landed(write(target, state, tensors))


class ShardedWriter(CheckpointWriter):
    """Writes sharded checkpoints. All ranks must create their writer at the same time. Only the thread of rank 0 calls
    `landed`."""

    def __init__(self, checkpoints: Path, world: World, landed: Callable[[Path], None]):
        super().__init__(checkpoints, landed)
        self.world, self._group = world, world.new_gloo_group()

    def begin(self, state: State, tensors: Tensors) -> None:
        """Waits for the previous checkpoint, copies the tensors of this rank and starts to write the copies. `tensors`
        maps the parts (model, optimizer, critic) to their tensors."""
        # The import is here, because it takes a second and only runs of several processes need it.
        from torch.distributed.checkpoint import async_save

        self.settle()
        target = folder_of(self.checkpoints, state.step)
        parts = {part_prefix(part) + name: one for part, content in tensors.items() for name, one in content.items()}
        state.version = SHARDED_VERSION
        folder = aside_of(target)
        if self.world.main:
            require_disk(self.checkpoints, bytes_of(parts), "a checkpoint")
            (cleared_aside(target) / SHARDS).mkdir(parents=True)
        every = self.world.gather({name: bytes_of({name: one}) for name, one in parts.items()})
        writer = writer_of(folder / SHARDS, {name: size for share in every for name, size in share.items()}, len(every))
        saving: Any = async_save(parts, storage_writer=writer, process_group=self._group)
        text = json.dumps(asdict(state), indent=2)  # the values of the state may change in the next step
        self._writing = self._thread.submit(self._finish, saving, text, folder, target)

    def _finish(self, saving: Future[Any], state: str, folder: Path, target: Path) -> None:
        from torch.distributed.checkpoint import CheckpointException

        result: dict[str, Any] | str
        try:
            saving.result()
            result = told_of(folder, files_of(folder / SHARDS, self.world.rank))
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # the other ranks wait for a result
            result = _reason(error)
        every: list[Any] = [None] * self.world.size
        dist.all_gather_object(every, result, group=self._group)
        failed = [f"rank {rank}: {one}" for rank, one in enumerate(every) if isinstance(one, str)]
        if failed:
            raise unwritten_checkpoint(target, failed[0])
        if self.world.main:
            try:
                self._land(state, folder, target, every)
            except OSError as error:
                raise unwritten_checkpoint(target, str(error)) from error

    def _land(self, state: str, folder: Path, target: Path, every: list[dict[str, Any]]) -> None:
        write_private(folder / STATE, state)
        manifest = {name: facts for files in every for name, facts in files.items()}
        write_manifest(folder, {**manifest, **told_of(folder, [folder / STATE])})
        take_name(folder, target)
        self.landed(target)


def _reason(error: BaseException) -> str:
    """Returns the first line of the error message. If torch reports errors of several ranks, the first error is
    used."""
    if failures := getattr(error, "failures", None):
        error = next(iter(failures.values()))[0]
    return first_line(error) or type(error).__name__
