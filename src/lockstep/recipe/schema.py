"""Every key a recipe can have, once, with its default, its range and what it means.

`docs/recipe.md` is generated from this file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A group of keys. Strict: a quoted number is not a number, an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def _as_sources(value: Any) -> Any:
    """`train: rows.parquet` and `train: [a.jsonl, b.jsonl]` are short for a list of sources."""
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


class Run(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run's folder.")
    folder: str = Field("runs", description="Folder that holds the run folders.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything that is random in the run.")
    epochs: int | None = Field(
        None, ge=1, description="Passes over the training rows. Default 1 when `run.steps` is not set."
    )
    steps: int | None = Field(None, ge=1, description="Optimizer steps; instead of `run.epochs`.")
    resume: Literal["auto", "never", "required"] = Field(
        "auto",
        description="`auto` continues from the newest whole checkpoint, `never` refuses a folder that exists, "
        "`required` refuses when there is nothing to continue.",
    )
    deterministic: bool = Field(False, description="Switch the device's deterministic kernels on.")
    export: bool = Field(True, description="Write the trained model to the run's `export/` folder at the end.")


class Lora(Section):
    rank: int = Field(ge=1, description="Rank of the adapter matrices.")
    alpha: float | None = Field(
        None, gt=0, description="Scale numerator (the adapter is scaled by alpha / rank). Default: 2 x rank."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    targets: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="Which linear layers get an adapter: `all-linear` (all but the output head) or name endings.",
    )


class Model(Section):
    path: str = Field(description="Hugging Face folder (or hub name) of the model and its tokenizer.")
    dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="Precision of the forward and backward pass.")
    master_weights: bool | None = Field(
        None,
        description="Keep fp32 copies of the trained weights, sum gradients in fp32. Default: yes for bf16, fp16.",
    )
    lora: Lora | None = Field(None, description="Train a LoRA adapter instead of all weights.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, more time."
    )
    attention: Literal["auto", "sdpa"] = Field(
        "auto", description="`auto` takes the device's packed attention kernel, `sdpa` the plain-torch twin."
    )


class Source(Section):
    path: str = Field(
        description="parquet, jsonl, json or csv file, a folder or glob of them, or `hub:name[:config[:split]]`."
    )
    weight: float | None = Field(None, gt=0, description="Share of this source in the mix; on all sources or on none.")
    shape: Literal["messages", "prompt_response", "text"] | None = Field(
        None, description="As `data.shape`, for this source."
    )
    messages_key: str | None = Field(None, description="As `data.messages_key`, for this source.")
    prompt_key: str | None = Field(None, description="As `data.prompt_key`, for this source.")
    response_key: str | None = Field(None, description="As `data.response_key`, for this source.")
    text_key: str | None = Field(None, description="As `data.text_key`, for this source.")


Sources = Annotated[list[Source], BeforeValidator(_as_sources)]


class Data(Section):
    train: Sources = Field(min_length=1, description="Training rows: a path, a list of paths, or a list of sources.")
    val: Sources = Field(default_factory=list, description="Validation rows, in the same forms.")
    shape: Literal["auto", "messages", "prompt_response", "text"] = Field(
        "auto",
        description="`messages`: a chat, every assistant turn is trained; `prompt_response`: the response is trained; "
        "`text`: every token is trained; `auto` looks at the columns and says what it found.",
    )
    messages_key: str | None = Field(None, description="Column of the chat. Default `messages` or `conversations`.")
    prompt_key: str | None = Field(
        None, description="Column of the prompt; dots reach into nested columns (`extra_info.question`)."
    )
    response_key: str | None = Field(None, description="Column of the response; dots as in `prompt_key`.")
    text_key: str | None = Field(None, description="Column of plain text. Default `text`.")
    system: str | None = Field(None, description="System message put before rows that have none.")
    template: Literal["auto", "none"] = Field(
        "auto",
        description="`auto` renders prompts with the tokenizer's chat template where it has one; "
        "`none` joins prompt and response as they are.",
    )
    require_end: bool = Field(
        True, description="Refuse rows whose last trained token is not an end token: the model would not learn to stop."
    )
    max_tokens: int | None = Field(
        None, ge=2, description="Longest row in tokens. Default: the model's context, or `batch.tokens` if smaller."
    )
    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = Field(
        "error", description="What happens to a row over `max_tokens`. Dropped and truncated rows are counted."
    )
    shuffle: bool = Field(True, description="Visit the rows in a new seeded order each epoch.")


class Batch(Section):
    rows_per_update: int = Field(32, ge=1, description="Rows of one optimizer step, over all devices.")
    tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of one packed micro-batch on one device. Default 4096 when `batch.rows` is not set.",
    )
    rows: int | None = Field(
        None, ge=1, description="Rows of one right-padded micro-batch on one device; instead of `batch.tokens`."
    )


class Optim(Section):
    lr: float = Field(1e-5, gt=0, description="Peak learning rate.")
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2, description="AdamW's moment decay rates.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.01, ge=0, description="Decay of weight matrices; biases and norms are spared.")
    clip: float | None = Field(1.0, gt=0, description="Largest gradient norm; `null` switches clipping off.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="Shape of the learning rate after the warm-up."
    )
    warmup: int | float = Field(
        0.0, ge=0, description="Warm-up: steps (a whole number) or a share of all steps (below 1)."
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Lowest learning rate as a share of `lr`.")
    decay: float = Field(
        0.2, gt=0, le=1, description="wsd: share of all steps in which the rate falls linearly to its minimum."
    )


class Val(Section):
    every: int | None = Field(None, ge=1, description="Steps between validations. Default: only at the end.")
    at_start: bool = Field(False, description="Validate before the first step too.")
    questions: str | None = Field(
        None, description="Rows in the RL schema to answer greedily: `val/accuracy` by the rule of their data source."
    )
    question_rows: int | None = Field(None, ge=1, description="Answer only the first so many questions.")
    max_new_tokens: int = Field(64, ge=1, description="Longest answer in tokens.")


class Checkpoint(Section):
    every: int | None = Field(None, ge=1, description="Steps between checkpoints. Default: only at the end.")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept.")
    keep_best: int = Field(0, ge=0, description="Checkpoints with the lowest `val/loss` kept besides.")


class Log(Section):
    every: int = Field(1, ge=1, description="Steps between console lines when the output is not a terminal.")
    track: list[Literal["tensorboard", "wandb", "mlflow", "swanlab"]] = Field(
        default_factory=list, description="Trackers besides `metrics.jsonl`; they come with the `[track]` extra."
    )
    project: str = Field("lockstep", description="Project name in the trackers.")


class Recipe(Section):
    """A whole run."""

    method: Literal["sft"] = Field("sft", description="What is trained, and by which loss.")
    device: Literal["auto", "cpu", "cuda", "npu"] = Field(
        "auto", description="Where it runs; a named device that is absent is an error."
    )
    run: Run = Field(default_factory=Run)
    model: Model
    data: Data
    batch: Batch = Field(default_factory=Batch)
    optim: Optim = Field(default_factory=Optim)
    val: Val = Field(default_factory=Val)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    log: Log = Field(default_factory=Log)
