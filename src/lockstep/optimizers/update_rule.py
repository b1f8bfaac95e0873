"""The interface of an update rule, and the layout of a parameter whose shards are on several ranks.

A rule works on the shard of a parameter that this rank has. Rules that need more than this rank's shard sum over ranks
or gather the parameter with the parameter's `ShardLayout`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lockstep.parallel.sharding import as_sharded, held_part
from lockstep.parallel.tensor import is_sliced
from lockstep.recipe.keys_optim import Optim


class Roles(NamedTuple):
    """The names of parameters that some rules treat in their own way."""

    embeddings: frozenset[str] = frozenset()
    matrices: frozenset[str] = frozenset()
    """The weights of linear layers and of experts, without the output head."""


class StateTensor(NamedTuple):
    """A tensor of the optimizer state of a parameter. It has as many dimensions as the parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    reduced: int | None = None
    """The dimension over which the tensor is a mean, or None. Ranks that share this dimension of the parameter have the
    same state tensor."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ShardLayout:
    """The full shape of a parameter, and this rank's part of it."""

    shape: tuple[int, ...]
    part: tuple[int, ...]
    offsets: tuple[int, ...]
    mesh: Any = None
    placements: tuple[Any, ...] = ()
    """The mesh and the placements of a sharded parameter (a DTensor). Empty for a parameter of one rank."""

    @classmethod
    def of(cls, parameter: torch.Tensor) -> ShardLayout:
        held, offsets = held_part(parameter.detach())
        sharded = (parameter.device_mesh, tuple(parameter.placements)) if is_sliced(parameter) else ()
        return cls(tuple(parameter.shape), tuple(held.shape), tuple(offsets), *sharded)

    def sum_over(self, tensor: torch.Tensor, *dimensions: int) -> torch.Tensor:
        """Sums a tensor, in place, over the ranks among which these dimensions of the parameter are divided. All ranks
        must call this function."""
        for index, place in enumerate(self.placements):
            if not place.is_replicate() and place.dim in dimensions:
                dist.all_reduce(tensor, group=self.mesh.get_group(index))
        return tensor

    def divides(self, *dimensions: int) -> bool:
        """Returns whether ranks have different parts of one of these dimensions."""
        return any(not place.is_replicate() and place.dim in dimensions for place in self.placements)

    def gathered(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns the full tensor of the ranks' shards. All ranks must call this function."""
        return self.sharded(shard, self.shape).full_tensor() if self.placements else shard

    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a full tensor."""
        for dimension, (start, size) in enumerate(zip(self.offsets, self.part, strict=True)):
            full = full.narrow(dimension, start if size else 0, size)
        return full

    def sharded(self, shard: torch.Tensor, shape: Sequence[int], reduced: int | None = None) -> Any:
        """Returns the shard of this rank as a tensor with the layout of the parameter. `shape` is the full shape. The
        tensor is not divided along the dimension `reduced`."""
        if not self.placements:
            return shard
        from torch.distributed.tensor import Replicate

        places = [Replicate() if not one.is_replicate() and one.dim == reduced else one for one in self.placements]
        return as_sharded(shard, self.mesh, places, shape)


@dataclass
class ParameterStep:
    """One update of a parameter, or of some rows of it. `weight` and `gradient` are this rank's shards in fp32. The
    rule changes `weight` and `state` in place, and may overwrite `gradient`. `count` is the number of updates of the
    parameter, including this one."""

    name: str
    weight: torch.Tensor
    gradient: torch.Tensor
    state: Mapping[str, torch.Tensor]
    count: int
    lr: float
    decay: float
    layout: ShardLayout


class UpdateRule(Protocol):
    """How an optimizer changes a parameter. `moments` is the dtype in which first and second moments are stored."""

    keys: ClassVar[tuple[str, ...]]
    """The names of all state tensors that the rule may have."""

    def __init__(self, settings: Optim, roles: Roles, moments: torch.dtype): ...

    def state(self, name: str, shape: Sequence[int], part: Sequence[int]) -> dict[str, StateTensor]:
        """Returns the state tensors of this rank's part of a parameter. `shape` is the full shape of the parameter."""
        ...

    def by_rows(self, name: str) -> bool:
        """Returns whether rows of the parameter may be updated one after the other. Otherwise a step has the full
        shard, and all ranks run the step at the same time."""
        ...

    def update(self, one: ParameterStep) -> None: ...
