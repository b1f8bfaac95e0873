"""Conversion rules of OpenRLHF's `train_ppo_ray`, for PPO, GRPO, REINFORCE++, RLOO and rollout correction."""

from __future__ import annotations

from typing import Any

from lockstep.compat.key_table import Conversion, KeyRule
from lockstep.compat.offload_keys import frozen_offload_rule, offload_rule, separate_reference
from lockstep.compat.openrlhf.openrlhf_rules import (
    data_rule,
    dataset_names,
    is_dotted_command,
    optimizer_rule,
    run_rule,
    schedule_rule,
    source_paths,
    template_rule,
)

# For these estimators OpenRLHF computes the baseline before it subtracts a KL penalty from the reward, and gamma is 1.
_GROUPS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce")
ESTIMATOR, AGGREGATION = "advantage_estimator", "actor.loss_agg_mode"
# For each value of is_correction_type: the values of is_correction_level and is_correction_mode.
_KINDS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
_GATES = ("ratio", "binary_kl", "tv")
GROUP = "algo.advantage.is_correction"
ENABLE, CAP = "enable_vllm_is_correction", "vllm_is_truncated_threshold"
KIND, BOUNDS, LEVEL, MODE, GATE = (f"{GROUP}_{name}" for name in ("type", "threshold", "level", "mode", "gating"))


def algorithm_rule(done: Conversion) -> None:
    values = done.lookup(ESTIMATOR)
    if values is None:
        return
    name = done[ESTIMATOR]
    for to, value in values.items():
        done.write(to, value, ESTIMATOR)
    if name == "rloo" and is_dotted_command(done):  # OpenRLHF 0.11 does not whiten RLOO's advantages
        done.write("algorithm.whiten.over", "none", ESTIMATOR)
    if done.recipe["algorithm.whiten.over"].value == "step":
        done.write("algorithm.whiten.biased", True, ESTIMATOR)
        done.write("algorithm.whiten.divide", not done["no_advantage_std_norm"], "no_advantage_std_norm")
    if not _loss(done):
        return
    done.write("algorithm.entropy", done["entropy_loss_coef"] or 0.0, "entropy_loss_coef")
    if name in _GROUPS:
        done.write(
            "algorithm.gamma",
            1.0,
            "gamma",
            note="" if done["gamma"] == 1 else "gamma is 1 with this estimator; OpenRLHF uses 1 too",
        )
    else:
        done.write_number("algorithm.gamma", "gamma")
    if name == "gae":
        done.write_number("algorithm.lam", "lambd")
    _kl(done)
    _correction(done)
    if done["dynamic_filtering"]:
        note = "after 10 generation batches, lockstep adds groups that failed the filter; OpenRLHF has no such limit"
        done.write("algorithm.dynamic_sampling.max_gen_batches", 10, "dynamic_filtering", note=note)
        bounds = "dynamic_filtering_reward_range"
        done.write("algorithm.dynamic_sampling.between", done.numbers(bounds), bounds)


def _loss(done: Conversion) -> bool:
    loss = done.write_lookup("algorithm.loss", "policy_loss_type")
    if loss is None:
        return False
    by_sequence = loss == "gspo" or done[AGGREGATION] == "seq-mean-token-mean"
    done.write("algorithm.aggregation", "seq_mean_token_mean" if by_sequence else "token_mean", AGGREGATION)
    if by_sequence:
        done.write("algorithm.penalty_aggregation", "token_mean", AGGREGATION)
    if done[AGGREGATION] is not None:
        done.lookup(AGGREGATION)
    pair, one = "eps_clip_low_high", "eps_clip"
    if done[pair]:
        low, high = done[pair]
        done.write("algorithm.clip_low", low, pair)
        done.write("algorithm.clip_high", high, pair)
        done.ignore("eps_clip_low_high takes precedence", one)
    else:
        done.write_number("algorithm.clip_low", one)
        done.write_number("algorithm.clip_high", one)
    if loss == "clip":
        done.write("algorithm.dual_clip", done["dual_clip"], "dual_clip")
    return True


