"""The known stacks of `stacks.yaml`, and which of them this machine is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lockstep.doctor.facts import Facts
from lockstep.doctor.packages import MINIMUM
from lockstep.doctor.versions import older, release, satisfies

FILE = Path(__file__).parent / "stacks.yaml"

STATUSES = ("documented upstream", "contract-tested here", "run here")


@dataclass(frozen=True)
class Step:
    say: str
    run: str
    where: str = ""


@dataclass(frozen=True)
class Stack:
    name: str
    title: str
    device: str
    status: str
    source: str
    packages: Mapping[str, str]
    steps: tuple[Step, ...]
    engines: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    hardware: tuple[str, ...] = ()
    python: str = ""
    architecture: str = ""
    cann: tuple[str, ...] = ()
    hdk: tuple[str, ...] = ()
    """The oldest and the newest driver release that are documented or were seen with this CANN."""
    remove: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def too_old_for_lockstep(self) -> bool:
        """The stack pins a package below lockstep's minimum: it is for an engine's own environment."""
        return any(
            pin.startswith("==") and name in MINIMUM and older(pin[2:], MINIMUM[name])
            for name, pin in self.packages.items()
        )


@cache
def known_stacks() -> dict[str, Stack]:
    table = yaml.load(FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: _stack(name, entry) for name, entry in table.items()}


def _stack(name: str, entry: dict[str, Any]) -> Stack:
    steps = tuple(Step(step["say"], step["run"], step.get("in", "")) for step in entry["steps"])
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return Stack(**{**entry, **lists, "name": name, "steps": steps})


def fitting(facts: Facts, device: str) -> Stack | None:
    """The stack whose every pinned version is what is installed; of several, the one that pins most."""
    found = [stack for stack in known_stacks().values() if stack.device == device and _fits(stack, facts)]
    return max(found, key=lambda stack: len(stack.packages) + len(stack.cann), default=None)


def _fits(stack: Stack, facts: Facts) -> bool:
    if stack.architecture or "torch" not in stack.packages:
        return False  # a remark on packages, not a whole stack
    cann = not stack.cann or (facts.cann is not None and cann_fits(facts.cann.version, stack.cann))
    pins = {**stack.packages, **{name: f"=={version}" for name, version in stack.engines.items() if version}}
    return cann and all(name in facts.packages and satisfies(facts.packages[name], pin) for name, pin in pins.items())


def cann_fits(version: str, listed: tuple[str, ...]) -> bool:
    """Whether it is one of the listed versions, or not older than one that is listed as `>=X`."""
    exact = [each.lower() for each in listed if not each.startswith(">=")]
    floors = [each for each in listed if each.startswith(">=")]
    return version.lower() in exact or any(satisfies(version, floor) for floor in floors)


def canns_for(torch_npu: str) -> tuple[str, ...]:
    """The CANN versions that stacks name for this torch_npu."""
    stacks = [stack for stack in known_stacks().values() if "torch_npu" in stack.packages]
    same = [stack for stack in stacks if release(stack.packages["torch_npu"].lstrip("=>")) == release(torch_npu)]
    return tuple(dict.fromkeys(version for stack in same for version in stack.cann))


def driver_for(cann: str) -> str | None:
    """The oldest HDK release that stacks name for this CANN."""
    named = (stack.hdk[0] for stack in known_stacks().values() if stack.hdk and cann_fits(cann, stack.cann))
    return next(named, None)
