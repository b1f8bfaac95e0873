"""Trained weights of a model by parameter name, and the residuals of fp32 master weights."""

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
from lockstep.model.streamed import Streamed, places_of, weight_files
from lockstep.model.weight_conversion import InFiles, fill_from, stored_bytes
from lockstep.parallel.sharded_files import StoredTensors, fill_all, shapes_of
from lockstep.parallel.sharding import whole

# Trained weights out of a model and back into it, by parameter name, sharded or not.

# Of a parameter that its module holds beside others: a norm's scale, an expert's bias.
_BIAS = re.compile(r"(^|_)bias(_|$)")
_NORM = re.compile(r"(^|_)(layer|rms|batch|group)?norm(_|$)")


def biases_and_norms(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay spares, by what they are for: their shapes do not tell. The biases of
    stacked experts are matrices (gpt-oss), and so are the scales of norms that have one for each head (Cohere)."""
    found = set()
    for name, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for leaf, _ in module.named_parameters(recurse=False):
            if norm or _BIAS.search(leaf) or _NORM.search(leaf):
                found.add(f"{name}.{leaf}" if name else leaf)
    return frozenset(found)


def held_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters as this rank holds them: slices where they are sharded."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters, whole and on the host: of a CPU run they themselves (a collective when sharded)."""
    return {name: whole(p).cpu() for name, p in held_weights(model).items()}


def restore_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Put trained weights back; every name must be there on both sides."""
    fill_all(refuse_other_weights(model, weights, where), weights)


def refuse_other_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], where: str) -> dict[str, nn.Parameter]:
    """The trained parameters by name, where the weights are theirs."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name in sorted(parameters.keys() ^ weights.keys()):
        side = "the checkpoint" if name not in weights else "the model"
        raise Refusal.at(where, f"{side} has no weight {name}", "use the recipe the checkpoint was trained with")
    shapes = shapes_of(weights)
    for name, parameter in parameters.items():
        if parameter.shape != shapes[name]:
            raise Refusal.at(
                where, f"{name} is {tuple(shapes[name])} in the checkpoint and {tuple(parameter.shape)} in the model"
            )
    return parameters


# The digits of trained weights that a model's files have and the model, which computes in fewer, has not.
#
# fp32 masters start from what is in the files: from weights that were rounded to bf16 on the way in they would begin
# up to 0.4 % elsewhere.


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
