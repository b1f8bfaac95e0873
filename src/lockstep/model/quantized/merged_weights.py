"""Merges an adapter into its quantised base model, one tensor at a time.

An adapter is trained on the dequantised weights, so it is merged into these and not into the weights of the files. The
merged weights are computed in fp32 and rounded once. Neither the original nor the merged model is ever in memory as a
whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import Problem, Refusal, first_line, refuse_all
from lockstep.kernels.quantized.formats import dequantize
from lockstep.model.adapters.active import give_storage
from lockstep.model.decoder import own_attention
from lockstep.model.load_folder import DTYPES, ModelFolders, load_base, stream_transformers
from lockstep.model.lora import NewAdapter, with_adapter
from lockstep.model.quantized.quantize import CodedWeight, dequantize_layers
from lockstep.model.streamed import InFiles, Streamed, blocks_of, coded_blocks_of
from lockstep.model.text_model import LanguageModel
from lockstep.model.weights import restore_weights
from lockstep.recipe.schema import Model


class MergedWeights(Mapping[str, torch.Tensor]):
    """The merged weights in fp32 by parameter name, computed at each access. `source.model` has the adapter. `places`
    and `shapes` describe the model before it was quantised."""

    def __init__(
        self,
        source: Streamed,
        places: Mapping[str, InFiles],
        shapes: Mapping[str, torch.Size],
        layers: Mapping[str, Any],
        dtype: torch.dtype,
    ):
        self.source, self.places, self.shapes, self.layers, self.dtype = source, places, shapes, layers, dtype
        self.coded: dict[str, CodedWeight] = {one.name: one for one in source.coded}

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        coded, stored, place = self.coded.get(name), self.source.stored, self.places[name]
        if coded is None:
            blocks = [block.to(self.dtype).float() for _, block in blocks_of(stored, place)]
        else:
            found = (coded.coding.coded(block) for _, block in coded_blocks_of(stored, place, coded.coding))
            blocks = [dequantize(codes, self.dtype).float() for codes in found]
        weight = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        layer = self.layers.get(name)
        return weight if layer is None else weight + layer.get_delta_weight(layer.active_adapters[0])


def merged_weights(
    settings: Model, folders: ModelFolders, trained: Mapping[str, torch.Tensor], where: str
) -> tuple[Any, MergedWeights] | None:
    """Returns the model without weights, for its config and the names of its tensors, and its merged weights. Returns
    None if the tensors of the model cannot be read one by one, or if the adapter changes more than linear layers."""
    source = stream_transformers(LanguageModel, folders.model, settings.dtype, settings.path)
    if source is None:
        return None
    parameters = dict(source.model.named_parameters())
    places = {name: source.places[parameter] for name, parameter in parameters.items()}
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    source.quantize(settings, DTYPES[settings.dtype])
    adapted = with_adapter(source.model, settings.lora, NewAdapter(0, values=False), folders.adapter)
    give_storage(adapted)
    restore_weights(adapted, trained, where)
    layers = _merged_layers(adapted, shapes)
    if layers is None:
        return None
    # The product of the adapter's matrices is computed in fp32.
    for layer in layers.values():
        layer.lora_A.float()
        layer.lora_B.float()
    return source.model, MergedWeights(source, places, shapes, layers, DTYPES[settings.dtype])


def _merged_layers(adapted: Any, shapes: Mapping[str, torch.Size]) -> dict[str, Any] | None:
    """Returns the adapter of each weight. Returns None if an adapter adds more than a product of two matrices."""
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    model, found = adapted.get_base_model(), {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if type(layer) is not Linear or layer.lora_variant or f"{name}.weight" not in shapes:
            return None
        found[f"{name}.weight"] = layer
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    return found if trained == 2 * len(found) else None


def dequantized_base(settings: Model, folders: ModelFolders, dtype: torch.dtype) -> Any:
    """Returns the base model in host memory, with the dequantised weights on which its adapter was trained."""
    cpu = torch.device("cpu")
    _, model, _ = load_base(LanguageModel, folders.model, settings, settings.path, cpu, None)
    dequantize_layers(model, dtype)
    model.set_attn_implementation(own_attention(model))
    return model.to(dtype)


# An exported adapter records the quantised weights on which it was trained, so that it can be merged into these.

RECORD = "quantized_base.json"
_RECORDED = ("dtype", "quantize", "double_quantize", "quantize_exclude")


def base_record(settings: Model) -> dict[str, str]:
    """Returns the file that an exported adapter has beside its weights, by name. An adapter of weights that are not
    quantised has no such file."""
    if settings.quantize is None:
        return {}
    return {RECORD: json.dumps({key: getattr(settings, key) for key in _RECORDED}, indent=2) + "\n"}


def recorded_base(adapter: Path, base: str, where: str) -> Model | None:
    """Returns the model settings of the quantised weights on which an adapter was trained, or None if these were not
    quantised."""
    file = adapter / RECORD
    if not file.is_file():
        return None
    try:
        return Model(path=base, **json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        why = f"{RECORD} cannot be read: {first_line(error)}"
        raise Refusal.at(where, why, "export the adapter again", code="damaged-file") from error


def refuse_other_base(adapter: Path, settings: Model, where: str) -> None:
    """Raises `Refusal` if an adapter was trained on quantised weights, and the recipe gives it other weights."""
    found = recorded_base(adapter, settings.path, where)
    if found is None:
        return
    keys = [key for key in _RECORDED[1:] if key != "double_quantize" or found.quantize == settings.quantize == "nf4"]
    problems = [
        Problem(
            f"model.{key}",
            f"is {json.dumps(now)}, but {where} was trained on weights with {json.dumps(then)} ({RECORD})",
            f"set model.{key}={json.dumps(then)}; or merge the adapter: set model.path to its path",
            code="changed-setting",
        )
        for key in keys
        if (now := getattr(settings, key)) != (then := getattr(found, key))
    ]
    refuse_all(problems)
