"""Reads and writes tensors in safetensors files, complete or as slices of several ranks.

A rank can read only its own part of a tensor. Reading and writing use torch.distributed.checkpoint's safetensors
format. Any safetensors reader can open a file; its header says where each slice belongs. Ranks read independently of
each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.parallel.sharding import fill

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# Approximate maximum size of a file. A file is assembled in memory before it is written, so a rank writes several small
# files.
FILE_BYTES = 2**30


class StoredTensors(Mapping[str, torch.Tensor]):
    """A mapping of the tensors in `files` whose names start with `prefix`. Keys are the names without the prefix.
    `stored[name]` reads a complete tensor. `fill` reads only this rank's part."""

    def __init__(self, files: Iterable[Path], prefix: str = ""):
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from lockstep.parallel.slice_reader import SliceReader

        self.files = sorted(files)
        self._reader = SliceReader(self.files)
        self._prefix = prefix
        metadata = self._reader.read_metadata().state_dict_metadata
        self._metadata: dict[str, TensorStorageMetadata] = {
            name.removeprefix(prefix): entry
            for name, entry in metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        metadata = self._metadata[name]
        tensor = torch.empty(metadata.size, dtype=metadata.properties.dtype)
        self.fill({name: tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)

    def shape(self, name: str) -> torch.Size:
        return self._metadata[name].size

    def dtype(self, name: str) -> torch.dtype:
        return self._metadata[name].properties.dtype

    @torch.no_grad()
    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Reads stored tensors into targets of the same shapes. The targets may be sharded, and have any dtype and
        device."""
        from torch.distributed.checkpoint import load as load_parts

        if targets:
            requested: dict[str, Any] = {self._prefix + name: target.detach() for name, target in targets.items()}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load_parts(requested, storage_reader=self._reader, no_dist=True)


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
