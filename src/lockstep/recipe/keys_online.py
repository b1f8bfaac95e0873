"""Keys of the online methods: algorithm, critic and rewards; those of generation are in `rollout.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from lockstep.recipe.registry import ESTIMATORS, LOSSES
from lockstep.recipe.section import FOLDER, RATE, REWARD, Effect, Field, Named, Section


class Reject(Section):
    over: Literal["token", "sum", "mean", "max"] = Field(
        "token", description="A token by itself, or its whole response by the sum, mean or largest of its tokens."
    )
    by: Literal["ratio", "k2", "k3", "binary_kl", "tv"] = Field(
        description="Trainer's over engine's probability, an estimate of their divergence (k2, k3), the divergence or "
        "the distance of the two probabilities alone (binary_kl, tv).",
    )
    low: float | None = Field(None, ge=0, description="Lower end of the band; default: none.")
    high: float = Field(gt=0, description="Upper end of the band.")


class Correction(Section):
    bypass: bool = Field(
        False,
        description="The engine's log-probabilities are the old ones of the ratio: no pass of the trainer before the "
        "first update, and the difference of engine and trainer is clipped with the rest. Default: `true` where "
        "`rollout.max_staleness` is over 0, the loss clips token by token (`clip`, `geo_mean`, `clip_cov`, `dppo_*`) "
        "and no weight is asked for, otherwise `false`.",
    )
    weight: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Truncated importance sampling: trainer's over engine's probability, as a weight. Default: `token` "
        "where a serving engine generates, or `rollout.max_staleness` is over 0 without `bypass`; otherwise `none`.",
    )
    cap: float | None = Field(
        2.0,
        gt=0,
        description="Largest weight; `null` is none.",
        read_where=("algorithm.correction.weight", ("token", "sequence")),
    )
    floor: float = Field(
        0.0, ge=0, description="Smallest weight.", read_where=("algorithm.correction.weight", ("token", "sequence"))
    )
    normalize: bool = Field(
        False,
        description="Divide the weights by their mean over the step.",
        read_where=("algorithm.correction.weight", ("token", "sequence")),
    )
    mask: Literal["none", "token", "sequence"] = Field(
        "none", description="Leave out tokens, or sequences (by their geometric mean), whose ratio is out of band."
    )
    low: float = Field(
        0.5, gt=0, description="Lower end of the band.", read_where=("algorithm.correction.mask", ("token", "sequence"))
    )
    high: float = Field(
        2.0, gt=0, description="Upper end of the band.", read_where=("algorithm.correction.mask", ("token", "sequence"))
    )
    reject: list[Reject] = Field(
        default_factory=list, description="Further bands; what is out of one of them is left out, as by `mask`."
    )
    rejected: Literal["left_out", "zero"] = Field(
        "left_out", description="What is out of band does not count in the means, or counts in them with 0."
    )

    @property
    def compares(self) -> bool:
        """Whether the trainer's own log-probabilities are needed before the first update."""
        return self.weight != "none" or self.mask != "none" or bool(self.reject)


Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


