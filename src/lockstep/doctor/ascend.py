"""What a machine says of its Ascend devices: `npu-smi`, and the files of CANN, of the driver and of the firmware."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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


def ask_npu_smi(machine: Machine) -> NpuSmi:
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


ROOT = "/usr/local/Ascend"
DRIVER = f"{ROOT}/driver/version.info"
FIRMWARE = f"{ROOT}/firmware/version.info"


@dataclass(frozen=True)
class Installation:
    """A part of the Ascend software: its version, Huawei's inner number, and the inner numbers that it goes with."""

    version: str
    path: str
    inner: str | None = None
    goes_with: tuple[tuple[str, str], ...] = ()
    """Ranges of inner numbers, first and last."""


def find_toolkit(machine: Machine) -> Installation | None:
    """The toolkit that the environment names, or the one in the usual place. Newer ones live in `cann`."""
    for folder in toolkit_folders(machine):
        # Arm's folder has two names.
        for name in (machine.architecture, machine.architecture.replace("aarch64", "arm64")):
            text = machine.read(f"{folder}/{name}-linux/ascend_toolkit_install.info")
            if text is not None and (found := installation_in(text, folder)) is not None:
                return found
        text = machine.read(f"{folder}/version.cfg")
        if text is not None and (version := running_version(text)) is not None:
            return Installation(version, folder)
        for file in ("version.info", "runtime/version.info", "compiler/version.info"):
            text = machine.read(f"{folder}/{file}")
            if text is not None and (found := installation_in(text, folder)) is not None:
                return found
    return None


def toolkit_folders(machine: Machine) -> Iterator[str]:
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if folder := machine.variables.get(variable):
            yield folder.rstrip("/")
    yield f"{ROOT}/ascend-toolkit/latest"
    yield f"{ROOT}/cann"


def find_driver(machine: Machine) -> Installation | None:
    text = machine.read(DRIVER)
    return installation_in(text, DRIVER) if text is not None else None


def find_firmware(machine: Machine) -> Installation | None:
    """Firmware is known by a number of its own, not by the release of the package that it came in."""
    text = machine.read(FIRMWARE)
    return installation_in(text, FIRMWARE, ("version",)) if text is not None else None


def installation_in(
    text: str, path: str, keys: tuple[str, ...] = ("package_version", "version")
) -> Installation | None:
    """From lines of the form key=value; `package_version` is the release that people know."""
    pairs = (line.partition("=") for line in text.splitlines())
    values = {key.strip().lower(): value.strip() for key, _, value in pairs}
    version = next((values[key] for key in keys if values.get(key)), None)
    if version is None:
        return None
    listed = re.findall(r"\[([^\],]+)(?:,([^\]]*))?\]", values.get("compatible_version", ""))
    ranges = tuple((first, last or first) for first, last in listed)
    return Installation(version, path, branch(values.get("innerversion")), ranges)


def branch(inner: str | None) -> str | None:
    """V100R001C23 of V100R001C23SPC002B210: the part that compatibility lists name."""
    found = re.match(r"V\d+R\d+C\d+", inner or "")
    return found.group(0) if found else None


def running_version(text: str) -> str | None:
    """8.2.RC2 of `toolkit_running_version=[8.2.0.2.220:8.2.RC2]`, the last of several."""
    for state in ("running", "installed"):
        found = re.search(rf"^\s*toolkit_{state}_version=(.*)$", text, re.MULTILINE)
        versions = re.findall(r"\[[^:\]]*:([^\]]+)\]", found.group(1)) if found else []
        if versions:
            return str(versions[-1])
    return None


def go_together(toolkit: Installation, driver: Installation) -> bool | None:
    """Whether one of the two lists the other; None when neither says."""
    answers = [_lists(toolkit, driver), _lists(driver, toolkit)]
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def _lists(one: Installation, other: Installation) -> bool | None:
    if not one.goes_with or other.inner is None:
        return None
    return any(first <= other.inner <= last for first, last in one.goes_with)
