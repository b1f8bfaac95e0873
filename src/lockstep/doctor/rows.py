"""The rows of the report: every fact once, with what the judgements found of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.doctor.facts import Facts
from lockstep.doctor.finding import Finding, Verdict
from lockstep.doctor.judge_ascend import driver_version, names_cann
from lockstep.doctor.packages import CORE, OTHERS
from lockstep.doctor.stacks import fitting

GIB = 2**30


@dataclass(frozen=True)
class Row:
    group: str
    name: str
    value: str | None
    findings: tuple[Finding, ...] = ()

    @property
    def verdict(self) -> Verdict:
        found = {finding.verdict for finding in self.findings}
        if found:
            return "broken" if "broken" in found else "warning"
        return "ok" if self.value is not None else "absent"


def make_rows(facts: Facts, device: str, findings: Sequence[Finding]) -> list[Row]:
    rows = [Row(group, name, value) for group, name, value in _entries(facts, device)]
    named = {row.name for row in rows}
    # A finding on something that is absent and not listed has its row too.
    rows += [
        Row("other", name, None) for name in dict.fromkeys(finding.row for finding in findings) if name not in named
    ]
    return [
        Row(row.group, row.name, row.value, tuple(finding for finding in findings if finding.row == row.name))
        for row in rows
    ]


def _entries(facts: Facts, device: str) -> Iterator[tuple[str, str, str | None]]:
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


def _ascend(facts: Facts, device: str) -> Iterator[tuple[str, str, str | None]]:
    if device != "npu" and not facts.has_npu and facts.cann is None:
        yield "Ascend", "Ascend", None
        return
    yield "Ascend", "npu-smi", "works" if facts.npu.state == "works" else None
    yield "Ascend", "npu devices", _counted([(chip.name, chip.memory_mb) for chip in facts.npu.chips])
    yield "Ascend", "driver", driver_version(facts)
    boards = list(dict.fromkeys(board.firmware for board in facts.npu.boards.values() if board.firmware))
    yield "Ascend", "firmware", ", ".join(boards) or (facts.firmware.version if facts.firmware else None)
    yield "Ascend", "CANN", f"{facts.cann.version} in {facts.cann.path}" if facts.cann else None


def _nvidia(facts: Facts, device: str) -> Iterator[tuple[str, str, str | None]]:
    if device != "cuda" and facts.nvidia.state == "absent":
        yield "NVIDIA", "NVIDIA", None
        return
    yield "NVIDIA", "nvidia-smi", "works" if facts.nvidia.state == "works" else None
    yield "NVIDIA", "cuda devices", _counted([(gpu.name, gpu.memory_mb) for gpu in facts.nvidia.gpus])
    yield "NVIDIA", "nvidia driver", facts.nvidia.driver


def _folders(path: str, facts: Facts) -> str:
    """A search path is too long to show, and one thing in it matters."""
    count = f"{len([folder for folder in path.split(':') if folder])} folders"
    if facts.cann is None:
        return count
    return count + (", CANN's among them" if names_cann(path) else ", none of CANN's")


def _counted(devices: Sequence[tuple[str, int | None]]) -> str | None:
    """8 x 910B4 (32 GiB)."""
    kinds = Counter(devices)
    return (
        ", ".join(
            f"{count} x {name}" + (f" ({memory / 1024:.0f} GiB)" if memory else "")
            for (name, memory), count in kinds.items()
        )
        or None
    )