class Kl(Section):
    where: Literal["none", "loss", "reward"] = Field(
        "none", description="Divergence from the reference: not used, a term of the loss, or a part of the reward."
    )
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"] = Field(
        "k3",
        description="k3 is also known as low_var_kl. `+`: this value, with the gradient of k2 (straight through); "
        "`k2+` is k2.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    coefficient: float = Field(
        0.001, ge=0, description="Weight of the divergence.", read_where=("algorithm.kl.where", ("loss", "reward"))
    )
    target: float | None = Field(
        None,
        gt=0,
        description="Adapt the coefficient so that the divergence (per token) comes to this value.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    horizon: int = Field(
        10000,
        ge=1,
        description="Sequences over which the coefficient adapts.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    reward_coefficient: float = Field(
        0.0,
        ge=0,
        description="With `where: loss`: weight of another divergence, which is a part of the reward; 0 is none.",
        read_where=("algorithm.kl.where", ("loss",)),
    )
    reward_estimator: Literal["k1", "abs", "k2", "k3"] = Field(
        "k1", description="Its estimator.", read_where=("algorithm.kl.where", ("loss",))
    )
    weighted: bool = Field(
        False,
        description="With an estimator with `+` in the loss: its gradient is weighed by the ratio of new to old "
        "probability, at most 10, so that it is that of the divergence in later updates of a step too.",
        read_where=("algorithm.kl.where", ("loss",)),
    )
    compared: bool = Field(
        True,
        description="Of a divergence in the reward, where responses are compared in groups: a part of the scores that "
        "a group compares. `false` takes it off after that, at each token what is left of it in the response.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    reference: str | None = Field(
        None,
        description="Folder of the reference model. Default: `model.path` (with LoRA: the adapter switched off).",
        effect=FOLDER,
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )

    def in_reward(self) -> bool:
        """Whether a divergence is a part of the reward: the one there is, or the one besides."""
        return self.where == "reward" or self.reward_coefficient > 0


class Whiten(Section):
    over: Literal["own", "none", "step"] = Field(
        "own",
        description="Advantages are brought to mean 0 and deviation 1 over the tokens of the step: as the estimator's "
        "paper has it (`gae`, `reinforce_pp`, `reinforce_pp_baseline`), never, or always. An estimator of your own "
        "does this itself.",
    )
    biased: bool = Field(False, description="The variance is taken with n, not with n - 1.")
    divide: bool = Field(True, description="`false` takes off the mean and does not divide by the deviation.")


class DynamicSampling(Section):
    rounds: int = Field(
        1,
        ge=1,
        description="Rounds of generation in a step. Over 1, groups whose rewards are all equal are replaced by new "
        "prompts, until the step is full or the rounds are used up.",
    )
    between: list[float] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="Replace instead the groups whose mean reward is not between these two.",
    )
    metric: str | None = Field(
        None,
        description="Look at this part of the reward: `rule`, `function`, `function/NAME` for a number that your "
        "function returns by name. Default: the whole score.",
    )


class Filtration(Section):
    method: Literal["none", "pow", "max_min", "max_random"] = Field(
        "none",
        description="Learn from responses as often as they are drawn by their scores (PF-PPO): by a power of the "
        "score, the best and worst of the step only, or the best four times as often as others.",
    )
    power: float = Field(
        2.0, gt=0, description="`pow`: the power.", read_where=("algorithm.filtration.method", ("pow",))
    )


class Overlong(Section):
    buffer: int = Field(
        0, ge=0, description="Responses in the last so many tokens before the limit lose reward; 0 is off."
    )
    factor: float = Field(1.0, ge=0, description="Reward lost at the very limit.")
    cut: float | None = Field(
        None,
        le=1,
        description="Of responses that met the limit: their score times this, from 0 to 1; below 0 their score itself.",
    )
    skip: bool = Field(
        False,
        description="Leave responses that met the limit out of the loss (overlong filtering); they still count in the "
        "baselines of others.",
    )


