"""A disk cache with the log-probs of a frozen model for every target token of a dataset.

A cache is a folder of `.npy` files with a `manifest.json`. The folder is written under a temporary name and then
renamed. The fingerprint of a cache is computed from the files of the model, the tokenized rows (after the chat
template) and the settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.data.array_store import sequences
from lockstep.data.updates import Update, even_groups
from lockstep.model.fingerprint import model_checksums
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import World
from lockstep.run.checkpoint import require_disk
from lockstep.run.files import written_aside
from lockstep.types import Example, Item

MANIFEST = "manifest.json"
# The number of rows that are computed together. A large number of rows allows dense packing.
GROUP = 256

Columns = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The shape of a column of a cache. `width` is the number of values per target token; 0 means one value and no
    second axis."""

    dtype: str
    width: int = 0

    def of(self, targets: int) -> tuple[int, ...]:
        return (targets, self.width) if self.width else (targets,)


class LogprobCache:
    """A cache whose columns are memory-mapped."""

    def __init__(self, folder: Path, names: Sequence[str], examples: Iterable[Example]):
        self._columns = {name: np.lib.format.open_memmap(folder / f"{name}.npy", "r") for name in names}
        # Examples are identified by content, because they are new objects in every epoch.
        self._starts: dict[bytes, int] = {}
        start = 0
        for example in examples:
            self._starts.setdefault(_identity(example), start)
            start += example.targets

    def rows(self, update: Update[Any]) -> np.ndarray:
        """Returns the cache indices of the target tokens of an update."""
        starts = ((self._starts[_identity(example)], example.targets) for example in update.examples)
        return np.concatenate([np.arange(start, start + targets) for start, targets in starts])

    def take(self, name: str, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self._columns[name][rows]))


def fingerprint(path: str, examples: Iterable[Example], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the fingerprint of a cache: model files, tokenized rows and settings."""
    return {"model": model_checksums(model_folder(path)), "rows": _rows_digest(examples), "asked": settings}


def open_cache(
    parent: Path,
    kind: str,
    identity: dict[str, Any],
    shapes: dict[str, Shape],
    items: Sequence[Item],
    compute: Callable[[Sequence[Item]], Columns],
    world: World,
    advance: Callable[[int], None],
) -> LogprobCache:
    """Returns the cache of these rows. Computes and writes the cache if it is not on disk. `compute` returns the
    columns of some rows, and every rank must call it."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    folder = parent / f"{kind}-{digest[:16]}"
    targets = sum(example.targets for example in sequences(items))
    if world.gather(_is_complete(folder, shapes, targets))[0]:
        advance(len(items))
    else:
        parts = _computed(items, compute, advance)
        if world.main:
            _write(folder, identity, shapes, targets, parts)
        else:
            for _ in parts:
                pass  # every rank computes a part of the rows; only rank 0 writes files
        world.barrier()
    return LogprobCache(folder, list(shapes), sequences(items))


def _is_complete(folder: Path, shapes: dict[str, Shape], targets: int) -> bool:
    """Returns whether the cache folder is complete. An incomplete cache is computed again."""
    if not (folder / MANIFEST).is_file():
        return False
    for name, shape in shapes.items():
        try:
            # np.load is not used, because it also reads zip archives and pickles.
            column = np.lib.format.open_memmap(folder / f"{name}.npy", "r")
        except (OSError, ValueError):
            return False
        if column.shape != shape.of(targets) or column.dtype != np.dtype(shape.dtype):
            return False
    return True


def _computed(
    items: Sequence[Item], compute: Callable[[Sequence[Item]], Columns], advance: Callable[[int], None]
) -> Iterator[Columns]:
    for group in even_groups(items, GROUP):
        yield compute(group)
        advance(len(group))


def _write(
    folder: Path, identity: dict[str, Any], shapes: dict[str, Shape], targets: int, parts: Iterable[Columns]
) -> None:
    with written_aside(folder, over=True) as aside:
        aside.mkdir(parents=True)
        _write_columns(aside, folder.name, shapes, targets, parts)
        (aside / MANIFEST).write_text(json.dumps(identity, indent=2), encoding="utf-8")


def _write_columns(aside: Path, name: str, shapes: dict[str, Shape], targets: int, parts: Iterable[Columns]) -> None:
    size = sum(int(np.prod(shape.of(targets))) * np.dtype(shape.dtype).itemsize for shape in shapes.values())
    require_disk(aside, size, name)
    files = {
        name: np.lib.format.open_memmap(aside / f"{name}.npy", "w+", shape.dtype, shape.of(targets))
        for name, shape in shapes.items()
    }
    start = 0
    for part in parts:
        end = start + len(next(iter(part.values())))
        for name, file in files.items():
            file[start:end] = part[name].numpy()
        start = end
    for file in files.values():
        file.flush()


def _rows_digest(examples: Iterable[Example]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(_content(example))
    return digest.hexdigest()


def _identity(example: Example) -> bytes:
    """Returns a hash of an example and its origin. The origin is included, because equal rows in different batches may
    have log-probs with different rounding."""
    return hashlib.blake2b(str(example.origin).encode() + b"\0" + _content(example), digest_size=16).digest()


def _content(example: Example) -> bytes:
    ids = np.asarray([len(example), *example.ids], dtype=np.int64)
    images = b"".join(bytes.fromhex(image.ref.digest) for image in example.images)
    return ids.tobytes() + images + np.asarray(example.scored_tokens(), dtype=np.int64).tobytes()
