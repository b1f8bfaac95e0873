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
    allow_fallback: bool = Field(
        True,
        description="Operators that the device does not have may run on the CPU, where they are counted and named; "
        "`false` makes the first one an error. Looked at in the first step.",
    )
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
    chosen_key: str | None = Field(None, description="As `data.chosen_key`, for this source.")
    rejected_key: str | None = Field(None, description="As `data.rejected_key`, for this source.")
    margin_key: str | None = Field(None, description="As `data.margin_key`, for this source.")
    responses_key: str | None = Field(None, description="As `data.responses_key`, for this source.")
    scores_key: str | None = Field(None, description="As `data.scores_key`, for this source.")
    label_key: str | None = Field(None, description="As `data.label_key`, for this source.")
    steps_key: str | None = Field(None, description="As `data.steps_key`, for this source.")


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
    chosen_key: str | None = Field(None, description="Column of the better response. Default `chosen`.")
    rejected_key: str | None = Field(None, description="Column of the worse response. Default `rejected`.")
    margin_key: str | None = Field(
        None,
        description="Column of the margin asked of a pair (`rm`). Default `margin`, or `score_chosen` less "
        "`score_rejected`.",
    )
    responses_key: str | None = Field(
        None, description="Column of a list of responses to rank (`rm`). Default `responses`."
    )
    scores_key: str | None = Field(
        None,
        description="Column of their scores, higher is better. Default `scores`; without: best first.",
    )
    label_key: str | None = Field(
        None,
        description="Column of the verdict (`kto`) or of the verdicts on the steps (`prm`). Default `label`, `labels`.",
    )
    steps_key: str | None = Field(None, description="Column of a list of steps (`prm`). Default `completions`.")
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
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Online: longest prompt in tokens. Default: what `rollout.max_tokens` leaves of the context.",
    )
    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = Field(
        "error",
        description="What happens to a row over `max_tokens` (online: a prompt over `max_prompt_tokens`). "
        "Dropped and truncated rows are counted.",
    )
    shuffle: bool = Field(True, description="Visit the rows in a new seeded order each epoch.")


class Batch(Section):
    rows_per_update: int = Field(32, ge=1, description="Offline: rows of one optimizer step, over all devices.")
    prompts: int = Field(32, ge=1, description="Online: prompts of one step, over all devices.")
    prompts_per_update: int | None = Field(
        None, ge=1, description="Online: prompts of one optimizer step; must divide `batch.prompts`, the default."
    )
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


class Rollout(Section):
    engine: Literal["native", "hf"] = Field(
        "native", description="`native` is the built-in engine, `hf` plain `generate`: slow, for comparison."
    )
    n: int = Field(8, ge=1, description="Responses sampled for each prompt.")
    max_tokens: int = Field(256, ge=1, description="Longest response in tokens.")
    temperature: float = Field(
        1.0, gt=0, description="Divides the logits, in the engine and in the trainer's log-probabilities alike."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Sample from the most likely tokens that hold this probability.")
    top_k: int = Field(0, ge=0, description="Sample from the so many most likely tokens; 0 is all.")
    min_p: float = Field(0.0, ge=0, lt=1, description="Leave out tokens below this share of the likeliest one's.")
    truncated: Literal["refuse", "mask", "ignore"] = Field(
        "refuse",
        description="With `top_p`, `top_k` or `min_p`: the trainer scores with the same truncation (`mask`) or under "
        "the whole distribution (`ignore`: ratios are then off); `refuse` asks to choose.",
    )
    stop: list[str] = Field(default_factory=list, description="Texts that end a response.")
    stop_ids: list[int] = Field(default_factory=list, description="Tokens that end a response, besides the model's.")
    max_sequences: int = Field(256, ge=1, description="Native: responses decoded at once on one device.")
    prefill_tokens: int = Field(8192, ge=1, description="Native: prompt tokens of one forward pass.")
    block_tokens: int = Field(16, ge=1, description="Native: tokens of one block of the key/value cache.")
    cache_gb: float | None = Field(
        None,
        gt=0,
        description="Native: memory of the key/value cache. Default: what the step can use, at most half of what is "
        "free.",
    )
    free_cache: bool = Field(
        True,
        description="Native: give the cache back after each phase. `false` keeps it, and with it what was captured for "
        "it: faster where memory is plentiful.",
    )
    max_probs_diff: float | None = Field(
        None, gt=0, description="Stop when the mean difference of engine's and trainer's probabilities is over this."
    )


class Correction(Section):
    weight: Literal["none", "token", "sequence"] = Field(
        "none", description="Truncated importance sampling: trainer's over engine's probability, as a weight."
    )
    cap: float = Field(2.0, gt=0, description="Largest weight.")
    mask: Literal["none", "token", "sequence"] = Field(
        "none", description="Leave out tokens, or sequences (by their geometric mean), whose ratio is out of band."
    )
    low: float = Field(0.5, gt=0, description="Lower end of the band.")
    high: float = Field(2.0, gt=0, description="Upper end of the band.")


Estimator = Literal[
    "gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "opo",
    "grpo_passk",
    "gpg",
]
PolicyLoss = Literal["clip", "gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov", "policy_gradient"]
Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


class Kl(Section):
    where: Literal["none", "loss", "reward"] = Field(
        "none", description="Divergence from the reference: not used, a term of the loss, or a part of the reward."
    )
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"] = Field(
        "k3",
        description="k3 is also known as low_var_kl. `+`: this value, with the gradient of k2 (straight through); "
        "`k2+` is k2.",
    )
    coefficient: float = Field(0.001, ge=0, description="Weight of the divergence.")
    target: float | None = Field(
        None, gt=0, description="Adapt the coefficient so that the divergence (per token) comes to this value."
    )
    horizon: int = Field(10000, ge=1, description="Sequences over which the coefficient adapts.")
    reference: str | None = Field(
        None, description="Folder of the reference model. Default: `model.path` (with LoRA: the adapter switched off)."
    )


