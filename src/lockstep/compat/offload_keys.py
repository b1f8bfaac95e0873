"""Conversion of the other trainers' offload keys to `parallel.offload` and its siblings.

The keys move weights or optimizer state to host memory. They change memory and speed, not results.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.compat.key_table import Conversion

_OFF = "this value switches the offload off"
ONE_DEVICE = "one process keeps its weights on the device; it offloads the optimizer state, which is larger"


def offload_rule(
    done: Conversion, to: str, weights: Sequence[str] = (), optimizer: Sequence[str] = (), both: Sequence[str] = ()
) -> None:
    """Converts the keys that offload the weights, the optimizer state, or both, of one trained model."""
    on = {name: _on(done, keys) for name, keys in (("weights", weights), ("optimizer", optimizer), ("both", both))}
    keys = [key for some in on.values() for key in some]
    if not keys:
        return
    if to in done.recipe:  # another backend's keys have set it
        return
    host_weights = [*on["weights"], *on["both"]]
    if not host_weights:
        done.write(to, "optimizer", *keys)
    elif done.devices * done.nodes == 1:
        done.write(to, "optimizer", *keys, note=ONE_DEVICE)
    else:
        done.write(to, "all" if on["optimizer"] or on["both"] else "params", *keys)


def keep_weights_on_device(done: Conversion) -> None:
    """Replaces the offload of weights if the run has only one process."""
    for key in ("parallel.offload", "parallel.offload_critic"):
        written = done.recipe.get(key)
        if written is not None and written.value in ("params", "all"):
            done.write(key, "optimizer", *written.sources, note=ONE_DEVICE)
            done.remarks.append(f"{key} is optimizer: {ONE_DEVICE}")


def frozen_offload_rule(done: Conversion, to: str, keys: Sequence[str], model: str, exists: bool) -> None:
    """Converts the keys that offload a model that is not trained (reference, reward model or teacher)."""
    if not (on := _on(done, keys)):
        return
    if exists:
        done.write(to, True, *on)
    else:
        done.ignore(f"the run has no separate {model}", *on)


def separate_reference(done: Conversion) -> bool:
    """Returns whether the converted online run has a reference model of its own. With LoRA, the reference is the policy
    without its adapter."""
    where = done.recipe.get("algorithm.kl.where")
    return where is not None and where.value != "none" and not uses_lora(done)


def uses_lora(done: Conversion) -> bool:
    return any(key.startswith("model.lora.") for key in done.recipe)


def _on(done: Conversion, keys: Sequence[str]) -> list[str]:
    for key in keys:
        if done.is_set(key) and not done[key]:
            done.ignore(_OFF, key)
    return [key for key in keys if done[key] and done.is_set(key)]