def _kl(done: Conversion) -> None:
    coefficient, unbiased, in_loss = done.number("init_kl_coef"), "algo.kl.unbiased_gradient", done["use_kl_loss"]
    if coefficient <= 0:
        done.write("algorithm.kl.where", "none", "init_kl_coef")
        keys = ("use_kl_loss", "kl_estimator", "kl_target", "kl_horizon", unbiased)
        done.ignore("the coefficient is 0, so there is no KL term, as in OpenRLHF", *keys)
        return
    done.write("algorithm.kl.where", "loss" if in_loss else "reward", "use_kl_loss", "init_kl_coef")
    done.write("algorithm.kl.coefficient", coefficient, "init_kl_coef")
    estimator = "k3" if done["use_kl_estimator_k3"] else done.lookup("kl_estimator")
    if estimator is None:
        return
    if done[unbiased] and in_loss:
        done.write("algorithm.kl.estimator", f"{estimator}+", "kl_estimator", unbiased)
        done.write("algorithm.kl.weighted", True, unbiased)
    else:
        key = "use_kl_estimator_k3" if done["use_kl_estimator_k3"] else "kl_estimator"
        done.write("algorithm.kl.estimator", estimator, key)
        done.ignore("OpenRLHF reads this flag only with a KL term in the loss", unbiased)
    if done[ESTIMATOR] in _GROUPS and not in_loss:
        done.write("algorithm.kl.before_baseline", False, ESTIMATOR)
    if done["kl_target"]:
        done.write_number("algorithm.kl.target", "kl_target")
        done.write_integer("algorithm.kl.horizon", "kl_horizon")
    else:
        done.ignore("OpenRLHF reads this flag only with kl_target", "kl_horizon")


# Rollout correction of OpenRLHF: 0.7.5 has token weights, 0.11 `is_correction_type` and 0.11.2 `is_correction_level`.


def _correction(done: Conversion) -> None:
    if is_dotted_command(done) and done[LEVEL] not in (None, "off"):
        _gated(done)
    elif not done[ENABLE]:
        done.ignore("the correction is off", BOUNDS, KIND, CAP, MODE, GATE)
    elif not is_dotted_command(done):
        done.write("algorithm.rollout_correction.weight", "token", ENABLE)
        done.write_number("algorithm.rollout_correction.cap", CAP)
    else:
        bounds = _bounds(done)
        if bounds is not None and done[KIND] not in _KINDS:
            done.refuse(KIND, f"{done[KIND]} is not supported", f"use one of {', '.join(_KINDS)}")
        elif bounds is not None:
            _write_correction(done, *_KINDS[done[KIND]], "ratio", bounds, (ENABLE, KIND))


def _gated(done: Conversion) -> None:
    bounds = _bounds(done)
    level, mode, gate = str(done[LEVEL]), str(done[MODE]), str(done[GATE])
    if bounds is None:
        return
    if level not in ("token", "seq") or mode not in ("mask", "clip") or gate not in _GATES:
        remedy = "use level token or seq, mode mask or clip, and gating ratio, binary_kl or tv"
        done.refuse(LEVEL, f"level {level}, mode {mode}, gating {gate} is not a rollout correction of OpenRLHF", remedy)
    elif mode == "clip" and (level == "seq" or gate != "ratio"):
        done.refuse(MODE, "clip is for token ratios only, as in OpenRLHF", f"--{MODE} mask")
    elif str(done["policy_loss_type"]) == "gspo":
        note = "with gspo, OpenRLHF computes the ratio from the engine's log-probs and masks or clips nothing"
        done.write("algorithm.rollout_correction.bypass", True, LEVEL, note=note)
        done.ignore(note, MODE, GATE, BOUNDS)
    else:
        keys = tuple(key for key in (LEVEL, MODE, GATE) if done.is_set(key))
        _write_correction(done, level, mode, gate, bounds, keys)


