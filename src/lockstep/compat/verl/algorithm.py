"""verl's `algorithm` and the losses of its actor: estimator, loss, aggregation, divergence, filters."""

from __future__ import annotations

from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion
from lockstep.compat.verl.correction import BYPASS, LOSS, WEIGHT, bypass_loss, correction_rule
from lockstep.compat.verl.online_keys import A

# Their estimators as ours: the method whose defaults are nearest, and the advantage.
ESTIMATORS: dict[str, tuple[str, str]] = {
    "gae": ("ppo", "gae"),
    "grpo": ("grpo", "grpo"),
    "grpo_vectorized": ("grpo", "grpo"),
    "grpo_passk": ("grpo", "grpo_passk"),
    "reinforce_plus_plus": ("reinforce_pp", "reinforce_pp"),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "reinforce_pp_baseline"),
    "remax": ("remax", "remax"),
    "rloo": ("rloo", "rloo"),
    "rloo_vectorized": ("rloo", "rloo"),
    "opo": ("opo", "opo"),
    "gpg": ("gpg", "gpg"),
    "gdpo": ("grpo", "gdpo"),
    "optimal_token_baseline": ("grpo", "optimal_token_baseline"),
    "tir_optimal_token_baseline": ("grpo", "optimal_token_baseline"),
}
LOSSES = {
    "vanilla": "clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "gpg": "policy_gradient",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "geo_mean",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "dro": "dro",
}
# These losses are averaged over sequences whatever loss_agg_mode says; divergence and entropy are not.
_BY_SEQUENCE = ("sapo", "geo_mean")
_GSPO = "0.9 averages GSPO as loss_agg_mode says, over tokens by default; releases before it always over sequences"
_SUM_NORM = {
    "0.4": "0.4 adds a micro-batch's sequences up: its loss is as many times larger as a micro-batch has sequences",
    "0.9": "divided by max_response_length; 0.9 divides by the longest response of a micro-batch",
}
_CLIPPED = ("clip", "gspo", "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl")
# Metrics of filter_groups that are the whole score of a response.
_WHOLE_SCORE = (None, "score", "reward", "seq_reward", "seq_final_reward")
AGGREGATIONS = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def algorithm_rule(settings: Settings, done: Conversion) -> None:
    name = settings["algorithm.adv_estimator"]
    if name not in ESTIMATORS:
        done.refuse("algorithm.adv_estimator", f"{name} is not here", f"one of {', '.join(ESTIMATORS)}")
        return
    method, advantage = ESTIMATORS[name]
    done.write("method", method, "algorithm.adv_estimator")
    if advantage == "optimal_token_baseline":
        note = "a group of one response gives 0; theirs gives it its whole return"
        done.write("algorithm.advantage", advantage, "algorithm.adv_estimator", note=note)
    elif advantage == "grpo" and not settings["algorithm.norm_adv_by_std_in_grpo"]:
        done.write("algorithm.advantage", "dr_grpo", "algorithm.norm_adv_by_std_in_grpo")
    elif advantage == "gpg":
        note = "the factor counts sequences of groups whose scores differ; theirs counts scores that are not zero"
        done.write("algorithm.advantage", "gpg", "algorithm.adv_estimator", note=note)
    else:
        done.write("algorithm.advantage", advantage, "algorithm.adv_estimator")
    if advantage == "gae":
        done.write("algorithm.lam", settings.number("algorithm.lam"), "algorithm.lam")
    _loss(settings, done)
    _kl(settings, done)
    correction_rule(settings, done)
    _filtration(settings, done, advantage)
    _gdpo(settings, done, advantage)
    if settings["algorithm.filter_groups.enable"]:
        rounds = settings.whole("algorithm.filter_groups.max_num_gen_batches") or 10
        keys = ("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches")
        note = (
            "groups whose rewards are all equal are replaced; when the rounds are used up the step is filled with them"
        )
        done.write("algorithm.dynamic_sampling.rounds", rounds, *keys, note=note)
        _filter_metric(settings, done)


def _filter_metric(settings: Settings, done: Conversion) -> None:
    """Which of a response's numbers groups are compared by."""
    key = "algorithm.filter_groups.metric"
    metric = settings[key]
    if metric in _WHOLE_SCORE:
        if settings.says(key):
            done.ignore(key, "the whole score of a response, here too")
    elif settings["custom_reward_function.path"] is not None:
        done.write("algorithm.dynamic_sampling.metric", f"function/{metric}", key)
    else:
        done.ignore(key, f"{metric} of their rules is the score of a rule here: 1 where the answer is right")


