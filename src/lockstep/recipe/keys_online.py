"""Recipe keys of the online methods: algorithm, critic and rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from lockstep.recipe.registry import ESTIMATORS, LOSSES
from lockstep.recipe.section import FOLDER, RATE, REWARD, Effect, Field, Named, Section


class Reject(Section):
    over: Literal["token", "sum", "mean", "max"] = Field(
        "token",
        description="Unit that is tested: a token, or a response by the sum, mean or maximum over its tokens.",
    )
    by: Literal["ratio", "k2", "k3", "binary_kl", "tv"] = Field(
        description="Measure of the mismatch. `ratio`: trainer probability / engine probability; `k2`, `k3`: "
        "estimates of their KL divergence; `binary_kl`, `tv`: KL divergence or total variation of the two "
        "probabilities of the token alone.",
    )
    low: float | None = Field(None, ge=0, description="Lower bound of the accepted range. Default: none.")
    high: float = Field(gt=0, description="Upper bound of the accepted range.")


class RolloutCorrection(Section):
    bypass: bool = Field(
        False,
        description="Use the engine's log-probabilities as the old log-probabilities of the ratio. This saves the "
        "trainer's forward pass before the first update, and clipping then includes the mismatch between engine "
        "and trainer. Default: `true` if `rollout.max_staleness` is above 0, the loss clips per token (`clip`, "
        "`geo_mean`, `clip_cov`, `dppo_*`) and no weight is set, otherwise `false`.",
    )
    weight: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Truncated importance sampling: weight by trainer probability / engine probability. Default: "
        "`token` if a serving engine generates, or if `rollout.max_staleness` is above 0 without `bypass`; "
        "otherwise `none`.",
    )
    cap: float | None = Field(
        2.0,
        gt=0,
        description="Maximum weight; `null` means no maximum.",
        read_where=("algorithm.rollout_correction.weight", ("token", "sequence")),
    )
    floor: float = Field(
        0.0,
        ge=0,
        description="Minimum weight.",
        read_where=("algorithm.rollout_correction.weight", ("token", "sequence")),
    )
    normalize: bool = Field(
        False,
        description="Divide the weights by their mean over the step.",
        read_where=("algorithm.rollout_correction.weight", ("token", "sequence")),
    )
    mask: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Mask tokens, or sequences (by their geometric mean), whose ratio is outside `low` and `high`.",
    )
    low: float = Field(
        0.5,
        gt=0,
        description="Lower bound of the ratio for `mask`.",
        read_where=("algorithm.rollout_correction.mask", ("token", "sequence")),
    )
    high: float = Field(
        2.0,
        gt=0,
        description="Upper bound of the ratio for `mask`.",
        read_where=("algorithm.rollout_correction.mask", ("token", "sequence")),
    )
    reject: list[Reject] = Field(
        default_factory=list,
        description="Additional accepted ranges. Tokens outside any of them are masked, as with `mask`.",
    )
    rejected: Literal["left_out", "zero"] = Field(
        "left_out", description="`left_out`: masked tokens do not count in the means; `zero`: they count with 0."
    )

    @property
    def compares(self) -> bool:
        """Returns whether the trainer must compute log-probabilities before the first update."""
        return self.weight != "none" or self.mask != "none" or bool(self.reject)


Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


class Kl(Section):
    where: Literal["none", "loss", "reward"] = Field(
        "none",
        description="Where the KL divergence from the reference is used: nowhere, in the loss, or in the reward.",
    )
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"] = Field(
        "k3",
        description="KL estimator. k3 is also called low_var_kl. `+`: this value with the gradient of k2 "
        "(straight-through); `k2+` equals k2.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    coefficient: float = Field(
        0.001, ge=0, description="Weight of the KL divergence.", read_where=("algorithm.kl.where", ("loss", "reward"))
    )
    target: float | None = Field(
        None,
        gt=0,
        description="Adapt the coefficient so that the KL divergence per token approaches this value.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    horizon: int = Field(
        10000,
        ge=1,
        description="Number of sequences over which the coefficient adapts.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    reward_coefficient: float = Field(
        0.0,
        ge=0,
        description="With `where: loss`: weight of an additional KL penalty in the reward; 0 disables it.",
        read_where=("algorithm.kl.where", ("loss",)),
    )
    reward_estimator: Literal["k1", "abs", "k2", "k3"] = Field(
        "k1", description="KL estimator of the penalty in the reward.", read_where=("algorithm.kl.where", ("loss",))
    )
    weighted: bool = Field(
        False,
        description="With a `+` estimator in the loss: weight its gradient by the ratio of new to old probability, "
        "at most 10, so that it stays the gradient of the divergence in later updates of a step.",
        read_where=("algorithm.kl.where", ("loss",)),
    )
    before_baseline: bool = Field(
        True,
        description="For a KL penalty in the reward, with estimators that compare groups: `true` subtracts it from "
        "the scores before the baseline of the group is computed; `false` subtracts it afterwards, at each token "
        "the penalty of the rest of the response.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    reference: str | None = Field(
        None,
        description="Folder of the reference model. Default: `model.path` (with LoRA: the model with the adapter "
        "disabled).",
        effect=FOLDER,
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )

    def in_reward(self) -> bool:
        """Whether the reward contains a KL penalty, alone or in addition to one in the loss."""
        return self.where == "reward" or self.reward_coefficient > 0


class Whiten(Section):
    over: Literal["own", "none", "step"] = Field(
        "own",
        description="When advantages are normalised to mean 0 and standard deviation 1 over the tokens of the "
        "step. `own`: if the estimator's paper does so (`gae`, `reinforce_pp`, `reinforce_pp_baseline`); `none`: "
        "never; `step`: always. An estimator function of yours must normalise by itself.",
    )
    biased: bool = Field(False, description="Divide by n instead of n - 1 in the variance.")
    divide: bool = Field(True, description="`false` subtracts the mean without dividing by the standard deviation.")


class DynamicSampling(Section):
    max_gen_batches: int = Field(
        1,
        ge=1,
        description="Maximum number of batches of prompts generated per step. Above 1, groups with equal rewards "
        "are replaced by new prompts until the step is full or this number is reached.",
    )
    between: list[float] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="Replace instead the groups whose mean reward is not between these two values.",
    )
    metric: str | None = Field(
        None,
        description="Reward component to use: `rule`, `function`, or `function/NAME` for a number that your "
        "function returns by name. Default: the total score.",
    )


class PolicyFiltration(Section):
    method: Literal["none", "pow", "max_min", "max_random"] = Field(
        "none",
        description="PF-PPO: resample the responses of a step by their scores. `pow`: by a power of the score; "
        "`max_min`: only the best and the worst; `max_random`: the best four times as often as the others.",
    )
    power: float = Field(
        2.0, gt=0, description="`pow`: the exponent.", read_where=("algorithm.pf_ppo.method", ("pow",))
    )


class Overlong(Section):
    buffer: int = Field(
        0, ge=0, description="Penalise responses that end within this many tokens before the limit; 0 disables it."
    )
    factor: float = Field(1.0, ge=0, description="Penalty at the limit.")
    truncated_reward: float | None = Field(
        None,
        le=1,
        description="Score of responses that reached the limit. From 0 to 1: their score is multiplied by this "
        "value; below 0: this value replaces their score.",
    )
    mask_truncated: bool = Field(
        False,
        description="Mask responses that reached the limit in the loss (overlong filtering). They still count in "
        "the baselines of other responses.",
    )


class Algorithm(Section):
    advantage: Annotated[str, Named(ESTIMATORS, allow_function=True)] = Field(
        "grpo", description="Advantage estimator: a name, or your function `path/to/file.py:name`."
    )
    loss: Annotated[str, Named(LOSSES, allow_function=True)] = Field(
        "clip", description="Policy loss: a name, or your function `path/to/file.py:name`."
    )
    function_timeout: float = Field(
        600.0,
        gt=0,
        description="Timeout in seconds for one call of your `advantage` or `loss`. After it, the run stops.",
        effect=Effect("harmless", "changes only when the run stops"),
        resumable=True,
    )
    aggregation: Aggregation = Field("token_mean", description="How the token losses of an update are averaged.")
    penalty_aggregation: Aggregation | None = Field(
        None, description="How the KL and entropy terms of the loss are averaged. Default: same as `aggregation`."
    )
    epochs: int = Field(1, ge=1, description="Passes over the responses of a step.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount factor of later rewards.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda.", read_where=("algorithm.advantage", ("gae",)))
    clip_low: float = Field(
        0.2,
        ge=0,
        description="Lower clip bound of the ratio: 1 - this value. `dppo_tv`, `dppo_kl`: how far a probability "
        "may fall.",
    )
    clip_high: float = Field(
        0.2,
        ge=0,
        description="Upper clip bound of the ratio: 1 + this value. `dppo_tv`, `dppo_kl`: how far a probability "
        "may rise.",
    )
    dual_clip: float | None = Field(
        3.0,
        gt=1,
        description="`clip`: bound of the ratio for negative advantages; `null` disables it.",
        read_where=("algorithm.loss", ("clip",)),
    )
    ratio_cap: float = Field(
        20.0,
        gt=0,
        description="`dppo_tv`, `dppo_kl`, `importance`: maximum weight of a token.",
        read_where=("algorithm.loss", ("dppo_tv", "dppo_kl", "importance")),
    )
    ratio_of: Literal["token", "sequence"] = Field(
        "token",
        description="`importance`: the weight of a token is the ratio of the token, or the product of the ratios "
        "of its response.",
        read_where=("algorithm.loss", ("importance",)),
    )
    dro_beta: float = Field(
        1.0,
        gt=0,
        description="`dro`: weight of the squared log-ratio.",
        read_where=("algorithm.loss", ("dro",)),
    )
    sapo_positive: float = Field(
        1.0,
        gt=0,
        description="`sapo`: temperature for positive advantages.",
        read_where=("algorithm.loss", ("sapo",)),
    )
    sapo_negative: float = Field(
        1.05,
        gt=0,
        description="`sapo`: temperature for negative advantages.",
        read_where=("algorithm.loss", ("sapo",)),
    )
    cov_ratio: float = Field(
        0.0002,
        ge=0,
        le=1,
        description="`clip_cov`, `kl_cov`: fraction of tokens to select.",
        read_where=("algorithm.loss", ("clip_cov", "kl_cov")),
    )
    cov_low: float = Field(
        1.0,
        description="`clip_cov`: lowest covariance of a selected token.",
        read_where=("algorithm.loss", ("clip_cov",)),
    )
    cov_high: float = Field(
        5.0,
        description="`clip_cov`: highest covariance of a selected token.",
        read_where=("algorithm.loss", ("clip_cov",)),
    )
    cov_kl: float = Field(
        1.0,
        ge=0,
        description="`kl_cov`: weight of the KL penalty of the selected tokens.",
        read_where=("algorithm.loss", ("kl_cov",)),
    )
    gdpo_rewards: dict[str, float] = Field(
        default_factory=dict,
        description="`gdpo`: the rewards to compare separately, with their weights; names as in "
        "`dynamic_sampling.metric`. Default: the rewards of the recipe, with `reward.weights`.",
        read_where=("algorithm.advantage", ("gdpo",)),
    )
    whiten: Whiten = Field(default_factory=Whiten)
    entropy: float = Field(0.0, description="Weight of the entropy bonus.")
    kl: Kl = Field(default_factory=Kl, effect=Effect("blocks", "the KL penalty differs"))
    rollout_correction: RolloutCorrection = Field(
        default_factory=RolloutCorrection, effect=Effect("blocks", "tokens are weighted or masked differently")
    )
    dynamic_sampling: DynamicSampling = Field(
        default_factory=DynamicSampling, effect=Effect("blocks", "different groups are trained")
    )
    pf_ppo: PolicyFiltration = Field(
        default_factory=PolicyFiltration, effect=Effect("blocks", "responses are resampled differently")
    )
    overlong: Overlong = Field(default_factory=Overlong, effect=REWARD)


class Critic(Section):
    path: str | None = Field(
        None, description="Folder of the model that initialises the critic. Default: `model.path`.", effect=FOLDER
    )
    lr: float = Field(
        1e-5,
        gt=0,
        description="Peak learning rate of the critic. The schedule is the same as the policy's.",
        effect=RATE,
        resumable=True,
    )
    clip: float | None = Field(
        0.5, gt=0, description="Maximum change of a value from its old value; `null` disables clipping."
    )
    aggregation: Aggregation = Field(
        "token_mean", description="How the token losses of the critic are averaged in an update."
    )
    warmup: int = Field(0, ge=0, description="Steps in which only the critic is trained.")


class Reward(Section):
    rules: dict[str, str] = Field(
        default_factory=dict,
        description="Rule of each data source: `gsm8k`, `gsm8k_flexible`, `math`, `exact`. Built in: `arithmetic` "
        "and `openai/gsm8k` (gsm8k), `lighteval/MATH`, `DigitalLearningGmbH/MATH-lighteval` and "
        "`HuggingFaceH4/MATH-500` (math).",
        effect=REWARD,
    )
    function: str | None = Field(
        None,
        description="Your reward function: `path/to/file.py:name`.",
        effect=Effect("matters", "a different function, or the same one at another path; compare the rewards"),
    )
    arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Additional keyword arguments of `function`.",
        effect=REWARD,
    )
    model: str | list[str] | None = Field(
        None,
        description="Folder of a reward model (sequence classification, one label), or a list of folders whose "
        "scores are added.",
        effect=FOLDER,
    )
    model_weights: list[float] = Field(
        default_factory=list, description="With a list in `model`: the weight of each model. Default: 1.", effect=REWARD
    )
    process: str | None = Field(
        None,
        description="Folder of a process reward model (method `prm`). Each step of a response earns its "
        "probability of being good, divided by the number of steps, at the token where it ends.",
        effect=FOLDER,
    )
    separator: str = Field(
        "\n", min_length=1, description="Text between the steps that `process` scores.", effect=REWARD
    )
    remote: str | list[str] | None = Field(
        None,
        description="Address of an HTTP endpoint that scores batches, or a list of addresses that share the batches.",
        effect=Effect("matters", "a different endpoint may use a different model"),
    )
    remote_form: Literal["items", "openrlhf"] = Field(
        "items",
        description="Request and response format of the endpoint: `items` as in docs/rewards.md; `openrlhf` sends "
        "the lists `query`, `prompts` and `labels` and expects `rewards`.",
        effect=Effect("matters", "requests to the endpoint have another format"),
    )
    format: str | None = Field(
        None, description="Regular expression that must match the full response: reward 1, otherwise 0.", effect=REWARD
    )
    weights: dict[Literal["rule", "function", "model", "process", "remote", "format"], float] = Field(
        default_factory=dict,
        description="Weight of each reward. Default: 1 for each reward that is set. The rule counts if it is "
        "listed here or if nothing else is set.",
        effect=REWARD,
    )
    clip: list[float] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="Bounds of the total score of a response. Scores outside are set to the nearest bound.",
        effect=REWARD,
    )
    workers: int = Field(
        2,
        ge=1,
        description="Number of processes that run the function.",
        effect=Effect("harmless", "changes only the number of processes that compute rewards"),
        resumable=True,
    )
    time_limit: float = Field(
        10.0,
        gt=0,
        description="Timeout in seconds for one call of the function.",
        effect=Effect("harmless", "matters only if a call is aborted; see reward/failed"),
    )
    memory_limit_gb: float = Field(
        4.0,
        gt=0,
        description="Memory limit of a process that runs the function.",
        effect=Effect("harmless", "matters only if a call is aborted; see reward/failed"),
    )
    max_failures: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Stop if more than this fraction of a step's responses could not be generated "
        "(`rollout.function`) or scored.",
        effect=Effect("harmless", "changes only when the run stops"),
        resumable=True,
    )
    remote_batch: int = Field(
        32,
        ge=1,
        description="Responses per request to the endpoint.",
        effect=Effect("harmless", "changes only the number of responses per request"),
    )
    remote_timeout: float = Field(
        30.0,
        gt=0,
        description="Timeout in seconds for a request to an endpoint, including its full response.",
        effect=Effect("harmless", "matters only if a call is aborted; see reward/failed"),
    )
    remote_retries: int = Field(
        4,
        ge=0,
        description="Number of retries after a failed request, with increasing pauses.",
        effect=Effect("harmless", "matters only if a call is aborted; see reward/failed"),
    )