def _write_correction(
    done: Conversion, level: str, mode: str, gate: str, bounds: tuple[float, float], keys: tuple[str, ...]
) -> None:
    """Writes the rollout correction: kept tokens have their ratio as weight; dropped tokens count with weight 0."""
    low, high = bounds
    done.write("algorithm.rollout_correction.weight", "token", *keys)
    if mode == "clip":
        done.write("algorithm.rollout_correction.floor", low, BOUNDS)
        done.write("algorithm.rollout_correction.cap", high, BOUNDS)
        return
    done.write("algorithm.rollout_correction.cap", None, BOUNDS)
    band: dict[str, Any] = {"over": "token" if level == "token" else "mean", "by": gate}
    band |= {"low": low, "high": high} if low else {"high": high}
    done.write("algorithm.rollout_correction.reject", [band], BOUNDS, *keys)
    done.write("algorithm.rollout_correction.rejected", "zero", *keys)


def _bounds(done: Conversion) -> tuple[float, float] | None:
    """Returns the bounds LOW and HIGH of the threshold flag; LOW is 0 if the flag has only HIGH."""
    given = done.numbers(BOUNDS)
    low, high = [0.0, *given] if len(given) == 1 else [*given, 0.0, 0.0][:2]
    if len(given) not in (1, 2) or not 0 <= low <= high or high <= 0:
        done.refuse(BOUNDS, f"{given} is not a range of ratios", "write LOW HIGH, or only HIGH")
        return None
    return low, high


def async_rule(done: Conversion) -> None:
    """Converts asynchronous training: generation runs in parallel with training, with weights of earlier steps."""
    queue = "async_queue_size"
    if done["async_train"]:
        note = "the maximum age of responses in steps; OpenRLHF's responses may be one step older"
        partial = [key for key in ("train.partial_rollout_enable",) if done.is_set(key)]
        done.write("rollout.max_staleness", done.integer(queue), "async_train", queue, *partial, note=note)
        if "algorithm.rollout_correction.weight" not in done.recipe:
            done.write("algorithm.rollout_correction.weight", "none", "async_train")
    else:
        done.ignore("OpenRLHF reads this flag only with async training", queue, "train.partial_rollout_enable")


def agent_rule(done: Conversion) -> None:
    """Converts an agent, which writes the feedback between the turns and gives the rewards."""
    agent = "agent_func_path"
    if not done[agent]:
        return
    done.write("rollout.environment", f"openrlhf:{done[agent]}", agent)
    if "rollout.max_tokens" in done.recipe:
        most = done.recipe["rollout.max_tokens"].value
        done.write(
            "rollout.max_turns", most, agent, note="OpenRLHF has no limit of turns; rollout.max_tokens limits them"
        )
    if done["dynamic_filtering"]:
        # OpenRLHF filters by `scores` and trains with `rewards`, so the scores are a component without weight.
        done.write("rollout.environment_args", {"scores": True}, agent)
        done.write("reward.weights", {"score": 0.0}, agent)
        done.write("algorithm.dynamic_sampling.metric", "score", "dynamic_filtering")


def data_and_model_rule(done: Conversion) -> None:
    if not done.require("pretrain", "give the path of the model"):
        return
    done.write_text("model.path", "pretrain")
    data_rule(done, "prompt_data", "prompt_data_probs", "prompt_split")
    done.write_text("data.prompt_key", "input_key")
    if done["label_key"]:
        done.write_text("data.label_key", "label_key")
    template_rule(done)
    _lengths(done)
    optimizer_rule(done, "actor.", "actor_learning_rate")
    if done["actor.optim"] == "muon" and done[ESTIMATOR] == "gae":
        why = "the critic of lockstep uses the optimizer of the policy; the critic of OpenRLHF uses adam"
        done.refuse("actor.optim", why, "remove the key, or use an advantage_estimator without a critic")
    schedule_rule(done)
    if "optim.warmup_start" in done.recipe or done["lr_scheduler"] not in ("constant", "constant_with_warmup"):
        done.write("optim.schedule_unit", "update", "lr_scheduler")
    done.write_number("rollout.top_p", "top_p")
    if done.number("top_p") < 1:
        note = "as in OpenRLHF: the trainer uses log-probs of the untruncated distribution, so ratios are inexact"
        done.write("rollout.truncated_sampling", "ignore", "top_p", note=note)
    for key, name in (("actor_num_gpus_per_node", "devices"), ("actor_num_nodes", "nodes")):
        setattr(done, name, done.integer(key))
        done.ignore(f"the number of {name} is not part of the recipe; the end of the report says what starts", key)


