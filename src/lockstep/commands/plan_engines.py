"""What `lockstep plan` says of rollout engines: that of the recipe with how it starts, and which others there are."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.device.base import Device
from lockstep.device.serving import serving_on
from lockstep.doctor.engines import engines_here, packages_in
from lockstep.doctor.facts import installed_packages
from lockstep.doctor.machine import Machine
from lockstep.recipe import Recipe
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES
from lockstep.rollout.server.collective import by_collective
from lockstep.rollout.server.dialect import ServerNeeds
from lockstep.rollout.server.memory import by_memory
from lockstep.rollout.server.process import dialect_of

# The flag of each engine for its share of a device's memory, and the share without it (of vLLM 0.26 and 0.32; SGLang
# computes it from the device's size and its own settings).
SHARES: dict[str, tuple[str, float | None]] = {
    "vllm": ("--gpu-memory-utilization", 0.92),
    "sglang": ("--mem-fraction-static", None),
}


def engine_lines(recipe: Recipe, device: Device) -> list[tuple[str, str]]:
    machine, rollout = Machine(), recipe.rollout
    python = rollout.server.python
    packages = installed_packages(machine) if python is None else packages_in(machine, python)
    here = {engine.name: engine for engine in engines_here(packages, device.name)}
    own = here[rollout.engine]
    lines: list[tuple[str, str]] = []
    if rollout.url is not None:
        urls = [rollout.url] if isinstance(rollout.url, str) else rollout.url
        lines.append(("engine", f"{own.name} at {', '.join(urls)}, which the run asks when it starts"))
    elif ENGINES[own.name].served:
        lines.append(("engine", f"{own.name}, started by the run: {own.found or own.told()}"))
        lines += _start(recipe, device)
    else:
        lines.append(("engine", f"{own.name} ({own.found})"))
    if ENGINES[own.name].served:
        lines.append(("engine weights", _way(recipe, device)))
    others = [engine for engine in here.values() if engine.name != own.name]
    lines += [
        ("other engines", f"{engine.name} ({engine.found})" if engine.found else f"not {engine.name}: {engine.missing}")
        for engine in others
    ]
    return lines


def _way(recipe: Recipe, device: Device) -> str:
    """How weights reach the server, where the run is one process."""
    rollout, files = recipe.rollout, "through files"
    if by_collective(rollout):
        return f"by {device.collective}"
    if by_memory(rollout, dialect_of(rollout), device, 1, adapter=recipe.model.lora is not None):
        opened = "opened in the run's memory"
        return opened if rollout.hand_over == "memory" else f"{opened}, else {files}"
    return files


def _start(recipe: Recipe, device: Device) -> list[tuple[str, str]]:
    rollout, lora = recipe.rollout, recipe.model.lora
    needs = ServerNeeds(device.name, rollout.sleep, None if lora is None else lora.rank)
    settings = [
        *dialect_of(rollout).settings(needs).items(),
        *serving_on(device.name, rollout.engine).settings(sleep=rollout.sleep),
    ]
    lines = [("engine setting", f"{what}: {why}") for what, why in settings]
    if device.visible_variable is not None and rollout.server.devices is None:
        lines.append(("engine memory", _memory(rollout)))
    return lines


def _memory(rollout: RolloutSettings) -> str:
    """What a server on the run's own devices takes of them."""
    flag, default = SHARES[rollout.engine]
    when = "while it is awake" if rollout.sleep else "while the run trains, too (rollout.sleep gives it back)"
    said = _said(rollout.server.args, flag)
    if said is not None:
        return f"{flag} {said} of the run's own devices, {when}"
    share = "most of it" if default is None else f"{default:g}, which leaves {1 - default:.0%} to the run"
    return (
        f"the engine's own share of the run's own devices, {share}, {when}: say less by rollout.server.args "
        f'[{flag}, "0.5"], or name other devices by rollout.server.devices'
    )


def _said(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag on a command line; of several the last, as the engines read them."""
    found = None
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == flag or word.startswith(f"{flag}="):
            found = after if word == flag else word.partition("=")[2]
    return found