def _filtration(settings: Settings, done: Conversion, advantage: str) -> None:
    """PF-PPO, which they do with gae only."""
    keys = ("algorithm.use_pf_ppo", "algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow")
    if not settings[keys[0]] or advantage != "gae":
        why = "read with use_pf_ppo only" if not settings[keys[0]] else "they resample with gae only"
        for key in keys:
            if settings.says(key):
                done.ignore(key, why)
        return
    note = "a response counts in its own update as often as it is drawn; theirs move over the updates of a step"
    done.write("algorithm.filtration.method", str(settings[keys[1]]), *keys[:2], note=note)
    if settings[keys[1]] == "pow":
        done.write("algorithm.filtration.power", settings.number(keys[2]), keys[2])


def _gdpo(settings: Settings, done: Conversion, advantage: str) -> None:
    keys, weights = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
    if advantage != "gdpo":
        for key in (keys, weights):
            if settings.says(key):
                done.ignore(key, "read with gdpo only")
        return
    names = settings[keys]
    if not isinstance(names, list) or not names or settings["custom_reward_function.path"] is None:
        done.refuse(keys, "gdpo compares the numbers that a custom_reward_function returns by name", "name them")
        return
    if not settings["algorithm.norm_adv_by_std_in_grpo"]:
        done.refuse("algorithm.norm_adv_by_std_in_grpo", "gdpo divides each reward by its deviation", "True")
    given = settings[weights] or [1.0] * len(names)
    if len(given) != len(names):
        done.refuse(weights, f"{len(given)} weights for {len(names)} rewards", "one for each")
        return
    # `score` is what the function's own number is called there.
    rewards = {
        "function" if name == "score" else f"function/{name}": float(weight)
        for name, weight in zip(names, given, strict=True)
    }
    done.write("algorithm.gdpo_rewards", rewards, keys, weights)


def _loss(settings: Settings, done: Conversion) -> None:
    mode = settings[f"{A}.policy_loss.loss_mode"]
    bypass = bypass_loss(settings)
    if bypass is None and mode not in LOSSES:
        done.refuse(f"{A}.policy_loss.loss_mode", f"{mode} is not here", f"one of {', '.join(LOSSES)}")
        return
    if bypass == "reinforce":
        loss = "policy_gradient" if settings[WEIGHT] is None else "importance"
        done.write("algorithm.loss", loss, LOSS, BYPASS)
    else:
        loss = "clip" if bypass else LOSSES[mode]
        done.write("algorithm.loss", loss, *((LOSS, BYPASS) if bypass else (f"{A}.policy_loss.loss_mode",)))
    if bypass is not None and settings.says(f"{A}.policy_loss.loss_mode"):
        done.ignore(f"{A}.policy_loss.loss_mode", "bypass_mode has a loss of its own: loss_type")
    elif bypass is None and settings.says(LOSS):
        done.ignore(LOSS, "read with bypass_mode only")
    _aggregation(settings, done, mode if bypass is None else "")
    if loss in _CLIPPED:
        done.write("algorithm.clip_low", settings.number(f"{A}.clip_ratio_low"), f"{A}.clip_ratio_low")
        done.write("algorithm.clip_high", settings.number(f"{A}.clip_ratio_high"), f"{A}.clip_ratio_high")
    if loss == "clip":
        done.write("algorithm.dual_clip", settings.number(f"{A}.clip_ratio_c"), f"{A}.clip_ratio_c")
    if loss in ("dppo_tv", "dppo_kl"):
        done.write("algorithm.ratio_cap", settings.number(f"{A}.clip_ratio_c"), f"{A}.clip_ratio_c")
    if loss == "dro":
        beta = f"{A}.policy_loss.dro_beta"
        if settings[beta] is None:
            done.refuse(beta, "is not set, and dro asks for it", "a number over 0")
        else:
            done.write("algorithm.dro_beta", settings.number(beta), beta)
    group = f"{A}.policy_loss"
    if loss == "clip_cov":
        for ours, theirs in (("cov_share", "clip_cov_ratio"), ("cov_low", "clip_cov_lb"), ("cov_high", "clip_cov_ub")):
            done.write(f"algorithm.{ours}", settings.number(f"{group}.{theirs}"), f"{group}.{theirs}")
    if loss == "kl_cov":
        for ours, theirs in (("cov_share", "kl_cov_ratio"), ("cov_kl", "ppo_kl_coef")):
            done.write(f"algorithm.{ours}", settings.number(f"{group}.{theirs}"), f"{group}.{theirs}")
    if loss == "sapo":
        for ours, theirs in (("sapo_positive", "tau_pos"), ("sapo_negative", "tau_neg")):
            key = f"{group}.{theirs}" if settings.says(f"{group}.{theirs}") else f"{A}.{theirs}"
            done.write(f"algorithm.{ours}", settings.number(key), key)


