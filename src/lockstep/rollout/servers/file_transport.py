"""Weight transport by files: safetensors in shared memory or a shared folder, written one tensor at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import Refusal, unwritten
from lockstep.rollout.servers.adapter import PushedWeights
from lockstep.rollout.servers.plugin.lockstep_group import bit_sum
from lockstep.run.tensor_file import write_model

KEY = "rollout.server.folder"
SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "lockstep-weights-"


@contextmanager
def transfer_folder(parent: str | None) -> Iterator[Path]:
    """A new folder that run and server can both access; removed afterwards."""
    where = Path(parent) if parent is not None else _default_parent()
    try:
        _remove_stale(where)
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where))
    except OSError as error:
        raise unwritten(where, error, f"name another {KEY}") from error
    try:
        if parent is not None:
            folder.chmod(0o755)  # the server may run as another user
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_weights(folder: Path, weights: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> PushedWeights:
    """Writes all weights of a model in `dtype`; at most one tensor at a time is converted on the device."""
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
        raise unwritten(folder, error, f"name another {KEY}") from error
    return PushedWeights(sorted(folder.glob("*.safetensors")), list(shapes), [sums[name] for name in shapes])


def write_adapter(folder: Path, model: Any) -> None:
    """Writes the adapter as a PEFT folder."""
    try:
        model.save_pretrained(folder, safe_serialization=True)
    except OSError as error:
        raise unwritten(folder, error, f"name another {KEY}") from error


def _default_parent() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _refuse_no_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise Refusal.at(
            KEY,
            f"{folder.parent} has {free / 2**30:.1f} GiB free; the weights need {size / 2**30:.1f} GiB",
            "name a folder with more free space that run and engine can both access",
            code="disk-full",
        )


def _remove_stale(parent: Path) -> None:
    """Removes folders of runs that were killed during a push."""
    for folder in parent.glob(f"{_PREFIX}*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        # Another run may remove its folder at the same time.
        with suppress(FileNotFoundError):
            is_ours = folder.stat().st_uid == os.getuid()
            if process.isdigit() and is_ours and not Path(f"/proc/{process}").exists():
                shutil.rmtree(folder, ignore_errors=True)
