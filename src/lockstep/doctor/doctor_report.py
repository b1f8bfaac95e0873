"""The report of `lockstep doctor`: every fact with its problems, as a table, plain lines or JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from lockstep.doctor.doctor_checks import GIB, MACHINE_CHECKS, Diagnosis, Verdict
from lockstep.doctor.engine_packages import engines_here
from lockstep.doctor.local_machine import Machine
from lockstep.doctor.machine_facts import CORE, MINIMUM, OTHERS, MachineFacts, choose_device, gather, names_cann
from lockstep.doctor.package_checks import ENGINE_CHECKS, PACKAGE_CHECKS
from lockstep.doctor.version_stacks import fitting, known_stacks, older, pins_text, release, stack_named
from lockstep.errors import Refusal

DEVICES = ("npu", "cuda", "cpu")
CHECKS = (*PACKAGE_CHECKS, *ENGINE_CHECKS, *MACHINE_CHECKS)
WIDTH = 80
MARKS: dict[Verdict, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "absent": ("–", "dim"),
    "unknown": ("?", "yellow"),
    "warning": ("!", "yellow"),
    "broken": ("✗", "red"),
}


def run_doctor(device: str | None, json_wanted: bool, pins: str | None) -> int:
    """Prints the report, or with `pins` the package versions of a known stack. Returns exit status 1 if something is
    broken for the device."""
    if pins is not None:
        print(pins_text(stack_named(pins)), end="")
        return 0
    report = examine(Machine(), device)
    if json_wanted:
        print(as_json(report))
    else:
        show(report)
    return 0 if report.healthy else 1


def examine(machine: Machine, device: str | None = None) -> Report:
    if device is not None and device not in DEVICES:
        raise Refusal.at(
            "--device", f"unknown device {device!r}", f"one of: {', '.join(DEVICES)}", code="unknown-device"
        )
    facts = gather(machine)
    chosen, why = (device, "--device") if device is not None else choose_device(facts)
    findings = [finding for check in CHECKS for finding in check(facts, chosen)]
    return Report(chosen, why, make_rows(facts, chosen, findings), cannot_train(facts, chosen))


def cannot_train(facts: MachineFacts, device: str) -> tuple[str, ...]:
    """Returns why lockstep cannot train on a machine whose torch_npu is too old, and the alternatives. Returns nothing
    if lockstep can train."""
    torch_npu = facts.packages.get("torch_npu")
    if device != "npu" or torch_npu is None or not older(release(torch_npu), MINIMUM["torch"]):
        return ()
    stack, driver = known_stacks()["lockstep-npu"], facts.driver_version
    cann = f"CANN {facts.cann.version}" if facts.cann is not None else "no CANN"
    needed = f"torch_npu {stack.packages['torch_npu'].lstrip('=')}, CANN {stack.cann[0]}, driver HDK {stack.hdk[0]}"
    here = f"; the driver here is {driver}" if driver is not None else ""
    return (
        f"lockstep cannot train on this stack (torch_npu {torch_npu}, {cann}): it needs torch {MINIMUM['torch']} or "
        "newer",
        f"1. install a newer stack in addition: {needed} or newer; this needs root{here} (`lockstep help ascend`)",
        "2. compare existing runs by their logs, on any machine: lockstep compare A B (`lockstep help foreign-logs`)",
        "3. record a run here with the single file lockstep_record.py, and check it on another machine: lockstep "
        "replay (`lockstep help replay`)",
    )


@dataclass(frozen=True)
class Fact:
    group: str
    name: str
    value: str | None
    findings: tuple[Diagnosis, ...] = ()
    missing: str = ""
    """What an absent engine lacks, and the command that installs it. Empty for other facts."""
    short: str = ""
    """The same without the command, which is too long for a line."""

    @property
    def shown(self) -> str:
        return self.value or (f"absent: {self.short}" if self.short else "absent")

    @property
    def verdict(self) -> Verdict:
        verdicts = {finding.verdict for finding in self.findings}
        order: tuple[Verdict, ...] = ("broken", "warning", "unknown")
        for worst in order:
            if worst in verdicts:
                return worst
        return "ok" if self.value is not None else "absent"


def make_rows(facts: MachineFacts, device: str, findings: Sequence[Diagnosis]) -> list[Fact]:
    rows = [Fact(group, name, value) for group, name, value in _entries(facts, device)]
    rows += [
        Fact("engines", f"engine {engine.name}", engine.found, missing=engine.explanation(), short=engine.short())
        for engine in engines_here(facts.packages, device)
    ]
    named = {row.name for row in rows}
    # A problem whose name has no row yet gets a new row.
    rows += [
        Fact("other", name, None) for name in dict.fromkeys(finding.row for finding in findings) if name not in named
    ]
    return [replace(row, findings=tuple(each for each in findings if each.row == row.name)) for row in rows]


def _entries(facts: MachineFacts, device: str) -> Iterator[tuple[str, str, str | None]]:
    yield "system", "os", facts.system
    yield "system", "architecture", facts.architecture
    yield "system", "python", facts.python
    yield "system", "compiler", facts.compiler
    yield "system", "disk", f"{facts.disk.free / GIB:.0f} of {facts.disk.total / GIB:.0f} GiB free"
    if facts.extensions:
        yield "system", "torch_extensions", f"{len(facts.extensions)} compiled"
    for name in CORE:
        yield "packages", name, facts.packages.get(name)
    if device == "npu" or facts.has_npu or "torch_npu" in facts.packages:
        yield "packages", "torch_npu", facts.packages.get("torch_npu")
    for name in OTHERS:
        if name in facts.packages:
            yield "packages", name, facts.packages[name]
    yield from _ascend(facts, device)
    yield from _nvidia(facts, device)
    stack = fitting(facts, device)
    yield "stack", "known stack", f"{stack.name}: {stack.title}, {stack.status}" if stack else None
    for name, value in facts.variables.items():
        yield "environment", name, _folders(value, facts) if name == "LD_LIBRARY_PATH" else value


def _ascend(facts: MachineFacts, device: str) -> Iterator[tuple[str, str, str | None]]:
    if device != "npu" and not facts.has_npu and facts.cann is None:
        yield "Ascend", "Ascend", None
        return
    yield "Ascend", "npu-smi", "works" if facts.npu.state == "works" else None
    yield "Ascend", "npu devices", _counted([(chip.name, chip.memory_mb) for chip in facts.npu.chips])
    yield "Ascend", "driver", facts.driver_version
    boards = list(dict.fromkeys(board.firmware for board in facts.npu.boards.values() if board.firmware))
    yield "Ascend", "firmware", ", ".join(boards) or (facts.firmware.version if facts.firmware else None)
    yield "Ascend", "CANN", f"{facts.cann.version} in {facts.cann.path}" if facts.cann else None


def _nvidia(facts: MachineFacts, device: str) -> Iterator[tuple[str, str, str | None]]:
    if device != "cuda" and facts.nvidia.state == "absent":
        yield "NVIDIA", "NVIDIA", None
        return
    yield "NVIDIA", "nvidia-smi", "works" if facts.nvidia.state == "works" else None
    yield "NVIDIA", "cuda devices", _counted([(gpu.name, gpu.memory_mb) for gpu in facts.nvidia.gpus])
    yield "NVIDIA", "nvidia driver", facts.nvidia.driver


def _folders(path: str, facts: MachineFacts) -> str:
    """Returns how many folders a search path has, and whether CANN is among them. The full path is too long to show."""
    count = f"{len([folder for folder in path.split(':') if folder])} folders"
    if facts.cann is None:
        return count
    return count + (", CANN's among them" if names_cann(path) else ", none of CANN's")


def _counted(devices: Sequence[tuple[str, int | None]]) -> str | None:
    """Returns a text such as `8 x 910B4 (32 GiB)`."""
    kinds = Counter(devices)
    return (
        ", ".join(
            f"{count} x {name}" + (f" ({memory / 1024:.0f} GiB)" if memory else "")
            for (name, memory), count in kinds.items()
        )
        or None
    )


@dataclass(frozen=True)
class Report:
    device: str
    why: str
    rows: Sequence[Fact]
    cannot_train: tuple[str, ...] = ()
    """Why lockstep cannot train on this machine, and the alternatives; empty if it can train."""

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def healthy(self) -> bool:
        return self.count("broken") == 0

    def verdict(self) -> str:
        broken, warnings = self.count("broken"), self.count("warning")
        state = "nothing broken" if self.healthy else f"{broken} broken"
        unknown = f", {self.count('unknown')} unknown" if self.count("unknown") else ""
        return f"device {self.device} ({self.why}): {state}, {warnings} warning{'s' if warnings != 1 else ''}{unknown}"


def as_json(report: Report) -> str:
    rows = [
        {
            "group": row.group,
            "name": row.name,
            "value": row.value,
            "missing": row.missing,
            "verdict": row.verdict,
            "findings": [
                {"verdict": finding.verdict, "why": finding.why, "remedy": finding.remedy} for finding in row.findings
            ],
        }
        for row in report.rows
    ]
    broken, warnings = report.count("broken"), report.count("warning")
    head: dict[str, Any] = {"device": report.device, "why": report.why, "broken": broken, "warnings": warnings}
    head |= {"unknown": report.count("unknown"), "cannot_train": list(report.cannot_train)}
    return json.dumps({**head, "rows": rows}, indent=2, ensure_ascii=False)


def show(report: Report) -> None:
    if sys.stdout.isatty():
        _show_table(report)
    else:
        print("\n".join(plain_lines(report)))


def plain_lines(report: Report) -> Iterator[str]:
    """Yields one line per fact and per problem. Lines are never wrapped, so that grep finds their texts."""
    yield from report.cannot_train
    width = max(len(row.name) for row in report.rows)
    for row in report.rows:
        yield f"{row.verdict:8} {row.name:{width}}  {row.shown}"
        for finding in row.findings:
            yield f"{finding.verdict:8} {row.name}: {finding.why} -> {finding.remedy}"
    yield report.verdict()


def _show_table(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for line in table_lines(report, min(console.width, WIDTH)):
        # soft_wrap lets the terminal wrap a long path, so that the path stays one word when the user copies it.
        console.print(line, soft_wrap=True)


def table_lines(report: Report, width: int) -> Iterator[Text]:
    for number, text in enumerate(report.cannot_train):
        for line in _wrapped(text, width):
            yield Text(line, style="" if number else "bold red")
    if report.cannot_train:
        yield Text()
    names = min(max(len(row.name) for row in report.rows), 20)
    for index, row in enumerate(report.rows):
        if index == 0 or report.rows[index - 1].group != row.group:
            yield Text(row.group, style="bold")
        yield from _row_lines(row, names, width)
    for row in report.rows:
        for finding in row.findings:
            yield Text()
            yield from _marked(*MARKS[finding.verdict], f"{row.name}: {finding.why}", width)
            yield from _marked("  ->", "cyan", finding.remedy, width)
    yield Text()
    for line in _wrapped(report.verdict(), width):
        yield Text(line, style="bold green" if report.healthy else "bold red")


def _row_lines(row: Fact, names: int, width: int) -> Iterator[Text]:
    mark, style = MARKS[row.verdict]
    name = row.name
    if len(name) > names:  # a name that is too long for its column gets a separate line
        yield Text.assemble((f"  {mark} ", style), name)
        mark, name = " ", ""
    for line in _wrapped(row.shown, width - names - 6):
        yield Text.assemble((f"  {mark} ", style), f"{name:{names}}  ", (line, "" if row.value else "dim"))
        mark, name = " ", ""


def _marked(mark: str, style: str, text: str, width: int) -> Iterator[Text]:
    for index, line in enumerate(_wrapped(text, width - len(mark) - 1)):
        yield Text.assemble((mark if index == 0 else " " * len(mark), style), f" {line}")


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