class Algorithm(Section):
    advantage: Annotated[str, Named(ESTIMATORS, own=True)] = Field(
        "grpo", description="How rewards become advantages: by name, or by your own function: `path/to/file.py:name`."
    )
    loss: Annotated[str, Named(LOSSES, own=True)] = Field(
        "clip", description="The policy loss: by name, or your own function: `path/to/file.py:name`."
    )
    function_limit: float = Field(
        600.0,
        gt=0,
        description="Seconds that one call of your own `advantage` or `loss` may take; then the run stops.",
        effect=Effect("harmless", "only when the run is stopped"),
        resumable=True,
    )
    aggregation: Aggregation = Field("token_mean", description="How the token losses of an update are averaged.")
    penalty_aggregation: Aggregation | None = Field(
        None, description="How divergence and entropy in the loss are averaged. Default: as `aggregation`."
    )
    epochs: int = Field(1, ge=1, description="Passes over the responses of a step.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount of a token's later rewards.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda.", read_where=("algorithm.advantage", ("gae",)))
    clip_low: float = Field(
        0.2,
        ge=0,
        description="The ratio is clipped at 1 - this. `dppo_tv`, `dppo_kl`: how far a probability may fall.",
    )
    clip_high: float = Field(
        0.2,
        ge=0,
        description="The ratio is clipped at 1 + this. `dppo_tv`, `dppo_kl`: how far a probability may rise.",
    )
    dual_clip: float | None = Field(
        3.0,
        gt=1,
        description="`clip`: bound of the ratio where the advantage is negative; `null` is none.",
        read_where=("algorithm.loss", ("clip",)),
    )
    ratio_cap: float = Field(
        20.0,
        gt=0,
        description="`dppo_tv`, `dppo_kl`, `importance`: largest weight of a token.",
        read_where=("algorithm.loss", ("dppo_tv", "dppo_kl", "importance")),
    )
    ratio_of: Literal["token", "sequence"] = Field(
        "token",
        description="`importance`: a token's weight is its own ratio, or the product of its response's.",
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
        description="`sapo`: temperature where the advantage is positive.",
        read_where=("algorithm.loss", ("sapo",)),
    )
    sapo_negative: float = Field(
        1.05,
        gt=0,
        description="`sapo`: temperature where the advantage is negative.",
        read_where=("algorithm.loss", ("sapo",)),
    )
    cov_share: float = Field(
        0.0002,
        ge=0,
        le=1,
        description="`clip_cov`, `kl_cov`: share of tokens that are held back.",
        read_where=("algorithm.loss", ("clip_cov", "kl_cov")),
    )
    cov_low: float = Field(
        1.0,
        description="`clip_cov`: lowest covariance of a token that may be held back.",
        read_where=("algorithm.loss", ("clip_cov",)),
    )
    cov_high: float = Field(
        5.0,
        description="`clip_cov`: highest covariance of a token that may be held back.",
        read_where=("algorithm.loss", ("clip_cov",)),
    )
    cov_kl: float = Field(
        1.0,
        ge=0,
        description="`kl_cov`: weight of the divergence of the tokens held back.",
        read_where=("algorithm.loss", ("kl_cov",)),
    )
    gdpo_rewards: dict[str, float] = Field(
        default_factory=dict,
        description="`gdpo`: the rewards that are compared one by one, with their weights; named as in "
        "`dynamic_sampling.metric`. Default: those of the recipe, by `reward.weights`.",
        read_where=("algorithm.advantage", ("gdpo",)),
    )
    whiten: Whiten = Field(default_factory=Whiten)
    entropy: float = Field(0.0, description="Weight of the entropy bonus.")
    kl: Kl = Field(default_factory=Kl, effect=Effect("blocks", "the pull to the reference is another"))
    correction: Correction = Field(
        default_factory=Correction, effect=Effect("blocks", "tokens are weighted or left out otherwise")
    )
    dynamic_sampling: DynamicSampling = Field(
        default_factory=DynamicSampling, effect=Effect("blocks", "other groups are trained on")
    )
    filtration: Filtration = Field(
        default_factory=Filtration, effect=Effect("blocks", "responses count another number of times")
    )
    overlong: Overlong = Field(default_factory=Overlong, effect=REWARD)


class Critic(Section):
    path: str | None = Field(
        None, description="Folder that the critic starts from. Default: `model.path`.", effect=FOLDER
    )
    lr: float = Field(
        1e-5,
        gt=0,
        description="Peak learning rate of the critic; the schedule is the policy's.",
        effect=RATE,
        resumable=True,
    )
    clip: float | None = Field(0.5, gt=0, description="How far a value may move from the old one; `null` is no bound.")
    aggregation: Aggregation = Field("token_mean", description="How its token losses of an update are averaged.")
    warmup: int = Field(0, ge=0, description="Steps in which only the critic is trained.")