def _lengths(done: Conversion) -> None:
    drop = "lockstep drops and counts prompts over the limit; OpenRLHF truncates their end"
    keys = [key for key in ("prompt_max_len", "max_len") if done.is_set(key)]
    done.write("data.overlong", "drop", *keys, note=drop)
    if not is_dotted_command(done):
        done.write_integer("data.max_prompt_tokens", "prompt_max_len")
        done.write_integer("rollout.max_tokens", "generate_max_len")
        done.ignore("prompt_max_len and generate_max_len take precedence", "max_len")
        return
    total, new, note = done.integer("max_len"), "rollout.max_new_tokens", ""
    if done[new] is not None:
        response = done.integer(new)
        done.write("rollout.max_tokens", response, new)
        done.write("data.max_prompt_tokens", total - response, "max_len", new)
        return
    note = "OpenRLHF limits prompt plus response; lockstep limits prompt and response each, here to half of max_len"
    done.write("rollout.max_tokens", total // 2, "max_len", note=note)
    done.write("data.max_prompt_tokens", total - total // 2, "max_len", note=note)


def batch_rule(done: Conversion) -> None:
    n, responses = done.integer("n_samples_per_prompt"), done.integer("train_batch_size")
    prompts = done.integer("rollout_batch_size")
    if n < 1 or responses % n:
        why = f"{responses} responses are not a multiple of {n} responses per prompt"
        done.refuse("train_batch_size", why, f"write a multiple of {n}")
        return
    per_update, note = min(responses // n, prompts), ""
    if per_update < prompts and n > 1:
        note = "all responses to a prompt are in one update; OpenRLHF shuffles responses over the updates"
    if responses // n > prompts:
        note = f"{responses} responses are more than the step has, so a step has one update"
    done.write("batch.prompts_per_update", per_update, "train_batch_size", note=note)
    if "rollout.max_tokens" not in done.recipe:
        return  # the command is refused already
    longest = done.recipe["data.max_prompt_tokens"].value + done.recipe["rollout.max_tokens"].value
    micro, most = "micro_train_batch_size", "train_max_tokens_per_gpu"
    if done["use_dynamic_batch"]:
        done.write("batch.tokens", max(done.integer(most), longest), most, "use_dynamic_batch")
        done.ignore("dynamic batches count tokens instead of rows", micro)
        return
    done.ignore("OpenRLHF reads this flag only with dynamic batches", most)
    if done["packing_samples"]:
        done.write("batch.tokens", done.integer(micro) * longest, micro, "packing_samples")
    else:
        done.write_integer("batch.micro_batch_size", micro)


def reward_rule(done: Conversion) -> None:
    agent = bool(done["agent_func_path"])
    remote, model = done["remote_rm_url"] or agent, done["reward_pretrain"]
    if agent:
        done.ignore("the agent gives the rewards, as in OpenRLHF", "remote_rm_url", "reward_pretrain")
    elif remote:
        _remote(done, str(remote))
        done.ignore("remote_rm_url takes precedence, as in OpenRLHF", "reward_pretrain")
    elif done.require("reward_pretrain", "set one of them", "neither a reward model nor --remote_rm_url is set"):
        models = dataset_names(model) if "," in model else model
        note = "the scores are added (reward.model_weights)" if "," in model else ""
        done.write("reward.model", models, "reward_pretrain", note=note)
    if done["normalize_reward"]:
        if model and not remote:
            note = "lockstep reads score_stats.json in the model folder; create it from `mean` and `std` of config.json"
            done.decided["normalize_reward"] = ("changed", note)
        else:
            done.ignore("scores of functions and endpoints are not normalized, as in OpenRLHF", "normalize_reward")
    clip = "reward_clip_range"
    if done[ESTIMATOR] not in _GROUPS:
        done.write("reward.clip", done.numbers(clip), clip)
    else:
        done.ignore("OpenRLHF clips scores after subtracting the group baseline; they rarely reach the bounds", clip)
    if done["overlong_buffer_len"]:
        done.write_integer("algorithm.overlong.buffer", "overlong_buffer_len")
        done.write_number("algorithm.overlong.factor", "overlong_penalty_factor")
    if done["reward.stop_properly_penalty_coef"] is not None:
        done.write_number("algorithm.overlong.truncated_reward", "reward.stop_properly_penalty_coef")
    if done[ESTIMATOR] == "gae":
        path = done["critic_pretrain"] or (done["pretrain"] if remote else model)
        done.write("critic.path", str(path).split(",")[0], "critic_pretrain")
        done.write_number("critic.lr", "critic_learning_rate")
        done.write_number("critic.clip", "value_clip")
        done.write("critic.warmup", max(0, done.integer("freezing_actor_steps")), "freezing_actor_steps")
    else:
        keys = ("critic_pretrain", "critic_learning_rate", "value_clip", "freezing_actor_steps")
        done.ignore("the estimator has no critic", *keys)


def _remote(done: Conversion, remote: str) -> None:
    """Converts --remote_rm_url: a reward function in a Python file, or HTTP endpoints."""
    note = "a query is prompt text plus response, without the special tokens of the chat template"
    if remote.endswith(".py"):
        done.write("reward.function", f"{remote}:reward_func", "remote_rm_url", note=f"{note}; one response per call")
        return
    addresses = dataset_names(remote)
    done.write("reward.remote", addresses if len(addresses) > 1 else addresses[0], "remote_rm_url", note=note)
    done.write("reward.remote_form", "openrlhf", "remote_rm_url")


def validation_rule(done: Conversion) -> None:
    if not done["eval_dataset"] or done.integer("eval_steps") <= 0:
        keys = ("eval_dataset", "eval_split", "eval_steps", "eval_temperature", "eval_n_samples_per_prompt")
        done.ignore("a validation needs eval_dataset and eval_steps", *keys)
        return
    paths = source_paths(done, "eval_dataset", "eval_split")
    done.write("val.questions", paths if len(paths) > 1 else paths[0], "eval_dataset")
    done.write_integer("val.every", "eval_steps")
    done.write_number("val.temperature", "eval_temperature")
    done.write_integer("val.n", "eval_n_samples_per_prompt")
    if "rollout.max_tokens" in done.recipe:
        done.write("val.max_new_tokens", done.recipe["rollout.max_tokens"].value, "eval_dataset")


def offload_keys_rule(done: Conversion) -> None:
    offload_rule(done, "parallel.offload", optimizer=["adam_offload"])
    if "critic.path" in done.recipe and "parallel.offload" in done.recipe:
        done.write("parallel.offload_critic", "optimizer", "adam_offload")  # the flag applies to both models
    reference, reward = ("ref_reward_offload", "ref.offload"), ("ref_reward_offload", "reward.offload")
    both = {"reference": separate_reference(done), "reward": "reward.model" in done.recipe}
    frozen_offload_rule(done, "parallel.offload_reference", reference, "reference model", both["reference"])
    frozen_offload_rule(done, "parallel.offload_reward", reward, "reward model", both["reward"])
    if any(both.values()):  # one of the two models is enough for the flag of both
        done.decided.pop("ref_reward_offload", None)


PPO_RULES: tuple[KeyRule, ...] = (
    run_rule, algorithm_rule, async_rule, data_and_model_rule, agent_rule, batch_rule, reward_rule,
    validation_rule, offload_keys_rule,
)  # fmt: skip
