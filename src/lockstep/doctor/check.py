"""The command: gather, judge, show."""

from __future__ import annotations

from lockstep.doctor import judge_engines, judge_machine, judge_packages
from lockstep.doctor.facts import MINIMUM, Diagnosis, MachineFacts, choose_device, gather
from lockstep.doctor.judge_machine import driver_version
from lockstep.doctor.machine import Machine
from lockstep.doctor.report import Report, as_json, make_rows, show
from lockstep.doctor.stacks import known_stacks, older, pins_text, release, stack_named
from lockstep.errors import Refusal

DEVICES = ("npu", "cuda", "cpu")


def examine(machine: Machine, device: str | None = None) -> Report:
    if device is not None and device not in DEVICES:
        raise Refusal.at("--device", f"unknown device {device!r}", f"one of: {', '.join(DEVICES)}")
    facts = gather(machine)
    chosen, why = (device, "as asked") if device is not None else choose_device(facts)
    return Report(chosen, why, make_rows(facts, chosen, judge(facts, chosen)), cannot_train(facts, chosen))


def cannot_train(facts: MachineFacts, device: str) -> tuple[str, ...]:
    """For a machine that has the stack of another project's guide for Ascend: first that, then what is left to do."""
    torch_npu = facts.packages.get("torch_npu")
    if device != "npu" or torch_npu is None or not older(release(torch_npu), MINIMUM["torch"]):
        return ()
    stack, driver = known_stacks()["lockstep-npu"], driver_version(facts)
    cann = f"CANN {facts.cann.version}" if facts.cann is not None else "no CANN"
    needed = f"torch_npu {stack.packages['torch_npu'].lstrip('=')}, CANN {stack.cann[0]}, driver HDK {stack.hdk[0]}"
    here = f"; the driver here is {driver}" if driver is not None else ""
    return (
        f"lockstep cannot train on this stack (torch_npu {torch_npu}, {cann}): it needs torch {MINIMUM['torch']}",
        f"1. a newer stack beside this one: {needed} or newer, which needs root{here} (docs/ascend.md)",
        "2. compare runs that exist, from their logs, on any machine: lockstep compare A B (docs/foreign-logs.md)",
        "3. record a run here with lockstep_record.py, a single file, and judge it elsewhere: lockstep replay "
        "(docs/replay.md)",
    )


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
