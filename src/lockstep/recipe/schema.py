"""The recipe schema: every key with its default, range and description.

The larger groups of recipe keys are in the `keys_*.py` files. `docs/recipe.md` is generated from the descriptions of
all keys.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from lockstep.recipe.keys_data import Data
from lockstep.recipe.keys_lora import Lora as Lora
from lockstep.recipe.keys_offline import Distill, Preference, ProcessReward, RewardModelSettings
from lockstep.recipe.keys_online import Algorithm, Critic
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.keys_parallel import Parallel, Tape
from lockstep.recipe.keys_reward import Reward
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.methods import OFFLINE, ONLINE
from lockstep.recipe.registry import ENVIRONMENTS, NO_ENVIRONMENT, TRACKERS
from lockstep.recipe.renamed_keys import with_current_names
from lockstep.recipe.section import (
    COLUMN,
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
    """Expands `tape: true` to the group with `record: true`."""
    return {"record": value} if isinstance(value, bool) else value


class EarlyStopping(Section):
    metric: str = Field(
        description="Metric that must improve, for example `val/loss`, `val/accuracy`, `reward` or any other metric "
        "of the run. Add `max` or `min` after the name of the metric if the name does not imply whether higher is "
        "better."
    )
    patience: int = Field(
        ge=1,
        description="Stop after this many measurements of the metric (at validations or steps) without an improvement.",
    )
    min_delta: float = Field(0.0, ge=0, description="Smallest change of the metric that is regarded as an improvement.")


class RunSettings(Section):
    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run folder.",
        effect=NAME,
        resumable=True,
    )
    folder: str = Field("runs", description="Folder that contains the run folders.", effect=NAME, resumable=True)
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Random seed of the run.",
        effect=Effect("matters", "responses and the order of rows differ; metrics agree only in distribution"),
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Number of passes over the training rows. Default: 1 pass if `run.steps` is not set.",
        resumable=True,
    )
    steps: int | None = Field(None, ge=1, description="Optimizer steps. Use instead of `run.epochs`.", resumable=True)
    early_stopping: EarlyStopping | None = Field(
        None,
        description="Stop the run when a metric no longer improves.",
        effect=Effect("harmless", "this key affects only at which step the run ends"),
        resumable=True,
    )
    max_idle_updates: int | None = Field(
        10,
        ge=0,
        description="Stop after this many consecutive steps whose updates change nothing, because all gradients or "
        "advantages are zero or every token is masked. With 0 or `null`, steps without a change never stop the run.",
        effect=Effect("harmless", "this key affects only at which step the run ends"),
        resumable=True,
    )
    resume: Literal["auto", "never", "required"] = Field(
        "auto",
        description="`auto` resumes from the newest complete checkpoint; `never` stops with an error if the run "
        "folder exists; `required` stops with an error if there is nothing to resume.",
        effect=STORED,
        resumable=True,
    )
    deterministic: bool = Field(
        False,
        description="Use the device's deterministic kernels. With deterministic kernels on an NVIDIA device in bf16 or "
        "fp16, generation and training compute bit-identical log-probabilities of a token.",
        effect=Effect("matters", "nondeterministic kernels add noise between runs"),
        resumable=True,
    )
    plugins: list[str] = Field(
        default_factory=list,
        description="Your modules that add estimators, losses, methods, engines or trackers: names of installed "
        "modules, or `path/to/file.py`. Plug-ins are imported before the recipe is checked.",
        effect=Effect(
            "matters", "a name in the recipe may refer to other code; compare the checksums of the plug-in files"
        ),
        resumable=True,
    )
    allow_fallback: bool = Field(
        True,
        description="Whether operators that the device lacks may run on the CPU. The run counts and lists the "
        "operators that ran on the CPU. With `false`, the first operator that the device lacks stops the run. The run "
        "looks for operators that the device lacks only in the first step.",
        effect=Effect(
            "harmless",
            "decides only whether an operator that the device lacks runs on the CPU (true) or stops the run (false)",
        ),
        resumable=True,
    )
    migration: str | None = Field(
        None,
        description="The table that `lockstep migrate` writes for a converted command. The run copies it to "
        "`migration.json` in its folder, and `lockstep compare` shows the known differences from the other trainer.",
        effect=STORED,
        resumable=True,
    )
    export: bool = Field(
        True,
        description="Write the trained model to the run's `export/` folder at the end.",
        effect=STORED,
        resumable=True,
    )


class Model(Section):
    path: str = Field(
        description="The model and its tokenizer: a Hugging Face folder, a run folder or one of its checkpoints, a "
        "PEFT adapter folder (merged into its base model), a GGUF file, or a hub name."
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Precision of the forward and backward pass.",
        effect=Effect("matters", "rounding differs in every operation; metrics diverge slowly"),
    )
    master_weights: bool | None = Field(
        None,
        description="Keep fp32 copies of the trained weights and sum gradients in fp32. Default: the fp32 copies are "
        "kept if `model.dtype` is bf16 or fp16.",
        effect=Effect("matters", "without fp32 copies, small updates are lost to rounding"),
    )
    lora: Lora | None = Field(
        None,
        description="Train a LoRA adapter instead of all weights.",
        effect=Effect("blocks", "different parameters are trained"),
    )
    quantize: Literal["nf4", "int8", "fp8"] | None = Field(
        None,
        description="Store the weights of the frozen linear layers in 4 bits (`nf4`) or 8 bits (`int8`, `fp8`). Needs "
        "`model.lora`. Embeddings, output head, routers and norms keep `model.dtype`, in which the layers also "
        "compute. Applies to all models of the run that have the precision `model.dtype`.",
        effect=Effect("blocks", "the adapter is trained on other base weights"),
    )
    double_quantize: bool = Field(
        True,
        description="Store the scales of `nf4` in 8 bits too, as bitsandbytes does: 0.52 instead of 0.56 bytes per "
        "weight.",
        effect=Effect("blocks", "the adapter is trained on other base weights"),
        read_where=("model.quantize", ("nf4",)),
    )
    quantize_exclude: list[str] = Field(
        default_factory=list,
        description="Layers that are not quantised, as name suffixes. Each suffix must match at least one layer.",
        effect=Effect("blocks", "the adapter is trained on other base weights"),
    )
    vision_lr: float | None = Field(
        None,
        gt=0,
        description="`model.vision: train`: peak learning rate of the vision tower and the projector. Default: "
        "`optim.lr`. A group of `optim.groups` that matches their parameters takes precedence.",
        effect=RATE,
        resumable=True,
    )
    vision_cache_gb: float = Field(
        2.0,
        ge=0,
        description="`model.vision: freeze`: host memory of each process for the features of images that the frozen "
        "tower has computed, so that later passes and epochs do not compute them again. `0` keeps none. An image of "
        "1000 tokens needs 4 MB in bf16 if the hidden size is 2048.",
        effect=Effect("harmless", "kept features have the same bits as computed ones"),
        resumable=True,
    )
    vision: Literal["freeze", "train"] | None = Field(
        None,
        description="Train on rows with images, with any method. The vision tower and the "
        "projector are loaded, and are frozen (`freeze`) or trained too (`train`; `optim.groups` can set their "
        "learning rate). Adapters of `model.lora` are only in the language model. Default: the tower is not loaded, "
        "and rows with images are refused.",
        effect=Effect("blocks", "different parameters are trained, or on other inputs"),
    )
    aux_loss_coef: float | None = Field(
        None,
        ge=0,
        description="Weight of the load-balancing loss of a mixture of experts, computed over all tokens of an "
        "update. The load-balancing loss needs one more forward pass. Default: no load-balancing loss; a model whose "
        "config.json sets the weight of this loss is then refused.",
        effect=Effect("blocks", "a different loss is minimised"),
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass: less memory, more time.",
        effect=Effect("harmless", "activations are recomputed with the same values"),
    )
    activation_offload: bool = Field(
        False,
        description="Keep the activations of the policy and the critic in host memory until the backward pass needs "
        "them. With `model.gradient_checkpointing`, these activations are only the inputs of the layers.",
        effect=Effect("harmless", "activations are stored in host memory with the same values"),
        resumable=True,
    )
    tiled_mlp: int | None = Field(
        None,
        ge=1,
        description="Compute the feed-forward (MLP) of a layer for this many tokens at a time, and again in the "
        "backward pass, so that its wide activations exist for so many tokens only. For long sequences; 4096 is a "
        "good value. A model with experts is refused.",
        effect=Effect("harmless", "the feed-forward computes each token alone; only rounding can differ"),
        resumable=True,
    )
    attention: Literal["auto", "sdpa"] = Field(
        "auto",
        description="`auto` uses the device's packed attention kernel and its fused norm, feed-forward and rotary "
        "embedding kernels; `sdpa` uses plain PyTorch operations instead of these kernels.",
        effect=Effect("matters", "another kernel sums in another order, which changes rounding"),
    )

    matmul: Literal["fp8"] | None = Field(
        None,
        description="Train with fp8 matmuls in the projections of the policy's decoder layers: the forward and the "
        "gradients of activations in fp8, the gradients of weights in `model.dtype` (torchao's `rowwise_with_gw_hp`). "
        "Weights and optimizer keep their precision. Default: matmuls in `model.dtype`.",
        effect=Effect("matters", "matmuls round to fp8; metrics diverge slowly"),
    )
    matmul_exclude_ends: int = Field(
        1,
        ge=0,
        description="`model.matmul: fp8`: number of decoder layers at the start, and as many at the end, whose matmuls "
        "keep `model.dtype`. Rounding in these layers changes loss and gradients most.",
        effect=Effect("matters", "other matmuls round to fp8"),
        read_where=("model.matmul", ("fp8",)),
    )

    @model_validator(mode="before")
    @classmethod
    def _adapter(cls, values: Any) -> Any:
        """Expands `adapter: FOLDER` to `lora: {adapter: FOLDER}`."""
        if not isinstance(values, dict) or "adapter" not in values:
            return values
        adapter, lora = values["adapter"], values.get("lora") or {}
        rest = {name: value for name, value in values.items() if name != "adapter"}
        if adapter is None or not isinstance(lora, dict):
            return rest
        return {**rest, "lora": {**lora, "adapter": lora.get("adapter") or adapter}}


class Batch(Section):
    rows_per_update: int = Field(
        32, ge=1, description="Offline: rows per optimizer step, over all devices.", effect=GROUPS
    )
    prompts: int = Field(32, ge=1, description="Online: prompts per step, over all devices.", effect=GROUPS)
    prompts_per_update: int | None = Field(
        None,
        ge=1,
        description="Online: prompts per optimizer step. The number must divide `batch.prompts`, which is also its "
        "default.",
        effect=GROUPS,
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of one packed micro-batch on one device. Default, if `batch.micro_batch_size` is "
        "not set: 4096, or more if a row of `data.max_tokens` needs more.",
        effect=MICRO,
        resumable=True,
    )
    micro_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rows of one right-padded micro-batch on one device. Use instead of `batch.tokens`.",
        effect=MICRO,
        resumable=True,
    )


class Val(Section):
    every: int | None = Field(None, ge=1, description="Steps between validations. Default: validate only at the end.")
    at_start: bool = Field(False, description="Validate before the first step too.")
    questions: str | list[str] | None = Field(
        None,
        description="Path of validation questions: rows with the columns of verl's RL data (`prompt`, `data_source`, "
        "`reward_model.ground_truth`). The model answers the questions greedily unless `val.temperature` is set. The "
        "rule of a question's data source scores its answer for the metric `val/accuracy`. A list of paths is read in "
        "order.",
    )
    question_rows: int | None = Field(
        None, ge=1, description="Number of questions to use from the start of each path. Default: all."
    )
    rules: dict[str, str] = Field(
        default_factory=dict,
        description="Offline: maps a data source to the rule that checks its answers, as in `{my/sums: gsm8k}`. "
        "Default: the built-in rules listed at `reward.rules`. Online runs use `reward.rules` instead.",
    )
    max_new_tokens: int = Field(64, ge=1, description="Maximum answer length in tokens.")
    environment: Annotated[str, Named(ENVIRONMENTS, NO_ENVIRONMENT, allow_function=True)] | None = Field(
        None,
        description="Environment of the validation questions, with the other keys of `rollout`. `none`: the model "
        "answers each question with one response. Default: `rollout.environment`, `rollout.tools` or `rollout.agent`.",
    )
    agent: Annotated[str, Named(allow_function=True)] | None = Field(
        None, description="Agent of the validation questions, as in `rollout.agent`. Default: `rollout.agent`."
    )
    n: int = Field(1, ge=1, description="Answers per question; more than 1 needs `val.temperature`.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling of answers: sample from the most likely tokens with this total probability. "
        "Needs a temperature.",
    )
    top_k: int = Field(
        0,
        ge=0,
        description="Sample only from this many of the most likely tokens; 0 means from all tokens. Needs a "
        "temperature.",
    )


class CheckpointSettings(Section):
    every: int | None = Field(None, ge=1, description="Steps between checkpoints. Default: one checkpoint at the end.")
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    best: str | None = Field(
        None,
        description="Metric that ranks the checkpoints, for example `val/loss`, `val/accuracy`, `reward` or any other "
        "metric of the run. Add `max` or `min` after the name of the metric if the name does not imply whether "
        "higher is better. If `best` is set, the run exports its best checkpoint at the end. Default: if only "
        "`keep_best` is set, `val/loss` ranks the checkpoints.",
    )
    keep_best: int = Field(
        0,
        ge=0,
        description="Number of best checkpoints (by `best`) to keep in addition to `keep_last`. Default: 1 if "
        "`checkpoint.best` is set.",
    )
    asynchronous: bool = Field(
        True,
        description="Continue training while a checkpoint is written. Before training continues, each process copies "
        "its tensors to host memory. A run of one process waits for the write if host memory is too small for the "
        "copy.",
    )


def _check_address(value: int | str | None) -> int | str | None:
    _, _, port = str(value).rpartition(":")
    if value is None or (port.isdecimal() and int(port) < 2**16):
        return value
    raise PydanticCustomError("literal_error", "must be {expected}", {"expected": "a port, or HOST:PORT"})


class LogSettings(Section):
    every: int = Field(1, ge=1, description="Steps between console lines when the output is not a terminal.")
    track: list[Annotated[str, Named(TRACKERS)]] = Field(
        default_factory=list,
        description="Trackers to use in addition to `metrics.jsonl`. Trackers need the `[track]` extra of the package.",
    )
    project: str = Field("lockstep", description="Project name in the trackers.")
    prometheus: Annotated[int | str | None, AfterValidator(_check_address)] = Field(
        None,
        description="Port, or HOST:PORT, at which rank 0 serves the newest metrics to Prometheus (`/metrics`). A port "
        "without a host is open only to this machine; `0.0.0.0:9400` is open to every machine that reaches it. "
        "Default: no port.",
    )
    samples: int = Field(
        4,
        ge=0,
        description="Online: number of responses per step that are stored in `samples.jsonl` with their per-token "
        "values.",
    )


class Recipe(Section):
    """A complete recipe: all keys of a run."""

    method: Annotated[str, Named(OFFLINE, ONLINE)] = Field(
        "sft",
        description="Training method. `lockstep recipes METHOD` shows the defaults of a method.",
        effect=Effect("blocks", "a different objective is trained"),
    )
    device: str = Field(
        "auto",
        description="Device of the run: a device name, or `auto` for the first usable one. If a named device is "
        "not present, the run stops with an error.",
        effect=Effect(
            "harmless", "every device should compute the same updates, which is what a comparison of two runs tests"
        ),
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
        default_factory=Algorithm, effect=Effect("blocks", "the same responses give a different loss or advantage")
    )
    critic: Critic = Field(
        default_factory=Critic,
        effect=Effect("blocks", "the critic is trained differently, which changes the advantages"),
    )
    preference: Preference = Field(
        default_factory=Preference, effect=Effect("blocks", "the same pairs give a different loss")
    )
    rm: RewardModelSettings = Field(
        default_factory=RewardModelSettings, effect=Effect("blocks", "the same responses give a different loss")
    )
    prm: ProcessReward = Field(
        default_factory=ProcessReward,
        effect=Effect(
            "blocks", "the process reward model is trained at different positions or on different label words"
        ),
    )
    distill: Distill = Field(
        default_factory=Distill,
        effect=Effect("blocks", "the student minimises a different divergence from the teacher"),
    )
    parallel: Parallel = Field(default_factory=Parallel, effect=SPREAD, resumable=True)
    val: Val = Field(
        default_factory=Val,
        effect=Effect("harmless", "this key changes only validation"),
        resumable=True,
    )
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings, effect=STORED, resumable=True)
    log: LogSettings = Field(default_factory=LogSettings, effect=STORED, resumable=True)
    tape: Annotated[Tape, BeforeValidator(_as_tape)] = Field(default_factory=Tape, effect=STORED, resumable=True)

    @model_validator(mode="before")
    @classmethod
    def _current_names(cls, values: Any) -> Any:
        """Renames old keys to their current names."""
        if not isinstance(values, dict):
            return values
        renamed, problems = with_current_names(values)
        if problems:
            raise PydanticCustomError("renamed", "{problems}", {"problems": "; ".join(map(str, problems))})
        return renamed

    @property
    def line_tokens(self) -> int | None:
        """The tokens of one packed micro-batch over all context-parallel devices, or None for padded micro-batches."""
        return None if self.batch.tokens is None else self.batch.tokens * self.parallel.context_parallel
