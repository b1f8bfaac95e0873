"""Everything that is judged, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.doctor import npu_smi, nvidia, packages
from lockstep.doctor.cann import Installation, find_driver, find_firmware, find_toolkit
from lockstep.doctor.extensions import Extension, find_extensions
from lockstep.doctor.machine import Disk, Machine

# Variables that are shown when they are set: by their beginning, or by name.
PREFIXES = ("ASCEND_", "HCCL_")
NAMES = (
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "VLLM_USE_V1",
    "VLLM_ASCEND_ENABLE_NZ",
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
class Facts:
    system: str
    architecture: str
    python: str
    compiler: str | None
    disk: Disk
    packages: Mapping[str, str]
    npu: npu_smi.NpuSmi
    npu_nodes: int
    """Device files of Ascend devices that this machine or container has."""
    cann: Installation | None
    driver: Installation | None
    firmware: Installation | None
    nvidia: nvidia.Nvidia
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


def gather(machine: Machine) -> Facts:
    return Facts(
        system=machine.system,
        architecture=machine.architecture,
        python=machine.python,
        compiler=_compiler(machine),
        disk=machine.disk(),
        packages=packages.installed(machine),
        npu=npu_smi.ask(machine),
        npu_nodes=len(machine.matching("/dev/davinci[0-9]*")),
        cann=find_toolkit(machine),
        driver=find_driver(machine),
        firmware=find_firmware(machine),
        nvidia=nvidia.ask(machine),
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


def choose_device(facts: Facts) -> tuple[str, str]:
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
