"""Adapters of stacked experts, which run as low-rank products beside the grouped products of the experts.

PEFT adds B A to the weights of all experts in every forward pass, and then multiplies. lockstep computes x W + (x A) B
for the experts that this rank has. With tensor parallelism, the ranks of a group have different experts and the same
adapter matrices, so the gradients of the matrices are summed over the group. With expert parallelism, FSDP sums them.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.experts.grouped_experts import ADAPTERS, LowRank, grouped_experts, stacks_experts
from lockstep.kernels.fused_modules import KernelForward
from lockstep.model.adapters.active import lora_layers
from lockstep.parallel.tensor import TensorGroup


class ExpertAdapters:
    """Returns the adapters of the experts module inside some of PEFT's wrappers (`ParamWrapper`), of which each adapts
    one parameter."""

    def __init__(self, *wrappers: Any):
        # The wrappers contain the experts module, which refers to this object.
        self._wrappers = [ref(wrapper) for wrapper in wrappers]
        self._held: list[int] | None = None
        self._group: TensorGroup | None = None

    def __reduce__(self) -> tuple[type[ExpertAdapters], tuple[Any, ...]]:
        return type(self), tuple(wrapper() for wrapper in self._wrappers)

    def hold(self, experts: list[int], group: TensorGroup | None) -> None:
        """Says which experts this rank has, and the tensor-parallel group, in whose ranks they differ."""
        self._held, self._group = experts, group

    def __call__(self) -> dict[str, list[LowRank]]:
        found: dict[str, list[LowRank]] = {}
        for wrapper in (one() for one in self._wrappers):
            if wrapper is None or wrapper.disable_adapters or wrapper.merged:
                continue
            names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
            found[wrapper.parameter_name] = [self._factors(wrapper, name) for name in names]
        return found

    def _factors(self, wrapper: Any, name: str) -> LowRank:
        """Returns the two matrices of each expert. The layout is that of PEFT's `ParamWrapper.get_delta_factors`."""
        a, b = (self._entered(one[name].weight) for one in (wrapper.lora_A, wrapper.lora_B))
        a_ERI = a.reshape(wrapper.num_experts, -1, a.shape[-1])
        b_EOR = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
        if self._held is not None and len(self._held) < wrapper.num_experts:
            first, last = self._held[0], self._held[-1] + 1
            held: Any = slice(first, last) if last - first == len(self._held) else self._held
            a_ERI, b_EOR = a_ERI[held], b_EOR[held]
        return LowRank(a_ERI, b_EOR, wrapper.scaling[name])

    def _entered(self, weight: torch.Tensor) -> torch.Tensor:
        if self._group is None or not (torch.is_grad_enabled() and weight.requires_grad):
            return weight
        return self._group.enter_apart(weight)


def adapt_experts(decoder: nn.Module) -> None:
    """Lets the experts modules of a decoder apply their adapters themselves, instead of PEFT's wrappers. Call this
    function before the decoder is split over ranks."""
    wrappers: dict[nn.Module, list[Any]] = {}
    for _, wrapper in lora_layers(decoder):
        if hasattr(wrapper, "parameter_name") and stacks_experts(wrapper.get_base_layer()):
            wrappers.setdefault(wrapper.get_base_layer(), []).append(wrapper)
    for experts, each in wrappers.items():
        vars(experts)[ADAPTERS] = ExpertAdapters(*each)
        if "forward" not in vars(experts):  # the device's kernel for experts applies adapters too
            vars(experts)["forward"] = KernelForward(grouped_experts, experts)
        for wrapper in each:
            wrapper.forward = wrapper.base_layer.__call__


def innermost(decoder: nn.Module, names: list[str]) -> list[str]:
    """Returns the names of the experts modules inside PEFT's wrappers. Raises `Refusal` for a trained copy of the
    experts."""
    for name in names:
        if hasattr(decoder.get_submodule(name), "modules_to_save"):
            why = f"it trains a copy of {name}, whose experts are divided over processes"
            remedy = "remove it there and adapt the experts (model.lora.targets), or set parallel.expert_parallel=1"
            raise Refusal.at("model.lora.modules_to_save", why, remedy, code="unfit-adapter")
    return [f"{name}{'.base_layer' * _depth(decoder.get_submodule(name))}" for name in names]


def _depth(module: Any) -> int:
    """Returns how many adapters of single parameters wrap a module of experts."""
    return 1 + _depth(module.base_layer) if hasattr(module, "parameter_name") else 0
