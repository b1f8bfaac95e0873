"""Judgements on the machine: Python, compiler and disk, the devices with their software, and environment variables."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.ascend import go_together
from lockstep.doctor.facts import PYTHON, Diagnosis, Examination, MachineFacts, broken, unknown, warning
from lockstep.doctor.stacks import NEWEST_PAIR, cann_fits, canns_for, driver_for, older, release

GIB = 2**30


def python_is_supported(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    minor = ".".join(facts.python.split(".")[:2])
    oldest, newest = PYTHON
    if older(minor, oldest) or older(newest, minor):
        yield broken(
            "python",
            f"lockstep runs on Python {oldest} to {newest}, this is {release(facts.python)}",
            f"make the environment with one of these, for example python{newest} -m venv .venv",
        )


def compiler_for_kernels(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if facts.compiler is None:
        yield warning("compiler", "no gcc: Triton compiles a small launcher with it", "install gcc")


def disk_has_room(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    free, total = facts.disk.free, facts.disk.total
    where = f"{free / GIB:.1f} GiB of {total / GIB:.0f} GiB are free in this folder"
    if free < GIB:
        yield broken("disk", where, "free some, or set run.folder to another disk: a checkpoint would not fit")
    elif free < 10 * GIB or free < 0.05 * total:
        yield warning(
            "disk", where, "checkpoints hold weights and optimizer state: free some, or set run.folder to another disk"
        )


def extensions_are_fresh(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    for extension in facts.extensions:
        if extension.locked:
            yield warning(
                "torch_extensions",
                f"{extension.folder} has the lock of a build: unless one is running now, the next waits for ever",
                f"stop what builds, then rm -r {extension.folder}",
            )
        elif extension.older_than_torch:
            yield warning(
                "torch_extensions",
                f"{extension.folder} was built before the installed torch was, and may not load with it",
                f"rm -r {extension.folder}; it is built again when needed",
            )


DOWNLOAD = "the driver and firmware package (HDK) of this device"


def devices_answer(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
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


def devices_are_healthy(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    for number, chip in enumerate(facts.npu.chips):
        if chip.health.lower() == "ok":
            continue
        say = warning if chip.health.lower() == "warning" else broken
        yield say(
            "npu devices",
            f"device {number} (card {chip.card}, {chip.name}) reports {chip.health}",
            f"npu-smi info -t health -i {chip.card} tells more; leave it out with ASCEND_RT_VISIBLE_DEVICES",
        )


def cann_is_loaded(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if facts.cann is None:
        yield broken("CANN", "not found", "install the toolkit and the kernels of this device, and source set_env.sh")
    elif not _loader_knows(facts, facts.cann.path):
        yield warning(
            "CANN",
            "LD_LIBRARY_PATH does not name its libraries: `import torch_npu` will not find libhccl.so",
            f"source {_set_env(facts.cann.path)}",
        )


def _loader_knows(facts: MachineFacts, folder: str) -> bool:
    search_path = facts.variables.get("LD_LIBRARY_PATH", "")
    return folder in search_path or names_cann(search_path)


def names_cann(search_path: str) -> bool:
    return any(part in search_path for part in ("/ascend-toolkit/", "/cann/", "/cann-"))


def _set_env(folder: str) -> str:
    return folder.removesuffix("/latest") + "/set_env.sh"


def cann_fits_torch_npu(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    torch_npu = facts.packages.get("torch_npu")
    if facts.cann is None or torch_npu is None:
        return
    named, installed = canns_for(torch_npu), facts.cann.version
    beside = "install the CANN that is named beside this one, and source its set_env.sh where lockstep runs"
    if named:
        if not cann_fits(installed, named):
            # Between releases of one generation programs often still load; a generation back, symbols are missing.
            generation = min((each.split(".")[0] for each in named), key=int)
            say = broken if older(installed, generation) else warning
            yield say(
                "CANN", f"torch_npu {torch_npu} is known with CANN {', '.join(named)}, this is {installed}", beside
            )
        return
    newest, needed = NEWEST_PAIR
    if older(newest, torch_npu) and older(installed, needed):
        why = f"torch_npu {newest} already needs CANN {needed}, and {torch_npu} is newer; this is {installed}"
        yield broken("CANN", why, f"install CANN {needed} beside this one, with torch and torch_npu {newest}")
    else:
        yield unknown(
            "CANN",
            f"TorchNPU's compatibility table has no torch_npu {torch_npu}: nobody says which CANN it needs",
            f"take a pair of the table: torch_npu {newest} with CANN {needed}",
        )


def driver_fits_cann(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    driver = driver_version(facts)
    if facts.cann is None or driver is None:
        return
    wanted = driver_for(facts.cann.version)
    listed: bool | None = go_together(facts.cann, facts.driver) if facts.driver is not None else None
    if wanted is not None and older(driver, wanted):
        say = warning if listed else broken
        yield say(
            "driver",
            f"CANN {facts.cann.version} is known with HDK {wanted} and newer, this is {driver}",
            f"install HDK {wanted} or newer, driver and firmware (needs root; all users of the machine share them)",
        )
    elif listed is False:
        yield warning(
            "driver",
            f"neither CANN {facts.cann.version} nor driver {driver} lists the other as compatible",
            "install the HDK that the CANN release notes name",
        )
    elif wanted is None and not listed:
        yield unknown(
            "driver",
            f"no stack names a driver for CANN {facts.cann.version}, this is {driver}",
            "see the release notes of that CANN; installing a driver needs root",
        )


def driver_version(facts: MachineFacts) -> str | None:
    if facts.npu.driver is not None:
        return facts.npu.driver
    return facts.driver.version if facts.driver is not None else None


def firmware_fits_driver(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    for card, board in facts.npu.boards.items():
        if board.compatibility not in (None, "OK"):
            yield broken(
                "firmware",
                f"card {card}: npu-smi calls driver {board.driver} and firmware {board.firmware} {board.compatibility}",
                "install driver and firmware of one HDK release, and restart the machine",
            )


NOSET = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
LAST_PORT, PORTS = 65535, 16
"""HCCL listens on this many ports from its first one on."""


def nvidia_answers(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if facts.nvidia.state == "absent":
        yield broken(
            "nvidia-smi",
            "not found: no NVIDIA driver, or a container without it",
            "install the driver; for a container: docker run --gpus all",
        )
    elif facts.nvidia.state == "failed":
        yield broken(
            "nvidia-smi",
            f"it fails: {facts.nvidia.message}",
            "is the driver loaded, and of the version of the kernel module?",
        )


def ray_sets_devices(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if facts.variables.get(NOSET, "0") not in ("", "0"):
        yield warning(
            NOSET, "Ray then gives every worker all devices: invalid device, or all on the first one", f"unset {NOSET}"
        )


def visible_devices_exist(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    count = {"npu": facts.npu_count, "cuda": len(facts.nvidia.gpus)}.get(device, 0)
    variable = VISIBLE.get(device, "")
    named = facts.variables.get(variable)
    if named is None or not count:
        return
    numbers = [word.strip() for word in named.split(",")]
    if named.strip() in ("", "-1"):
        yield broken(variable, "it hides every device", f"unset {variable}, or name devices: 0 to {count - 1}")
    elif all(number.isdigit() for number in numbers):
        missing = [number for number in numbers if int(number) >= count]
        if missing:
            yield broken(
                variable,
                f"there is no device {', '.join(missing)}: the {count} here are 0 to {count - 1}",
                f"export {variable}=" + ",".join(map(str, range(count))),
            )
        elif device == "npu" and [int(number) for number in numbers] != sorted({int(number) for number in numbers}):
            yield broken(
                variable,
                f"{named!r} is not in ascending order, each device once",
                f"export {variable}=" + ",".join(sorted(set(numbers), key=int)),
            )
    # Other words are names of devices (GPU-...), which only the driver can tell.


def ports_are_valid(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    first = facts.variables.get("HCCL_IF_BASE_PORT")
    if first is None:
        return
    if not first.isdigit() or not 1024 <= int(first) <= LAST_PORT - PORTS + 1:
        yield broken(
            "HCCL_IF_BASE_PORT",
            f"{first!r} is not between 1024 and {LAST_PORT - PORTS + 1}: HCCL takes {PORTS} ports from it on",
            "export HCCL_IF_BASE_PORT=50000, or another range that is free",
        )


def not_blocking(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if facts.variables.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield warning(
            "ASCEND_LAUNCH_BLOCKING",
            "every kernel is waited for: good for finding an error, slow for training",
            "unset ASCEND_LAUNCH_BLOCKING",
        )


ON_ANY: tuple[Examination, ...] = (
    python_is_supported,
    disk_has_room,
    extensions_are_fresh,
    visible_devices_exist,
)
ON: dict[str, tuple[Examination, ...]] = {
    "cuda": (compiler_for_kernels, nvidia_answers),
    "npu": (
        devices_answer,
        devices_are_healthy,
        cann_is_loaded,
        cann_fits_torch_npu,
        driver_fits_cann,
        firmware_fits_driver,
        ray_sets_devices,
        ports_are_valid,
        not_blocking,
    ),
}
