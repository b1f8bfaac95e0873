"""Sharded, asynchronous checkpoints: each rank writes its shards while training continues.

The tensors are copied first, so the next step may change them. A thread of each rank writes and checksums its files and
synchronises with the others over a separate process group. When all are done, the thread of rank 0 renames the folder.
A kill before that leaves the earlier checkpoints intact.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException, async_save

from lockstep.errors import first_line
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
    write_manifest,
)
from lockstep.run.files import aside_of, cleared_aside, take_name, write_private


class ShardedWriter:
    """Writes the checkpoints of a run, one at a time. All ranks create it together. The thread of rank 0 calls `landed`
    when a checkpoint is complete."""

    def __init__(self, checkpoints: Path, world: World, landed: Callable[[Path], None]):
        self.checkpoints, self.world, self.landed = checkpoints, world, landed
        self._group = world.new_gloo_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def begin(self, state: State, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        """Waits for the previous checkpoint, copies the shards of this rank (tensors by part) and starts writing."""
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
        self._writing = self._thread.submit(self._finish, saving, state, folder, target)

    def settle(self) -> None:
        """Waits until the current checkpoint is complete; raises if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """After an error: finishes the current checkpoint if possible."""
        if self._writing is not None:
            self._writing.exception()
        self._thread.shutdown()

    def _finish(self, saving: Future[Any], state: State, folder: Path, target: Path) -> None:
        result: dict[str, Any] | str
        try:
            saving.result()
            result = told_of(folder, files_of(folder / SHARDS, self.world.rank))
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # any error is sent to the other ranks, which wait
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

    def _land(self, state: State, folder: Path, target: Path, every: list[dict[str, Any]]) -> None:
        write_private(folder / STATE, json.dumps(asdict(state), indent=2))
        manifest = {name: facts for files in every for name, facts in files.items()}
        write_manifest(folder, {**manifest, **told_of(folder, [folder / STATE])})
        take_name(folder, target)
        self.landed(target)


def _reason(error: BaseException) -> str:
    """The first error; torch reports the errors of all ranks to every rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error) or type(error).__name__
