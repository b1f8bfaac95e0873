"""Tensor parallelism: neighbouring ranks that each hold a part of every projection and compute with it.

With N of them, ranks 0 to N-1 are the first group, N to 2N-1 the second, and so on. A group sees the same tokens. The
projections into attention and feed-forward are divided by their outputs, whole heads each, those out of them by their
inputs (`model/tensor_plan.py` says which is which); what these give is added up over the group, so everything between
the layers is the same on every rank of it. Weights are DTensors over the group, and a module computes with its rank's
part of them: between a module's own hooks there are plain tensors, for any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeGuard
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import Refusal
from lockstep.parallel.world import HOST_COLLECTIVE, TIMEOUT, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# What a group does with a module: its outputs, its inputs or its experts are divided, or it is whole and sees a part of
# the heads.
Style = Literal["columns", "rows", "experts", "shared"]
# Where on a model stands the group that divides it.
GROUP = "lockstep_tensor_group"


@dataclass(frozen=True)
class TensorGroup:
    """The ranks of a device mesh of one dimension."""

    mesh: DeviceMesh
    _entered: list[Any] = field(default_factory=list, compare=False, repr=False)

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.mesh.get_group()
        return group

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place. The same bits on every rank: collectives reduce each number once."""
        if tensor.numel():
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def least(self, number: int, device: torch.device) -> int:
        """The smallest number that a rank says."""
        told = torch.tensor([number], dtype=torch.int32, device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MIN, group=self.group)
        return int(told.item())

    def as_first_(self, tensor: torch.Tensor) -> None:
        """What the first rank has, on all of them."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input of divided modules. Its gradient, of which each rank has what its own part gives, is added up: once
        where several modules take the same input."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if self._entered:
            last, before = (one() for one in self._entered)
            if last is tensor and before is not None:
                return before
        entered = self.enter_apart(tensor)
        self._entered[:] = [ref(tensor), ref(entered)]
        return entered

    def enter_apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same of an input that one module takes, or of a parameter."""
        entered: torch.Tensor = _Entered.apply(tensor, self)
        return entered


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.sum_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    """The outputs of all ranks, added up. Each goes on with the sum, so each has its whole gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.sum_(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def divide(
    model: nn.Module, decoder: nn.Module, styles: Mapping[str, Style], group: TensorGroup
) -> dict[nn.Parameter, nn.Parameter]:
    """Divide the modules of `decoder`, by name, over the group; returns the new parameter of each that was divided."""
    from torch.distributed.tensor import DTensor, Shard

    divided: dict[nn.Parameter, nn.Parameter] = {}
    for name, style in styles.items():
        module = decoder.get_submodule(name)
        for part, dimension in divided_dimensions(module, style).items():
            whole = module._parameters[part]
            assert whole is not None
            # Every rank has the whole one, or nobody has any of it; only the part of it goes to the device.
            own = whole.detach().chunk(group.size, dimension)[group.mesh.get_local_rank()].contiguous()
            sliced = DTensor.from_local(
                own, group.mesh, [Shard(dimension)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            divided[whole] = nn.Parameter(sliced, whole.requires_grad)
            module.register_parameter(part, divided[whole])
        if style == "experts":
            # As transformers tells its modules that they have a part of the experts.
            vars(module).update(num_experts=vars(module)["num_experts"] // group.size, _is_expert_parallel=True)
        before, after = HOOKS[style]
        module.register_forward_pre_hook(lambda module, inputs, hook=before: hook(module, inputs, group))
        module.register_forward_hook(
            lambda module, inputs, output, hook=after: hook(module, output, group), always_call=True
        )
    setattr(model, GROUP, group)
    return divided


def group_of(model: nn.Module) -> TensorGroup | None:
    """The ranks that divide a model with this one; None where it has all of it."""
    group: TensorGroup | None = vars(model).get(GROUP)
    return group


def divided_dimensions(module: nn.Module, style: Style) -> dict[str, int]:
    """By which dimension each parameter is divided, of a projection (outputs, inputs) or of experts (experts, ...)."""
    if style in ("columns", "experts"):
        return {name: 0 for name, parameter in module._parameters.items() if parameter is not None}
    return {"weight": 1} if style == "rows" else {}


def _show(module: nn.Module, **parts: torch.Tensor | None) -> None:
    """For the length of a forward pass the module has these in the place of its parameters: what an object has itself
    is found before what `nn.Module` looks up."""
    vars(module).update(parts)


def _hide(module: nn.Module) -> None:
    for name in module._parameters:
        vars(module).pop(name, None)


def _local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter.to_local() if is_sliced(parameter) else parameter


def _before_columns(module: nn.Module, inputs: tuple[Any, ...], group: TensorGroup) -> tuple[Any, ...]:
    _show(module, **{name: _local(parameter) for name, parameter in module._parameters.items()})
    return group.enter(inputs[0]), *inputs[1:]


def _after_columns(module: nn.Module, output: Any, group: TensorGroup) -> None:
    _hide(module)


def _before_rows(module: nn.Module, inputs: tuple[Any, ...], group: TensorGroup) -> None:
    # The bias is added to the sum, once.
    _show(module, weight=_local(module._parameters["weight"]), bias=None)


def _after_rows(module: nn.Module, output: Any, group: TensorGroup) -> torch.Tensor | None:
    _hide(module)
    if output is None:  # the pass has failed, or a recomputation needed no more of it
        return None
    summed: torch.Tensor = _Summed.apply(output, group)
    bias = module._parameters.get("bias")
    return summed if bias is None else summed + bias


def _before_shared(module: nn.Module, inputs: tuple[Any, ...], group: TensorGroup) -> None:
    """Of a norm of single heads: each rank's heads give a part of its gradient."""
    known = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if torch.is_grad_enabled():
        _show(module, **{name: group.enter_apart(one) for name, one in known.items() if one.requires_grad})


