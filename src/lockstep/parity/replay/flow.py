"""Who reads whose results among the operators of a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from lockstep.parity.replay.oplog import CallResult, Operator


@dataclass(frozen=True)
class Result:
    """One of an operator's results, or, where `given` is set, one of its inputs."""

    call: Operator
    index: int
    given: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        return (self.call.inputs if self.given else self.call.outputs)[self.index]


class Flow:
    """Operators in their order, without those that only take memory."""

    def __init__(self, calls: Sequence[Operator]):
        kept = [number for number, call in enumerate(calls) if not call.unset]
        indices = {number: index for index, number in enumerate(kept)}
        self.calls = [_renumbered(calls[number], indices) for number in kept]
        self.readers: dict[CallResult, list[int]] = {}
        for number, call in enumerate(self.calls):
            for source in call.sources:
                if source is not None:
                    self.readers.setdefault(source, []).append(number)

    def results(self) -> list[Result]:
        return self.made(range(len(self.calls)))

    def made(self, part: range) -> list[Result]:
        return [Result(self.calls[number], index) for number in part for index in _numbers(self.calls[number])]

    def given(self, part: range) -> list[Result]:
        """What the part reads from outside of it."""
        return [
            Result(self.calls[number], index, given=True)
            for number in part
            for index, (_, source) in enumerate(zip_longest(self.calls[number].inputs, self.calls[number].sources))
            if source is None or source[0] not in part
        ]

    def ends(self) -> list[Result]:
        """What nobody here reads: what the module gives, to its caller or to its children."""
        return self.leaving(range(len(self.calls)))

    def leaving(self, part: range) -> list[Result]:
        """The results that are read outside of the part, or by nobody.

        Of an operator with several results those that nobody reads are by-products, unless it is all of them: then the
        first is what it is run for.
        """
        found = []
        for number in part:
            indices = _numbers(self.calls[number])
            read = [index for index in indices if (number, index) in self.readers]
            found += [
                Result(self.calls[number], index)
                for index in read or indices[:1]
                if any(reader not in part for reader in self.readers.get((number, index), [-1]))
            ]
        return found

    def before(self, ends: Sequence[Result]) -> Flow:
        """Only what leads to these results."""
        wanted = {number for number, call in enumerate(self.calls) if any(call is end.call for end in ends)}
        for number in reversed(range(len(self.calls))):
            if number in wanted:
                wanted |= {source[0] for source in self.calls[number].sources if source is not None}
        indices = {number: index for index, number in enumerate(sorted(wanted))}
        return Flow([_renumbered(self.calls[number], indices) for number in sorted(wanted)])


def _numbers(call: Operator) -> list[int]:
    """Places of its results that are numbers with a fraction; of an operator without any, all."""
    floats = [index for index, tensor in enumerate(call.outputs) if tensor.is_floating_point() and tensor.numel()]
    return floats or list(range(len(call.outputs)))


def _renumbered(call: Operator, indices: dict[int, int]) -> Operator:
    sources = [
        (indices[source[0]], source[1]) if source is not None and source[0] in indices else None
        for source in call.sources
    ]
    return replace(call, sources=tuple(sources))
