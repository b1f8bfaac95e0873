"""Tensor parallelism: each rank of a group of neighbouring ranks has and computes a part of every projection.

With a group size of N, ranks 0 to N-1 are the first group, N to 2N-1 the second, and so on. All ranks of a group
process the same tokens. The input projections of attention and MLP are split by output (column parallel, in complete
heads). The output projections of attention and MLP are split by input (row parallel). `model/division/tensor_plan.py`
finds these modules. Row-parallel outputs are all-reduced, so activations between layers are the same on every rank.
Weights are DTensors over the group. During a module's forward its DTensors are replaced by local plain tensors, so that
any kernel can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeGuard
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.experts.grouped_experts import ADAPTERS
from lockstep.parallel.world import HOST_COLLECTIVE, TIMEOUT, World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# How a module is split: by outputs, by inputs or by experts. A `shared` module (a per-head norm) is not split, but each
# rank applies it to its own heads.
Style = Literal["columns", "rows", "experts", "shared"]
# Name of the model attribute that refers to the model's tensor-parallel group.
GROUP = "lockstep_tensor_group"


@dataclass(frozen=True)
class TensorGroup:
    """A tensor-parallel group: the ranks of a one-dimensional device mesh."""

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
        """Sums a tensor over the ranks of the group, in place (all-reduce). The result is bitwise equal on all
        ranks."""
        if tensor.numel():
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def least(self, number: int, device: torch.device) -> int:
        """Returns the minimum of `number` over the ranks of the group."""
        value = torch.tensor([number], dtype=torch.int32, device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self.group)
        return int(value.item())

    def as_first_(self, tensor: torch.Tensor) -> None:
        """Overwrites the tensor with that of the group's first rank (broadcast)."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    @property
    def is_first(self) -> bool:
        """Whether this process is the group's first rank."""
        return dist.get_rank(self.group) == 0

    def object_of_first(self, value: Any) -> Any:
        """Returns the picklable object of the group's first rank (broadcast)."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Marks a tensor as input of column-parallel modules. The gradient of a marked input is all-reduced in the
        backward pass, only once if several modules have the same input."""
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
        """All-reduces the gradient like `enter`, but for the input of a single module, or for a parameter."""
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
    """All-reduces the outputs of a module. Every rank uses the sum, so the backward returns the gradient unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        return group.sum_(tensor.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def sum_outputs(tensor: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Sums the outputs of a module over the group. The gradient is the same on all ranks, and is not summed."""
    summed: torch.Tensor = _Summed.apply(tensor, group)
    return summed


