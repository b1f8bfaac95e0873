"""Expert parallelism: each rank of a group has some experts of every layer, and tokens go to the ranks of theirs.

With a group size of N, ranks 0 to N-1 are the first group, N to 2N-1 the second, and so on. The ranks of a group have
different tokens. Each rank sorts the pairs of a token and one of its experts by expert, and sends them to the ranks of
the experts (all-to-all). A second all-to-all returns the outputs, and the rank of the token weights and sums them. The
backward pass makes the same exchanges in the opposite direction. So the gradient of an expert has the tokens of all
ranks of the group, and FSDP sums it over the remaining ranks.

With tensor parallelism of T ranks, the experts of a layer are divided over N x T ranks. The ranks of a tensor-parallel
group have the same tokens. Each of them sends only the pairs of its experts and of those of its peers: the ranks with
its index in their tensor-parallel groups. The results are all-reduced over the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.experts.grouped_experts import (
    EXCHANGE,
    Moves,
    expert_outputs,
    grouped_experts,
    merged_pairs,
    sort_pairs,
)
from lockstep.kernels.fused_modules import KernelForward
from lockstep.parallel.tensor import (
    TensorGroup,
    hide_parts,
    hold_experts,
    is_sliced,
    local_part,
    show_parts,
    sum_outputs,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KEY = "parallel.expert_parallel"
# Name of the attribute of an experts module that refers to its `DividedExperts`.
DIVIDED = "lockstep_divided_experts"


@dataclass(frozen=True)
class ExpertGroup:
    """An expert-parallel group. `mesh` has the ranks that divide the experts of a layer, in the order of the experts.
    With tensor parallelism these are several tensor-parallel groups. `peers` has the ranks of `mesh` with which this
    rank exchanges tokens."""

    mesh: DeviceMesh
    peers: dist.ProcessGroup
    size: int
    """The number of peers."""
    shards: DeviceMesh
    """The mesh over which FSDP shards the experts of this rank."""
    tensor: TensorGroup | None = None

    @property
    def slices(self) -> int:
        """The number of ranks that have the same tokens."""
        return 1 if self.tensor is None else self.tensor.size

    @property
    def slot(self) -> int:
        """The index of this rank's experts."""
        return int(self.mesh.get_local_rank())

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends the first `sent[0]` rows to the first peer, the next `sent[1]` rows to the second, and so on. Returns
        the rows that this rank receives, ordered by sender (all-to-all)."""
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arriving, rows.contiguous(), list(received), list(sent), group=self.peers)
        return arriving


class _Exchanged(torch.autograd.Function):
    """Exchanges rows between the peers. The backward pass returns the gradients to the senders of the rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: ExpertGroup, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return group.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.group.exchange(grads[0], ctx.received, ctx.sent), None, None, None


class DividedExperts:
    """The hooks around the forward of an experts module, which computes the experts of this rank."""

    def __init__(self, group: ExpertGroup, experts: int):
        self.group, self.experts = group, experts
        self.each = experts // (group.size * group.slices)
        self.gathered: Mapping[str, torch.Tensor] = {}
        """The parameters of the experts of all peers, while the model generates."""

    @property
    def held(self) -> list[int]:
        """The experts that this rank computes, in the order of the local index."""
        group = self.group
        if not self.gathered:
            return list(range(group.slot * self.each, (group.slot + 1) * self.each))
        slots = range(group.slot % group.slices, group.size * group.slices, group.slices)
        return [expert for slot in slots for expert in range(slot * self.each, (slot + 1) * self.each)]

    def before(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        states, chosen, shares = inputs
        parts = {name: local_part(parameter) for name, parameter in module._parameters.items()}
        show_parts(module, **(self.gathered or parts))
        tensor, index = self.group.tensor, self._peer_index(chosen)
        hold_experts(module, self.held, tensor)
        if tensor is not None:
            elsewhere = index == self.each * self.group.size
            states, shares = tensor.enter(states), tensor.enter_apart(shares).masked_fill(elsewhere, 0)
        if self.gathered:
            self._size(module, len(self.held), elsewhere=tensor is not None)
            return states, index, shares
        self.hold(module)
        vars(module)[EXCHANGE] = self._exchanged
        return states, index, shares

    def hold(self, module: nn.Module) -> None:
        """Tells the module that it has the experts of this rank."""
        self._size(module, self.each, elsewhere=False)

    def after(self, module: nn.Module, output: torch.Tensor | None) -> torch.Tensor | None:
        hide_parts(module)
        vars(module).pop(EXCHANGE, None)
        if output is None:  # the forward pass failed, or the recomputation of gradient checkpointing stopped early
            return None
        return output if self.group.tensor is None else sum_outputs(output, self.group.tensor)

    def _peer_index(self, chosen_TK: torch.Tensor) -> torch.Tensor:
        """Returns the index of each expert among those of the peers, which are numbered one peer after the other. An
        expert that no peer has gets the index after the last one."""
        slices = self.group.slices
        if slices == 1:
            return chosen_TK
        slot = chosen_TK // self.each
        index = slot // slices * self.each + chosen_TK % self.each
        return index.masked_fill(slot % slices != self.group.slot % slices, self.each * self.group.size)

    def _exchanged(
        self, module: nn.Module, states_TW: torch.Tensor, index_TK: torch.Tensor, shares_TK: torch.Tensor, moves: Moves
    ) -> torch.Tensor:
        """Computes the pairs of all peers with the experts of this rank, and sums the outputs of each own token."""
        group, peers = self.group, self.group.size
        order_P, place_P, ends = sort_pairs(index_TK, peers * self.each)
        leaving = ends.diff(prepend=ends.new_zeros(1)).view(peers, self.each)
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=group.peers)
        sent, received = torch.stack([leaving, arriving]).sum(-1).tolist()
        order_P, rows = order_P[: sum(sent)], sum(received)
        leaving_RW = moves.to_experts(states_TW, order_P, place_P, index_TK.shape[1])
        rows_RW: torch.Tensor = _Exchanged.apply(leaving_RW, group, sent, received)
        if not rows:
            # A row of zeros, whose output is dropped, so that this rank has gradients for FSDP and takes part in the
            # exchanges of the backward pass.
            rows_RW = torch.cat([rows_RW, rows_RW.new_zeros(1, rows_RW.shape[1])])
            arriving[0, 0] = 1
        order_R, place_R, ends_E = merged_pairs(arriving, len(rows_RW))
        x_RW = moves.to_experts(rows_RW, order_R, place_R, 1)
        out_RW = expert_outputs(module, x_RW, ends_E, moves)
        out_RW = moves.to_experts(out_RW, place_R, order_R, 1)[:rows]
        returned_PW: torch.Tensor = _Exchanged.apply(out_RW, group, received, sent)
        return moves.to_tokens(returned_PW, shares_TK, order_P, place_P).to(states_TW.dtype)

    @staticmethod
    def _size(module: nn.Module, count: int, *, elsewhere: bool) -> None:
        vars(module).update(num_experts=count, _is_expert_parallel=elsewhere)


