"""Weights on their way to a server: safetensors files in shared memory or a shared folder, a tensor at a time."""

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
def travelling(named: str | None) -> Iterator[Path]:
    """A fresh folder that run and server both see, gone afterwards."""
    above = Path(named) if named is not None else _usual()
    try:
        _remove_left(above)
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=above))
    except OSError as error:
        raise unwritten(above, error, f"name another {KEY}") from error
    try:
        if named is not None:
            folder.chmod(0o755)  # the server there may be another user's
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def written_weights(folder: Path, weights: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> PushedWeights:
    """All weights of a model, in `dtype`; on the device there is never more than the one that is being written."""
    shapes = {name: tensor.shape for name, tensor in weights}
    _refuse_no_room(folder, sum(shape.numel() for shape in shapes.values()) * dtype.itemsize)
    tensors = dict(weights)
    sums: dict[str, int] = {}

    def summed(name: str) -> torch.Tensor:
        tensor = tensors[name].detach().to(dtype)
        sums[name] = int(bit_sum(tensor))
        return tensor

    try:
        write_model(folder, shapes, dtype, summed)
    except OSError as error:
        raise unwritten(folder, error, f"name another {KEY}") from error
    return PushedWeights(sorted(folder.glob("*.safetensors")), list(shapes), [sums[name] for name in shapes])


def write_adapter(folder: Path, model: Any) -> None:
    """A PEFT folder of the adapter alone."""
    try:
        model.save_pretrained(folder, safe_serialization=True)
    except OSError as error:
        raise unwritten(folder, error, f"name another {KEY}") from error


def _usual() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _refuse_no_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise Refusal.at(
            KEY,
            f"{folder.parent} has {free / 2**30:.1f} GiB free, and the weights take {size / 2**30:.1f} GiB",
            "name a folder with room that run and engine both see",
        )


def _remove_left(above: Path) -> None:
    """What a run that was killed in the middle of a push has left."""
    for folder in above.glob(f"{_PREFIX}*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        # Another run removes its own folder while this one looks.
        with suppress(FileNotFoundError):
            mine = folder.stat().st_uid == os.getuid()
            if process.isdigit() and mine and not Path(f"/proc/{process}").exists():
                shutil.rmtree(folder, ignore_errors=True)
