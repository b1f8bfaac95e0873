"""What `lockstep plan` says of rollout engines: that of the recipe with how it starts, and which others there are."""

from __future__ import annotations

from lockstep.device.base import Device
from lockstep.device.serving import serving_on
from lockstep.doctor.engines import engines_here, packages_in
from lockstep.doctor.facts import installed_packages
from lockstep.doctor.machine import Machine
from lockstep.recipe import Recipe
from lockstep.recipe.rows import ENGINES
from lockstep.rollout.server.collective import by_collective
from lockstep.rollout.server.memory import by_memory
from lockstep.rollout.server.process import dialect_of


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
    rollout = recipe.rollout
    settings = serving_on(device.name, rollout.engine).settings(sleep=rollout.sleep)
    lines = [("engine setting", f"{what}: {why}") for what, why in settings]
    if device.visible_variable is not None and rollout.server.devices is None and not rollout.sleep:
        lines.append(
            (
                "engine memory",
                "taken of the run's own devices while it trains: say how much by rollout.server.args, give it back by "
                "rollout.sleep, or name other devices by rollout.server.devices",
            )
        )
    return lines
