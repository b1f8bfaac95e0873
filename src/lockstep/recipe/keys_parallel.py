"""Recipe keys of `parallel` (processes, parallelism, offload, launcher) and of `tape` (recording for a replay)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lockstep.recipe.section import MICRO, Field, Section

Offload = Literal["none", "optimizer", "params", "all"]

# Ray's node labels have the syntax of Kubernetes labels, and its label selectors have the operators `!` and `in`.
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = re.compile(rf"(?:{_LABEL}/)?{_LABEL}")
_SELECTOR = re.compile(rf"!?(?:{_LABEL}|in\({_LABEL}(?:, ?{_LABEL})*\))")


def _selectors(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if _LABEL_KEY.fullmatch(key) is None:
            raise PydanticCustomError("label", "{key} is not a label of a Ray node", {"key": repr(key)})
        if _SELECTOR.fullmatch(value) is None:
            why = "{key}: must be a value such as h200, !h200 or in(h200, b200), not {value}"
            raise PydanticCustomError("label", why, {"key": key, "value": repr(value)})
    return labels


Labels = Annotated[dict[str, str], AfterValidator(_selectors)]

_RAY: Any = {"read_where": ("parallel.launcher", ("ray",))}


class RaySettings(Section):
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "PACK",
        description="How Ray places the processes. `PACK` uses as few nodes as possible, and `STRICT_PACK` one node. "
        "`SPREAD` uses as many nodes as possible, and `STRICT_SPREAD` a different node for each process.",
        **_RAY,
    )
    labels: Labels = Field(
        default_factory=dict,
        description="Labels of the nodes on which Ray places the processes, for example `{rack: r1, "
        "ray.io/accelerator-type: 'in(H200, B200)'}`. `!VALUE` and `!in(A, B)` exclude values. Default: any node.",
        **_RAY,
    )
    cpus_per_rank: int | None = Field(
        None,
        ge=1,
        description="CPUs that Ray reserves for each process. Default: 1, and 1 for each process that it starts: "
        "`reward.workers`, `rollout.environment_workers`, and the rollout worker of `rollout.max_staleness`. The "
        "process that starts a serving engine gets 1 more.",
        **_RAY,
    )
    wait_seconds: float | None = Field(
        None,
        gt=0,
        description="How long a start or restart waits for devices that the cluster does not have, for example until "
        "an autoscaler has added nodes. Default: a start waits 120 seconds for devices that other jobs use, and "
        "refuses a number of devices that the cluster does not have. A restart waits 300 seconds.",
        **_RAY,
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict,
        description="Ray's runtime environment of the processes, for example `{pip: [PACKAGE], env_vars: {NAME: "
        "VALUE}}`.",
        **_RAY,
    )


class Parallel(Section):
    devices: int | None = Field(
        None,
        ge=1,
        description="Number of processes that `lockstep train` starts, one per device. Default: no process is "
        "started, and the command trains in its own process, which may be a rank of torchrun or `srun`.",
    )
    launcher: Literal["local", "ray"] = Field(
        "local",
        description="Where `lockstep train` starts the processes. `local` starts the processes on this machine, and "
        "`ray` on a Ray cluster.",
    )
    stall_seconds: float | None = Field(
        None,
        gt=0,
        description="Stop the run if no process makes progress for this many seconds. The run reports the stage of "
        "each process and writes the stack traces to the run folder. Choose a value above the duration of the longest "
        "stage of a training step. Before the first step of the run, a process that computes or reads from disk is "
        "regarded as making progress. Default: a stalled run is not stopped, but a collective times out after 30 "
        "minutes.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="How often `lockstep train` restarts the processes from the last checkpoint after one of them "
        "fails, is killed, is lost with its machine, or stalls.",
    )
    elastic: bool = Field(
        False,
        description="With launcher `ray`: restart with fewer devices if the cluster has lost devices, instead of "
        "waiting until they return.",
        read_where=("parallel.launcher", ("ray",)),
    )
    ray: RaySettings = Field(default_factory=RaySettings)
    shard: int | None = Field(
        None,
        ge=1,
        description="Number of processes that share one copy of a model, one shard each. Default: the number of "
        "processes, divided by `parallel.replicate` and `parallel.tensor_parallel`.",
    )
    replicate: int | None = Field(
        None,
        ge=1,
        description="Number of copies of a model. `shard` x `replicate` (x `tensor_parallel`) is the number of "
        "processes. Default: 1 copy; if `parallel.shard` is set, the number of processes divided by `shard` and "
        "`tensor_parallel`.",
    )
    offload: Offload = Field(
        "none",
        description="Which parts of the trained model are kept in host memory. `optimizer` keeps the optimizer moments "
        "and the master weights in host memory. `params` keeps the weights and gradients in host memory (needs several "
        "processes). `all` does the same as `optimizer` and `params` together. Offloading makes a step slower and does "
        "not change its results.",
    )
    offload_critic: Offload = Field("none", description="Same as `parallel.offload`, for the critic.")
    offload_reference: bool = Field(
        False, description="Keep the weights of the reference model in host memory, except during its forward passes."
    )
    offload_teacher: bool = Field(False, description="Same as `parallel.offload_reference`, for the teacher.")
    offload_reward: bool = Field(
        False, description="Same as `parallel.offload_reference`, for `reward.model` and `reward.process`."
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Tensor parallelism: number of processes that split the modules of every layer, in training and "
        "generation. Tensor parallelism splits attention by heads. The model must have a tensor-parallel plan. `shard` "
        "x `replicate` x `tensor_parallel` is the number of processes.",
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        description="Expert parallelism: number of processes that divide the experts of every layer of a "
        "mixture-of-experts model. Tokens are sent to the processes of their experts and back (all-to-all). The "
        "processes of a group train on different rows. The value must divide `parallel.shard`, and the number of "
        "experts must be divisible by it (times `tensor_parallel`).",
    )
    context_parallel: int = Field(
        1,
        ge=1,
        description="Context parallelism: number of processes that split every micro-batch, for sequences too long "
        "for one device. Each process gets at most `batch.tokens` tokens of a micro-batch. The value must divide the "
        "number of processes.",
        effect=MICRO,
        resumable=True,
    )
    context_layout: Literal["zigzag", "gather", "ulysses"] = Field(
        "zigzag",
        description="How context parallelism splits a micro-batch. `zigzag`: ring attention, in which keys and values "
        "pass from process to process, with equal work per process. `gather`: each process has one contiguous range "
        "of tokens and gathers all keys and values; it supports sliding windows. `ulysses`: an all-to-all exchange "
        "gives each process all tokens of some heads; it supports every kind of attention, and the number of heads "
        "must be divisible by `parallel.context_parallel`.",
        effect=MICRO,
        resumable=True,
    )

    @property
    def group(self) -> int:
        """Number of context- and tensor-parallel processes that train on the same rows."""
        return self.context_parallel * self.tensor_parallel


class Tape(Section):
    record: bool = Field(
        False,
        description="Record a tape: the data that a replay of this run on another device needs. `tape=true` is short "
        "for `tape.record=true`.",
    )
    steps: int = Field(100, ge=1, description="Number of steps to record, starting with the first step.")
    every: int = Field(
        10,
        ge=1,
        description="Steps between snapshots. A snapshot contains digests per module and parameter, and the weights "
        "if `tape.weights` is true.",
    )
    modules: list[str] = Field(
        ["*"],
        description="Modules whose inputs and outputs a snapshot records as digests, as name patterns "
        "(`*.layers.0.*`). Each pattern must match at least one module.",
    )
    tensors: list[str] = Field(
        default_factory=list, description="Modules whose full inputs and outputs a snapshot keeps, as name patterns."
    )
    rows: int = Field(
        4,
        ge=1,
        description="Number of sequences in the forward and backward pass with which a snapshot records the inputs and "
        "outputs of modules.",
    )
    weights: bool | None = Field(
        None,
        description="Keep weights and optimizer state at snapshots, for teacher-forced replays. Default: weights are "
        "kept for models with at most 16 million trained parameters.",
    )
