"""What each rank of test_held.py does: a run, and the most bytes of tensors that it held in each stage of it.

    torchrun --nproc-per-node 2 held_ranks.py FOLDER WORDS

The words are those of `lockstep`; the host has fused kernels of its own here, so that what devices do with theirs is
done too. Every rank writes `FOLDER/held.RANK.json`. Bytes are those that torch's allocator gave out: parameters,
gradients and moments, and whatever else there was at that moment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from host_kernels import HOST
from lockstep.cli import main
from lockstep.kernels.fused import FUSED
from lockstep.kernels.fused_modules import plug_in
from lockstep.train import offline, training
from lockstep.train.checkpointer import Checkpointer

STAGE = "stage: "


def marked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def within(*words: Any, **more: Any) -> Any:
        with record_function(STAGE + name):
            return call(*words, **more)

    return within


def peaks(told: Any) -> dict[str, int]:
    """By stage the most bytes that were there at a time."""
    events = told.profiler.kineto_results.events()
    stages = [one for one in events if one.name().startswith(STAGE)]
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    found = {one.name().removeprefix(STAGE): 0 for one in stages}
    held = 0
    for when, size in changes:
        held += size
        for one in stages:
            if one.start_ns() <= when <= one.start_ns() + one.duration_ns():
                name = one.name().removeprefix(STAGE)
                found[name] = max(found[name], held)
    return found


if __name__ == "__main__":
    folder, *sys.argv[1:] = sys.argv[1:]
    FUSED["sdpa"] = lambda model, gather: plug_in(model, HOST, gather)
    training.load_models = marked("load", training.load_models)
    offline.train_step = marked("update", offline.train_step)
    Checkpointer.save = marked("save", Checkpointer.save)  # type: ignore[method-assign]
    Checkpointer.resume = marked("resume", Checkpointer.resume)  # type: ignore[method-assign]
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as held:
            main()
    finally:
        name = f"held.{os.environ['RANK']}.json"
        Path(folder, name).write_text(json.dumps(peaks(held)), encoding="utf-8")
