"""How much work a call does, counted: a clock tells of the machine and of what else it runs, a count does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that the call runs in this thread; a line that loops counts each time round."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def operators_run(call: Callable[[], object]) -> int:
    """Torch operators that the call runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            self.count += 1
            return operator(*given, **(named or {}))

    with Counting() as counting:
        call()
    return counting.count


@dataclass(frozen=True)
class Held:
    """Bytes of the tensors that a call makes: the most that exist at a time, and those of the largest."""

    peak: int
    largest: int


def bytes_held(call: Callable[[], object]) -> Held:
    """Counted by the storages that torch operators give back; what is inside of an operator alone does not count."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def storages(tree: Any) -> list[torch.UntypedStorage]:
        return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    class Holding(TorchDispatchMode):
        peak = largest = 0

        def __init__(self) -> None:
            super().__init__()
            self.live: dict[StorageWeakRef, int] = {}

        def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            known = {storage._cdata for storage in storages((given, named))}
            result = operator(*given, **(named or {}))
            self.live = {storage: size for storage, size in self.live.items() if not storage.expired()}
            for storage in storages(result):
                if storage._cdata not in known:
                    self.live[StorageWeakRef(storage)] = storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())
            self.peak = max(self.peak, sum(self.live.values()))
            return result

    with Holding() as holding:
        call()
    return Held(holding.peak, holding.largest)
