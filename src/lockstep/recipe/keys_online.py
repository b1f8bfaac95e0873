"""Recipe keys of the online methods: algorithm and critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from lockstep.recipe.registry import ESTIMATORS, LOSSES
from lockstep.recipe.section import FOLDER, RATE, REWARD, Effect, Field, Named, Section


class Reject(Section):
    over: Literal["token", "sum", "mean", "max"] = Field(
        "token",
        description="Whether tokens or whole responses are compared with the bounds `low` and `high`. `token` compares "
        "the measure `by` of each token. `sum`, `mean` and `max` compare the sum, mean or maximum of `by` over the "
        "tokens of a response.",
    )
    by: Literal["ratio", "k2", "k3", "binary_kl", "tv"] = Field(
        description="Measure of the mismatch between trainer and engine. `ratio` is the trainer's probability of a "
        "token divided by the engine's. `k2` and `k3` are estimates of the KL divergence between trainer and engine. "
        "`binary_kl` and `tv` are the KL divergence and the total variation of the two-way choice between the "
        "sampled token and all other tokens.",
    )
    low: float | None = Field(
        None, ge=0, description="Lower bound of the measure that `by` selects. Default: no lower bound."
    )
    high: float = Field(gt=0, description="Upper bound of the measure that `by` selects.")


class RolloutCorrection(Section):
    bypass: bool = Field(
        False,
        description="Use the engine's log-probabilities as the old log-probabilities of the ratio, which saves the "
        "trainer's forward pass before the first update. With `bypass`, the clipping of the ratio also limits the "
        "mismatch between engine and trainer. The default is `true` if `rollout.max_staleness` is above 0, the loss "
        "clips per token (`clip`, `geo_mean`, `clip_cov`, `dppo_*`) and `weight` is not set. Otherwise `false`.",
    )
    weight: Literal["none", "token", "sequence", "geometric_mean"] = Field(
        "none",
        description="Truncated importance sampling: multiply the loss of each token or sequence by trainer probability "
        "/ engine probability. `geometric_mean` multiplies the loss of a token by the geometric mean of the token "
        "weights of its response, as verl does for the loss `geo_mean`. The default is `token` if a serving engine "
        "generates, or if `rollout.max_staleness` is above 0 without `bypass`. In all other cases the default of "
        "`weight` is `none`.",
    )
    cap: float | None = Field(
        2.0,
        gt=0,
        description="Maximum importance weight. `null` means no maximum.",
        read_where=("algorithm.rollout_correction.weight", ("token", "sequence", "geometric_mean")),
    )
    floor: float = Field(
        0.0,
        ge=0,
        description="Minimum weight.",
        read_where=("algorithm.rollout_correction.weight", ("token", "sequence", "geometric_mean")),
    )
    outside: Literal["clip", "zero"] = Field(
        "clip",
        description="What happens to an importance weight below `floor` or above `cap`. `clip` replaces the weight by "
        "`floor` or `cap`. `zero` sets the weight to 0 (IcePop).",
        read_where=("algorithm.rollout_correction.weight", ("token", "sequence", "geometric_mean")),
    )
    normalize: bool = Field(
        False,
        description="Divide the importance weights by their mean over the step.",
        read_where=("algorithm.rollout_correction.weight", ("token", "sequence", "geometric_mean")),
    )
    mask: Literal["none", "token", "sequence"] = Field(
        "none",
        description="Mask tokens whose ratio of trainer to engine probability is below `low` or above `high`. With "
        "`sequence`, mask whole sequences by the geometric mean of their ratios.",
    )
    low: float = Field(
        0.5,
        gt=0,
        description="Lower bound of the ratio of trainer to engine probability for `mask`.",
        read_where=("algorithm.rollout_correction.mask", ("token", "sequence")),
    )
    high: float = Field(
        2.0,
        gt=0,
        description="Upper bound of the ratio of trainer to engine probability for `mask`.",
        read_where=("algorithm.rollout_correction.mask", ("token", "sequence")),
    )
    reject: list[Reject] = Field(
        default_factory=list,
        description="Additional accepted ranges. A token whose mismatch between trainer and engine is outside at least "
        "one range of `reject` is masked, as with `mask`.",
    )
    rejected: Literal["left_out", "counted", "zero"] = Field(
        "left_out",
        description="How the means in the loss treat masked tokens. `left_out` excludes masked tokens from the mean. "
        "`counted` excludes masked tokens from all terms of the loss, but divides by the number of all tokens or "
        "sequences of the update, as verl does. "
        "`zero` includes masked tokens in the mean with the policy loss 0.",
    )
    mask_first: bool = Field(
        False,
        description="Apply `mask` and `reject` before the advantages are computed, as verl does. Then discounted "
        "returns, lengths and whitening skip masked tokens, and a reward at a masked token is lost. Group estimators "
        "still compare the scores of all responses.",
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
        description="KL estimator. k3 is also called low_var_kl. A `+` after the name means that the gradient of k2 "
        "replaces the gradient of the estimator (straight-through). `k2+` equals k2.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    coefficient: float = Field(
        0.001, ge=0, description="Weight of the KL divergence.", read_where=("algorithm.kl.where", ("loss", "reward"))
    )
    target: float | None = Field(
        None,
        gt=0,
        description="Adapt `coefficient` during training so that the KL divergence per token approaches this value.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    horizon: int = Field(
        10000,
        ge=1,
        description="With `target`, `coefficient` changes in each step by an amount proportional to the number of "
        "sequences divided by `horizon`. With a larger value, `coefficient` adapts more slowly.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    reward_coefficient: float = Field(
        0.0,
        ge=0,
        description="With `where: loss`, weight of an additional KL penalty in the reward. The value 0 disables this "
        "additional penalty.",
        read_where=("algorithm.kl.where", ("loss",)),
    )
    reward_estimator: Literal["k1", "abs", "k2", "k3"] = Field(
        "k1",
        description="KL estimator of the additional penalty in the reward (`reward_coefficient`).",
        read_where=("algorithm.kl.where", ("loss",)),
    )
    weighted: bool = Field(
        False,
        description="With a `+` estimator in the loss, multiply the gradient of the KL term by the ratio of new to old "
        "probability, at most 10. This importance ratio keeps the gradient of the KL divergence correct in later "
        "updates of a step, when responses are off-policy.",
        read_where=("algorithm.kl.where", ("loss",)),
    )
    before_baseline: bool = Field(
        True,
        description="For advantage estimators that compare the responses of a group: when a KL penalty in the reward "
        "is subtracted. `true` subtracts the penalty from the rewards before the baseline of the group is computed. "
        "`false` computes the advantages without the penalty, and then subtracts from the advantage of each token the "
        "sum of the penalties of this token and all later tokens.",
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )
    reference: str | None = Field(
        None,
        description="Folder of the reference model. The default is `model.path` (with LoRA: the model with the "
        "adapter disabled).",
        effect=FOLDER,
        read_where=("algorithm.kl.where", ("loss", "reward")),
    )

    def in_reward(self) -> bool:
        """Returns whether the reward contains a KL penalty. The loss may contain a KL term in addition."""
        return self.where == "reward" or self.reward_coefficient > 0


class Whiten(Section):
    over: Literal["own", "none", "step"] = Field(
        "own",
        description="Whether advantages are normalised to mean 0 and standard deviation 1 over the tokens of the step. "
        "`own` normalises only for estimators whose paper does so (`gae`, `reinforce_pp`, `reinforce_pp_baseline`). "
        "`none` never normalises advantages, and `step` always normalises them. Your own estimator function must "
        "normalise its advantages itself.",
    )
    biased: bool = Field(
        False, description="Use the biased variance for the normalisation: divide by n instead of n - 1."
    )
    divide: bool = Field(
        True,
        description="`true` normalises advantages by their mean and standard deviation. `false` only subtracts the "
        "mean of the advantages.",
    )


class DynamicSampling(Section):
    max_gen_batches: int = Field(
        1,
        ge=1,
        description="Maximum number of batches of prompts that are generated per step. If this number is above 1, "
        "groups whose responses all have equal rewards are replaced by new prompts, until the step is full or this "
        "maximum is reached.",
    )
    between: list[float] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="Replace groups whose mean reward is not between these two values, instead of groups with equal "
        "rewards.",
    )
    metric: str | None = Field(
        None,
        description="Reward component that decides which groups are replaced (`rule`, `function`, or `function/NAME` "
        "for a number that your function returns under this name). Default: the total score.",
    )


class PolicyFiltration(Section):
    method: Literal["none", "pow", "max_min", "max_random"] = Field(
        "none",
        description="PF-PPO: resample the responses of a step by their scores. `pow` samples responses in proportion "
        "to a power of the score. `max_min` samples only the best and the worst responses. `max_random` samples the "
        "best responses four times as often as all others.",
    )
    power: float = Field(
        2.0, gt=0, description="Score exponent of the method `pow`.", read_where=("algorithm.pf_ppo.method", ("pow",))
    )


class Overlong(Section):
    buffer: int = Field(
        0,
        ge=0,
        description="Penalise responses that are longer than `rollout.max_tokens` minus this many tokens. The value 0 "
        "disables the length penalty.",
    )
    factor: float = Field(
        1.0,
        ge=0,
        description="Penalty of a response with `rollout.max_tokens` tokens. The penalty grows linearly from 0 over "
        "the last `buffer` tokens before `rollout.max_tokens`.",
    )
    truncated_reward: float | None = Field(
        None,
        le=1,
        description="Changes the score of responses that were cut off at `rollout.max_tokens`. A value from 0 to 1 is "
        "a factor for the score of a truncated response. A value below 0 replaces the score of a truncated response.",
    )
    mask_truncated: bool = Field(
        False,
        description="Mask responses that were cut off at `rollout.max_tokens` in the loss (overlong filtering), and "
        "trajectories that another limit ended, such as `rollout.max_turns`. The baselines of other responses still "
        "include the scores of masked responses.",
    )


def _as_off(value: object) -> object:
    """YAML reads `off` as false."""
    return "off" if value is False else value


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
        description="Timeout in seconds for one call of your `advantage` or `loss` function. After the timeout, the "
        "run stops.",
        effect=Effect("harmless", "this key affects only whether the run stops with an error"),
        resumable=True,
    )
    aggregation: Aggregation = Field("token_mean", description="How the token losses of an update are averaged.")
    penalty_aggregation: Aggregation | None = Field(
        None, description="How the KL and entropy terms of the loss are averaged. Default: same as `aggregation`."
    )
    epochs: int = Field(1, ge=1, description="Number of training passes over the responses of a step.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount factor of later rewards.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda.", read_where=("algorithm.advantage", ("gae",)))
    turn_discount: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Discount factor of the rewards of later turns in a conversation with an environment: the return "
        "of turn t is its reward plus this factor times the return of turn t + 1, as in AReaL.",
    )
    turn_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of the advantages of turns, which are added to the advantages of trajectories.",
        read_where=("algorithm.advantage", ("gigpo",)),
    )
    clip_low: float = Field(
        0.2,
        ge=0,
        description="The ratio of new to old probability is clipped at 1 minus this value. With `dppo_tv` and "
        "`dppo_kl`, the value limits how far a probability may fall.",
    )
    clip_high: float = Field(
        0.2,
        ge=0,
        description="The ratio of new to old probability is clipped at 1 plus this value. With `dppo_tv` and "
        "`dppo_kl`, the value limits how far a probability may rise.",
    )
    dual_clip: float | None = Field(
        3.0,
        gt=1,
        description="For the loss `clip`: upper bound of the ratio for negative advantages (dual clip). `null` "
        "disables it.",
        read_where=("algorithm.loss", ("clip",)),
    )
    ratio_cap: float = Field(
        20.0,
        gt=0,
        description="For the losses `dppo_tv`, `dppo_kl` and `importance`: maximum weight (ratio) of a token.",
        read_where=("algorithm.loss", ("dppo_tv", "dppo_kl", "importance")),
    )
    ratio_of: Literal["token", "sequence", "response"] = Field(
        "token",
        description="For the loss `importance`: the weight of a token is the ratio of this token, or the product of "
        "the ratios of the tokens of its response. `sequence` multiplies the ratios of unmasked tokens, and `response` "
        "those of all tokens, as verl does.",
        read_where=("algorithm.loss", ("importance",)),
    )
    dro_beta: float = Field(
        1.0,
        gt=0,
        description="For the loss `dro`: weight of the squared log-ratio.",
        read_where=("algorithm.loss", ("dro",)),
    )
    sapo_positive: float = Field(
        1.0,
        gt=0,
        description="For the loss `sapo`: temperature for positive advantages.",
        read_where=("algorithm.loss", ("sapo",)),
    )
    sapo_negative: float = Field(
        1.05,
        gt=0,
        description="For the loss `sapo`: temperature for negative advantages.",
        read_where=("algorithm.loss", ("sapo",)),
    )
    cov_ratio: float = Field(
        0.0002,
        ge=0,
        le=1,
        description="For the losses `clip_cov` and `kl_cov`: fraction of tokens that are selected by their "
        "covariance of log-probability and advantage.",
        read_where=("algorithm.loss", ("clip_cov", "kl_cov")),
    )
    cov_low: float = Field(
        1.0,
        description="For the loss `clip_cov`: lowest covariance of a selected token.",
        read_where=("algorithm.loss", ("clip_cov",)),
    )
    cov_high: float = Field(
        5.0,
        description="For the loss `clip_cov`: highest covariance of a selected token.",
        read_where=("algorithm.loss", ("clip_cov",)),
    )
    cov_kl: float = Field(
        1.0,
        ge=0,
        description="For the loss `kl_cov`: weight of the KL penalty of the selected tokens.",
        read_where=("algorithm.loss", ("kl_cov",)),
    )
    gdpo_rewards: dict[str, float] = Field(
        default_factory=dict,
        description="For the estimator `gdpo`: the weights of the rewards that are compared separately. The rewards "
        "have the same names as in `dynamic_sampling.metric`. Default: all rewards of the recipe, with "
        "`reward.weights`.",
        read_where=("algorithm.advantage", ("gdpo",)),
    )
    divide_by_std: bool = Field(
        True,
        description="For the estimator `grpo_passk`: divide by the standard deviation of the group. For `grpo` without "
        "this division, use the estimator `dr_grpo`.",
        read_where=("algorithm.advantage", ("grpo_passk",)),
    )
    gpg_count: Literal["mixed_groups", "nonzero"] = Field(
        "mixed_groups",
        description="For the estimator `gpg`: which responses M counts in the factor N / M. `mixed_groups` counts the "
        "responses of groups with unequal scores. `nonzero` counts the responses with a score other than 0, as verl.",
        read_where=("algorithm.advantage", ("gpg",)),
    )
    lone_response: Literal["zero", "score"] = Field(
        "zero",
        description="For estimators that compare the responses to a prompt: the advantage of the only response to a "
        "prompt. `score` is the score of the response, without a baseline, as in verl. With `score`, `rollout.n` may "
        "be 1.",
    )
    whiten: Whiten = Field(default_factory=Whiten)
    entropy: float = Field(0.0, description="Weight of the entropy bonus.")
    kl: Kl = Field(default_factory=Kl, effect=Effect("blocks", "the KL penalty differs"))
    rollout_correction: RolloutCorrection = Field(
        default_factory=RolloutCorrection,
        effect=Effect("blocks", "tokens are weighted or masked differently in the loss"),
    )
    routing_replay: Annotated[Literal["off", "rollout", "old"], BeforeValidator(_as_off)] = Field(
        "off",
        description="For a mixture of experts: which experts the policy uses for each token in training. `off`: those "
        "that its routers choose in each pass. `rollout`: those that the engine used when it generated the response "
        "(R3); the passes for old and reference log-probabilities and all updates use them. `old`: those of the pass "
        "for old log-probabilities, in all updates of the step (R2). Gate weights are always computed by the current "
        "routers, so routers are trained.",
        effect=Effect("blocks", "tokens are routed to other experts in training"),
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
    head_init: Literal["zeros", "random"] = Field(
        "zeros",
        description="How the value head starts if the critic folder has none. `zeros`: the first values are 0, "
        "and the head has no bias. `random`: random weights and a bias, as in verl. A reward model or a critic of verl "
        "keeps its own head.",
    )
    lr: float = Field(
        1e-5,
        gt=0,
        description="Peak learning rate of the critic. The critic has the same learning-rate schedule as the policy.",
        effect=RATE,
        resumable=True,
    )
    clip: float | None = Field(
        0.5,
        gt=0,
        description="Maximum change of a value estimate from its old value (value clipping). `null` disables clipping.",
    )
    aggregation: Aggregation = Field(
        "token_mean", description="How the token losses of the critic are averaged in an update."
    )
    warmup: int = Field(0, ge=0, description="Number of steps at the start in which only the critic is trained.")
