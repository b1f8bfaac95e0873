"""Compares versions, finds the stack (known set of versions) of `stacks.yaml` on a machine, and prints a stack."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from lockstep.doctor.machine_facts import MINIMUM, MachineFacts
from lockstep.errors import Refusal

_RANK = {"dev": -3, "alpha": -2, "beta": -2, "b": -2, "a": -2, "t": -2, "rc": -1, "post": 1}


def release(version: str) -> str:
    """Returns the release part of a version: 2.13.0 for 2.13.0+cpu, 2.13.0rc1 or 2.13.0.post4. Packages that belong
    together have the same release."""
    match = re.match(r"\d+(\.\d+){0,2}", version)
    return match.group(0) if match else version


def order(version: str) -> tuple[int, ...]:
    """Returns the sort key of a version. A release candidate precedes its release, and a post-release follows it. A
    local part such as `+cpu` is ignored."""
    key: list[int] = []
    for word, number in re.findall(r"([a-z]+)?\.?(\d+)", version.lower().partition("+")[0]):
        key += [_RANK.get(word, 0), int(number)] if word else [int(number)]
    return tuple(key)


def older(version: str, than: str) -> bool:
    for mine, other in zip_longest(order(version), order(than), fillvalue=0):
        if mine != other:
            return mine < other
    return False


def satisfies(version: str, pin: str) -> bool:
    """Returns whether `version` satisfies a pin `>=X` or `==X`. In stacks, `==X` accepts every version of the release
    X."""
    if pin.startswith(">="):
        return not older(version, pin[2:])
    wanted = pin.removeprefix("==")
    # A pin of a release candidate or post-release also accepts later versions of the same release.
    return release(version) == wanted or (release(version) == release(wanted) and not older(version, wanted))


# TorchNPU's compatibility table of August 2026: the CANN version that each torch_npu version needs.
TORCH_NPU_CANN = {
    "2.12.0": "9.1.0",
    "2.11.0": "9.1.0",
    "2.10.0.post4": "9.1.0",
    "2.9.0.post6": "9.1.0",
    "2.7.1.post8": "9.1.0",
    "2.9.0.post2": "9.0.0",
    "2.8.0.post4": "9.0.0",
    "2.7.1.post4": "9.0.0",
    "2.9.0": "8.5.0",
    "2.8.0.post2": "8.5.0",
    "2.7.1.post2": "8.5.0",
    "2.6.0.post5": "8.5.0",
    "2.8.0": "8.3.RC1",
    "2.7.1": "8.3.RC1",
    "2.6.0.post3": "8.3.RC1",
    "2.1.0.post17": "8.3.RC1",
    "2.6.0": "8.2.RC1",
    "2.5.1.post1": "8.2.RC1",
    "2.1.0.post13": "8.2.RC1",
    "2.5.1": "8.1.RC1",
    "2.4.0.post4": "8.1.RC1",
    "2.3.1.post6": "8.1.RC1",
    "2.1.0.post12": "8.1.RC1",
    "2.4.0.post2": "8.0.0",
    "2.3.1.post4": "8.0.0",
    "2.1.0.post10": "8.0.0",
    "2.4.0": "8.0.RC3",
    "2.3.1.post2": "8.0.RC3",
    "2.1.0.post8": "8.0.RC3",
    "2.3.1": "8.0.RC2",
    "2.2.0.post2": "8.0.RC2",
    "2.1.0.post6": "8.0.RC2",
}
NEWEST_PAIR = next(iter(TORCH_NPU_CANN.items()))

FILE = Path(__file__).parent / "stacks.yaml"


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
    """The oldest and the newest driver release documented or seen with this CANN."""
    remove: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def too_old_for_lockstep(self) -> bool:
        """Whether the stack pins a package below lockstep's minimum version. A stack with such a pin is meant for the
        separate environment of a rollout engine."""
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


def fitting(facts: MachineFacts, device: str) -> Stack | None:
    """Returns the stack whose pinned versions are all installed. If several stacks match, returns the stack with the
    most pins."""
    stacks = [stack for stack in known_stacks().values() if stack.device == device and _fits(stack, facts)]
    return max(stacks, key=lambda stack: len(stack.packages) + len(stack.cann), default=None)


def _fits(stack: Stack, facts: MachineFacts) -> bool:
    if stack.architecture or "torch" not in stack.packages:
        return False  # the entry is a note on packages, not a complete stack
    cann = not stack.cann or (facts.cann is not None and cann_fits(facts.cann.version, stack.cann))
    pins = {**stack.packages, **{name: f"=={version}" for name, version in stack.engines.items() if version}}
    return cann and all(name in facts.packages and satisfies(facts.packages[name], pin) for name, pin in pins.items())


def cann_fits(version: str, listed: tuple[str, ...]) -> bool:
    """Returns whether a CANN version is in the list, or satisfies an entry `>=X` of the list."""
    exact = [each.lower() for each in listed if not each.startswith(">=")]
    floors = [each for each in listed if each.startswith(">=")]
    return version.lower() in exact or any(satisfies(version, floor) for floor in floors)


def canns_for(installed: str) -> tuple[str, ...]:
    """Returns the CANN versions that TorchNPU's table or a stack names for this torch_npu version."""
    version = installed.partition("+")[0]
    listed = TORCH_NPU_CANN.get(version)
    named = [listed] if listed is not None else []
    for stack in known_stacks().values():
        pin = stack.packages.get("torch_npu", "")
        # A pin of a release includes its release candidates and nightly builds. The pin does not include post-releases
        # that have their own table entry.
        if pin and (pin.lstrip("=>") == version or (listed is None and satisfies(version, pin))):
            named += stack.cann
    return tuple(dict.fromkeys(named))


