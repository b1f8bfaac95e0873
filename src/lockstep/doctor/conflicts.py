"""What a run asks for that is known not to work on its device: refused before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.doctor import packages
from lockstep.doctor.judge_environment import expandable
from lockstep.doctor.judge_packages import INSTEAD, torch_mismatch
from lockstep.doctor.machine import Machine
from lockstep.errors import Problem

# The last part of a key that is switched on -> what it asks for.
ASKED_BY_KEY = {
    "flash_attn": "flash_attn",
    "use_flash_attn": "flash_attn",
    "liger": "liger_kernel",
    "use_liger": "liger_kernel",
    "use_liger_kernel": "liger_kernel",
    "load_in_4bit": "bitsandbytes",
    "load_in_8bit": "bitsandbytes",
    "autotp": "autotp",
    "ds_tensor_parallel_size": "autotp",
    "hybrid_engine": "hybrid_engine",
    "enable_hybrid_engine": "hybrid_engine",
    "torch_compile": "torch_compile",
    "use_torch_compile": "torch_compile",
    "compile": "torch_compile",
}
# A value -> what it asks for, under a key that chooses: a run or a folder may be called anything.
CHOICES = ("attention", "attn_implementation", "kernels", "quantization", "optimizer", "optim", "engine", "parallel")
ASKED_BY_VALUE = {
    "flash_attn": "flash_attn",
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn",
    "liger": "liger_kernel",
    "liger_kernel": "liger_kernel",
    "bitsandbytes": "bitsandbytes",
    "adamw_8bit": "bitsandbytes",
    "adamw_bnb_8bit": "bitsandbytes",
    "paged_adamw_8bit": "bitsandbytes",
    "autotp": "autotp",
    "hybrid_engine": "hybrid_engine",
}
ON_NPU = {
    **INSTEAD,
    "autotp": ("DeepSpeed's AutoTP does not work there", "shard with FSDP2: start the run with torchrun"),
    "hybrid_engine": (
        "DeepSpeed's hybrid engine does not work there",
        "rollout.engine: native, which generates with the trained weights themselves",
    ),
    "torch_compile": (
        "torch.compile has no code generator there that lockstep has tried",
        "leave it off: the fused kernels of torch_npu are used without it",
    ),
}
SLEEP = ("sleep", "sleep_mode", "enable_sleep_mode", "enable_sleep", "vllm_enable_sleep")


def conflicts(device: str, settings: Mapping[str, Any], machine: Machine) -> list[Problem]:
    """`settings` are a run's, nested or with dotted keys."""
    flat = dict(_flat(settings))
    problems = list(_unsupported(flat)) if device == "npu" else []
    if device == "npu":
        finding = torch_mismatch(packages.installed(machine), device)
        if finding is not None:
            problems.append(Problem(f"package {finding.row}", finding.why, finding.remedy))
    for key in _sleeps(flat):
        for variable in expandable(machine.variables, device):
            problems.append(
                Problem(
                    f"environment variable {variable}",
                    f"expandable_segments does not go with the engine's sleep mode ({key})",
                    f"export {variable}=expandable_segments:False, or switch {key} off",
                )
            )
    return problems


def _unsupported(flat: Mapping[str, Any]) -> Iterator[Problem]:
    for key, value in flat.items():
        last = key.rpartition(".")[2].lower()
        subject = ASKED_BY_KEY.get(last) if _switched_on(value) else None
        if last in CHOICES and isinstance(value, str):
            subject = ASKED_BY_VALUE.get(value.lower().replace("-", "_"))
        if subject is not None:
            why, remedy = ON_NPU[subject]
            yield Problem(key, f"{subject} is asked for on an Ascend device: {why}", remedy)


def _sleeps(flat: Mapping[str, Any]) -> list[str]:
    """The first setting that makes an engine sleep. vLLM's adapter frees its cache by sleeping."""
    asked = [key for key, value in flat.items() if key.rpartition(".")[2].lower() in SLEEP and _switched_on(value)]
    if flat.get("rollout.engine") == "vllm" and flat.get("rollout.free_cache", True):
        asked.append("rollout.free_cache")
    return asked[:1]


def _switched_on(value: Any) -> bool:
    """A size of 1 is no parallelism, and a text may say no."""
    if isinstance(value, str):
        return value.lower() not in ("", "0", "1", "false", "no", "none", "off", "null")
    return value is True or (isinstance(value, int | float) and value > 1)


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
