"""Adapters of stacked experts under tensor parallelism, where each rank has some of the experts.

PEFT adds the adapter to the parameter of all experts. With tensor parallelism, this module adds the part of the adapter
that belongs to the experts of this rank. The adapter matrices are the same on all ranks, and their gradients are summed
over the ranks.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import nn

from lockstep.model.adapters.active import lora_layers
from lockstep.parallel.tensor import ADAPTED, TensorGroup


class AdaptedExperts:
    """Adds the adapters of one PEFT wrapper (`ParamWrapper`) to the part of a parameter that this rank has."""

    def __init__(self, wrapper: Any):
        # The wrapper contains the experts module, which refers to this object.
        self._wrapper = ref(wrapper)

    def __call__(self, part: torch.Tensor, first: int, group: TensorGroup) -> torch.Tensor:
        wrapper: Any = self._wrapper()
        if wrapper.disable_adapters:
            return part
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A:
                lhs, rhs = (one[first : first + len(part)] for one in self._factors(wrapper, name, group))
                part = torch.baddbmm(part, lhs.to(part.dtype), rhs.to(part.dtype), alpha=wrapper.scaling[name])
        return part

    def _factors(self, wrapper: Any, name: str, group: TensorGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns two matrices for each expert, whose product is the unscaled change of the expert. The layout is that
        of PEFT's `ParamWrapper.get_delta_factors`."""
        a, b = (self._entered(one[name].weight, group) for one in (wrapper.lora_A, wrapper.lora_B))
        a_eri = a.reshape(wrapper.num_experts, -1, a.shape[-1])
        b_eor = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
        if wrapper._did_swap_in_out_features:
            return b_eor, a_eri
        return a_eri.transpose(-2, -1), b_eor.transpose(-2, -1)

    @staticmethod
    def _entered(weight: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        grads = torch.is_grad_enabled() and weight.requires_grad
        return group.enter_apart(weight) if grads else weight


def adapt_experts(decoder: nn.Module) -> None:
    """Lets the experts modules of a decoder apply their adapters themselves, instead of PEFT's wrappers. Call this
    function before the decoder is split over a tensor-parallel group."""
    for _, wrapper in lora_layers(decoder):
        if not hasattr(wrapper, "parameter_name"):
            continue
        experts: Any = wrapper.get_base_layer()
        vars(experts).setdefault(ADAPTED, {})[wrapper.parameter_name] = AdaptedExperts(wrapper)
        wrapper.forward = wrapper.base_layer.__call__
