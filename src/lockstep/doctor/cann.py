"""The CANN toolkit, the Ascend driver and its firmware, from the files that their installers leave."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.doctor.machine import Machine

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
        for place in ("version.info", "runtime/version.info", "compiler/version.info"):
            text = machine.read(f"{folder}/{place}")
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