def _before_experts(module: nn.Module, inputs: tuple[Any, ...], group: TensorGroup) -> tuple[Any, ...]:
    """The experts that each token has chosen: those of other ranks become the number behind the last of this rank's,
    which modules of transformers pass over, with a weight of 0 for those that compute them all the same."""
    known = {name: _local(parameter) for name, parameter in module._parameters.items()}
    own = next(len(part) for part in known.values() if part is not None)
    _show(module, **known)
    states, chosen, weights = inputs
    index = chosen - own * group.mesh.get_local_rank()
    here = (index >= 0) & (index < own)
    weights = group.enter_apart(weights).masked_fill(~here, 0)
    return group.enter(states), index.masked_fill(~here, own), weights


def _after_experts(module: nn.Module, output: Any, group: TensorGroup) -> torch.Tensor | None:
    _hide(module)
    return None if output is None else _Summed.apply(output, group)


HOOKS: dict[Style, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "columns": (_before_columns, _after_columns),
    "rows": (_before_rows, _after_rows),
    "experts": (_before_experts, _after_experts),
    "shared": (_before_shared, _after_columns),
}


def refuse_groups(tensor: int, processes: int) -> None:
    """Groups of one size for all."""
    if processes % tensor:
        raise Refusal.at(
            "parallel.tensor",
            f"{processes} process(es) cannot be divided into groups of {tensor}",
            f"start {tensor} or a multiple of it (torchrun --nproc-per-node {tensor}), or set parallel.tensor=1",
        )


def with_tensor(world: World, tensor: int) -> World:
    """The world with its ranks in groups of `tensor` (a collective: every rank must call it)."""
    refuse_groups(tensor, world.size)
    if tensor == 1:
        return world
    # Those with the same part of the model in every group: what they say of their shares of the rows is added up.
    columns = [tuple(range(first, world.size, tensor)) for first in range(tensor)]
    across = [dist.new_group(members, backend=HOST_COLLECTIVE, timeout=TIMEOUT) for members in columns]
    return replace(world, tensor=tensor, column=across[world.rank % tensor])


def is_sliced(tensor: object) -> TypeGuard[DTensor]:
    """Whether ranks hold slices of a tensor. What these are is imported late: it takes a second."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
