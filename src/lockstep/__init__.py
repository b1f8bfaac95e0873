"""Post-training of language models, the same on every device.

    model = lockstep.load("folder", lr=1e-4)        a handle: sample, logprobs, forward_backward, optim_step
    lockstep.train("recipe.yaml", run={"steps": 5}) a whole run
    lockstep.compare("runs/a", "runs/b")            did two runs train in step?

Importing the package is cheap on purpose: nothing here pulls in torch. Each name is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before anything imports torch: a device package that torch would load by itself must not be able to break that import.
import lockstep.device  # noqa: F401
from lockstep.version import __version__ as __version__

if TYPE_CHECKING:
    from lockstep.api.front_door import Comparison, compare, load
    from lockstep.api.handle import Handle
    from lockstep.api.losses import Datum, Response
    from lockstep.errors import Refusal
    from lockstep.recipe.schema import Recipe
    from lockstep.train.start import train

__all__ = ["Comparison", "Datum", "Handle", "Recipe", "Refusal", "Response", "compare", "load", "train"]

_HOMES = {
    "Comparison": "lockstep.api.front_door",
    "compare": "lockstep.api.front_door",
    "Datum": "lockstep.api.losses",
    "Response": "lockstep.api.losses",
    "Handle": "lockstep.api.handle",
    "load": "lockstep.api.front_door",
    "Refusal": "lockstep.errors",
    "Recipe": "lockstep.recipe.schema",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        # The package of the loops, which can be called: see there.
        return import_module("lockstep.train")
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