class Reward(Section):
    rules: dict[str, str] = Field(
        default_factory=dict,
        description="Rule of each data source: `gsm8k`, `gsm8k_flexible`, `math`, `exact`. Known without being "
        "said: `arithmetic` and `openai/gsm8k` (gsm8k), `lighteval/MATH`, `DigitalLearningGmbH/MATH-lighteval` and "
        "`HuggingFaceH4/MATH-500` (math).",
        effect=REWARD,
    )
    function: str | None = Field(
        None,
        description="Your own function: `path/to/file.py:name`.",
        effect=Effect("matters", "another function, or the same one elsewhere: the rewards tell"),
    )
    arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Arguments that `function` gets by name besides those of every reward function.",
        effect=REWARD,
    )
    model: str | list[str] | None = Field(
        None,
        description="Folder of a reward model (sequence classification, one label); or several, which are added.",
        effect=FOLDER,
    )
    model_weights: list[float] = Field(
        default_factory=list, description="With several of `model`: the weight of each. Default: 1.", effect=REWARD
    )
    process: str | None = Field(
        None,
        description="Folder of a process reward model (method `prm`): each step of a response earns its probability of "
        "being good over the number of steps, at the token where it ends.",
        effect=FOLDER,
    )
    separator: str = Field(
        "\n", min_length=1, description="Text between the steps that `process` judges.", effect=REWARD
    )
    remote: str | list[str] | None = Field(
        None,
        description="Address of an HTTP endpoint that scores batches; or several, that share the batches.",
        effect=Effect("matters", "another endpoint: a model behind it may judge otherwise"),
    )
    remote_form: Literal["items", "openrlhf"] = Field(
        "items",
        description="What an endpoint is sent and answers: `items` as in docs/rewards.md, `openrlhf` lists `query`, "
        "`prompts` and `labels`, and `rewards` back.",
        effect=Effect("matters", "the endpoint is asked in another form"),
    )
    format: str | None = Field(
        None, description="Regular expression that a whole response must match: 1, else 0.", effect=REWARD
    )
    weights: dict[Literal["rule", "function", "model", "process", "remote", "format"], float] = Field(
        default_factory=dict,
        description="Weight of each reward. Default: 1 for each that is set; the rule counts when it is named here or "
        "nothing else is set.",
        effect=REWARD,
    )
    clip: list[float] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="Bounds of a response's score, all rewards together: what lies beyond is set to the bound.",
        effect=REWARD,
    )
    workers: int = Field(
        2,
        ge=1,
        description="Processes that run the function.",
        effect=Effect("harmless", "how many processes judge at once"),
        resumable=True,
    )
    time_limit: float = Field(
        10.0,
        gt=0,
        description="Seconds that one call of the function may take.",
        effect=Effect("harmless", "only where a call is cut off; reward/failed tells"),
    )
    memory_limit_gb: float = Field(
        4.0,
        gt=0,
        description="Memory of a process that runs the function.",
        effect=Effect("harmless", "only where a call is cut off; reward/failed tells"),
    )
    max_failures: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Stop when more than this share of a step's responses could not be generated "
        "(`rollout.function`) or scored.",
        effect=Effect("harmless", "only when the run is stopped"),
        resumable=True,
    )
    remote_batch: int = Field(
        32,
        ge=1,
        description="Responses sent to the endpoint at once.",
        effect=Effect("harmless", "how many responses are sent at once"),
    )
    remote_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds that a request to an endpoint may take, to the last byte of its answer.",
        effect=Effect("harmless", "only where a call is cut off; reward/failed tells"),
    )
    remote_retries: int = Field(
        4,
        ge=0,
        description="Further tries after a failed one, with growing pauses.",
        effect=Effect("harmless", "only where a call is cut off; reward/failed tells"),
    )
