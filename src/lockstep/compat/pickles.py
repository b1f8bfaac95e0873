"""Pickled checkpoints of other programs, read without running anything that they name.

Tensors and plain containers are made; every other class becomes an empty stand-in, so that neither the program that
wrote the file nor code hidden in it is needed or run.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.errors import Refusal, first_line

_BUILTINS = {"set", "frozenset", "dict", "list", "tuple", "int", "float", "bool", "str", "bytes", "complex", "slice"}
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_parameter_with_state"),
    ("torch.nn.parameter", "Parameter"),
}


class _StandIn:
    """Of a class that is not needed; takes whatever it is given and keeps nothing."""

    def __init__(self, *arguments: Any, **named: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _BUILTINS:
            return super().find_class(module, name)
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        return type(name, (_StandIn,), {})


_READER = SimpleNamespace(__name__="lockstep.compat.pickles", Unpickler=_Unpickler, load=None)


def read_pickle(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU."""
    try:
        return torch.load(path, map_location="cpu", pickle_module=_READER, weights_only=False)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, AttributeError, TypeError) as error:
        raise Refusal.at(path, f"cannot be read: {first_line(error)}", "is the file whole?") from error


def read_sharded(path: Path) -> dict[str, Any]:
    """A shard of FSDP's: plain and distributed tensors, and nothing else."""
    import torch.distributed.tensor

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise Refusal.at(path, f"cannot be read: {first_line(error)}", "is the file whole?") from error
    if not isinstance(loaded, dict):
        raise Refusal.at(path, f"holds a {type(loaded).__name__}, not weights by name")
    return loaded
