"""What `npu-smi` says of Ascend devices: the table of `info`, and `info -t board` of each card."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lockstep.doctor.machine import Machine


@dataclass(frozen=True)
class Chip:
    """One device as torch counts them; a card of an A3 carries two."""

    card: int
    name: str
    health: str
    memory_mb: int | None


@dataclass(frozen=True)
class Board:
    driver: str | None
    firmware: str | None
    compatibility: str | None


@dataclass(frozen=True)
class NpuSmi:
    state: Literal["absent", "failed", "works"]
    message: str = ""
    driver: str | None = None
    chips: tuple[Chip, ...] = ()
    boards: Mapping[int, Board] = field(default_factory=dict)


def ask(machine: Machine) -> NpuSmi:
    answer = machine.run("npu-smi", "info")
    if answer is None:
        return NpuSmi("absent")
    chips = chips_in(answer.text)
    if answer.status != 0 or not chips:
        lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
        return NpuSmi("failed", lines[-1] if lines else f"exit status {answer.status}", driver_in(answer.text))
    cards = sorted({chip.card for chip in chips})
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and most machines have no cards

    with ThreadPoolExecutor(8) as pool:
        boards = dict(zip(cards, pool.map(lambda card: _board(machine, card), cards), strict=True))
    return NpuSmi("works", driver=driver_in(answer.text), chips=chips, boards=boards)


def driver_in(text: str) -> str | None:
    found = re.search(r"\bVersion:\s*([\w.-]+)", text)
    return found.group(1) if found else None


def chips_in(text: str) -> tuple[Chip, ...]:
    """A device takes two lines of three cells: (card, name), health, ... and (chip, ...), bus, ... memory."""
    chips: list[Chip] = []
    first: tuple[int, str, str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        # The table of processes has four cells, a message that spans the table has one.
        if len(cells) != 3 or not cells[0][:1].isdigit():
            continue
        if first is None:
            card, _, name = cells[0].partition(" ")
            first = (int(card), name.strip(), cells[1])
        else:
            # The last pair is the device's own memory; a pair before it counts the host's part.
            pairs = re.findall(r"\d+\s*/\s*(\d+)", cells[2])
            chips.append(Chip(*first, memory_mb=int(pairs[-1]) if pairs else None))
            first = None
    return tuple(chips)


def _board(machine: Machine, card: int) -> Board:
    answer = machine.run("npu-smi", "info", "-t", "board", "-i", str(card))
    return board_in(answer.text if answer is not None else "")


def board_in(text: str) -> Board:
    pairs = (line.partition(":") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, _, value in pairs}
    known = {key: value for key, value in values.items() if value not in ("", "NA")}
    return Board(known.get("Software Version"), known.get("Firmware Version"), known.get("Compatibility"))
