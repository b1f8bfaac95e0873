"""Tensors in safetensors files, whole or in slices that several ranks wrote: any rank reads what it holds of them.

Both directions are torch.distributed.checkpoint's, in its safetensors format: a file is read by anything that reads
safetensors, and says in its header where its slices belong. Reading needs no other rank.
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

# A file is put together in memory before it is written, so a rank's part goes into several.
FILE_BYTES = 2**30


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of some files by name, those that begin with `prefix` and without it. `stored[name]` reads a whole
    one; `fill` reads only what this rank holds."""

    def __init__(self, files: Iterable[Path], prefix: str = ""):
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from lockstep.parallel.slice_reader import SliceReader

        self._reader = SliceReader(sorted(files))
        self._prefix = prefix
        told = self._reader.read_metadata().state_dict_metadata
        self._told: dict[str, TensorStorageMetadata] = {
            name.removeprefix(prefix): one
            for name, one in told.items()
            if name.startswith(prefix) and isinstance(one, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        told = self._told[name]
        tensor = torch.empty(told.size, dtype=told.properties.dtype)
        self.fill({name: tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._told)

    def __len__(self) -> int:
        return len(self._told)

    def shape(self, name: str) -> torch.Size:
        return self._told[name].size

    def dtype(self, name: str) -> torch.dtype:
        return self._told[name].properties.dtype

    @torch.no_grad()
    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy into tensors of the same shapes, sharded or not, of any dtype and on any device."""
        from torch.distributed.checkpoint import load as load_parts

        if targets:
            wanted: dict[str, Any] = {self._prefix + name: target.detach() for name, target in targets.items()}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load_parts(wanted, storage_reader=self._reader, no_dist=True)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    if isinstance(tensors, StoredTensors):
        return {name: tensors.shape(name) for name in tensors}
    return {name: tensor.shape for name, tensor in tensors.items()}


def fill_all(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Copy whole or stored tensors by name into parameters or states, sharded or not."""
    if isinstance(values, StoredTensors):
        values.fill(targets)
        return
    for name, target in targets.items():
        fill(target, values[name])


def writer_of(folder: Path, sizes: Mapping[str, int], ranks: int) -> HuggingFaceStorageWriter:
    """Writes each rank's slices to files of its own, of at most about `FILE_BYTES`. `sizes` are the bytes of all that
    any rank writes, by name and the same on every rank."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    index, room = 1, FILE_BYTES * ranks
    places: dict[str, int] = {}
    for name, size in sizes.items():
        if places and size > room:
            index, room = index + 1, FILE_BYTES * ranks
        places[name], room = index, room - size
    return HuggingFaceStorageWriter(str(folder), places, save_distributed=True)


def files_of(folder: Path, rank: int) -> list[Path]:
    """What that rank wrote."""
    return sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))
