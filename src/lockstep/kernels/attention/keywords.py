"""Passes the layout of a forward pass to modules whose outer modules do not pass the keyword on.

lockstep calls the decoder with the keyword `layout`, and most classes of transformers pass all keywords on to their
attention and recurrent modules. A probe pass finds modules that the keyword does not reach, and the innermost module
around each that it reaches. While that outer module runs, hooks set the layout as an attribute of the inner modules.
Gradient checkpointing runs a layer again with the same keywords, and so with the same layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lockstep.kernels.attention.masks import BeyondCausal

LAYOUT = "layout"
# Attributes of modules: CARRIED is the layout of the current pass. CARRIES marks modules with hooks. RELAYED is the
# layout that a layer adds to its keywords.
CARRIED, CARRIES, RELAYED = "lockstep_layout", "lockstep_carries", "lockstep_relayed"


@dataclass
class CallTrace:
    """Names of the modules of a decoder that a probe pass has called, and of those that received its keyword."""

    called: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)


@contextmanager
def noting_calls(decoder: nn.Module, keyword: str) -> Iterator[CallTrace]:
    """Yields the names of the modules that are called inside the `with` block, and of those that receive the
    keyword."""
    trace = CallTrace()

    def note(name: str, named: dict[str, Any]) -> None:
        trace.called.add(name)
        if keyword in named:
            trace.received.add(name)

    def noting(name: str) -> Callable[..., None]:
        return lambda module, args, named: note(name, named)

    hooks = [module.register_forward_pre_hook(noting(name), with_kwargs=True) for name, module in inside(decoder)]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def inside(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in decoder.named_modules() if name)


def carried_layout(module: nn.Module) -> Any:
    """Returns the layout that an outer module has received, while that module runs, or None."""
    return vars(module).get(CARRIED)


def carry_layout(decoder: nn.Module, name: str, trace: CallTrace) -> None:
    """Makes the layout of a forward pass available to the module `name`; `trace` is from a probe pass."""
    outer = name
    while outer and outer not in trace.received:
        outer = outer.rpartition(".")[0]
    if not outer:
        outer = _relay(decoder, name)
    if outer != name:
        vars(decoder.get_submodule(name)).setdefault(CARRIED, None)
        _carry(decoder.get_submodule(outer))


def _carry(outer: nn.Module, attribute: str = CARRIED) -> None:
    """Sets the layout that `outer` receives on the modules inside that have the attribute, while `outer` runs."""
    if CARRIES not in vars(outer):
        vars(outer)[CARRIES] = True
        outer.register_forward_pre_hook(
            lambda module, args, named: _set(module, attribute, named.get(LAYOUT)), with_kwargs=True
        )
        outer.register_forward_hook(lambda module, *_: _set(module, attribute, None), always_call=True)


def _set(outer: nn.Module, attribute: str, layout: Any) -> None:
    for module in outer.modules():
        if attribute in vars(module):
            vars(module)[attribute] = layout


# A decoder that passes no keywords to its layers (Mamba-1). Each layer then gets another class, whose call adds the
# layout to the keywords. A hook inside the layer would come too late: gradient checkpointing stores the keywords first.


def _relay(decoder: nn.Module, name: str) -> str:
    """Makes the outermost module around `name` that accepts any keyword receive the layout. Returns its name."""
    parts = name.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts))]
    layers = [one for one in names if _accepts_keywords(decoder.get_submodule(one))]
    if not layers:
        module = type(decoder.get_submodule(name)).__name__
        raise BeyondCausal(f"{module} does not receive the keywords of the forward pass")
    layer = decoder.get_submodule(layers[0])
    if RELAYED not in vars(layer):
        vars(layer)[RELAYED] = None
        layer.__class__ = _relaying(type(layer))
        _carry(decoder, RELAYED)
    return layers[0]


def _accepts_keywords(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return False
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _relaying(kind: type) -> type:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        layout = vars(self)[RELAYED]
        more = {} if layout is None else {LAYOUT: layout}
        return kind.__call__(self, *args, **named, **more)

    # Layers are found by the name of their class.
    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
