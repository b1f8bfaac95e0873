"""Conversion rules for verl's advantage estimator, policy loss, aggregation, KL, group filter, rollout correction."""

from __future__ import annotations

import math
from typing import Any

from lockstep.compat.key_table import Conversion

A = "actor_rollout_ref.actor"
LOSS_MODE, AGGREGATION, SCALE = f"{A}.policy_loss.loss_mode", f"{A}.loss_agg_mode", f"{A}.loss_scale_factor"
ESTIMATOR, NORM_BY_STD = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
GROUP = "algorithm.rollout_correction"
WEIGHT, BOUND, NORMALIZE = (f"{GROUP}.rollout_is{name}" for name in ("", "_threshold", "_batch_normalize"))
REJECT, BOUNDS = f"{GROUP}.rollout_rs", f"{GROUP}.rollout_rs_threshold"
BYPASS, BYPASS_LOSS = f"{GROUP}.bypass_mode", f"{GROUP}.loss_type"
N, LOGPROBS = "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.calculate_log_probs"

# Whatever loss_agg_mode is, verl averages sapo and geo_mean over sequences. KL and entropy follow loss_agg_mode.
_BY_SEQUENCE = ("sapo", "geo_mean")
_GSPO = "verl 0.9 aggregates GSPO by loss_agg_mode (default: over tokens); earlier releases always over sequences"
SUM_NORM = {
    "0.4": "verl 0.4 sums over a micro-batch's sequences: the loss is larger by the number of sequences (as a factor)",
    "0.9": "lockstep divides by max_response_length, verl 0.9 by the longest response of a micro-batch",
}
_CLIPPED = ("clip", "gspo", "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl")
# For each loss, its parameters as pairs: recipe key and verl's key.
_LOSS_PARAMETERS = {
    "clip": [("dual_clip", "clip_ratio_c")],
    "dppo_tv": [("ratio_cap", "clip_ratio_c")],
    "dppo_kl": [("ratio_cap", "clip_ratio_c")],
    "clip_cov": [
        ("cov_ratio", "policy_loss.clip_cov_ratio"),
        ("cov_low", "policy_loss.clip_cov_lb"),
        ("cov_high", "policy_loss.clip_cov_ub"),
    ],
    "kl_cov": [("cov_ratio", "policy_loss.kl_cov_ratio"), ("cov_kl", "policy_loss.ppo_kl_coef")],
}
# Values of verl's filter_groups.metric that mean the score of a response.
_SCORE = (None, "score", "reward", "seq_reward", "seq_final_reward")

# `CRITERIA` maps a rejection criterion of verl to lockstep's aggregation over tokens and lockstep's name of the
# statistic. verl's k1 becomes a range of the ratio in lockstep; `_band` inverts its bounds.
_STATISTICS = {"k1": "ratio", "k2": "k2", "k3": "k3"}
_OVER = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
CRITERIA = {
    f"{over}_{name}": (ours, statistic)
    for over, ours in _OVER.items()
    for name, statistic in _STATISTICS.items()
    if (over, name) != ("seq_max", "k1")
}
ONCE = "lockstep rejects tokens once per step, before the first update; verl at every update with the current policy"
_KEPT = "verl before 0.9, and verl 0.9 with trainer.use_v1=False, divide by the tokens that are not rejected"
_V1 = "verl 0.9 reads this key only with trainer.use_v1=False; earlier releases always do"
# These estimators of verl return the score of a response that is alone in its group.
_LONE = (
    "grpo", "grpo_vectorized", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline", "optimal_token_baseline",
    "tir_optimal_token_baseline",
)  # fmt: skip
_ALONE = "as in verl: each prompt has one response, so its advantage is its score, without a baseline"
_DISCOUNTED = ("gae", "reinforce_pp")


