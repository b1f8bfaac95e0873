"""Judgements on environment variables and on NVIDIA's driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep.doctor.facts import Facts
from lockstep.doctor.finding import Finding, broken, warning

NOSET = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
ALLOCATORS = {
    "npu": ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}
LAST_PORT, PORTS = 65535, 16
"""HCCL listens on this many ports from its first one on."""


def nvidia_answers(facts: Facts, device: str) -> Iterator[Finding]:
    if device != "cuda":
        return
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


def ray_sets_devices(facts: Facts, device: str) -> Iterator[Finding]:
    if device == "npu" and facts.variables.get(NOSET, "0") not in ("", "0"):
        yield warning(
            NOSET, "Ray then gives every worker all devices: invalid device, or all on the first one", f"unset {NOSET}"
        )


def visible_devices_exist(facts: Facts, device: str) -> Iterator[Finding]:
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


def segments_can_sleep(facts: Facts, device: str) -> Iterator[Finding]:
    if "vllm" not in facts.packages:
        return
    for variable in expandable(facts.variables, device):
        yield warning(
            variable,
            "expandable_segments does not go with vLLM's sleep mode, which frees its memory while training",
            f"export {variable}=expandable_segments:False, or do without sleep mode",
        )


def expandable(variables: Mapping[str, str], device: str) -> Iterator[str]:
    """The allocator variables of this device that switch expandable segments on."""
    for variable in ALLOCATORS.get(device, ()):
        if "expandable_segments:true" in variables.get(variable, "").replace(" ", "").lower():
            yield variable


def weights_keep_their_layout(facts: Facts, device: str) -> Iterator[Finding]:
    if device == "npu" and "vllm-ascend" in facts.packages and facts.variables.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0":
        yield warning(
            "VLLM_ASCEND_ENABLE_NZ",
            "weights in the NZ layout move, and an update of the policy then misses the copies that the engine uses",
            "export VLLM_ASCEND_ENABLE_NZ=0",
        )


def ports_are_valid(facts: Facts, device: str) -> Iterator[Finding]:
    first = facts.variables.get("HCCL_IF_BASE_PORT")
    if device != "npu" or first is None:
        return
    if not first.isdigit() or not 1024 <= int(first) <= LAST_PORT - PORTS + 1:
        yield broken(
            "HCCL_IF_BASE_PORT",
            f"{first!r} is not between 1024 and {LAST_PORT - PORTS + 1}: HCCL takes {PORTS} ports from it on",
            "export HCCL_IF_BASE_PORT=50000, or another range that is free",
        )


def not_blocking(facts: Facts, device: str) -> Iterator[Finding]:
    if device == "npu" and facts.variables.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield warning(
            "ASCEND_LAUNCH_BLOCKING",
            "every kernel is waited for: good for finding an error, slow for training",
            "unset ASCEND_LAUNCH_BLOCKING",
        )


JUDGEMENTS = (
    nvidia_answers,
    ray_sets_devices,
    visible_devices_exist,
    segments_can_sleep,
    weights_keep_their_layout,
    ports_are_valid,
    not_blocking,
)
