"""The policy's weights for a serving engine: named as in the model's files, and gathered one parameter at a time.

A model may stack its experts in one parameter, which the files have as one tensor per expert. Engines load the tensors
of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.model.export_folder import SavedNames, saved_names
from lockstep.model.policy import Policy
from lockstep.parallel.sharding import held_part, whole_on
from lockstep.rollout.servers.adapter import Answer, WantedSample
from lockstep.rollout.servers.weight_check import fingerprint

Parameters = Iterable[tuple[str, torch.Tensor]]


def file_names(policy: Policy) -> SavedNames | None:
    """Returns the names of the weights in the model's files, or None if the names of the parameters can be used. Names
    change only if a parameter is made of several tensors: engines know the other names that transformers changes."""
    shapes = {name: parameter.shape for name, parameter in policy.stored.named_parameters()}
    names = saved_names(policy.stored, shapes)
    return None if names is None or len(names.shapes) == len(shapes) else names


class WeightSource:
    """The weights that are sent to servers, in a fixed order.

    `device`: the parameters are shards, and an iteration gathers them on this device, one at a time. All ranks must
    iterate together; `lead` is called on rank 0 before each iteration and makes the other ranks iterate too.
    """

    def __init__(
        self,
        policy: Policy,
        parameters: Parameters,
        names: SavedNames | None,
        device: torch.device | None = None,
        lead: Callable[[], None] = lambda: None,
    ):
        self.policy, self.parameters, self.names, self.device, self.lead = policy, list(parameters), names, device, lead
        self.shapes: Mapping[str, torch.Size]
        """The shape of each tensor by its name, in the order of the iteration."""
        self.shapes = {name: one.shape for name, one in self.parameters} if names is None else names.shapes

    @property
    def gathers(self) -> bool:
        return self.device is not None

    def bytes_in(self, dtype: torch.dtype) -> int:
        return sum(shape.numel() for shape in self.shapes.values()) * dtype.itemsize

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.lead()
        return self._tensors()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.names is None:
            for name, parameter in self.parameters:
                yield name, self._full(parameter)
            return
        parameters = dict(self.parameters)
        read = self.names.reader(lambda name: self._full(parameters[name]))
        for name in self.names.shapes:
            yield name, read(name)

    @torch.no_grad()
    def _full(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach() if self.device is None else whole_on(parameter.detach(), self.device)

    def held_sums(self) -> tuple[int, ...]:
        """Returns the checksum of this rank's part of each parameter, to detect changed weights."""
        return fingerprint((name, held_part(parameter.detach())[0]) for name, parameter in self.parameters)


def bucket_counts(sizes: Iterable[int], max_bytes: int) -> list[int]:
    """Divides tensors of these byte sizes into consecutive buckets of at most `max_bytes`, and returns the number of
    tensors of each bucket. A larger tensor is a bucket by itself."""
    counts, filled = list[int](), 0
    for size in sizes:
        if counts and filled + size <= max_bytes:
            counts[-1] += 1
            filled += size
        else:
            counts.append(1)
            filled = size
    return counts


# What rank 0 asks of the other ranks during a push, because its weights are sharded over all of them.


@dataclass(frozen=True)
class GatherWeights:
    """All ranks iterate over their `WeightSource`."""


@dataclass(frozen=True)
class ScoreAnswers:
    """All ranks compute the log-probs of a weight check, with `fp32` from fp32 copies of the weights."""

    requests: Sequence[WantedSample]
    answers: Sequence[Answer]
    fp32: bool = False