def algorithm_rule(done: Conversion) -> None:
    values = done.lookup(ESTIMATOR)
    if values is None:
        return
    advantage = values["algorithm.advantage"]
    done.write("method", values["method"], ESTIMATOR)
    if done[ESTIMATOR] == "grpo" and not done[NORM_BY_STD]:
        done.write("algorithm.advantage", "dr_grpo", NORM_BY_STD)
    else:
        done.write("algorithm.advantage", advantage, ESTIMATOR)
    if advantage == "gpg":
        done.write("algorithm.gpg_count", "nonzero", ESTIMATOR)
    if advantage == "grpo_passk":
        done.write("algorithm.divide_by_std", bool(done[NORM_BY_STD]), NORM_BY_STD)
    elif done[ESTIMATOR] != "grpo":
        done.ignore(f"verl's {done[ESTIMATOR]} does not read this key", NORM_BY_STD)
    if advantage == "gae":
        done.write_number("algorithm.lam", "algorithm.lam")
    if done.integer(N) == 1 and done[ESTIMATOR] in _LONE:
        done.write("algorithm.lone_response", "score", N, note=_ALONE)
    if advantage not in _DISCOUNTED:
        done.write("algorithm.gamma", 1.0)
        done.ignore(f"verl's {done[ESTIMATOR]} does not discount rewards", "algorithm.gamma")
    _loss(done)
    _kl(done)
    _routing(done)
    _correction(done)
    _resampling(done, advantage)
    _gdpo(done, advantage)
    if done["algorithm.filter_groups.enable"]:
        _filter_groups(done)


def _filter_groups(done: Conversion) -> None:
    enable, batches, key = (f"algorithm.filter_groups.{name}" for name in ("enable", "max_num_gen_batches", "metric"))
    note = "groups with equal rewards are sampled again; after the last generation batch such groups fill the step"
    done.write("algorithm.dynamic_sampling.max_gen_batches", done.integer(batches) or 10, enable, batches, note=note)
    metric = done[key]
    if metric in _SCORE:
        done.ignore("groups are filtered by the score of a response, as in verl", key)
    elif done["custom_reward_function.path"] is not None:
        done.write("algorithm.dynamic_sampling.metric", f"function/{metric}", key)
    else:
        done.ignore(f"{metric} of verl's reward rules is the score in lockstep: 1 for a correct answer", key)


def _resampling(done: Conversion, advantage: str) -> None:
    """Converts PF-PPO, which verl supports only with gae."""
    switch, method, power = (f"algorithm.{n}" for n in ("use_pf_ppo", "pf_ppo.reweight_method", "pf_ppo.weight_pow"))
    if not done[switch] or advantage != "gae":
        why = "verl resamples only with gae" if done[switch] else "verl reads this key only with use_pf_ppo"
        done.ignore(why, switch, method, power)
        return
    note = "a response is weighted by how often it is sampled; verl moves copies between the updates of a step"
    done.write("algorithm.pf_ppo.method", str(done[method]), switch, method, note=note)
    if done[method] == "pow":
        done.write_number("algorithm.pf_ppo.power", power)


def _gdpo(done: Conversion, advantage: str) -> None:
    keys, weights = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
    if advantage != "gdpo":
        done.ignore("verl reads this key only with gdpo", keys, weights)
        return
    names = done[keys]
    if not isinstance(names, list) or not names or done["custom_reward_function.path"] is None:
        done.refuse(keys, "gdpo needs a custom_reward_function that returns named rewards", f"{keys}=[a,b]")
        return
    given = done.numbers(weights) if done[weights] else [1.0] * len(names)
    if len(given) != len(names):
        done.refuse(weights, f"{len(given)} weights for {len(names)} rewards", "write one weight per reward")
        return
    # verl uses the name `score` for the main reward of the function.
    rewards = {
        "function" if name == "score" else f"function/{name}": weight for name, weight in zip(names, given, strict=True)
    }
    done.write("algorithm.gdpo_rewards", rewards, keys, weights)


def _loss(done: Conversion) -> None:
    if done[BYPASS]:  # bypass mode reads loss_type and ignores loss_mode
        loss = "clip"
        if str(done[BYPASS_LOSS]) == "reinforce":
            loss = "policy_gradient" if done[WEIGHT] is None else "importance"
        done.write("algorithm.loss", loss, BYPASS_LOSS, BYPASS)
        done.ignore("with bypass_mode, loss_type sets the loss", LOSS_MODE)
    else:
        loss = done.write_lookup("algorithm.loss", LOSS_MODE)
        if loss is None:
            return
        done.ignore("verl reads this key only with bypass_mode", BYPASS_LOSS)
    _aggregation(done, "" if done[BYPASS] else done[LOSS_MODE])
    if (
        loss == "clip"
        and not done.since("0.4")
        and not done.is_set(*(f"{A}.clip_ratio{name}" for name in ("_low", "_high", "_c")))
    ):
        _early_clip(done)
        return
    if loss in _CLIPPED:
        done.write_number("algorithm.clip_low", f"{A}.clip_ratio_low")
        done.write_number("algorithm.clip_high", f"{A}.clip_ratio_high")
    for ours, theirs in _LOSS_PARAMETERS.get(loss, []):
        done.write_number(f"algorithm.{ours}", f"{A}.{theirs}")
    if loss == "dro" and done.require(
        f"{A}.policy_loss.dro_beta", "write a number over 0", "is not set, but the loss dro needs a value"
    ):
        done.write_number("algorithm.dro_beta", f"{A}.policy_loss.dro_beta")
    if loss == "sapo":
        for ours, theirs in (("sapo_positive", "tau_pos"), ("sapo_negative", "tau_neg")):
            key = f"{A}.policy_loss.{theirs}"
            done.write_number(f"algorithm.{ours}", key if done.is_set(key) else f"{A}.{theirs}")


