"""Which packages matter, and which of them are installed. Metadata only: nothing is imported."""

from __future__ import annotations

from lockstep.doctor.machine import Machine

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


def installed(machine: Machine) -> dict[str, str]:
    names = (*CORE, *ASCEND, *OTHERS)
    return {name: version for name in names if (version := machine.version(name)) is not None}
