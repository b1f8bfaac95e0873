"""The command: gather, judge, show."""

from __future__ import annotations

from lockstep.doctor import judge_engines, judge_machine, judge_packages
from lockstep.doctor.facts import Diagnosis, MachineFacts, choose_device, gather
from lockstep.doctor.machine import Machine
from lockstep.doctor.report import Report, as_json, make_rows, show
from lockstep.doctor.stacks import pins_text, stack_named
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
    report = examine(Machine(), device)
    if json_wanted:
        print(as_json(report))
    else:
        show(report)
    return 0 if report.healthy else 1


def judge(facts: MachineFacts, device: str) -> list[Diagnosis]:
    machine = (*judge_machine.ON_ANY, *judge_machine.ON.get(device, ()))
    judgements = (*judge_packages.JUDGEMENTS, *judge_engines.JUDGEMENTS, *machine)
    return [finding for judgement in judgements for finding in judgement(facts, device)]