def _early_clip(done: Conversion) -> None:
    """verl before 0.4 has one bound, `clip_ratio`, and no second bound for negative advantages (dual clip)."""
    key = f"{A}.clip_ratio"
    bound = done.number(key) if done.is_set(key) else 0.2
    for name in ("low", "high"):
        done.write(f"algorithm.clip_{name}", bound, key)
    done.write("algorithm.dual_clip", None, key)
    done.decided[key] = ("mapped", "verl before 0.4 has this bound only, without dual clip")


def _aggregation(done: Conversion, mode: str) -> None:
    kind = done[AGGREGATION]
    ours = done.lookup(AGGREGATION)
    if ours is None:
        return
    sum_norm = kind == "seq-mean-token-sum-norm"
    old_gspo = mode == "gspo" and not done.is_set(AGGREGATION) and not done.since("0.9.1")
    if mode in _BY_SEQUENCE or old_gspo:
        done.write("algorithm.aggregation", "seq_mean_token_mean", LOSS_MODE, note=_GSPO if old_gspo else "")
        done.write("algorithm.penalty_aggregation", ours, AGGREGATION)
    else:
        note = SUM_NORM["0.9" if done.since("0.8") else "0.4"] if sum_norm else ""
        if mode == "gspo" and kind != "seq-mean-token-mean":
            note = _GSPO
        if done[SCALE] is not None and sum_norm:
            note = ""
        done.write("algorithm.aggregation", ours, AGGREGATION, note=note)
    if not sum_norm:
        done.ignore("verl reads this key only with seq-mean-token-sum-norm", SCALE)
        if done.is_set(SCALE):
            return
    if done[SCALE] is not None and done[SCALE] != done.integer("data.max_response_length"):
        why = "lockstep divides the token sums by data.max_response_length"
        done.refuse(SCALE, why, f"set it to {done['data.max_response_length']}")
    elif sum_norm:
        done.ignore("lockstep divides the token sums by data.max_response_length", SCALE)


def _routing(done: Conversion) -> None:
    """Converts the router replay of the policy. Older releases of verl have it in another group."""
    keys = [f"{A}.router_replay.mode", f"{A}.megatron.router_replay.mode"]
    named = [key for key in keys if done[key] != "disabled"]
    if len({done[key] for key in named}) > 1:
        done.refuse(named[1], f"{named[0]} has another mode", "set both keys to the same mode")
    elif named and (mode := done.lookup(named[0])) is not None:
        done.write("algorithm.routing_replay", mode, *named)


def _kl(done: Conversion) -> None:
    in_reward, in_loss, control = "algorithm.use_kl_in_reward", f"{A}.use_kl_loss", "algorithm.kl_ctrl"
    switch, why = in_reward, "has no effect without use_kl_in_reward, as in verl"
    rewarded = bool(done[in_reward])
    if not done.since("0.4") and not done.is_set(in_reward):
        # These releases have no such key: the penalty is in the reward, unless it is in the loss.
        rewarded, switch = not done[in_loss], in_loss
        why = "verl before 0.4 reads this key only without use_kl_loss"
    if rewarded and done[in_loss]:
        _kl_in_both(done)
    if done[in_loss]:
        _kl_terms(done, "loss", in_loss, f"{A}.kl_loss_coef", f"{A}.kl_loss_type")
    elif rewarded:
        _kl_terms(done, "reward", switch, f"{control}.kl_coef", "algorithm.kl_penalty")
        if done[f"{control}.type"] == "adaptive":
            done.write_number("algorithm.kl.target", f"{control}.target_kl", f"{control}.type")
            done.write_integer("algorithm.kl.horizon", f"{control}.horizon")
    else:
        done.write("algorithm.kl.where", "none", in_loss, in_reward)
    if not rewarded:
        done.ignore(why, *done.below(control), "algorithm.kl_penalty")
    if not done[in_loss]:
        done.ignore("has no effect without use_kl_loss, as in verl", f"{A}.kl_loss_coef", f"{A}.kl_loss_type")


