"""Stores the frozen linear layers of a model as codes (`model.quantize`), one tensor at a time.

A streamed model gets its codes while its weights are read from the files: a tensor of the files is copied to the
device, quantised there and freed. So neither the host nor the device ever has the whole model in its original
precision. Weights are quantised from the values of the files, so the codes do not depend on `model.dtype`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.errors import Problem, Refusal
from lockstep.kernels.quantized.formats import Quantized
from lockstep.kernels.quantized.quantized_experts import QuantizedExperts, dequantize_stacks, quantize_stacks
from lockstep.kernels.quantized.quantized_linear import Coding, QuantizedLinear
from lockstep.model.decoder import decoder_layers
from lockstep.model.pretrained import rounded
from lockstep.model.text_model import layer_sizes, text_config
from lockstep.parallel.sharding import held_part
from lockstep.recipe.schema import Model

# Parts of module names that mark a router. A router decides by small differences, so it keeps its precision.
ROUTER = re.compile(r"(.*_)?(router|gate|classifier)")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# The parameters in which transformers stacks the weights of all experts of a layer.
STACKS = ("gate_up_proj", "down_proj", "up_proj", "gate_proj")


class CodedWeight(NamedTuple):
    """A weight of the model that is stored as codes."""

    name: str
    original: nn.Parameter
    """The parameter that the codes replace."""
    module: nn.Module
    """The module that has the codes now."""
    coding: Coding

    @torch.no_grad()
    def fill(self, weight: torch.Tensor | Quantized, first: int = 0) -> None:
        """Quantises the weight, or the experts from number `first` on, and keeps this rank's part of the codes."""
        parts = self.coding.parts_of(self.coding.coded(weight))
        for part, value in parts.items():
            target = self.module._parameters[self.coding.name(part)]
            assert target is not None
            held, offsets = held_part(target.detach())
            for dimension in range(1, held.ndim):
                value = value.narrow(dimension, offsets[dimension], held.shape[dimension])
            start, stop = max(first, offsets[0]), min(first + len(value), offsets[0] + len(held))
            if start < stop:
                held[start - offsets[0] : stop - offsets[0]].copy_(value[start - first : stop - first])


def quantize_layers(model: Any, settings: Model, dtype: torch.dtype, where: str) -> list[CodedWeight]:
    """Replaces the linear layers and experts inside the decoder layers by layers that store codes without values.
    Returns the weights, from which `CodedWeight.fill` computes the codes."""
    assert settings.quantize is not None
    format, double = settings.quantize, settings.double_quantize

    def coding(shape: tuple[int, ...], prefix: str = "") -> Coding:
        return Coding(format, double, shape, prefix)

    found: list[CodedWeight] = []
    for name, module in list(quantizable(model, settings.quantize_exclude, where)):
        if isinstance(module, nn.Linear):
            weight = module.get_parameter("weight")
            coded = QuantizedLinear(coding(tuple(weight.shape)), dtype, weight.device, module.bias)
            coded.train(module.training)
            model.set_submodule(name, coded)
            found.append(CodedWeight(f"{name}.weight", weight, coded, coded.coding))
        else:
            stacks = {part: module.get_parameter(part) for part in stacks_of(module)}
            experts = quantize_stacks(module, list(stacks), coding, dtype)
            found += [CodedWeight(f"{name}.{part}", stacks[part], experts, experts.stacks[part]) for part in stacks]
    return found