def driver_for(cann: str) -> str | None:
    """Returns the oldest driver release (HDK) that a stack names for this CANN version."""
    named = (stack.hdk[0] for stack in known_stacks().values() if stack.hdk and cann_fits(cann, stack.cann))
    return next(named, None)


def stack_named(name: str) -> Stack:
    stacks = known_stacks()
    if name not in stacks:
        names = "; ".join(f"{stack.name} ({stack.title})" for stack in stacks.values())
        raise Refusal.at("--pins", f"there is no stack {name!r}", f"one of: {names}", code="unknown-name")
    return stacks[name]


def pins_text(stack: Stack) -> str:
    return "\n".join([*_heading(stack), *_requirements(stack), *_steps(stack)]) + "\n"


def _heading(stack: Stack) -> Iterator[str]:
    yield f"# {stack.name}: {stack.title}"
    yield f"# {stack.status}; source: {stack.source}"
    if stack.device == "npu":
        yield "# Not yet run on Ascend hardware by lockstep."
    if stack.too_old_for_lockstep:
        least = ", ".join(f"{name} >= {version}" for name, version in MINIMUM.items())
        yield f"# This stack is too old for lockstep itself, which needs {least}."
        yield "# Use it in a separate environment of the engine. Install lockstep elsewhere, with its extra [npu]."
    for label, value in (
        ("hardware", ", ".join(stack.hardware)),
        ("Python", stack.python.lstrip("=")),
        ("CANN", ", ".join(stack.cann)),
        ("HDK (driver and firmware)", " to ".join(dict.fromkeys(stack.hdk))),
        ("engines", ", ".join(f"{name} {version}".strip() for name, version in stack.engines.items())),
        ("environment", " ".join(f"{name}={value}" for name, value in stack.variables.items())),
        ("must not be installed", ", ".join(stack.remove)),
    ):
        if value:
            yield f"# {label}: {value}"
    for note in stack.notes:
        yield f"# note: {note}"


def _requirements(stack: Stack) -> Iterator[str]:
    yield ""
    for name, pin in stack.packages.items():
        # The environment marker makes pip ignore the line on another processor architecture.
        yield f"{name}{pin}" + (f'; platform_machine == "{stack.architecture}"' if stack.architecture else "")
    yield ""


def _steps(stack: Stack) -> Iterator[str]:
    yield "# Steps, in this order:"
    for number, step in enumerate(stack.steps, 1):
        yield f"# {number}. {step.say}" + (f", in {step.where}:" if step.where else ":")
        yield f"#      {step.run}"