def _kl_in_both(done: Conversion) -> None:
    """Converts a KL penalty in the reward of a command that also has a KL term in the loss."""
    coefficient, estimator, kind = "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "algorithm.kl_ctrl.type"
    if done[kind] == "adaptive":
        done.refuse(kind, "if the loss has a KL term too, the KL coefficient in the reward is fixed", f"{kind}=fixed")
    ours = done.lookup(estimator)
    if ours is not None:
        done.write_number("algorithm.kl.reward_coefficient", coefficient, "algorithm.use_kl_in_reward")
        done.write("algorithm.kl.reward_estimator", ours, estimator)


def _kl_terms(done: Conversion, where: str, switch: str, coefficient: str, estimator: str) -> None:
    done.write("algorithm.kl.where", where, switch)
    done.write_number("algorithm.kl.coefficient", coefficient)
    name = str(done[estimator])
    ours = done.lookup(estimator, name.removesuffix("+"))
    if ours is not None:
        done.write("algorithm.kl.estimator", ours + ("+" if name.endswith("+") else ""), estimator)


# Rollout correction --------------------------------------------------------------------------------------------------


def _correction(done: Conversion) -> None:
    kind = done[WEIGHT]
    if done[LOGPROBS] is False and (kind or done[REJECT] or done[BYPASS]):
        if done[BYPASS]:
            done.refuse(LOGPROBS, "bypass_mode needs the engine's log-probs", f"{LOGPROBS}=True")
        done.ignore("verl corrects only with calculate_log_probs=True", WEIGHT, BOUND, NORMALIZE, REJECT, BOUNDS)
        return
    if kind not in (None, "token", "sequence"):
        done.refuse(WEIGHT, f"{kind} is not supported", "use token, sequence or null")
        return
    try:
        floor, cap = _weight_bounds(done[BOUND])
        bands = _bands(done)
    except ValueError as bad:
        done.refuse(BOUNDS if done[REJECT] else BOUND, str(bad), "write one number, or lower_upper")
        return
    if done[BYPASS]:
        if "optimal_token_baseline" in str(done[ESTIMATOR]):
            why = "verl's bypass_mode does not compute the probabilities that the optimal token baseline needs"
            done.refuse(BYPASS, why, f"{BYPASS}=False")
        _bypass(done, kind, floor, cap, bands)
    elif kind is not None:
        _weights(done, kind, floor, cap)
    else:
        done.ignore("verl reads this key only with rollout_is", BOUND, NORMALIZE)
    if bands:
        done.write("algorithm.rollout_correction.reject", bands, REJECT, BOUNDS, note=ONCE if done[BYPASS] else "")
        _rejection(done, bands)


def _weights(done: Conversion, kind: str, floor: float | None, cap: float) -> None:
    if done[LOSS_MODE] == "geo_mean" and kind == "token":
        if "optimal_token_baseline" in str(done[ESTIMATOR]):
            why = "verl weights the baseline by token and the loss geo_mean by response, and lockstep has one weight"
            done.refuse(WEIGHT, why, "use rollout_is=sequence, or another estimator")
        kind = "geometric_mean"
    done.write("algorithm.rollout_correction.weight", kind, WEIGHT)
    done.write("algorithm.rollout_correction.cap", cap, BOUND)
    done.write("algorithm.rollout_correction.normalize", bool(done[NORMALIZE]), NORMALIZE)
    if floor is not None:
        done.write("algorithm.rollout_correction.floor", floor, BOUND)
        done.write("algorithm.rollout_correction.outside", "zero", BOUND)


