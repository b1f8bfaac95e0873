"""Every key a recipe can have, once, with its default, its range and what it means.

Groups of keys with a file of their own: `data.py`, `rollout.py`, `parallel.py`, `tape.py`, and those that only some
methods read, `online.py` and `offline.py`. `docs/recipe.md` is generated from all.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from lockstep.recipe.keys_data import Data
from lockstep.recipe.keys_offline import Distill, Preference, ProcessReward, RewardModelSettings
from lockstep.recipe.keys_online import Algorithm, Critic, Reward
from lockstep.recipe.keys_parallel import Parallel, Tape
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.methods import OFFLINE, ONLINE
from lockstep.recipe.registry import TRACKERS
from lockstep.recipe.section import (
    COLUMN,
    FOLDER,
    GROUPS,
    MICRO,
    NAME,
    RATE,
    SPREAD,
    STORED,
    UPDATE,
    Effect,
    Field,
    Named,
    Section,
)


def _as_tape(value: Any) -> Any:
    """`tape: true` is short for the group with `record: true`."""
    return {"record": value} if isinstance(value, bool) else value


class StopEarly(Section):
    metric: str = Field(
        description="What must improve: `val/loss`, `val/accuracy`, `reward` or any metric of the run; `max` or `min` "
        "after it says which end is good where the name does not."
    )
    patience: int = Field(
        ge=1, description="Stop when it was measured so many times (a validation, or a step) without improving."
    )
    min_delta: float = Field(0.0, ge=0, description="Least change that counts as an improvement.")


class RunSettings(Section):
    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run's folder.",
        effect=NAME,
        resumable=True,
    )
    folder: str = Field("runs", description="Folder that holds the run folders.", effect=NAME, resumable=True)
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Seed of everything that is random in the run.",
        effect=Effect("matters", "other samples and another order of rows: curves agree in distribution only"),
    )
    epochs: int | None = Field(
        None, ge=1, description="Passes over the training rows. Default 1 when `run.steps` is not set.", resumable=True
    )
    steps: int | None = Field(None, ge=1, description="Optimizer steps; instead of `run.epochs`.", resumable=True)
    stop_early: StopEarly | None = Field(
        None,
        description="End the run when a metric has stopped to improve.",
        effect=Effect("harmless", "where the run ends; the steps before it are the same"),
        resumable=True,
    )
    max_idle_updates: int | None = Field(
        10,
        ge=0,
        description="Stop after so many consecutive steps whose updates change nothing: zero gradients, all advantages "
        "zero, or every token masked. 0 or `null` never stops.",
        effect=Effect("harmless", "where the run ends; the steps before it are the same"),
        resumable=True,
    )
    resume: Literal["auto", "never", "required"] = Field(
        "auto",
        description="`auto` continues from the newest whole checkpoint, `never` refuses a folder that exists, "
        "`required` refuses when there is nothing to continue.",
        effect=STORED,
        resumable=True,
    )
    deterministic: bool = Field(
        False,
        description="Switch the device's deterministic kernels on. On an NVIDIA device in bf16 or fp16 a token then "
        "has the same bits while it is generated and while it is trained on.",
        effect=Effect("matters", "kernels without a fixed order add noise from run to run"),
        resumable=True,
    )
    plugins: list[str] = Field(
        default_factory=list,
        description="Your own modules that add estimators, losses, methods, engines or trackers: names of installed "
        "modules, or `path/to/file.py`. Imported before the recipe is checked.",
        effect=Effect("matters", "other code may stand behind a name; the checksums of the files tell"),
        resumable=True,
    )
    allow_fallback: bool = Field(
        True,
        description="Operators that the device does not have may run on the CPU, where they are counted and named; "
        "`false` makes the first one an error. Looked at in the first step.",
        effect=Effect("harmless", "an operator that the device lacks runs on the CPU, or stops the run"),
        resumable=True,
    )
    export: bool = Field(
        True,
        description="Write the trained model to the run's `export/` folder at the end.",
        effect=STORED,
        resumable=True,
    )


class Lora(Section):
    rank: int | None = Field(None, ge=1, description="Rank of the adapter matrices. Default: that of `adapter`.")
    alpha: float | None = Field(
        None, gt=0, description="Scale numerator (the adapter is scaled by alpha / rank). Default: 2 x rank."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    targets: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="Which linear layers get an adapter: `all-linear` (all but the output head) or name endings, each "
        "of which must match. Layers that share their weight with another one (a tied embedding) cannot have one.",
    )
    exclude: str | list[str] | None = Field(
        None,
        description="Layers that get none: name endings, or a regular expression of whole names. Each must match.",
    )
    adapter: str | None = Field(
        None,
        description="The adapter that training goes on with, which says rank, alpha, dropout and layers: a PEFT "
        "folder, a run that trained one, or a checkpoint of it. `model.adapter: FOLDER` is short for it. The reference "
        "is still the model without an adapter.",
        effect=FOLDER,
    )


class Model(Section):
    path: str = Field(
        description="The model and its tokenizer: a Hugging Face folder, a run folder or one of its checkpoints, a "
        "PEFT adapter's folder (merged into the base that it names), a GGUF file, or a hub name."
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Precision of the forward and backward pass.",
        effect=Effect("matters", "rounding in every operation: curves part slowly"),
    )
    master_weights: bool | None = Field(
        None,
        description="Keep fp32 copies of the trained weights, sum gradients in fp32. Default: yes for bf16, fp16.",
        effect=Effect("matters", "small updates are rounded away without fp32 copies"),
    )
    lora: Lora | None = Field(
        None,
        description="Train a LoRA adapter instead of all weights.",
        effect=Effect("blocks", "other parameters are trained"),
    )
    aux_loss_coef: float | None = Field(
        None,
        ge=0,
        description="Weight of the load-balancing loss of a mixture of experts, over all tokens of an update; it takes "
        "one more forward pass. Default: none, and a model whose config.json asks for one is refused.",
        effect=Effect("blocks", "another loss is minimised"),
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass: less memory, more time.",
        effect=Effect("harmless", "activations are computed again, with the same values"),
    )
    activation_offload: bool = Field(
        False,
        description="What the layers keep for the backward pass waits on the host, and comes back before it is needed: "
        "of the policy and the critic. With `model.gradient_checkpointing` these are the inputs of the layers.",
        effect=Effect("harmless", "activations wait elsewhere, with the same values"),
        resumable=True,
    )
    attention: Literal["auto", "sdpa"] = Field(
        "auto",
        description="`auto` takes the device's packed attention kernel and its fused norms, feed-forwards and rotary "
        "embedding, `sdpa` plain torch throughout.",
        effect=Effect("matters", "another kernel, another order of sums: rounding"),
    )

    @model_validator(mode="before")
    @classmethod
    def _adapter(cls, values: Any) -> Any:
        """`adapter: FOLDER` is short for `lora: {adapter: FOLDER}`."""
        if not isinstance(values, dict) or "adapter" not in values:
            return values
        adapter, lora = values["adapter"], values.get("lora") or {}
        rest = {name: value for name, value in values.items() if name != "adapter"}
        if adapter is None or not isinstance(lora, dict):
            return rest
        return {**rest, "lora": {**lora, "adapter": lora.get("adapter") or adapter}}


class Batch(Section):
    rows_per_update: int = Field(
        32, ge=1, description="Offline: rows of one optimizer step, over all devices.", effect=GROUPS
    )
    prompts: int = Field(32, ge=1, description="Online: prompts of one step, over all devices.", effect=GROUPS)
    prompts_per_update: int | None = Field(
        None,
        ge=1,
        description="Online: prompts of one optimizer step; must divide `batch.prompts`, the default.",
        effect=GROUPS,
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of one packed micro-batch on one device. Default 4096 when `batch.rows` is not set.",
        effect=MICRO,
        resumable=True,
    )
    rows: int | None = Field(
        None,
        ge=1,
        description="Rows of one right-padded micro-batch on one device; instead of `batch.tokens`.",
        effect=MICRO,
        resumable=True,
    )


class Optim(Section):
    lr: float = Field(1e-5, gt=0, description="Peak learning rate.", effect=RATE, resumable=True)
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2, description="AdamW's moment decay rates.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(
        0.01, ge=0, description="Decay of weight matrices; biases and norms, whatever their shape, are spared."
    )
    decay_all: bool = Field(False, description="Decay biases and norms too.")
    clip: float | None = Field(1.0, gt=0, description="Largest gradient norm; `null` switches clipping off.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape of the learning rate after the warm-up.", effect=RATE, resumable=True
    )
    warmup: int | float = Field(
        0.0,
        ge=0,
        description="Warm-up: steps (a whole number) or a share of all steps (below 1).",
        effect=RATE,
        resumable=True,
    )
    min_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Lowest learning rate as a share of `lr`.",
        effect=RATE,
        resumable=True,
        read_where=("optim.schedule", ("cosine", "linear", "wsd")),
    )
    decay: float = Field(
        0.2,
        gt=0,
        le=1,
        description="wsd: share of all steps in which the rate falls linearly to its minimum.",
        effect=RATE,
        resumable=True,
        read_where=("optim.schedule", ("wsd",)),
    )


class Val(Section):
    every: int | None = Field(None, ge=1, description="Steps between validations. Default: only at the end.")
    at_start: bool = Field(False, description="Validate before the first step too.")
    questions: str | list[str] | None = Field(
        None,
        description="Rows in the RL schema to answer greedily: `val/accuracy` by the rule of their data source. A path "
        "or a list of them, which are read one after the other.",
    )
    question_rows: int | None = Field(None, ge=1, description="Answer only the first so many questions of each path.")
    rules: dict[str, str] = Field(
        default_factory=dict,
        description="Offline: the rule that checks answers to questions of a data source, by its name: "
        "`{my/sums: gsm8k}`. Default: the built-in ones, as of `reward.rules`, which online runs read.",
    )
    max_new_tokens: int = Field(64, ge=1, description="Longest answer in tokens.")
    n: int = Field(1, ge=1, description="Answers to each question; more than 1 needs `val.temperature`.")
    temperature: float = Field(0.0, ge=0, description="0 answers greedily.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Answer from the most likely tokens that hold this probability; with a temperature.",
    )
    top_k: int = Field(0, ge=0, description="Answer from the so many most likely tokens; 0 is all. With a temperature.")


class CheckpointSettings(Section):
    every: int | None = Field(None, ge=1, description="Steps between checkpoints. Default: only at the end.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept.")
    best: str | None = Field(
        None,
        description="Metric that says which checkpoint is the best: `val/loss`, `val/accuracy`, `reward` or any metric "
        "of the run; `max` or `min` after it says which end is good where the name does not. Set, the best checkpoint "
        "is what the run exports at its end. Default: `val/loss`, for `keep_best`.",
    )
    keep_best: int = Field(
        0, ge=0, description="Checkpoints kept besides that are the best by `best`. Default 1 where `best` is set."
    )
    asynchronous: bool = Field(
        True,
        description="Several processes: train on while a checkpoint is written, from a copy of each one's slices in "
        "the host's memory.",
    )


class LogSettings(Section):
    every: int = Field(1, ge=1, description="Steps between console lines when the output is not a terminal.")
    track: list[Annotated[str, Named(TRACKERS)]] = Field(
        default_factory=list, description="Trackers besides `metrics.jsonl`; they come with the `[track]` extra."
    )
    project: str = Field("lockstep", description="Project name in the trackers.")
    samples: int = Field(
        4,
        ge=0,
        description="Online: responses stored in `samples.jsonl` each step, with what is known of their tokens.",
    )


class Recipe(Section):
    """A whole run."""

    method: Annotated[str, Named(OFFLINE, ONLINE)] = Field(
        "sft",
        description="What is trained, and how; `lockstep recipes METHOD` shows its defaults.",
        effect=Effect("blocks", "another objective is trained"),
    )
    device: str = Field(
        "auto",
        description="Where it runs: a device's name, or `auto` for the first that can be used. A named device that is "
        "absent is an error.",
        effect=Effect("harmless", "the same updates are meant on every device; this is what is compared"),
        resumable=True,
    )
    run: RunSettings = Field(default_factory=RunSettings)
    model: Model
    data: Data = Field(effect=COLUMN)
    batch: Batch = Field(default_factory=Batch)
    optim: Optim = Field(default_factory=Optim, effect=UPDATE)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    reward: Reward = Field(default_factory=Reward)
    algorithm: Algorithm = Field(
        default_factory=Algorithm, effect=Effect("blocks", "another loss or advantage from the same responses")
    )
    critic: Critic = Field(
        default_factory=Critic, effect=Effect("blocks", "values, and the advantages from them, are learned otherwise")
    )
    preference: Preference = Field(
        default_factory=Preference, effect=Effect("blocks", "another loss from the same pairs")
    )
    rm: RewardModelSettings = Field(
        default_factory=RewardModelSettings, effect=Effect("blocks", "another loss from the same responses")
    )
    prm: ProcessReward = Field(
        default_factory=ProcessReward, effect=Effect("blocks", "other places are judged, or by other words")
    )
    distill: Distill = Field(default_factory=Distill, effect=Effect("blocks", "another divergence from the teacher"))
    parallel: Parallel = Field(default_factory=Parallel, effect=SPREAD, resumable=True)
    val: Val = Field(
        default_factory=Val,
        effect=Effect("harmless", "when and how is validated; training does not see it"),
        resumable=True,
    )
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings, effect=STORED, resumable=True)
    log: LogSettings = Field(default_factory=LogSettings, effect=STORED, resumable=True)
    tape: Annotated[Tape, BeforeValidator(_as_tape)] = Field(default_factory=Tape, effect=STORED, resumable=True)

    @property
    def line_tokens(self) -> int | None:
        """Token budget of one packed micro-batch, over all the devices that divide it; None for padded ones."""
        return None if self.batch.tokens is None else self.batch.tokens * self.parallel.context
