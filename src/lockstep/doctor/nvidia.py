"""What `nvidia-smi` says of NVIDIA devices."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Literal

from lockstep.doctor.machine import Machine

QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_mb: int | None


@dataclass(frozen=True)
class Nvidia:
    state: Literal["absent", "failed", "works"]
    message: str = ""
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()


def ask(machine: Machine) -> Nvidia:
    answer = machine.run(*QUERY)
    if answer is None:
        return Nvidia("absent")
    rows = [[cell.strip() for cell in row] for row in csv.reader(answer.text.splitlines())]
    rows = [row for row in rows if len(row) == 3]
    if answer.status != 0 or not rows:
        lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
        return Nvidia("failed", lines[-1] if lines else f"exit status {answer.status}")
    gpus = tuple(Gpu(name, int(memory) if memory.isdigit() else None) for name, memory, _ in rows)
    return Nvidia("works", driver=rows[0][2], gpus=gpus)
