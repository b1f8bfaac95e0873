"""Judgements on the Ascend side: devices, driver, firmware and CANN. Made for the device `npu` only."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.cann import go_together
from lockstep.doctor.facts import Facts
from lockstep.doctor.finding import Finding, broken, warning
from lockstep.doctor.stacks import cann_fits, canns_for, driver_for
from lockstep.doctor.versions import older

DOWNLOAD = "the driver and firmware package (HDK) of this device"


def devices_answer(facts: Facts, device: str) -> Iterator[Finding]:
    if device != "npu":
        return
    if facts.npu.state == "absent" and not facts.npu_nodes:
        yield broken(
            "npu-smi",
            "not found, and there is no /dev/davinci*: no driver, or a container without it",
            f"install {DOWNLOAD}; a container needs the devices /dev/davinci* and the driver's folder",
        )
    elif facts.npu.state == "absent":
        yield warning(
            "npu-smi",
            "not found, though there are devices: their health is not known",
            "mount /usr/local/bin/npu-smi and /usr/local/dcmi into the container",
        )
    elif facts.npu.state == "failed":
        yield broken(
            "npu-smi",
            f"it fails: {facts.npu.message}",
            f"is the driver loaded, and may this user open the devices? Otherwise install {DOWNLOAD}",
        )


def devices_are_healthy(facts: Facts, device: str) -> Iterator[Finding]:
    if device != "npu":
        return
    for number, chip in enumerate(facts.npu.chips):
        if chip.health.lower() == "ok":
            continue
        say = warning if chip.health.lower() == "warning" else broken
        yield say(
            "npu devices",
            f"device {number} (card {chip.card}, {chip.name}) reports {chip.health}",
            f"npu-smi info -t health -i {chip.card} tells more; leave it out with ASCEND_RT_VISIBLE_DEVICES",
        )


def cann_is_loaded(facts: Facts, device: str) -> Iterator[Finding]:
    if device != "npu":
        return
    if facts.cann is None:
        yield broken("CANN", "not found", "install the toolkit and the kernels of this device, and source set_env.sh")
    elif not _loader_knows(facts, facts.cann.path):
        yield warning(
            "CANN",
            "LD_LIBRARY_PATH does not name its libraries: `import torch_npu` will not find libhccl.so",
            f"source {_set_env(facts.cann.path)}",
        )


def _loader_knows(facts: Facts, folder: str) -> bool:
    search_path = facts.variables.get("LD_LIBRARY_PATH", "")
    return folder in search_path or names_cann(search_path)


def names_cann(search_path: str) -> bool:
    return any(part in search_path for part in ("/ascend-toolkit/", "/cann/", "/cann-"))


def _set_env(folder: str) -> str:
    return folder.removesuffix("/latest") + "/set_env.sh"


def cann_fits_torch_npu(facts: Facts, device: str) -> Iterator[Finding]:
    torch_npu = facts.packages.get("torch_npu")
    if device != "npu" or facts.cann is None or torch_npu is None:
        return
    named = canns_for(torch_npu)
    if not named or cann_fits(facts.cann.version, named):
        return
    # Between releases of one generation programs often still load; a generation back, symbols are missing.
    floors = [each.removeprefix(">=") for each in named if each.startswith(">=")]
    say = broken if any(older(facts.cann.version, floor.split(".")[0]) for floor in floors) else warning
    words = [f"{each.removeprefix('>=')} or newer" if each.startswith(">=") else each for each in named]
    yield say(
        "CANN",
        f"torch_npu {torch_npu} is known with CANN {', '.join(words)}, this is {facts.cann.version}",
        "install the CANN that is named beside this one, and source its set_env.sh where lockstep runs",
    )


def driver_fits_cann(facts: Facts, device: str) -> Iterator[Finding]:
    driver = driver_version(facts)
    if device != "npu" or facts.cann is None or driver is None:
        return
    wanted = driver_for(facts.cann.version)
    listed = go_together(facts.cann, facts.driver) if facts.driver is not None else None
    if wanted is not None and older(driver, wanted):
        say = warning if listed else broken
        yield say(
            "driver",
            f"CANN {facts.cann.version} is known with HDK {wanted} and newer, this is {driver}",
            f"install HDK {wanted} or newer, driver and firmware",
        )
    elif listed is False:
        yield warning(
            "driver",
            f"neither CANN {facts.cann.version} nor driver {driver} lists the other as compatible",
            "install the HDK that the CANN release notes name",
        )


def driver_version(facts: Facts) -> str | None:
    if facts.npu.driver is not None:
        return facts.npu.driver
    return facts.driver.version if facts.driver is not None else None


def firmware_fits_driver(facts: Facts, device: str) -> Iterator[Finding]:
    if device != "npu":
        return
    for card, board in facts.npu.boards.items():
        if board.compatibility not in (None, "OK"):
            yield broken(
                "firmware",
                f"card {card}: npu-smi calls driver {board.driver} and firmware {board.firmware} {board.compatibility}",
                "install driver and firmware of one HDK release, and restart the machine",
            )


JUDGEMENTS = (
    devices_answer,
    devices_are_healthy,
    cann_is_loaded,
    cann_fits_torch_npu,
    driver_fits_cann,
    firmware_fits_driver,
)