def quantizable(model: Any, exclude: Sequence[str], where: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the linear layers and experts inside the decoder layers, except routers, tied weights and `exclude`."""
    inside = {part for layer in decoder_layers(model) for part in layer.modules()}
    unused = set(exclude)
    holders: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        holders[parameter] = holders.get(parameter, 0) + 1
    counts = {count for name in EXPERT_COUNTS for count in layer_sizes(text_config(model.config), name)}
    chosen = []
    for name, module in model.named_modules():
        if module not in inside or not _has_matrices(module) or _is_router(name, module, counts):
            continue
        left = [entry for entry in exclude if name == entry or name.endswith(f".{entry}")]
        unused -= set(left)
        if not left and all(holders[parameter] == 1 for parameter in module.parameters(recurse=False)):
            chosen.append((name, module))
    if unused:
        named = sorted({name.rpartition(".")[2] for name, _ in chosen})
        raise Refusal(
            [
                Problem(
                    "model.quantize_exclude",
                    f"{entry!r} matches no quantised layer of the model",
                    f"names of quantised layers end with {', '.join(named)}",
                    code="unknown-module",
                )
                for entry in sorted(unused)
            ]
        )
    if not chosen:
        raise Refusal.at(
            "model.quantize",
            f"{where}: {type(model).__name__} has no linear layers that can be quantised",
            "remove model.quantize" + (", or name fewer layers in model.quantize_exclude" if exclude else ""),
            code="unsupported-model",
        )
    yield from chosen


def stacks_of(module: nn.Module) -> list[str]:
    """Returns the names of the stacked expert weights of a module."""
    parameters = module.named_parameters(recurse=False)
    return [name for name, parameter in parameters if name in STACKS and parameter.ndim == 3]


def _has_matrices(module: nn.Module) -> bool:
    return type(module) is nn.Linear or bool(stacks_of(module))


def _is_router(name: str, module: nn.Module, counts: set[int]) -> bool:
    if type(module) is not nn.Linear:
        return False
    parts = name.rpartition("layers.")[2].split(".")
    return any(ROUTER.fullmatch(part) for part in parts) or module.out_features in counts


def fill_codes(
    coded: Sequence[CodedWeight],
    blocks: Callable[[CodedWeight], Iterator[tuple[int, torch.Tensor | Quantized]]],
    device: torch.device,
    where: str,
) -> None:
    """Computes all codes. `blocks` yields a weight, or its codes, in one or several blocks of its first dimension, each
    with its offset. A block is quantised on `device` and freed."""
    for one in coded:
        for first, block in blocks(one):
            try:
                one.fill(block.to(device), first)
            except ValueError as error:
                why = f"its weight {one.name} holds NaN or infinity"
                raise Refusal.at(where, why, "copy or download it again", code="not-finite") from error


def quantize_loaded(model: Any, settings: Model, dtype: torch.dtype, where: str) -> None:
    """Quantises a model whose weights are loaded in fp32, and rounds its other weights to `dtype`. The original weights
    of a layer are freed before the next layer is quantised."""
    coded = quantize_layers(model, settings, dtype, where)
    codes = {one.module.get_parameter(one.coding.name(part)) for one in coded for part in one.coding.shapes()}
    while coded:
        one = coded.pop(0)
        fill_codes([one], lambda this: iter([(0, this.original.detach())]), one.original.device, where)
        one.original.data = one.original.data.new_empty(0)
    rounded(model, dtype, codes)


def coded_parts(model: nn.Module) -> dict[str, list[str]]:
    """Returns the names of the quantised layers of a model, without the endings that PEFT adds, and for experts the
    names of their stacks."""
    coded = [(name.removesuffix(".base_layer"), module) for name, module in model.named_modules() if is_coded(module)]
    return {name: list(getattr(module, "stacks", ())) for name, module in coded}


def adapted_stacks(parts: Mapping[str, Sequence[str]], targets: Iterable[str]) -> Iterator[Problem]:
    """Yields a problem if an adapter targets a quantised stack of experts: PEFT would leave it out. `parts` are the
    layers that are quantised, or will be, as `coded_parts` returns them."""
    targets = list(targets)
    for name, part in ((name, part) for name, stacks in parts.items() for part in stacks):
        full = f"{name}.{part}"
        if any(full == entry or full.endswith(f".{entry}") for entry in targets):
            others = sorted({one.rpartition(".")[2] for one, stacks in parts.items() if not stacks})
            yield Problem(
                "model.lora.targets",
                f"{full} is quantised, and stacked experts get an adapter only in model.dtype",
                f"set model.lora.targets=[{','.join(others)}], or add {name.rpartition('.')[2]} to "
                "model.quantize_exclude",
                code="unfit-adapter",
            )
            return


def is_coded(module: nn.Module) -> bool:
    """Returns whether a module stores its weights as codes."""
    return isinstance(module, QuantizedLinear | QuantizedExperts)


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces all quantised layers of a model by plain layers with the dequantised weights, in `dtype`. The values are
    those with which the model computes."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedExperts):
            dequantize_stacks(module, dtype)
        elif isinstance(module, QuantizedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)
            plain.bias = module.bias
            model.set_submodule(name, plain)