class DynamicSampling(Section):
    rounds: int = Field(
        1,
        ge=1,
        description="Rounds of generation in a step. Over 1, groups whose rewards are all equal are replaced by new "
        "prompts, until the step is full or the rounds are used up.",
    )


class Overlong(Section):
    buffer: int = Field(
        0, ge=0, description="Responses in the last so many tokens before the limit lose reward; 0 is off."
    )
    factor: float = Field(1.0, ge=0, description="Reward lost at the very limit.")


class Algorithm(Section):
    advantage: Estimator = Field("grpo", description="How rewards become advantages.")
    loss: PolicyLoss = Field("clip", description="The policy loss.")
    aggregation: Aggregation = Field("token_mean", description="How the token losses of an update are averaged.")
    epochs: int = Field(1, ge=1, description="Passes over the responses of a step.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount of a token's later rewards.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda.")
    clip_low: float = Field(0.2, ge=0, description="The ratio is clipped at 1 - this.")
    clip_high: float = Field(0.2, ge=0, description="The ratio is clipped at 1 + this.")
    dual_clip: float | None = Field(
        3.0, gt=1, description="`clip`: bound of the ratio where the advantage is negative; `null` is none."
    )
    sapo_positive: float = Field(1.0, gt=0, description="`sapo`: temperature where the advantage is positive.")
    sapo_negative: float = Field(1.05, gt=0, description="`sapo`: temperature where the advantage is negative.")
    cov_share: float = Field(
        0.0002, ge=0, le=1, description="`clip_cov`, `kl_cov`: share of tokens that are held back."
    )
    cov_low: float = Field(1.0, description="`clip_cov`: lowest covariance of a token that may be held back.")
    cov_high: float = Field(5.0, description="`clip_cov`: highest covariance of a token that may be held back.")
    cov_kl: float = Field(1.0, ge=0, description="`kl_cov`: weight of the divergence of the tokens held back.")
    entropy: float = Field(0.0, description="Weight of the entropy bonus.")
    kl: Kl = Field(default_factory=Kl)
    correction: Correction = Field(default_factory=Correction)
    dynamic_sampling: DynamicSampling = Field(default_factory=DynamicSampling)
    overlong: Overlong = Field(default_factory=Overlong)


class Critic(Section):
    path: str | None = Field(None, description="Folder that the critic starts from. Default: `model.path`.")
    lr: float = Field(1e-5, gt=0, description="Peak learning rate of the critic; the schedule is the policy's.")
    clip: float | None = Field(0.5, gt=0, description="How far a value may move from the old one; `null` is no bound.")
    warmup: int = Field(0, ge=0, description="Steps in which only the critic is trained.")


class Reward(Section):
    rules: dict[str, str] = Field(
        default_factory=dict,
        description="Rule of each data source: `gsm8k`, `gsm8k_flexible`, `math`, `exact`. Known without being "
        "said: `arithmetic` and `openai/gsm8k` (gsm8k).",
    )
    function: str | None = Field(None, description="Your own function: `path/to/file.py:name`.")
    model: str | None = Field(None, description="Folder of a reward model (sequence classification, one label).")
    process: str | None = Field(
        None,
        description="Folder of a process reward model (method `prm`): each step of a response earns its probability of "
        "being good over the number of steps, at the token where it ends.",
    )
    separator: str = Field("\n", min_length=1, description="Text between the steps that `process` judges.")
    remote: str | None = Field(None, description="Address of an HTTP endpoint that scores batches.")
    format: str | None = Field(None, description="Regular expression that a whole response must match: 1, else 0.")
    weights: dict[Literal["rule", "function", "model", "process", "remote", "format"], float] = Field(
        default_factory=dict,
        description="Weight of each reward. Default: 1 for each that is set; the rule counts when it is named here or "
        "nothing else is set.",
    )
    workers: int = Field(2, ge=1, description="Processes that run the function.")
    time_limit: float = Field(10.0, gt=0, description="Seconds that one call of the function may take.")
    memory_limit_gb: float = Field(4.0, gt=0, description="Memory of a process that runs the function.")
    max_failures: float = Field(
        0.1, ge=0, le=1, description="Stop when more than this share of a step's responses could not be scored."
    )
    remote_batch: int = Field(32, ge=1, description="Responses sent to the endpoint at once.")
    remote_timeout: float = Field(30.0, gt=0, description="Seconds to wait for an answer of the endpoint.")
    remote_retries: int = Field(4, ge=0, description="Further tries after a failed one, with growing pauses.")


