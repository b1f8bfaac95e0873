"""The command: gather, judge, show."""

from __future__ import annotations

from lockstep.doctor.facts import choose_device, gather
from lockstep.doctor.judge import judge
from lockstep.doctor.machine import Machine, ThisMachine
from lockstep.doctor.pins import pins_text, stack_named
from lockstep.doctor.report import Report, as_json, show
from lockstep.doctor.rows import make_rows
from lockstep.errors import Refusal

DEVICES = ("npu", "cuda", "cpu")


def examine(machine: Machine, device: str | None = None) -> Report:
    if device is not None and device not in DEVICES:
        raise Refusal.at("--device", f"unknown device {device!r}", f"one of: {', '.join(DEVICES)}")
    facts = gather(machine)
    chosen, why = (device, "as asked") if device is not None else choose_device(facts)
    return Report(chosen, why, make_rows(facts, chosen, judge(facts, chosen)))


def run_doctor(device: str | None, json_wanted: bool, pins: str | None) -> int:
    """Print what was asked for; the exit status is 1 when something is broken for the device."""
    if pins is not None:
        print(pins_text(stack_named(pins)), end="")
        return 0
    report = examine(ThisMachine(), device)
    if json_wanted:
        print(as_json(report))
    else:
        show(report)
    return 0 if report.healthy else 1
