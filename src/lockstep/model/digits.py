"""The digits of trained weights that a model's files have and the model, which computes in fewer, has not.

fp32 masters start from what is in the files: from weights that were rounded to bf16 on the way in they would begin up
to 0.4 % elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from lockstep.model.conversion import InFiles, fill_from, stored_bytes
from lockstep.model.streamed import Streamed, places_of, weight_files
from lockstep.parallel.sharded_files import StoredTensors


class Trained(Protocol):
    def trainable(self) -> Any: ...


@dataclass(frozen=True)
class Digits:
    """By the name of a trained parameter: where it is in the files. `lost` says that there are such digits, and that
    the files cannot be read tensor by tensor."""

    stored: StoredTensors | None
    places: Mapping[str, InFiles]
    lost: bool = False

    def into(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Into the masters, sharded or not, of those weights that have more digits in the files."""
        if self.stored is not None:
            fill_from(self.stored, [(place, masters[name]) for name, place in self.places.items() if name in masters])


NONE = Digits(None, {})


def digits_of(root: Trained, model: Any, source: Streamed | None, folder: str, dtype: torch.dtype) -> Digits:
    """Of `root`, which trains (parts of) `model`, before it is sharded: sharded parameters are other objects."""
    if source is not None:
        stored, places = source.stored, source.places
    else:
        found = _read(model, folder)
        if found is None:
            return Digits(None, {}, lost=dtype != torch.float32 and _said_to_be_fp32(folder))
        stored, places = found
    trained = {name: places[p] for name, p in root.trainable() if p in places}
    longer = {name: place for name, place in trained.items() if stored_bytes(stored, place) > dtype.itemsize}
    return Digits(stored, longer) if longer else NONE


def _read(model: Any, folder: str) -> tuple[StoredTensors, dict[nn.Parameter, InFiles]] | None:
    files = weight_files(folder)
    if files is None:
        return None
    try:
        stored = StoredTensors(files)
    except (OSError, SafetensorError):
        return None
    places = places_of(model, stored)
    return None if places is None else (stored, places)


def _said_to_be_fp32(folder: str) -> bool:
    """As the folder's own config says; that of the loaded model has the dtype that it was loaded in."""
    told = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return (told.get("dtype") or told.get("torch_dtype")) == "float32"
