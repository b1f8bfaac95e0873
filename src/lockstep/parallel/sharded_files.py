"""Reads and writes tensors in safetensors files, complete or as slices of several ranks.

A rank can read only its own part of a tensor. Files with slices have torch.distributed.checkpoint's safetensors format.
Any safetensors reader can open a file; its header says where each slice belongs. Ranks read independently of each
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.parallel.sharding import fill, held_part
from lockstep.parallel.slice_reader import read_headers, read_parts

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

# Approximate maximum size of a file. A file is assembled in memory before it is written, so a rank writes several small
# files.
FILE_BYTES = 2**30


class StoredTensors(Mapping[str, torch.Tensor]):
    """A mapping of the tensors in `files` whose names start with `prefix`. Keys are the names without the prefix.
    `stored[name]` reads a complete tensor. `fill` reads only this rank's part."""

    def __init__(self, files: Iterable[Path], prefix: str = ""):
        self.files = sorted(files)
        self._stored = {
            name.removeprefix(prefix): stored
            for name, stored in read_headers(self.files).items()
            if name.startswith(prefix)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.fill({name: tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def shape(self, name: str) -> torch.Size:
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name].dtype

    @torch.no_grad()
    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Reads stored tensors into targets of the same shapes. The targets may be sharded, and have any dtype and
        device."""
        for name, target in targets.items():
            if target.shape != self.shape(name):
                shapes = f"{tuple(self.shape(name))} in the files, and {tuple(target.shape)} in the model"
                raise ValueError(f"{name} has the shape {shapes}")
        read_parts({name: held_part(target.detach()) for name, target in targets.items()}, self._stored)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    if isinstance(tensors, StoredTensors):
        return {name: tensors.shape(name) for name in tensors}
    return {name: tensor.shape for name, tensor in tensors.items()}


def fill_all(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors, from memory or from files, by name into parameters or optimizer states, sharded or not."""
    if isinstance(values, StoredTensors):
        values.fill(targets)
        return
    for name, target in targets.items():
        fill(target, values[name])


def writer_of(folder: Path, sizes: Mapping[str, int], ranks: int) -> HuggingFaceStorageWriter:
    """Returns a writer that stores each rank's slices in separate files of about `FILE_BYTES` at most. `sizes` has the
    bytes of each tensor by name, and must be the same on every rank."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    index, room = 1, FILE_BYTES * ranks
    places: dict[str, int] = {}
    for name, size in sizes.items():
        if places and size > room:
            index, room = index + 1, FILE_BYTES * ranks
        places[name], room = index, room - size
    return HuggingFaceStorageWriter(str(folder), places, save_distributed=True)


def files_of(folder: Path, rank: int) -> list[Path]:
    """Returns the files that this rank wrote to the folder."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))
