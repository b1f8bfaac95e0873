"""Finds the projections of a decoder whose matmuls may have low precision."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

# The last part of the names of linear layers that keep their precision: routers, gates with one output per expert, and
# the latent projection of MLA, whose weight attention reads directly.
KEPT = frozenset({"gate", "router", "shared_expert_gate", "kv_b_proj"})
# Parts of PEFT's adapters. The base layer of an adapter is a plain linear layer with the name `base_layer`.
_ADAPTER, _BASE = "lora_", "base_layer"


def projections(layers: Iterable[nn.Module], recurrent: Iterable[nn.Module] = ()) -> dict[str, nn.Linear]:
    """Returns the plain linear layers inside decoder layers, by name. Embeddings and the output head are outside the
    layers. Not in the result: routers, adapters, linear layers inside `recurrent` modules (a rounding error of a state
    would remain in it), and weights that are quantised already. Expert stacks are parameters, not linear layers."""
    excluded = {part for module in recurrent for part in module.modules()}
    found: dict[str, nn.Linear] = {}
    seen: set[nn.Module] = set()
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if type(module) is not nn.Linear or module in seen or module in excluded:
                continue
            parts = [part for part in name.split(".") if part != _BASE]
            if parts[-1] in KEPT or any(part.startswith(_ADAPTER) for part in parts):
                continue
            seen.add(module)
            found[f"{number}.{name}"] = module
    return found
