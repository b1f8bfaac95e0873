"""Post-training of language models on any device.

    model = lockstep.load("folder", lr=1e-4)        a handle: sample, logprobs, forward_backward, optim_step
    lockstep.train("recipe.yaml", run={"steps": 5}) a complete run
    lockstep.compare("runs/a", "runs/b")            compares two runs

Importing lockstep is fast, because it does not import torch. Each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The next import must run before any import of torch: otherwise a device plug-in that torch loads automatically could
# break the import of torch.
import lockstep.device  # noqa: F401

if TYPE_CHECKING:
    from lockstep.api.front_door import Comparison, compare, load
    from lockstep.api.handle import Handle
    from lockstep.api.losses import Datum, Response
    from lockstep.errors import Refusal
    from lockstep.recipe.schema import Recipe
    from lockstep.train.callbacks import Callback, TrainControl, TrainState
    from lockstep.train.start import train

    __version__: str

__all__ = [
    "Callback",
    "Comparison",
    "Datum",
    "Handle",
    "Recipe",
    "Refusal",
    "Response",
    "TrainControl",
    "TrainState",
    "compare",
    "load",
    "train",
]

_MODULES = {
    "Comparison": "lockstep.api.front_door",
    "compare": "lockstep.api.front_door",
    "Datum": "lockstep.api.losses",
    "Response": "lockstep.api.losses",
    "Handle": "lockstep.api.handle",
    "load": "lockstep.api.front_door",
    "Refusal": "lockstep.errors",
    "Recipe": "lockstep.recipe.schema",
    "Callback": "lockstep.train.callbacks",
    "TrainControl": "lockstep.train.callbacks",
    "TrainState": "lockstep.train.callbacks",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        # `lockstep.train` is a package that can also be called like a function; see lockstep/train/__init__.py.
        return import_module("lockstep.train")
    if name == "__version__":
        from lockstep.version import package_version

        return package_version()
    if name not in _MODULES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
