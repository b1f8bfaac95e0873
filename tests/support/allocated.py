"""Bytes of tensors that a process holds, stage by stage, as torch's allocator on the host gave them out.

Whatever made them: parameters, gradients and moments, gathered ones and the buffers that they come in, activations. Of
a file that is mapped all bytes count while it is open.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

STAGE = "stage: "


def marked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which is a stage when `allocated` looks."""

    def within(*words: Any, **more: Any) -> Any:
        with record_function(STAGE + name):
            return call(*words, **more)

    return within


@contextmanager
def allocated() -> Iterator[dict[str, int]]:
    """Yields a dict that has for each stage the maximum number of bytes, when the context has ended."""
    found: dict[str, int] = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as told:
        yield found
    results = told.profiler.kineto_results
    stages = [one for one in results.events() if one.name().startswith(STAGE)]
    spans = [(one.name().removeprefix(STAGE), one.start_ns(), one.start_ns() + one.duration_ns()) for one in stages]
    memory = Memory()
    for event in sorted(_memory_events(results.experimental_event_tree()), key=lambda event: event.start_time_ns):
        fields = event.typed[1]
        memory.change(fields.ptr, fields.alloc_size)
        for name, start, end in spans:
            if start <= event.start_time_ns <= end:
                found[name] = max(found.get(name, 0), memory.held)


def _memory_events(events: list[Any]) -> Iterator[Any]:
    for event in events:
        if event.name == "[memory]":
            yield event
        yield from _memory_events(event.children)


class Memory:
    """The allocated ranges of addresses. The profiler does not see what gloo's threads free. So an allocation that
    overlaps an earlier one shows that the earlier one was freed."""

    def __init__(self) -> None:
        self.held = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    def change(self, start: int, size: int) -> None:
        """Notes an allocation, or with a negative size that it was freed. What was allocated before the profiler
        started does not count."""
        if size < 0:
            if start in self._sizes:
                self._remove(bisect_left(self._starts, start))
            return
        at = bisect_right(self._starts, start)
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] > start:
            at -= 1
            self._remove(at)
        while at < len(self._starts) and self._starts[at] < start + size:
            self._remove(at)
        self._starts.insert(at, start)
        self._sizes[start] = size
        self.held += size

    def _remove(self, at: int) -> None:
        self.held -= self._sizes.pop(self._starts.pop(at))
