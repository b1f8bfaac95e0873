"""The checks of `lockstep doctor` for Python, disk, devices, drivers, CANN and environment variables.

A check is an entry of `MACHINE_CHECKS`. A simple check is a `DoctorCheck` with device, fact, condition, reason, remedy
and verdict. A check that compares versions or reports several problems is a function. package_checks.py contains the
checks of Python packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lockstep.doctor.machine_facts import PYTHON, MachineFacts, are_compatible, names_cann
from lockstep.doctor.version_stacks import NEWEST_PAIR, cann_fits, canns_for, driver_for, older, release

Verdict = Literal["ok", "absent", "unknown", "warning", "broken"]
Text = str | Callable[[MachineFacts], str]


@dataclass(frozen=True)
class Diagnosis:
    """A problem with one fact of the report, and its remedy. The verdict `unknown` means that no source states whether
    the combination works."""

    row: str
    verdict: Literal["unknown", "warning", "broken"]
    why: str
    remedy: str


Findings = Iterator[Diagnosis]
Examination = Callable[[MachineFacts, str], Findings]
"""A check: takes the facts of the machine and the chosen device, and yields the problems that it found."""


@dataclass(frozen=True)
class DoctorCheck:
    """A check of one fact. `device` None means that the check applies to every device."""

    device: Literal["npu", "cuda", None]
    row: str
    fails: Callable[[MachineFacts], bool]
    why: Text
    remedy: Text
    verdict: Literal["warning", "broken"] = "warning"

    def __call__(self, facts: MachineFacts, device: str) -> Findings:
        if self.device in (None, device) and self.fails(facts):
            why, remedy = (text if isinstance(text, str) else text(facts) for text in (self.why, self.remedy))
            yield Diagnosis(self.row, self.verdict, why, remedy)


def unknown(row: str, why: str, remedy: str) -> Diagnosis:
    return Diagnosis(row, "unknown", why, remedy)


def warning(row: str, why: str, remedy: str) -> Diagnosis:
    return Diagnosis(row, "warning", why, remedy)


def broken(row: str, why: str, remedy: str) -> Diagnosis:
    return Diagnosis(row, "broken", why, remedy)


GIB = 2**30
NOSET = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
HDK = "the driver and firmware package (HDK) of this device"
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
LAST_PORT, PORTS = 65535, 16
"""HCCL listens on this many consecutive ports."""


def python_is_supported(facts: MachineFacts, device: str) -> Findings:
    minor = ".".join(facts.python.split(".")[:2])
    oldest, newest = PYTHON
    if older(minor, oldest) or older(newest, minor):
        yield broken(
            "python",
            f"lockstep runs on Python {oldest} to {newest}, but this is Python {release(facts.python)}",
            f"create the environment with a supported Python, for example python{newest} -m venv .venv",
        )


def disk_has_room(facts: MachineFacts, device: str) -> Findings:
    free, total = facts.disk.free, facts.disk.total
    why = f"{free / GIB:.1f} GiB of {total / GIB:.0f} GiB are free in this folder"
    remedy = "free some space, or set run.folder to another disk"
    if free < GIB:
        yield broken("disk", why, f"{remedy}: a checkpoint would not fit")
    elif free < 10 * GIB or free < 0.05 * total:
        yield warning("disk", why, f"{remedy}: checkpoints contain weights and optimizer state")


def extensions_are_current(facts: MachineFacts, device: str) -> Findings:
    for extension in facts.extensions:
        if extension.locked:
            yield warning(
                "torch_extensions",
                f"{extension.folder} contains the lock file of a build: if no build is running, the next build waits "
                "forever",
                f"stop any running build, then rm -r {extension.folder}",
            )
        elif extension.older_than_torch:
            yield warning(
                "torch_extensions",
                f"{extension.folder} was compiled before the installed torch, and may not load with it",
                f"rm -r {extension.folder}; it is rebuilt when needed",
            )


def visible_devices_exist(facts: MachineFacts, device: str) -> Findings:
    count = {"npu": facts.npu_count, "cuda": len(facts.nvidia.gpus)}.get(device, 0)
    variable = VISIBLE.get(device, "")
    value = facts.variables.get(variable)
    if value is None or not count:
        return
    numbers = [word.strip() for word in value.split(",")]
    if value.strip() in ("", "-1"):
        yield broken(
            variable, "it hides every device", f"unset {variable}, or list device numbers from 0 to {count - 1}"
        )
    elif all(number.isdigit() for number in numbers):
        missing = [number for number in numbers if int(number) >= count]
        if missing:
            yield broken(
                variable,
                f"there is no device {', '.join(missing)}: this machine has {count}, numbered 0 to {count - 1}",
                f"export {variable}=" + ",".join(map(str, range(count))),
            )
        elif device == "npu" and [int(number) for number in numbers] != sorted({int(number) for number in numbers}):
            yield broken(
                variable,
                f"{value!r} must list each device once, in ascending order",
                f"export {variable}=" + ",".join(sorted(set(numbers), key=int)),
            )
    # Values that are not numbers are device names (GPU-...), which only the driver can resolve.


def devices_are_healthy(facts: MachineFacts, device: str) -> Findings:
    if device != "npu":
        return
    for number, chip in enumerate(facts.npu.chips):
        if chip.health.lower() == "ok":
            continue
        finding = warning if chip.health.lower() == "warning" else broken
        yield finding(
            "npu devices",
            f"device {number} (card {chip.card}, {chip.name}) reports {chip.health}",
            f"npu-smi info -t health -i {chip.card} shows details; exclude the device with ASCEND_RT_VISIBLE_DEVICES",
        )


def cann_fits_torch_npu(facts: MachineFacts, device: str) -> Findings:
    torch_npu = facts.packages.get("torch_npu")
    if device != "npu" or facts.cann is None or torch_npu is None:
        return
    named, installed = canns_for(torch_npu), facts.cann.version
    if named:
        if not cann_fits(installed, named):
            # With another CANN of the same major version, programs often still load. With an older major version of
            # CANN, symbols are missing.
            generation = min((each.split(".")[0] for each in named), key=int)
            finding = broken if older(installed, generation) else warning
            yield finding(
                "CANN",
                f"torch_npu {torch_npu} is documented with CANN {', '.join(named)}, but CANN {installed} is installed",
                "install the documented CANN in addition, and source its set_env.sh before you start lockstep",
            )
        return
    newest, needed = NEWEST_PAIR
    if older(newest, torch_npu) and older(installed, needed):
        why = (
            f"torch_npu {newest} already needs CANN {needed}, and torch_npu {torch_npu} is newer; installed is CANN "
            f"{installed}"
        )
        remedy = f"install CANN {needed} in addition, with torch and torch_npu {newest}"
        yield broken("CANN", why, remedy)
    else:
        yield unknown(
            "CANN",
            f"TorchNPU's compatibility table does not contain torch_npu {torch_npu}, so the CANN version that it "
            "needs is unknown",
            f"use a combination of that table: torch_npu {newest} with CANN {needed}",
        )


def driver_fits_cann(facts: MachineFacts, device: str) -> Findings:
    driver = facts.driver_version
    if device != "npu" or facts.cann is None or driver is None:
        return
    wanted = driver_for(facts.cann.version)
    listed = are_compatible(facts.cann, facts.driver) if facts.driver is not None else None
    if wanted is not None and older(driver, wanted):
        finding = warning if listed else broken
        yield finding(
            "driver",
            f"CANN {facts.cann.version} is documented with HDK {wanted} and newer, but HDK {driver} is installed",
            f"install HDK {wanted} or newer, driver and firmware (needs root, and changes the machine for all its "
            "users)",
        )
    elif listed is False:
        yield warning(
            "driver",
            f"CANN {facts.cann.version} and driver {driver} do not list each other as compatible",
            "install the HDK that the CANN release notes name",
        )
    elif wanted is None and not listed:
        yield unknown(
            "driver",
            f"no documented stack names a driver for CANN {facts.cann.version}; the installed driver is {driver}",
            "see the release notes of this CANN version; installing a driver needs root",
        )


def firmware_fits_driver(facts: MachineFacts, device: str) -> Findings:
    for card, board in facts.npu.boards.items():
        if device == "npu" and board.compatibility not in (None, "OK"):
            yield broken(
                "firmware",
                f"card {card}: npu-smi reports driver {board.driver} and firmware {board.firmware} as "
                f"{board.compatibility}",
                "install driver and firmware of the same HDK release, and restart the machine",
            )


def _cann_is_unloaded(facts: MachineFacts) -> bool:
    path = facts.variables.get("LD_LIBRARY_PATH", "")
    return facts.cann is not None and facts.cann.path not in path and not names_cann(path)


def _set_env(facts: MachineFacts) -> str:
    assert facts.cann is not None
    return f"source {facts.cann.path.removesuffix('/latest')}/set_env.sh"


def _bad_port(facts: MachineFacts) -> bool:
    first = facts.variables.get("HCCL_IF_BASE_PORT", "1024")
    return not first.isdigit() or not 1024 <= int(first) <= LAST_PORT - PORTS + 1


MACHINE_CHECKS: tuple[Examination, ...] = (
    python_is_supported,
    disk_has_room,
    extensions_are_current,
    visible_devices_exist,
    DoctorCheck(
        "cuda",
        "compiler",
        lambda f: f.compiler is None,
        "gcc is missing, and Triton needs it to compile a small launcher",
        "install gcc (on Debian and Ubuntu: apt install gcc)",
    ),
    DoctorCheck(
        "cuda",
        "compiler",
        lambda f: not f.python_headers,
        "Python.h is missing, and Triton needs it to compile a small launcher",
        "install the headers of this Python (on Debian and Ubuntu: apt install python3-dev)",
    ),
    DoctorCheck(
        "cuda",
        "nvidia-smi",
        lambda f: f.nvidia.state == "absent",
        "not found: there is no NVIDIA driver, or the container has no access to it",
        "install the driver; for a container, use docker run --gpus all",
        verdict="broken",
    ),
    DoctorCheck(
        "cuda",
        "nvidia-smi",
        lambda f: f.nvidia.state == "failed",
        lambda f: f"it fails: {f.nvidia.message}",
        "check that the driver is loaded, and that its libraries have the version of its kernel module",
        verdict="broken",
    ),
    DoctorCheck(
        "npu",
        "npu-smi",
        lambda f: f.npu.state == "absent" and not f.npu_nodes,
        "not found, and there is no /dev/davinci*: there is no Ascend driver, or the container has no access to it",
        f"install {HDK}; a container needs the devices /dev/davinci* and the driver's folder",
        verdict="broken",
    ),
    DoctorCheck(
        "npu",
        "npu-smi",
        lambda f: f.npu.state == "absent" and f.npu_nodes > 0,
        "npu-smi is not found, although there are Ascend devices, so their health is unknown",
        "mount /usr/local/bin/npu-smi and /usr/local/dcmi into the container",
    ),
    DoctorCheck(
        "npu",
        "npu-smi",
        lambda f: f.npu.state == "failed",
        lambda f: f"it fails: {f.npu.message}",
        f"check that the driver is loaded and that this user may open the devices; otherwise install {HDK}",
        verdict="broken",
    ),
    devices_are_healthy,
    DoctorCheck(
        "npu",
        "CANN",
        lambda f: f.cann is None,
        "not found",
        "install the CANN toolkit and the CANN kernels for this device, and source set_env.sh",
        verdict="broken",
    ),
    DoctorCheck(
        "npu",
        "CANN",
        _cann_is_unloaded,
        "LD_LIBRARY_PATH does not contain CANN's libraries, so `import torch_npu` will not find libhccl.so",
        _set_env,
    ),
    cann_fits_torch_npu,
    driver_fits_cann,
    firmware_fits_driver,
    DoctorCheck(
        "npu",
        NOSET,
        lambda f: f.variables.get(NOSET, "0") not in ("", "0"),
        "this variable makes Ray give every worker all devices, so workers fail or all use the first device",
        f"unset {NOSET}",
    ),
    DoctorCheck(
        "npu",
        "HCCL_IF_BASE_PORT",
        _bad_port,
        lambda f: (
            f"{f.variables['HCCL_IF_BASE_PORT']!r} is not between 1024 and {LAST_PORT - PORTS + 1}: HCCL uses "
            f"{PORTS} consecutive ports from this port on"
        ),
        "export HCCL_IF_BASE_PORT=50000, or the start of another free range",
        verdict="broken",
    ),
    DoctorCheck(
        "npu",
        "ASCEND_LAUNCH_BLOCKING",
        lambda f: f.variables.get("ASCEND_LAUNCH_BLOCKING") == "1",
        "with 1, the host waits for every kernel, which helps debugging but slows down training",
        "unset ASCEND_LAUNCH_BLOCKING",
    ),
)
