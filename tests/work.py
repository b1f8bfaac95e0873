"""How much work a call does, counted: a clock tells of the machine and of what else it runs, a count does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
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
