"""What each rank of the activation offload's runs does: those of `job_ranks.py`, with every activation on its way.

A rank that carries a weight about, or of whose activations none travels where they should, ends with an error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from job_ranks import train
from lockstep.parallel import offload as activations

PROGRAM = Path(__file__)
KEY = "model.activation_offload=true"
travelled = 0


def watch() -> None:
    """Weights are told from activations by what gathers them: the storages of all parameters that a module ever had."""
    # Held, so that no other storage gets the address of one that is gone.
    weights: dict[int, StorageWeakRef] = {}
    begin, call = activations._Storage.__init__, nn.Module._call_impl

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Inside of a layer its parameters are whole.
        for parameter in self._parameters.values():
            if parameter is not None:
                storage = parameter.untyped_storage()
                weights.setdefault(storage._cdata, StorageWeakRef(storage))
        return call(self, *args, **kwargs)

    def begun(self: activations._Storage, beside: Any, host: torch.Tensor, here: torch.Tensor) -> None:
        global travelled
        travelled += 1
        assert here.untyped_storage()._cdata not in weights, f"a weight of {here.numel()} numbers goes to the host"
        begin(self, beside, host, here)

    nn.Module._call_impl = called  # type: ignore[method-assign]
    activations._Storage.__init__ = begun  # type: ignore[method-assign]
    activations.LEAST = 1


if __name__ == "__main__":
    watch()
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(*job, file=sys.stderr, flush=True)
        before = travelled
        train(job)
        assert (travelled > before) == (KEY in job), f"{travelled - before} activations travelled"
