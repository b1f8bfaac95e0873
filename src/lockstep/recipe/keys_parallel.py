"""Recipe keys of the processes (data, tensor and context parallelism, offload, launcher) and of the tape."""

from __future__ import annotations

from typing import Literal

from lockstep.recipe.section import MICRO, Field, Section

# Keys of the processes: how many, who holds which part of a model, and how they divide the work.

Offload = Literal["none", "optimizer", "params", "all"]


class Parallel(Section):
    devices: int | None = Field(
        None,
        ge=1,
        description="Processes that `lockstep train` starts, one a device. Default: none; it runs by itself, or is one "
        "of those that torchrun or `srun` started.",
    )
    launcher: Literal["local", "ray"] = Field(
        "local",
        description="Where `lockstep train` starts them: `local` on this machine, `ray` on a Ray cluster.",
    )
    stall_seconds: float | None = Field(
        None,
        gt=0,
        description="A run in which no process makes progress for so long says where each of them is, leaves their "
        "stacks in the run folder and ends; choose more than the longest stage of a step takes. A start that is only "
        "slow does not count. Default: never, but a collective gives up after 30 minutes.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="How often `lockstep train` starts the processes again, from the last checkpoint, when one of them "
        "fails, is killed, is lost with its machine, or has stalled.",
    )
    elastic: bool = Field(
        False,
        description="Ray: a restart takes fewer devices where the cluster has lost some, and does not wait for them.",
        read_where=("parallel.launcher", ("ray",)),
    )
    shard: int | None = Field(
        None,
        ge=1,
        description="Processes that hold one copy of a model together, a slice each. Default: all of them, or what "
        "`parallel.replicate` and `parallel.tensor` leave.",
    )
    replicate: int | None = Field(
        None,
        ge=1,
        description="Copies of a model; `shard` x `replicate` (x `tensor`) is the number of processes. Default: 1, or "
        "what `parallel.shard` leaves.",
    )
    offload: Offload = Field(
        "none",
        description="What of the trained model lives on the host: `optimizer` its moments and master weights, `params` "
        "its weights and gradients (several processes), `all` both. Slower; the numbers are the same.",
    )
    offload_critic: Offload = Field("none", description="The same of the critic.")
    offload_reference: bool = Field(
        False, description="The reference's weights are on the device during its passes only."
    )
    offload_teacher: bool = Field(False, description="The same of the teacher.")
    offload_reward: bool = Field(False, description="The same of `reward.model` and `reward.process`.")
    tensor: int = Field(
        1,
        ge=1,
        description="Processes that divide the modules of every layer between them, whole heads each, for training and "
        "generation, where a model has a plan for it. `shard` x `replicate` x `tensor` is the number of processes.",
    )
    context: int = Field(
        1,
        ge=1,
        description="Processes that divide every micro-batch between them, for sequences too long for one device: each "
        "holds `batch.tokens` of it. Must divide the number of processes.",
        effect=MICRO,
        resumable=True,
    )
    context_layout: Literal["zigzag", "gather", "ulysses"] = Field(
        "zigzag",
        description="How they divide it. `zigzag`: keys and values travel along a ring, and all have as much to do; "
        "`gather`: a stretch for each, with gathered keys and values, also with sliding windows; `ulysses`: tokens are "
        "exchanged for heads, which must divide by `parallel.context`; for every kind of attention.",
        effect=MICRO,
        resumable=True,
    )

    @property
    def group(self) -> int:
        """Processes that have one share of the rows between them."""
        return self.context * self.tensor


# Keys of the tape.


class Tape(Section):
    record: bool = Field(
        False, description="Record what a replay on another device needs; `tape=true` says the same in short."
    )
    steps: int = Field(100, ge=1, description="Steps that are recorded, from the first.")
    every: int = Field(
        10, ge=1, description="Steps between snapshots: digests by module and parameter, and weights where kept."
    )
    modules: list[str] = Field(
        ["*"],
        description="Modules that a snapshot digests, as patterns of their names (`*.layers.0.*`), each of which "
        "must match.",
    )
    tensors: list[str] = Field(
        default_factory=list, description="Modules whose whole inputs and outputs a snapshot keeps, as patterns."
    )
    rows: int = Field(4, ge=1, description="Sequences that a snapshot sends through the modules.")
    weights: bool | None = Field(
        None,
        description="Keep weights and optimizer state at snapshots, for teacher-forced replays. Default: of models "
        "with at most 16 million trained parameters.",
    )