def divide(
    model: nn.Module, decoder: nn.Module, styles: Mapping[str, Style], group: TensorGroup
) -> dict[nn.Parameter, nn.Parameter]:
    """Splits the modules of `decoder` that `styles` names over the group. Returns a mapping from old to new
    parameters."""
    from torch.distributed.tensor import DTensor, Shard

    divided: dict[nn.Parameter, nn.Parameter] = {}
    for name, style in styles.items():
        module = decoder.get_submodule(name)
        for part, dimension in divided_dimensions(module, style).items():
            parameter = module._parameters[part]
            assert parameter is not None
            # Either all ranks have the full parameter, or all ranks have it on the meta device. Only this rank's part
            # of the parameter is kept.
            local = parameter.detach().chunk(group.size, dimension)[group.mesh.get_local_rank()].contiguous()
            sliced = DTensor.from_local(
                local, group.mesh, [Shard(dimension)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            divided[parameter] = nn.Parameter(sliced, parameter.requires_grad)
            module.register_parameter(part, divided[parameter])
        if style in ("columns", "rows") and (coding := getattr(module, "coding", None)) is not None:
            coding.slice_of(style, group.mesh.get_local_rank(), group.size)
        if style == "experts":
            # The expert modules of transformers read their number of experts from `num_experts`.
            vars(module).update(num_experts=vars(module)["num_experts"] // group.size, _is_expert_parallel=True)
        before, after = HOOKS[style]
        module.register_forward_pre_hook(lambda module, inputs, hook=before: hook(module, inputs, group))
        module.register_forward_hook(
            lambda module, inputs, output, hook=after: hook(module, output, group), always_call=True
        )
    setattr(model, GROUP, group)
    return divided


def group_of(model: nn.Module) -> TensorGroup | None:
    """Returns the tensor-parallel group of a model, or None if the model is not split."""
    group: TensorGroup | None = vars(model).get(GROUP)
    return group


def divided_dimensions(module: nn.Module, style: Style) -> dict[str, int]:
    """Returns for each split parameter of a module the dimension by which it is split. The weight of a linear layer has
    the dimensions (outputs, inputs). Parameters of stacked experts begin with the expert dimension. Quantised modules
    say themselves how their codes are split."""
    own: Callable[[Style], dict[str, int]] | None = getattr(module, "divided_parts", None)
    if own is not None:
        return own(style)
    if style in ("columns", "experts"):
        return {name: 0 for name, parameter in module._parameters.items() if parameter is not None}
    return {"weight": 1} if style == "rows" else {}


def show_parts(module: nn.Module, **parts: torch.Tensor | None) -> None:
    """Replaces the module's parameters by `parts` during a forward pass. The local tensors are set as instance
    attributes, which take precedence over parameters."""
    vars(module).update(parts)


def hide_parts(module: nn.Module) -> None:
    """Ends the effect of `show_parts`."""
    for name in module._parameters:
        vars(module).pop(name, None)


@contextmanager
def experts_shown(module: nn.Module) -> Iterator[None]:
    """Shows this rank's part of divided experts inside the `with` block. Does nothing for other modules."""
    divided = "is_transposed" in vars(module) and any(is_sliced(one) for one in module._parameters.values())
    if not divided:
        yield
        return
    show_parts(module, **{name: local_part(parameter) for name, parameter in module._parameters.items()})
    try:
        yield
    finally:
        hide_parts(module)


def local_part(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Returns this rank's part of a parameter."""
    return parameter.to_local() if is_sliced(parameter) else parameter


def _before_columns(module: nn.Module, inputs: tuple[Any, ...], group: TensorGroup) -> tuple[Any, ...]:
    show_parts(module, **{name: local_part(parameter) for name, parameter in module._parameters.items()})
    return group.enter(inputs[0]), *inputs[1:]


def _after_columns(module: nn.Module, output: Any, group: TensorGroup) -> None:
    hide_parts(module)


def _before_rows(module: nn.Module, inputs: tuple[Any, ...], group: TensorGroup) -> None:
    # The module's forward runs without bias. The bias is added once, after the all-reduce.
    parts = {name: local_part(parameter) for name, parameter in module._parameters.items()}
    show_parts(module, **parts | {"bias": None})


def _after_rows(module: nn.Module, output: Any, group: TensorGroup) -> torch.Tensor | None:
    hide_parts(module)
    if output is None:  # the forward pass failed, or the recomputation of gradient checkpointing stopped early
        return None
    summed = sum_outputs(output, group)
    bias = module._parameters.get("bias")
    return summed if bias is None else summed + bias


def _before_shared(module: nn.Module, inputs: tuple[Any, ...], group: TensorGroup) -> None:
    """Prepares a per-head norm, whose weight gradient must be summed over the ranks, because each rank has only some
    heads."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if torch.is_grad_enabled():
        show_parts(
            module,
            **{name: group.enter_apart(parameter) for name, parameter in parameters.items() if parameter.requires_grad},
        )


def hold_experts(module: nn.Module, experts: list[int], group: TensorGroup | None) -> None:
    """Tells the adapters of an experts module which experts this rank has."""
    if (adapters := vars(module).get(ADAPTERS)) is not None:
        adapters.hold(experts, group)


def _before_experts(module: nn.Module, inputs: tuple[Any, ...], group: TensorGroup) -> tuple[Any, ...]:
    """Maps the experts that the router chose for each token to indices of this rank's experts. Experts of other ranks
    get the index after the last local expert, which transformers' modules skip. Experts of other ranks also get the
    router weight 0, because some modules do not skip that index."""
    parts = {name: local_part(parameter) for name, parameter in module._parameters.items()}
    num_local = next(len(part) for part in parts.values() if part is not None)
    first = num_local * group.mesh.get_local_rank()
    hold_experts(module, list(range(first, first + num_local)), group)
    show_parts(module, **parts)
    states, chosen, weights = inputs
    index = chosen - first
    is_local = (index >= 0) & (index < num_local)
    weights = group.enter_apart(weights).masked_fill(~is_local, 0)
    return group.enter(states), index.masked_fill(~is_local, num_local), weights


def _after_experts(module: nn.Module, output: Any, group: TensorGroup) -> torch.Tensor | None:
    hide_parts(module)
    return None if output is None else sum_outputs(output, group)


HOOKS: dict[Style, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "columns": (_before_columns, _after_columns),
    "rows": (_before_rows, _after_rows),
    "experts": (_before_experts, _after_experts),
    "shared": (_before_shared, _after_columns),
}


def refuse_groups(tensor: int, processes: int) -> None:
    """Raises `Refusal` if the number of processes is not a multiple of the group size."""
    if processes % tensor:
        raise Refusal.at(
            "parallel.tensor_parallel",
            f"{processes} process(es) cannot be divided into groups of {tensor}",
            f"start {tensor} or a multiple of it (torchrun --nproc-per-node {tensor}), "
            "or set parallel.tensor_parallel=1",
            code="wrong-process-count",
        )


def with_tensor(world: World, tensor: int) -> World:
    """Returns the world with its ranks in tensor-parallel groups of size `tensor`. All ranks must call this
    function."""
    refuse_groups(tensor, world.size)
    if tensor == 1:
        return world
    # A data-parallel group has the ranks with the same index in every tensor-parallel group.
    dp_members = [tuple(range(first, world.size, tensor)) for first in range(tensor)]
    dp_groups = [dist.new_group(members, backend=HOST_COLLECTIVE, timeout=TIMEOUT) for members in dp_members]
    return replace(world, tensor=tensor, dp_group=dp_groups[world.rank % tensor])


def is_sliced(tensor: object) -> TypeGuard[DTensor]:
    """Returns whether a tensor is a DTensor. DTensor is imported inside the function, because its import takes a
    second."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
