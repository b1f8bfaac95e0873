"""Loads sharded models directly from safetensors files, so that a rank needs memory only for its shard and one tensor.

Modules are built on the meta device and sharded. After sharding, each rank reads its shards of the weights from the
files. Tensors are renamed and merged as in transformers. If the tensors of a model cannot be read one by one,
transformers loads the model completely.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from lockstep.kernels.quantized.formats import Quantized
from lockstep.kernels.quantized.quantized_linear import Coding
from lockstep.model.pretrained import kept_in_fp32, refuse_not_finite, unused_weights
from lockstep.model.quantized.quantize import CodedWeight, fill_codes, quantize_layers
from lockstep.model.quantized.quantized_folder import QuantizedTensors, stored_tensors
from lockstep.parallel.sharded_files import StoredTensors
from lockstep.parallel.sharding import Sharding, held_part, materialise, shard
from lockstep.recipe.schema import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Tensors of the files are converted to model tensors with transformers' weight mapping. For example, the tensors of
# single experts are stacked. The conversion operations of transformers are applied to one model tensor at a time. For a
# stack of experts the operations are applied only to the experts of this rank.

META = torch.device("meta")
# Conversion operations of transformers that only move values, so that they work in any dtype.
MOVES = ("MergeModulelist", "Concatenate", "Chunk", "Split", "Transpose", "Interleave", "PermuteForRope")
# The experts of a stacked tensor are read in blocks of about this many bytes.
BLOCK_BYTES = 2**26


class Unmapped(Exception):
    """Raised if the tensors of a model cannot be read from the files one by one. The message says why."""


@dataclass(frozen=True)
class Shapes:
    """An object that is passed to conversion operations in place of the model. It only provides the shapes of
    parameters by name. The names have no prefixes of wrappers."""

    parameters: Mapping[str, torch.Tensor]

    def get_parameter(self, name: str) -> torch.Tensor:
        return self.parameters[name]


@dataclass(frozen=True)
class Made:
    """A model tensor that is converted from several file tensors. `sources` has the names of the file tensors for each
    pattern of the converter."""

    name: str
    first: str
    """The name of the first model tensor that is converted from these file tensors. transformers identifies the
    conversion by this name."""
    converter: Any
    sources: Mapping[str, tuple[str, ...]]
    shapes: Shapes
    config: Any

    @property
    def keys(self) -> list[str]:
        return [key for keys in self.sources.values() for key in keys]

    @property
    def stacked(self) -> bool:
        """Whether row i of the model tensor depends only on the i-th file tensor of each pattern, as in a stack of
        experts."""
        from transformers.core_model_loading import MergeModulelist

        merge, *more = self.converter.operations
        return type(merge) is MergeModulelist and merge.dim == 0 and all(_keeps_rows(operation) for operation in more)

    def fill(self, stored: StoredTensors, target: torch.Tensor) -> None:
        """Reads this rank's part of the model tensor from the files into `target`, which may be sharded."""
        part, offsets = held_part(target)
        if not part.numel():
            return
        if not self.stacked:
            made = self.converted(_read(stored, self.keys, part.dtype))[self.name]
            for dimension, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
                made = made.narrow(dimension, offset, size)
            part.copy_(made)
            return
        rows = max(1, BLOCK_BYTES // (part[0].numel() * part.element_size()))
        for begin in range(0, len(part), rows):
            block = part[begin : begin + rows]
            wanted = slice(offsets[0] + begin, offsets[0] + begin + len(block))
            keys = [key for one in self.sources.values() for key in one[wanted]]
            made = self.converted(_read(stored, keys, part.dtype))[self.name]
            for dimension in range(1, part.ndim):
                made = made.narrow(dimension, offsets[dimension], part.shape[dimension])
            block.copy_(made)

    def converted(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Converts file tensors to model tensors and returns these by name. Removes the file tensors from `tensors`, so
        that each one is freed as soon as possible."""
        converter = deepcopy(self.converter)
        for pattern, keys in self.sources.items():
            for key in keys:
                if key in tensors:
                    converter.add_tensor(self.first, key, pattern, tensors.pop(key))
        made = converter.convert(self.first, model=self.shapes, config=self.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


InFiles = str | Made
"""Where a model tensor is in the files: the name of one file tensor, or a conversion of several file tensors."""


def fill_from(stored: StoredTensors, targets: list[tuple[InFiles, torch.Tensor]]) -> None:
    """Reads the target tensors, sharded or not, from the files. Converted tensors are read one after the other, to save
    memory."""
    named = [(place, target) for place, target in targets if isinstance(place, str)]
    stored.fill(dict(named))
    # A trained copy of a module (`modules_to_save`) has the same place in the files as the module.
    last = dict(named)
    stored.fill({place: target for place, target in named if target is not last[place]})
    with torch.no_grad():
        for place, target in targets:
            if isinstance(place, Made):
                place.fill(stored, target.detach())


def stored_bytes(stored: StoredTensors, place: InFiles) -> int:
    """Returns how many bytes one element of a model tensor has in the files. For a model tensor that is converted from
    several file tensors, returns the largest element size of these file tensors."""
    return max(stored.dtype(key).itemsize for key in ([place] if isinstance(place, str) else place.keys))


def conversions_of(model: PreTrainedModel) -> list[Any]:
    """Returns the mapping of file tensors to model tensors that transformers uses for loading."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def refuse_operations(conversions: list[Any]) -> None:
    """Raises `Unmapped` if a conversion operation does more than move values."""
    from transformers import core_model_loading

    moves = {getattr(core_model_loading, name) for name in MOVES if hasattr(core_model_loading, name)}
    for operation in (one for conversion in conversions for one in getattr(conversion, "operations", ())):
        if type(operation) not in moves:
            raise Unmapped(f"transformers creates some of the model's tensors with {type(operation).__name__}")


def places_by_name(
    model: PreTrainedModel, stored: StoredTensors, unused: list[str] | None = None
) -> dict[str, InFiles]:
    """Returns for each model tensor from which file tensors transformers would load it. Raises `Unmapped` if this
    mapping is not certain. The model keeps the list of conversions, which `save_pretrained` needs. Names of file
    tensors that the model does not use are added to `unused`."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = conversions_of(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    converter_of = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, InFiles] = {}
    collected: dict[str, dict[str, list[str]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            if unused is not None:
                unused.append(name)
            continue
        if name in found or (pattern is None and name in collected):
            raise Unmapped(f"its files have {name} more than once")
        if pattern is None:
            found[name] = key
        else:
            collected.setdefault(name, {}).setdefault(pattern, []).append(key)
    used = [one for one in conversions if one.was_used()]
    refuse_operations(used)
    shapes = Shapes({name: torch.empty(one.shape, device=META) for name, one in state.items()})
    for first, sources in collected.items():
        for made in _made(first, sources, converter_of, stored, shapes, model.config):
            if made.name in found:
                raise Unmapped(f"its files have {made.name} more than once")
            found[made.name] = made
    for name, place in found.items():
        if isinstance(place, str) and stored.shape(place) != state[name].shape:
            raise Unmapped(f"{name} has another shape in its files than in the model")
    model._weight_conversions = used
    return found


def _made(
    first: str,
    sources: Mapping[str, list[str]],
    converter_of: Mapping[str, Any],
    stored: StoredTensors,
    shapes: Shapes,
    config: Any,
) -> list[Made]:
    """Returns the model tensors that are converted from these file tensors (`sources`). Tests the conversion on the
    meta device."""
    if len({id(converter_of[pattern]) for pattern in sources}) > 1:
        raise Unmapped(f"{first} has two different converters")
    converter = converter_of[next(iter(sources))]
    kept = {pattern: tuple(keys) for pattern, keys in sources.items()}
    trial = Made(first, first, converter, kept, shapes, config)
    tensors = {key: torch.empty(stored.shape(key), device=META) for key in trial.keys}
    try:
        results = trial.converted(tensors)
    except Exception as error:  # operations raise various errors for unexpected files
        raise Unmapped(f"{first} cannot be converted from the tensors in its files") from error
    for name, result in results.items():
        if name not in shapes.parameters or result.shape != shapes.parameters[name].shape:
            raise Unmapped(f"{name} gets another shape when it is converted")
    found = [Made(name, first, converter, kept, shapes, config) for name in results]
    for one in found:
        if one.stacked and any(len(keys) != len(results[one.name]) for keys in kept.values()):
            raise Unmapped(f"{one.name} needs one file tensor for each of its rows")
    return found


def _keeps_rows(operation: Any) -> bool:
    """Returns whether each output row of a conversion operation depends only on the same row of its inputs."""
    from transformers.core_model_loading import Concatenate, Interleave, Transpose

    if type(operation) is Transpose:
        return operation.dim0 > 0 and operation.dim1 > 0 and not operation.check_dims
    return type(operation) in (Concatenate, Interleave) and operation.dim > 0


def coded_blocks_of(
    stored: StoredTensors, place: InFiles, coding: Coding
) -> Iterator[tuple[int, torch.Tensor | Quantized]]:
    """Yields the blocks of a model tensor that is stored as codes. If the files have the same codes, yields these."""
    if isinstance(stored, QuantizedTensors) and isinstance(place, str) and stored.is_quantized(place):
        found = stored.quantized(place)
        if isinstance(found, Quantized) and coding.stores(found):
            yield 0, found
            return
    yield from blocks_of(stored, place)


def blocks_of(stored: StoredTensors, place: InFiles) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields a complete model tensor in the dtype of the files, each block with its offset in the first dimension. Only
    a stack of experts has several blocks."""
    if isinstance(place, str):
        yield 0, stored[place]
        return
    if not place.stacked:
        yield 0, place.converted(_read(stored, place.keys))[place.name]
        return
    count = len(next(iter(place.sources.values())))
    of_row = [keys[0] for keys in place.sources.values()]
    size = sum(stored.shape(key).numel() * stored.dtype(key).itemsize for key in of_row)
    rows = max(1, BLOCK_BYTES // size)
    for begin in range(0, count, rows):
        keys = [key for one in place.sources.values() for key in one[begin : begin + rows]]
        yield begin, place.converted(_read(stored, keys))[place.name]


def _read(stored: StoredTensors, keys: list[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    tensors = {key: torch.empty(stored.shape(key), dtype=dtype or stored.dtype(key)) for key in keys}
    stored.fill(tensors)
    return tensors


@dataclass(frozen=True)
class Streamed:
    """A model without weights, and where each of its parameters is in the files. The keys of `places` are the parameter
    objects, because these do not change when the model is wrapped."""

    model: Any
    stored: StoredTensors
    places: dict[nn.Parameter, InFiles]
    where: str
    """How error messages name the model, such as `model.path NAME`."""
    unused: tuple[str, ...] = ()
    """Names of tensors in the files that the model does not use."""
    coded: list[CodedWeight] = field(default_factory=list)
    """The weights that are stored as codes."""

    def quantize(self, settings: Model, dtype: torch.dtype) -> None:
        """Replaces the layers that `model.quantize` names by layers that store codes. Call this function before other
        code wraps or replaces layers."""
        self.coded.extend(quantize_layers(self.model, settings, dtype, self.where))

    def load(self, device: torch.device) -> None:
        """Reads all parameters from the files to one device, tensor by tensor."""
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in filled:  # a tied parameter has several modules
                    empty = torch.empty_like(parameter, device=device)
                    filled[parameter] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = filled[parameter]
        found = {filled[parameter]: place for parameter, place in self.places.items() if parameter in filled}
        fill_from(self.stored, [(place, parameter) for parameter, place in found.items()])
        refuse_not_finite({name: p for name, p in self.model.named_parameters() if p in found}, self.where)
        self._fill_codes(device)
        self.model.to(device)  # the buffers

    def _fill_codes(self, device: torch.device) -> None:
        fill_codes(self.coded, lambda one: self._blocks_of(one), device, self.where)

    def _blocks_of(self, one: CodedWeight) -> Iterator[tuple[int, torch.Tensor | Quantized]]:
        return coded_blocks_of(self.stored, self.places[one.original], one.coding)

    def replaced(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        """Records that parameters of the model were replaced. `others` maps each old parameter to the new one."""
        for before, now in others.items():
            if before in self.places:
                self.places[now] = self.places.pop(before)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns the full values of a parameter on the host, in the dtype of the model."""
        target = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        fill_from(self.stored, [(self.places[parameter], target)])
        return target

    def shard(self, root: nn.Module, layers: list[nn.Module], sharding: Sharding) -> None:
        """Shards `root` and reads its parameters from the files. Parameters that are not in the files keep their
        values."""
        # `self.places` is read before sharding, because its keys are parameter objects, which sharding replaces.
        places = {name: self.places[p] for name, p in root.named_parameters() if p in self.places}
        shard(root, layers, sharding)
        materialise(root, sharding)
        parameters = dict(root.named_parameters())
        fill_from(self.stored, [(place, parameters[name]) for name, place in places.items()])
        filled = {parameters[name] for name in places}
        # The error messages use parameter names without the name parts that wrappers add.
        named = {name.replace(".base_layer", ""): p for name, p in self.model.named_parameters() if p in filled}
        refuse_not_finite({name: held_part(p.detach())[0] for name, p in named.items()}, self.where)
        self._fill_codes(sharding.device)


def streamed(build: Callable[[], PreTrainedModel], path: str, where: str) -> Streamed | None:
    """Builds the model with `build`, without weights, and finds its parameters in the files. Returns None if the
    parameters cannot be read one by one."""
    files = weight_files(path)
    if files is None:
        return None
    with _without_weights():
        model = build()
    try:
        stored = stored_tensors(files, where)
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
    """Returns the safetensors files of a model folder. Returns None if files are missing or `path` is not a local
    folder."""
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
    """Returns where each parameter is in the files, or None if a parameter is missing. A tied parameter has several
    names; the files may use any of these names. Unused tensors of the files are added to `unused`."""
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
            return None  # transformers does not tie weights that differ in the files
    return found if all(parameter in found for parameter in model.parameters()) else None


def _alike(stored: StoredTensors, one: InFiles, other: InFiles) -> bool:
    return isinstance(one, str) and isinstance(other, str) and torch.equal(stored[one], stored[other])


def _with_buffers(model: PreTrainedModel, stored: StoredTensors) -> bool:
    """Loads the complete buffers that are in the files, such as the bias of a router. Returns whether all buffers of
    the model were found."""
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
    """Returns the names of the buffers that `save_pretrained` writes."""
    saved = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name in saved]


def loaded_whole(model: PreTrainedModel, dtype: torch.dtype) -> str | None:
    """Returns why this model class and config must be loaded completely, or None if tensors can be read one by one."""
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
    """Modules that are built inside the `with` block have their parameters on the meta device. Buffers are computed as
    usual, so they have storage."""
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
    """Keeps new adapters on the host inside the `with` block. PEFT moves an adapter to the device of its layer; if that
    is the meta device, its values would be lost."""
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
