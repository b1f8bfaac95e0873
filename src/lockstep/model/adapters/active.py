"""Which adapters of a PEFT model are active.

A model has up to three adapters. `TRAINED` is the trained adapter. `INITIAL` is the frozen, negative copy of the first
values of a PiSSA adapter; it is always active together with `TRAINED`. `START` and `FIRST` are frozen copies of the
adapter with which the run started; they are active only while the model is the reference model. `START` is read again
from `model.lora.adapter` when the run resumes. `FIRST` is the computed start of a LoftQ adapter; checkpoints have it.

PEFT's own functions that switch adapters also change `requires_grad` of the parameters. The functions of this module
change only which adapter runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

TRAINED, INITIAL, START, FIRST = "default", "initial", "start", "first"


def _peft_is_used() -> bool:
    """Returns whether this process has imported PEFT. Otherwise, no model has layers of PEFT, and the import, which
    takes a second, is not needed."""
    return "peft" in sys.modules


def adapter_layers(model: nn.Module) -> list[Any]:
    """Returns the modules of PEFT inside a model: layers with LoRA matrices, and wrappers of `modules_to_save`."""
    if not _peft_is_used():
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns the layers that have LoRA matrices, with their names."""
    if not _peft_is_used():
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def saved_copies(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns PEFT's wrappers of `modules_to_save`, with their names. A wrapper has the original module and trained
    copies of it."""
    if not _peft_is_used():
        return []
    from peft.utils.other import ModulesToSaveWrapper

    return [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]


def is_kept(name: str, parameter: torch.Tensor) -> bool:
    """Returns whether a checkpoint stores this parameter: a trained parameter, or one of the first values of a PiSSA or
    LoftQ adapter, which cannot be computed again on another machine with the same bits."""
    return parameter.requires_grad or f".{INITIAL}." in name or f".{FIRST}." in name


def give_storage(model: nn.Module) -> None:
    """Allocates host memory for the parameters of an adapter that are on the meta device, so that the weights of a
    checkpoint can be copied into them."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and is_kept(f"{prefix}.{name}", parameter):
                empty = torch.empty_like(parameter, device="cpu")
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disables all adapters inside the `with` block, so that the model is the base model."""
    layers = adapter_layers(model)
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def as_at_start(model: nn.Module) -> Iterator[None]:
    """Activates the frozen copy of the first adapter instead of the trained adapter inside the `with` block."""
    before = [(layer, layer._active_adapter) for layer in adapter_layers(model)]
    copied = START if _has(model, START) else FIRST
    try:
        for layer, active in before:
            names = [active] if isinstance(active, str) else active
            layer._active_adapter = [copied if name == TRAINED else name for name in names]
            # A module of `modules_to_save` without a frozen copy has not changed before the start.
            layer._disable_adapters = copied not in getattr(layer, "modules_to_save", [copied])
        yield
    finally:
        for layer, active in before:
            layer._active_adapter, layer._disable_adapters = active, False


def has_start(model: nn.Module) -> bool:
    return _has(model, START) or _has(model, FIRST)


def _has(model: nn.Module, adapter: str) -> bool:
    return any(f".{adapter}." in name for name, _ in model.named_parameters())


def add_frozen(layer: Any, config: Any, name: str, *, sign: float = 1.0) -> None:
    """Adds a frozen copy of a layer's trained adapter under another name. With `sign` -1, the copy has the opposite
    effect. The copy has no dropout."""
    values = replace(config, init_lora_weights=False, lora_dropout=0.0)
    trained = {parameter for parameter in layer.parameters() if parameter.requires_grad}
    layer.update_layer(name, layer.r[TRAINED], lora_alpha=layer.lora_alpha[TRAINED], config=values)
    for parameter in layer.parameters():  # `update_layer` lets all active adapters be trained
        parameter.requires_grad_(parameter in trained)
    with torch.no_grad():
        for kind in layer.adapter_layer_names:
            matrices = getattr(layer, kind)
            if name not in matrices:
                continue
            copied = _parameters(matrices[name])
            for part, value in _parameters(matrices[TRAINED]).items():
                if value.device == copied[part].device:
                    negative = sign < 0 and kind in ("lora_B", "lora_embedding_B")
                    copied[part].copy_(-value if negative else value)


def _parameters(owner: Any) -> dict[str, nn.Parameter]:
    return {"": owner} if isinstance(owner, nn.Parameter) else dict(owner.named_parameters())


def add_start(model: nn.Module, config: Any, name: str = START) -> None:
    """Adds a frozen copy of the trained adapter as the reference model. `START` also has copies of its
    `modules_to_save`. The modules of a new adapter (`FIRST`) are unchanged, so the reference uses the originals."""
    for _, layer in lora_layers(model):
        if TRAINED in layer.r:
            add_frozen(layer, config, name)
    for _, wrapper in saved_copies(model):
        if name == START:
            wrapper.modules_to_save[START] = deepcopy(wrapper.modules_to_save[TRAINED]).requires_grad_(False)
            wrapper._adapters.add(START)
