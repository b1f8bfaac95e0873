"""A model whose weights come from their files a slice at a time: no rank ever holds more than its share and one tensor.

The modules are built without storage, sharded, and filled from the safetensors files of the folder. That needs files
whose tensors are the model's parameters under their own names; of other folders transformers loads the whole model.
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

from lockstep.parallel.shard import Sharding, materialise, shard
from lockstep.parallel.stored import StoredTensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

META = torch.device("meta")


@dataclass(frozen=True)
class Streamed:
    """A model without weights, and where in its files each of them is: by the parameter itself, which stays the same
    when the model is put into another module."""

    model: Any
    stored: StoredTensors
    names: dict[nn.Parameter, str]

    def replaced(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        """Parameters of the model that others stand for now."""
        for before, now in others.items():
            if before in self.names:
                self.names[now] = self.names.pop(before)

    def shard(self, root: nn.Module, layers: list[nn.Module], sharding: Sharding) -> None:
        """Shard `root` and fill it; what is no part of the model keeps its values."""
        # Sharded parameters are other objects.
        names = {name: self.names[p] for name, p in root.named_parameters() if p in self.names}
        shard(root, layers, sharding)
        materialise(root, sharding)
        parameters = dict(root.named_parameters())
        self.stored.fill({key: parameters[name] for name, key in names.items()})


def streamed(build: Callable[[], PreTrainedModel], path: str) -> Streamed | None:
    """What `build` makes, without weights; None where the folder must be loaded whole."""
    files = weight_files(path)
    if files is None:
        return None
    with _without_weights():
        model = build()
    try:
        stored = StoredTensors(files)
    except (OSError, SafetensorError):
        return None  # transformers says what is wrong with them
    names = places_of(model, stored)
    if names is None:
        return None
    generation = Path(path) / "generation_config.json"
    if model.can_generate() and generation.is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_dict(json.loads(generation.read_text(encoding="utf-8")))
    return Streamed(model, stored, names)


def weight_files(path: str) -> list[Path] | None:
    """The safetensors files of a model folder; None where it has none, or is no local folder."""
    index, alone = Path(path) / "model.safetensors.index.json", Path(path) / "model.safetensors"
    if index.is_file():
        try:
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = sorted({Path(path) / str(name) for name in places})
        except (OSError, ValueError, KeyError, AttributeError):
            return None
        return files if all(file.is_file() for file in files) else None
    return [alone] if alone.is_file() else None


def places_of(model: PreTrainedModel, stored: StoredTensors) -> dict[nn.Parameter, str] | None:
    """Where in the files each parameter is; None where loading is more than copying them. Tied parameters have several
    names, of which the files may have any."""
    if beyond_copying(model):
        return None
    found: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in stored and stored.shape(name) == parameter.shape:
            found.setdefault(parameter, name)
    return found if all(parameter in found for parameter in model.parameters()) else None


def beyond_copying(model: PreTrainedModel) -> bool:
    """Whether loading is more than a copy of each tensor in the model's dtype."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    kinds = {module.config.model_type for module in model.modules() if isinstance(module, PreTrainedModel)}
    buffers = dict(model.named_buffers()).keys() & model.state_dict().keys()
    return bool(
        buffers
        or getattr(model.config, "quantization_config", None)
        or getattr(model, "_keep_in_fp32_modules", None)
        or getattr(model, "_keep_in_fp32_modules_strict", None)
        or any(get_checkpoint_conversion_mapping(kind) for kind in kinds)
    )


@contextmanager
def _without_weights() -> Iterator[None]:
    """Parameters lose their storage as soon as a module takes them; buffers, which are computed, keep theirs."""
    own = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        own(module, name, parameter)
        if parameter is not None:
            taken = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
            module._parameters[name] = parameter if parameter.device == META else taken

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]


@contextmanager
def adapters_on_host() -> Iterator[None]:
    """PEFT moves a fresh adapter to where its layer is: with one without storage, what was drawn would be lost."""
    own = nn.Module.to

    def to(module: nn.Module, *where: Any, **more: Any) -> nn.Module:
        where = tuple(one for one in where if one != META)
        more = {name: one for name, one in more.items() if one != META}
        return own(module, *where, **more) if where or more else module

    nn.Module.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.to = own  # type: ignore[method-assign]
