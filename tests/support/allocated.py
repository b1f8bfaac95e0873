"""Bytes of tensors that a process holds, stage by stage, as torch's allocator on the host gave them out.

Whatever made them: parameters, gradients and moments, gathered ones and the buffers that they come in, activations. Of
a file that is mapped all bytes count while it is open.
"""

from __future__ import annotations

import gc
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
    """By stage the most bytes that were there at a time; filled in at the end."""
    found: dict[str, int] = {}
    gc.collect()  # what tests before left behind would be given back in a stage, and count against it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as told:
        yield found
    events = told.profiler.kineto_results.events()
    stages = [(one.name().removeprefix(STAGE), one) for one in events if one.name().startswith(STAGE)]
    held = 0
    for when, size in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        held += size
        for name, one in stages:
            if one.start_ns() <= when <= one.start_ns() + one.duration_ns():
                found[name] = max(found.get(name, 0), held)