def divide_experts(decoder: nn.Module, names: Sequence[str], group: ExpertGroup) -> dict[nn.Parameter, nn.Parameter]:
    """Divides the experts modules of a decoder over the group. Returns a mapping from old to new parameters."""
    from torch.distributed.tensor import DTensor, Shard

    divided: dict[nn.Parameter, nn.Parameter] = {}
    for name in names:
        module = decoder.get_submodule(name)
        hooks = DividedExperts(group, vars(module)["num_experts"])
        for part, parameter in list(module._parameters.items()):
            assert parameter is not None
            local = parameter.detach().chunk(group.mesh.size(), 0)[group.slot].contiguous()
            sliced = DTensor.from_local(
                local, group.mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            divided[parameter] = nn.Parameter(sliced, parameter.requires_grad)
            module.register_parameter(part, divided[parameter])
        vars(module)[DIVIDED] = hooks
        hooks.hold(module)
        if "forward" not in vars(module):  # the device's kernel for experts exchanges tokens too
            module.forward = KernelForward(grouped_experts, module)
        module.register_forward_pre_hook(hooks.before)
        module.register_forward_hook(
            lambda module, inputs, output, hooks=hooks: hooks.after(module, output), always_call=True
        )
    return divided


def divided_experts(module: nn.Module) -> DividedExperts | None:
    """Returns how the experts of a module are divided, or None for another module."""
    found: DividedExperts | None = vars(module).get(DIVIDED)
    return found


@contextmanager
def experts_gathered(root: nn.Module) -> Iterator[None]:
    """Gathers the experts of all peers on every rank inside the `with` block, so that ranks can run forward passes
    without exchanging tokens. FSDP must have gathered the parameters before."""
    modules = [(module, hooks) for module in root.modules() if (hooks := divided_experts(module)) is not None]
    for module, hooks in modules:
        parameters = {name: one for name, one in module._parameters.items() if one is not None}
        hooks.gathered = {name: _of_all_peers(one, hooks.group) for name, one in parameters.items()}
    try:
        yield
    finally:
        for _, hooks in modules:
            hooks.gathered = {}


def full_parameters(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters by name. Inside `experts_gathered`, the experts are those of all peers."""
    gathered = {
        parameter: hooks.gathered[name]
        for module in root.modules()
        if (hooks := divided_experts(module)) is not None and hooks.gathered
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    for name, parameter in root.named_parameters():
        yield name, gathered.get(parameter, parameter)


@torch.no_grad()
def _of_all_peers(parameter: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
    local = (parameter.to_local() if is_sliced(parameter) else parameter).detach().contiguous()
    full = local.new_empty(len(local) * group.size, *local.shape[1:])
    dist.all_gather_into_tensor(full, local, group=group.peers)
    return full


def refuse_expert_groups(expert: int, shards: int) -> None:
    """Raises `Refusal` if the ranks that share one copy of a model cannot be divided into groups of `expert` ranks."""
    if shards % expert:
        fitting = [str(number) for number in range(1, shards + 1) if shards % number == 0]
        raise Refusal.at(
            KEY,
            f"{expert} does not divide the {shards} process(es) that share one copy of the model (parallel.shard)",
            f"use {' or '.join(fitting)}, or change the number of processes or parallel.shard",
            code="wrong-process-count",
        )