class Preference(Section):
    loss: Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "cpo"] = Field(
        "sigmoid", description="Loss of a pair. `simpo`, `orpo` and `cpo` have no reference."
    )
    beta: float = Field(0.1, gt=0, description="Scale of the log-ratio (`orpo`: weight of the odds ratio).")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs that may be labelled the wrong way round."
    )
    gamma: float = Field(0.0, ge=0, description="`simpo`: margin asked of the scaled difference.")
    average: bool = Field(
        False, description="Log-probabilities are means over a response's tokens, not sums (length-normalised)."
    )
    nll: float = Field(0.0, ge=0, description="Weight of the chosen response's mean negative log-likelihood.")
    reference: str | None = Field(
        None, description="Folder of the reference model. Default: `model.path` (with LoRA: the adapter switched off)."
    )
    precompute: bool = Field(
        False,
        description="Compute the reference's log-probabilities once, before training, and keep them on disk: the "
        "reference then takes no memory.",
    )
    reference_free: bool = Field(
        False, description="`kto`: no reference; mean log-probabilities take the place of log-ratios."
    )
    desirable: float = Field(1.0, gt=0, description="`kto`: weight of desirable rows.")
    undesirable: float = Field(1.0, gt=0, description="`kto`: weight of undesirable rows.")


class RewardModel(Section):
    loss: Literal["sigmoid", "logexp"] = Field(
        "sigmoid", description="-log sigmoid(chosen - rejected - margin), or log(1 + exp(rejected - chosen))."
    )
    ranking: Literal["pairs", "plackett_luce"] = Field(
        "pairs", description="More than two responses: the mean over all pairs, or the Plackett-Luce likelihood."
    )
    centre: float = Field(
        0.0, ge=0, description="Weight of the squared sum of a pair's scores: keeps scores around zero."
    )


class ProcessReward(Section):
    placeholder: str = Field("ки", min_length=1, description="Text after each step where it is judged; one token.")
    tokens: list[str] = Field(
        ["+", "-"], min_length=2, description="Words that say how a step is, one token each; the first is the good one."
    )


class Distill(Section):
    teacher: str | None = Field(None, description="Folder of the teacher.")
    divergence: Literal["forward", "reverse", "jsd"] = Field(
        "forward", description="KL(teacher, student), KL(student, teacher), or Jensen-Shannon's mixture of both."
    )
    mix: float = Field(0.5, gt=0, lt=1, description="`jsd`: the teacher's share in the mixture.")
    temperature: float = Field(1.0, gt=0, description="Divides the logits of both.")
    coefficient: float = Field(
        0.5, ge=0, le=1, description="Weight of the divergence; the rest is the rows' own log-likelihood (SFT)."
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="Keep the teacher's so many likeliest words of each token on disk and train from there; what is "
        "left of the vocabulary counts as one word.",
    )


class Val(Section):
    every: int | None = Field(None, ge=1, description="Steps between validations. Default: only at the end.")
    at_start: bool = Field(False, description="Validate before the first step too.")
    questions: str | None = Field(
        None, description="Rows in the RL schema to answer greedily: `val/accuracy` by the rule of their data source."
    )
    question_rows: int | None = Field(None, ge=1, description="Answer only the first so many questions.")
    max_new_tokens: int = Field(64, ge=1, description="Longest answer in tokens.")
    n: int = Field(1, ge=1, description="Answers to each question; more than 1 needs `val.temperature`.")
    temperature: float = Field(0.0, ge=0, description="0 answers greedily.")


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
    samples: int = Field(4, ge=0, description="Online: responses stored in `samples.jsonl` each step.")


Method = Literal[
    "sft",
    "rm",
    "prm",
    "dpo",
    "ipo",
    "simpo",
    "orpo",
    "cpo",
    "kto",
    "distill",
    "ppo",
    "grpo",
    "dr_grpo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "remax",
    "opo",
    "gpg",
    "gspo",
    "dapo",
    "cispo",
    "on_policy_distill",
]


class Recipe(Section):
    """A whole run."""

    method: Method = Field("sft", description="What is trained, and how; `lockstep recipes METHOD` shows its defaults.")
    device: str = Field(
        "auto",
        description="Where it runs: a device's name, or `auto` for the first that can be used. A named device that is "
        "absent is an error.",
    )
    run: Run = Field(default_factory=Run)
    model: Model
    data: Data
    batch: Batch = Field(default_factory=Batch)
    optim: Optim = Field(default_factory=Optim)
    rollout: Rollout = Field(default_factory=Rollout)
    reward: Reward = Field(default_factory=Reward)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    critic: Critic = Field(default_factory=Critic)
    preference: Preference = Field(default_factory=Preference)
    rm: RewardModel = Field(default_factory=RewardModel)
    prm: ProcessReward = Field(default_factory=ProcessReward)
    distill: Distill = Field(default_factory=Distill)
    val: Val = Field(default_factory=Val)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    log: Log = Field(default_factory=Log)
