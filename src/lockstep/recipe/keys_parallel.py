"""Recipe keys of the processes (data, tensor and context parallelism, offload, launcher) and of the tape."""

from __future__ import annotations

from typing import Literal

from lockstep.recipe.section import MICRO, Field, Section

Offload = Literal["none", "optimizer", "params", "all"]


class Parallel(Section):
    devices: int | None = Field(
        None,
        ge=1,
        description="Number of processes that `lockstep train` starts, one per device. Default: it starts none and "
        "trains in one process, or as a rank that torchrun or `srun` started.",
    )
    launcher: Literal["local", "ray"] = Field(
        "local",
        description="Where `lockstep train` starts the processes: `local` on this machine, `ray` on a Ray cluster.",
    )
    stall_seconds: float | None = Field(
        None,
        gt=0,
        description="Stop the run if no process makes progress for this many seconds. The run reports where each "
        "process is and writes their stacks to the run folder. Choose more than the longest stage of a step. A "
        "slow start does not count. Default: never, but a collective times out after 30 minutes.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="How often `lockstep train` restarts the processes from the last checkpoint after one of them "
        "fails, is killed, is lost with its machine, or stalls.",
    )
    elastic: bool = Field(
        False,
        description="Ray: restart with fewer devices if the cluster has lost some, instead of waiting for them.",
        read_where=("parallel.launcher", ("ray",)),
    )
    shard: int | None = Field(
        None,
        ge=1,
        description="Number of processes that share one copy of a model, one shard each. Default: all processes, "
        "or those that `parallel.replicate` and `parallel.tensor_parallel` leave.",
    )
    replicate: int | None = Field(
        None,
        ge=1,
        description="Number of copies of a model. `shard` x `replicate` (x `tensor_parallel`) is the number of "
        "processes. Default: 1, or the number that `parallel.shard` leaves.",
    )
    offload: Offload = Field(
        "none",
        description="Which parts of the trained model are kept in host memory: `optimizer`: its moments and master "
        "weights; `params`: its weights and gradients (several processes); `all`: both. Slower; the numbers are "
        "the same.",
    )
    offload_critic: Offload = Field("none", description="Same as `parallel.offload`, for the critic.")
    offload_reference: bool = Field(
        False, description="Keep the weights of the reference in host memory, except during its forward passes."
    )
    offload_teacher: bool = Field(False, description="Same as `parallel.offload_reference`, for the teacher.")
    offload_reward: bool = Field(
        False, description="Same as `parallel.offload_reference`, for `reward.model` and `reward.process`."
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Tensor parallelism: number of processes that split the modules of every layer, by attention "
        "heads, in training and generation. The model must have a plan for it. `shard` x `replicate` x "
        "`tensor_parallel` is the number of processes.",
    )
    context_parallel: int = Field(
        1,
        ge=1,
        description="Context parallelism: number of processes that split every micro-batch, for sequences too long "
        "for one device. Each process gets `batch.tokens` of it. Must divide the number of processes.",
        effect=MICRO,
        resumable=True,
    )
    context_layout: Literal["zigzag", "gather", "ulysses"] = Field(
        "zigzag",
        description="How context parallelism splits a micro-batch. `zigzag`: keys and values pass around a ring, "
        "with equal work per process; `gather`: one contiguous span per process, with gathered keys and values, "
        "also for sliding windows; `ulysses`: tokens are exchanged for heads, for every kind of attention; the "
        "number of heads must be divisible by `parallel.context_parallel`.",
        effect=MICRO,
        resumable=True,
    )

    @property
    def group(self) -> int:
        """Number of processes that share one slice of the rows."""
        return self.context_parallel * self.tensor_parallel


class Tape(Section):
    record: bool = Field(
        False, description="Record what a replay on another device needs. `tape=true` is short for it."
    )
    steps: int = Field(100, ge=1, description="Number of steps to record, from the first.")
    every: int = Field(
        10,
        ge=1,
        description="Steps between snapshots. A snapshot contains digests per module and parameter, and the weights "
        "if they are kept.",
    )
    modules: list[str] = Field(
        ["*"],
        description="Modules that a snapshot digests, as name patterns (`*.layers.0.*`). Each pattern must match.",
    )
    tensors: list[str] = Field(
        default_factory=list, description="Modules whose full inputs and outputs a snapshot keeps, as name patterns."
    )
    rows: int = Field(4, ge=1, description="Number of sequences that a snapshot runs through the modules.")
    weights: bool | None = Field(
        None,
        description="Keep weights and optimizer state at snapshots, for teacher-forced replays. Default: `true` "
        "for models with at most 16 million trained parameters.",
    )