def _rejection(done: Conversion, bands: list[dict[str, Any]]) -> None:
    """Converts how rejected tokens count. verl masks them before it computes advantages, or with bypass_mode only in
    the policy loss. Its divisors count them."""
    by_token, kind = any(band["over"] == "token" for band in bands), done[AGGREGATION]
    if done[BYPASS]:
        done.write("algorithm.rollout_correction.rejected", "zero", REJECT)
        if by_token and kind == "seq-mean-token-mean":
            why = "verl's token means have no rejected tokens, and its KL and entropy terms have them"
            done.refuse(AGGREGATION, why, "use token-mean, or reject whole sequences")
        return
    legacy = done["trainer.use_v1"] is False
    left_out = legacy and kind == "token-mean"
    if left_out and done[LOSS_MODE] in _BY_SEQUENCE:
        why = f"verl divides the loss {done[LOSS_MODE]} and its KL and entropy terms by different numbers"
        done.refuse(REJECT, why, f"{AGGREGATION}=seq-mean-token-mean")
    done.write("algorithm.rollout_correction.rejected", "left_out" if left_out else "counted", REJECT)
    done.write("algorithm.rollout_correction.mask_first", True, REJECT)
    if kind == "token-mean" and not legacy:
        done.decided.setdefault(REJECT, ("changed", _KEPT))
    if by_token and done[ESTIMATOR] == "optimal_token_baseline":
        why = "verl's optimal_token_baseline shifts its baselines if single tokens are rejected"
        done.refuse(ESTIMATOR, why, f"{ESTIMATOR}=tir_optimal_token_baseline")


def _bypass(done: Conversion, kind: Any, floor: float | None, cap: float, bands: list[dict[str, Any]]) -> None:
    done.write("algorithm.rollout_correction.bypass", True, BYPASS)
    if done[BYPASS_LOSS] == "ppo_clip":
        why = "the clipped ratio already uses the rollout engine's log-probs; verl uses the weights only in metrics"
        done.ignore(why, WEIGHT, BOUND, NORMALIZE)
        return
    if done.lookup(BYPASS_LOSS) is None:
        return
    done.decided.setdefault(BYPASS_LOSS, ("changed", _V1))
    if done[NORMALIZE]:
        done.refuse(NORMALIZE, "division by the mean of a micro-batch depends on the batch size", f"{NORMALIZE}=false")
    if floor is not None:
        done.refuse(BOUND, "bypass_mode has no lower bound of weights", "write one number, the largest weight")
    if kind is None:
        if done["algorithm.use_kl_in_reward"]:
            why = "verl computes this KL penalty with the engine's log-probs, and the plain policy gradient has none"
            done.refuse("algorithm.use_kl_in_reward", why, f"set {A}.use_kl_loss=True instead, or {WEIGHT}=token")
        done.write("algorithm.rollout_correction.bypass", False, BYPASS)
        done.decided[BYPASS] = ("mapped", "without rollout_is, the loss is the plain policy gradient")
    else:
        done.write("algorithm.ratio_of", "response" if kind == "sequence" and bands else kind, WEIGHT)
        done.write("algorithm.ratio_cap", cap, BOUND)


def _weight_bounds(spec: Any) -> tuple[float | None, float]:
    """Returns the lower and upper bound of importance weights; a single number is the upper bound."""
    low, separator, high = str(spec).partition("_")
    if not separator:
        return None, _bound(low)
    lower, upper = _bound(low), _bound(high)
    if lower > upper:
        raise ValueError(f"{spec}: the lower bound exceeds the upper bound")
    return lower, upper


def _bands(done: Conversion) -> list[dict[str, Any]]:
    if done[REJECT] is None:
        return []
    names = list(dict.fromkeys(_listed(done[REJECT])))
    specs = _listed(done[BOUNDS])
    if done[BOUNDS] is None or len(specs) not in (1, len(names)):
        raise ValueError(f"{done[BOUNDS]} is neither one bound nor one for each of {', '.join(names)}")
    specs = specs * len(names) if len(specs) == 1 else specs
    return [_band(name, spec) for name, spec in zip(names, specs, strict=True)]


def _listed(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else str(value).replace(" ", "").split(",")


def _band(name: str, spec: str) -> dict[str, Any]:
    if name not in CRITERIA:
        raise ValueError(f"{name} is not supported; use one of {', '.join(CRITERIA)}")
    over, statistic = CRITERIA[name]
    if statistic != "ratio":
        return {"over": over, "by": statistic, "high": _bound(spec)}
    low, separator, high = spec.partition("_")
    lower, upper = (_bound(low), _bound(high)) if separator else (1 / _bound(low), _bound(low))
    # verl bounds -log r, so verl's ratio is engine probability / trainer probability: the inverse of lockstep's.
    return {"over": over, "by": "ratio", "low": _rounded(1 / upper), "high": _rounded(1 / lower)}


def _bound(text: str) -> float:
    # Python would read 0.5_2 as 0.52.
    value = math.nan if "_" in text else float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{text} is not a bound: a bound must be one number over 0")
    return value


def _rounded(value: float) -> float:
    """Rounds to 12 digits, which removes the rounding error of a division."""
    return float(f"{value:.12g}")
