"""Loads sharded models directly from safetensors files: a rank holds only its shard and one tensor.

Modules are built without storage, sharded, and filled from the files, with the renaming and merging of transformers
(`weight_conversion.py`). Models that do not support this are loaded completely by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from lockstep.model.pretrained import kept_in_fp32, refuse_not_finite, unused_weights
from lockstep.model.weight_conversion import (
    META,
    InFiles,
    Unmapped,
    conversions_of,
    fill_from,
    places_by_name,
    refuse_operations,
)
from lockstep.parallel.sharded_files import StoredTensors
from lockstep.parallel.sharding import Sharding, held_part, materialise, shard

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Streamed:
    """A model without weights, and the location of each parameter in its files. Keys are the parameter objects, which
    do not change when the model is wrapped."""

    model: Any
    stored: StoredTensors
    places: dict[nn.Parameter, InFiles]
    where: str
    """Names the model in refusals."""
    unused: tuple[str, ...] = ()
    """Tensors of the files that the model does not have."""

    def replaced(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters of the model by others."""
        for before, now in others.items():
            if before in self.places:
                self.places[now] = self.places.pop(before)

    def shard(self, root: nn.Module, layers: list[nn.Module], sharding: Sharding) -> None:
        """Shard `root` and fill it from the files; other parameters keep their values."""
        # Sharding creates new parameter objects.
        places = {name: self.places[p] for name, p in root.named_parameters() if p in self.places}
        shard(root, layers, sharding)
        materialise(root, sharding)
        parameters = dict(root.named_parameters())
        fill_from(self.stored, [(place, parameters[name]) for name, place in places.items()])
        filled = {parameters[name] for name in places}
        # Parameter names without wrappers.
        named = {name.replace(".base_layer", ""): p for name, p in self.model.named_parameters() if p in filled}
        refuse_not_finite({name: held_part(p.detach())[0] for name, p in named.items()}, self.where)


def streamed(build: Callable[[], PreTrainedModel], path: str, where: str) -> Streamed | None:
    """The model of `build` without weights; None if the folder cannot be streamed."""
    files = weight_files(path)
    if files is None:
        return None
    with _without_weights():
        model = build()
    try:
        stored = StoredTensors(files)
    except (OSError, SafetensorError):
        return None  # transformers reports the error
    unused: list[str] = []
    places = places_of(model, stored, unused)
    if places is None or not _with_buffers(model, stored):
        return None
    generation = Path(path) / "generation_config.json"
    if model.can_generate() and generation.is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_dict(json.loads(generation.read_text(encoding="utf-8")))
    return Streamed(model, stored, places, where, unused_weights(model, unused, where))


def weight_files(path: str) -> list[Path] | None:
    """The safetensors files of a model folder; None if it has none or is not a local folder."""
    index, alone = Path(path) / "model.safetensors.index.json", Path(path) / "model.safetensors"
    if index.is_file():
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = sorted({Path(path) / str(name) for name in places})
        except (OSError, ValueError, KeyError, AttributeError):
            return None
        return files if all(file.is_file() for file in files) else None
    return [alone] if alone.is_file() else None


def places_of(
    model: PreTrainedModel, stored: StoredTensors, unused: list[str] | None = None
) -> dict[nn.Parameter, InFiles] | None:
    """The location of each parameter in the files; None if one is missing. Tied parameters have several names, of which
    the files may have any. Unused tensors are added to `unused`."""
    if loaded_whole(model, model.dtype) is not None:
        return None
    try:
        by_name = places_by_name(model, stored, unused)
    except Unmapped:
        return None
    found: dict[nn.Parameter, InFiles] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in by_name:
            continue
        place = found.setdefault(parameter, by_name[name])
        if place is not by_name[name] and not _alike(stored, place, by_name[name]):
            return None  # transformers does not tie them in this case
    return found if all(parameter in found for parameter in model.parameters()) else None


def _alike(stored: StoredTensors, one: InFiles, other: InFiles) -> bool:
    return isinstance(one, str) and isinstance(other, str) and torch.equal(stored[one], stored[other])


def _with_buffers(model: PreTrainedModel, stored: StoredTensors) -> bool:
    """Load the buffers that are in the files (such as a router's bias), unsharded; returns whether all were found."""
    names = stored_buffers(model)
    if not names:
        return True
    kept, by_name = kept_in_fp32(model, model.dtype), places_by_name(model, stored)
    for name in names:
        place = by_name.get(name)
        if not isinstance(place, str):
            return False
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        value = stored[place].to(torch.float32 if kept(name) else owner.get_buffer(leaf).dtype)
        owner._buffers[leaf] = value
    return True


def stored_buffers(model: PreTrainedModel) -> list[str]:
    """The buffers that `save_pretrained` writes."""
    saved = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name in saved]


def loaded_whole(model: PreTrainedModel, dtype: torch.dtype) -> str | None:
    """Why the model cannot be streamed, by its class and configuration; None if it can."""
    if getattr(model.config, "quantization_config", None):
        return "it is quantised"
    kept = kept_in_fp32(model, dtype)
    mixed = next((name for name, _ in model.named_parameters() if kept(name)), None)
    if mixed is not None:
        return f"transformers keeps {mixed} in fp32"
    try:
        refuse_operations(conversions_of(model))
    except Unmapped as why:
        return str(why)
    return None


@contextmanager
def _without_weights() -> Iterator[None]:
    """Build modules with parameters on the meta device. Buffers keep their storage, because they are computed."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, parameter)
        if parameter is not None:
            taken = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
            module._parameters[name] = parameter if parameter.device == META else taken

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@contextmanager
def adapters_on_host() -> Iterator[None]:
    """Keep new adapters on the host. PEFT moves an adapter to the device of its layer; on meta, its values are lost."""
    original = nn.Module.to

    def to(module: nn.Module, *where: Any, **more: Any) -> nn.Module:
        where = tuple(one for one in where if one != META)
        more = {name: one for name, one in more.items() if one != META}
        return original(module, *where, **more) if where or more else module

    nn.Module.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]
