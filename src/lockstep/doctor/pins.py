"""A stack as a requirements file whose comments are the steps to install it."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.packages import MINIMUM
from lockstep.doctor.stacks import Stack, known_stacks
from lockstep.errors import Refusal


def stack_named(name: str) -> Stack:
    stacks = known_stacks()
    if name not in stacks:
        names = "; ".join(f"{stack.name} ({stack.title})" for stack in stacks.values())
        raise Refusal.at("--pins", f"there is no stack {name!r}", f"one of: {names}")
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
        yield f"# Older than lockstep itself, which needs {least}:"
        yield "# for the engine's own environment. lockstep goes into another one, with its extra [npu]."
    for label, words in (
        ("hardware", ", ".join(stack.hardware)),
        ("Python", stack.python.lstrip("=")),
        ("CANN", ", ".join(stack.cann)),
        ("HDK (driver and firmware)", " to ".join(dict.fromkeys(stack.hdk))),
        ("engines", ", ".join(f"{name} {version}".strip() for name, version in stack.engines.items())),
        ("environment", " ".join(f"{name}={value}" for name, value in stack.variables.items())),
        ("must not be installed", ", ".join(stack.remove)),
    ):
        if words:
            yield f"# {label}: {words}"
    for note in stack.notes:
        yield f"# note: {note}"


def _requirements(stack: Stack) -> Iterator[str]:
    yield ""
    for name, pin in stack.packages.items():
        # A marker, so that the line means nothing on another processor.
        yield f"{name}{pin}" + (f'; platform_machine == "{stack.architecture}"' if stack.architecture else "")
    yield ""


def _steps(stack: Stack) -> Iterator[str]:
    yield "# Steps, in this order:"
    for number, step in enumerate(stack.steps, 1):
        yield f"# {number}. {step.say}" + (f", in {step.where}:" if step.where else ":")
        yield f"#      {step.run}"