def _aggregation(settings: Settings, done: Conversion, mode: str) -> None:
    key, scale = f"{A}.loss_agg_mode", f"{A}.loss_scale_factor"
    kind = settings[key]
    if kind not in AGGREGATIONS:
        done.refuse(key, f"{kind} is not here", f"one of {', '.join(AGGREGATIONS)}")
        return
    newest = settings.peer.endswith("0.9")
    if mode in _BY_SEQUENCE:
        done.write("algorithm.aggregation", "seq_mean_token_mean", f"{A}.policy_loss.loss_mode")
        done.write("algorithm.penalty_aggregation", AGGREGATIONS[kind], key)
    elif mode == "gspo" and not settings.says(key) and not newest:
        done.write("algorithm.aggregation", "seq_mean_token_mean", f"{A}.policy_loss.loss_mode", note=_GSPO)
        done.write("algorithm.penalty_aggregation", AGGREGATIONS[kind], key)
    else:
        note = _SUM_NORM["0.9" if newest else "0.4"] if kind == "seq-mean-token-sum-norm" else ""
        if mode == "gspo" and kind != "seq-mean-token-mean":
            note = _GSPO
        if settings[scale] is not None and kind == "seq-mean-token-sum-norm":
            note = ""
        done.write("algorithm.aggregation", AGGREGATIONS[kind], key, note=note)
    if settings.says(scale) and kind != "seq-mean-token-sum-norm":
        done.ignore(scale, "read with seq-mean-token-sum-norm only")
    elif settings[scale] is not None and settings[scale] != settings.whole("data.max_response_length"):
        done.refuse(scale, "the sums are divided by data.max_response_length", "set both alike")
    elif settings.says(scale):
        done.ignore(scale, "the sums are divided by data.max_response_length")


def _kl(settings: Settings, done: Conversion) -> None:
    in_reward, in_loss = "algorithm.use_kl_in_reward", f"{A}.use_kl_loss"
    if settings[in_reward] and settings[in_loss]:
        _kl_besides(settings, done)
    if settings[in_loss]:
        _kl_terms(settings, done, "loss", in_loss, f"{A}.kl_loss_coef", f"{A}.kl_loss_type")
    elif settings[in_reward]:
        _kl_terms(settings, done, "reward", in_reward, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        if settings["algorithm.kl_ctrl.type"] == "adaptive":
            done.write(
                "algorithm.kl.target",
                settings.number("algorithm.kl_ctrl.target_kl"),
                "algorithm.kl_ctrl.target_kl",
                "algorithm.kl_ctrl.type",
            )
            done.write("algorithm.kl.horizon", settings.whole("algorithm.kl_ctrl.horizon"), "algorithm.kl_ctrl.horizon")
    else:
        done.write("algorithm.kl.where", "none", in_loss, in_reward)
    unread = "without use_kl_in_reward it does nothing, in verl neither"
    for key in settings.below("algorithm.kl_ctrl") + (
        ["algorithm.kl_penalty"] if settings.says("algorithm.kl_penalty") else []
    ):
        if not settings[in_reward]:
            done.ignore(key, unread)
    for key in (f"{A}.kl_loss_coef", f"{A}.kl_loss_type"):
        if settings.says(key) and not settings[in_loss]:
            done.ignore(key, "without use_kl_loss it does nothing, in verl neither")


def _kl_besides(settings: Settings, done: Conversion) -> None:
    """A divergence in the reward besides the one in the loss."""
    coefficient, estimator = "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
    if settings["algorithm.kl_ctrl.type"] == "adaptive":
        done.refuse(
            "algorithm.kl_ctrl.type", "with a divergence in the loss too, the one in the reward is fixed", "fixed"
        )
    if settings[estimator] not in KL:
        done.refuse(estimator, f"{settings[estimator]} is not here", f"one of {', '.join(KL)}")
        return
    done.write(
        "algorithm.kl.reward_coefficient", settings.number(coefficient), coefficient, "algorithm.use_kl_in_reward"
    )
    done.write("algorithm.kl.reward_estimator", KL[settings[estimator]], estimator)


def _kl_terms(settings: Settings, done: Conversion, where: str, switch: str, coefficient: str, estimator: str) -> None:
    done.write("algorithm.kl.where", where, switch)
    done.write("algorithm.kl.coefficient", settings.number(coefficient), coefficient)
    name = str(settings[estimator])
    plain, plus = name.removesuffix("+"), "+" if name.endswith("+") else ""
    if plain not in KL:
        done.refuse(estimator, f"{name} is not here", f"one of {', '.join(KL)}")
        return
    done.write("algorithm.kl.estimator", KL[plain] + plus, estimator)
