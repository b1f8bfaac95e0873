"""Writes two checkpoints in the background, and kills itself at a file operation of the second one.

python killed_writer.py FOLDER N kills itself at operation N, counted from 1. With 0 it prints the number of operations.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep.run import checkpoint, files, tensor_file
from lockstep.run.checkpoint_writers import LocalWriter

OPERATIONS = ("pwrite", "fdatasync", "fsync", "replace", "open", "rename")


def main(folder: Path, last: int) -> None:
    files.BLOCK = tensor_file.BLOCK = checkpoint.BLOCK = 64
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*words, **more)

        return call

    def write(step: int) -> None:
        weights, moments = {"w": torch.full((100,), float(step))}, {"m": torch.arange(99)}
        state = checkpoint.State(step=step, rows_seen=0, recipe={}, data={}, world_size=1)
        writer.begin(state, {checkpoint.MODEL: weights, checkpoint.OPTIMIZER: moments}, copies=True)
        writer.settle()

    writer = LocalWriter(folder, torch.device("cpu"), lambda path: None, print)
    write(1)
    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    write(2)
    print(calls)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
