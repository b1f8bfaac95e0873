"""Reads and restores the trained weights of a model, and finds the full-precision values of fp32 master weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from lockstep.errors import Refusal
from lockstep.model.adapters.active import is_kept
from lockstep.model.quantized.quantized_folder import stored_tensors
from lockstep.model.streamed import InFiles, Streamed, fill_from, places_of, stored_bytes, weight_files
from lockstep.parallel.sharded_files import StoredTensors, fill_all, shapes_of
from lockstep.parallel.sharding import whole

# Patterns for the names of bias and norm parameters that are direct parameters of a larger module.
_BIAS = re.compile(r"(^|_)bias(_|$)")
_NORM = re.compile(r"(^|_)(layer|rms|batch|group)?norm(_|$)")


def biases_and_norms(model: nn.Module) -> frozenset[str]:
    """Returns the names of biases and norm scales, which get no weight decay. The number of dimensions does not show
    whether a parameter is a bias or norm scale: biases of stacked experts (gpt-oss) and per-head norm scales (Cohere)
    are matrices."""
    found = set()
    for name, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for leaf, _ in module.named_parameters(recurse=False):
            if norm or _BIAS.search(leaf) or _NORM.search(leaf):
                found.add(f"{name}.{leaf}" if name else leaf)
    return frozenset(found)


def held_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the trained parameters of this rank, which are shards if the model is sharded. The frozen initial adapter
    of PiSSA belongs to them."""
    return {name: p.detach() for name, p in model.named_parameters() if is_kept(name, p)}


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the full trained parameters on the host. Parameters that are already on the CPU are not copied. If the
    model is sharded, all ranks must call this function."""
    return {name: whole(p).cpu() for name, p in held_weights(model).items()}


def restore_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Copies trained weights into the model. The parameter names must match exactly."""
    fill_all(refuse_other_weights(model, weights, where), weights)


def refuse_other_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], where: str) -> dict[str, nn.Parameter]:
    """Returns the trained parameters of the model by name. Raises `Refusal` if the names or shapes of `weights`
    differ."""
    parameters = {name: p for name, p in model.named_parameters() if is_kept(name, p)}
    for name in sorted(parameters.keys() ^ weights.keys()):
        side = "the checkpoint" if name not in weights else "the model"
        raise Refusal.at(
            where,
            f"{side} has no weight {name}",
            "use the recipe the checkpoint was trained with",
            code="missing-weight",
        )
    shapes = shapes_of(weights)
    for name, parameter in parameters.items():
        if parameter.shape != shapes[name]:
            raise Refusal.at(
                where,
                f"{name} has shape {tuple(shapes[name])} in the checkpoint and {tuple(parameter.shape)} in the model",
                code="wrong-shape",
            )
    return parameters


# fp32 master weights start from the values in the files, because weights rounded to bf16 differ from them by up to 0.4
# %.


class Trained(Protocol):
    def trainable(self) -> Any: ...


@dataclass(frozen=True)
class Digits:
    """Where to read trained parameters that the files store in a wider dtype than the model has. `lost` is true if the
    files have a wider dtype but cannot be read tensor by tensor."""

    stored: StoredTensors | None
    places: Mapping[str, InFiles]
    lost: bool = False

    def into(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Copies the values of the files into the master weights, sharded or not."""
        if self.stored is not None:
            fill_from(self.stored, [(place, masters[name]) for name, place in self.places.items() if name in masters])


NONE = Digits(None, {})


def digits_of(
    root: Trained,
    model: Any,
    source: Streamed | None,
    folder: str,
    dtype: torch.dtype,
    found: tuple[StoredTensors, dict[nn.Parameter, InFiles]] | None = None,
) -> Digits:
    """Returns where to read the full-precision values of the parameters that `root` trains. `root` contains `model` or
    parts of it. Call this function before sharding, because sharding replaces parameters. For a model with adapters,
    `found` is what `read_places` returned before the adapters were added."""
    if source is not None:
        stored, places = source.stored, source.places
    else:
        found = found or read_places(model, folder)
        if found is None:
            return Digits(None, {}, lost=dtype != torch.float32 and _is_stored_in_fp32(folder))
        stored, places = found
    trained = {name: places[p] for name, p in root.trainable() if p in places}
    longer = {name: place for name, place in trained.items() if stored_bytes(stored, place) > dtype.itemsize}
    return Digits(stored, longer) if longer else NONE


def read_places(model: Any, folder: str) -> tuple[StoredTensors, dict[nn.Parameter, InFiles]] | None:
    """Returns the files of a loaded model, and where each of its parameters is in the files."""
    files = weight_files(folder)
    if files is None:
        return None
    try:
        stored = stored_tensors(files, folder)
    except (OSError, SafetensorError):
        return None
    places = places_of(model, stored)
    return None if places is None else (stored, places)


def _is_stored_in_fp32(folder: str) -> bool:
    """Returns whether config.json of the folder says float32. The config of the loaded model has the dtype in which it
    was loaded."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return (config.get("dtype") or config.get("torch_dtype")) == "float32"
