"""OpenRLHF's `train_ppo_ray`: PPO, GRPO, REINFORCE++, RLOO."""

from __future__ import annotations

from lockstep.compat.openrlhf.options import Option, cannot, opt, without_effect
from lockstep.compat.openrlhf.shared import SHARED, data_rule, run_rule, schedule_rule, sources, template_rule
from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, KeyRule, part, same

# Their estimators: method, advantage, and whether they whiten over the step.
ESTIMATORS: dict[str, tuple[str, str, bool]] = {
    "gae": ("ppo", "gae", True),
    "reinforce": ("reinforce_pp", "reinforce_pp", True),
    "reinforce_baseline": ("reinforce_pp_baseline", "reinforce_pp_baseline", True),
    "rloo": ("rloo", "rloo", True),
    "group_norm": ("grpo", "grpo", False),
    "dr_grpo": ("dr_grpo", "dr_grpo", False),
}
_GROUPS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo")
PLACES = "all models share the devices of the policy; torchrun starts the processes"
ENGINE = "of the engine: the built-in one generates with the weights that are trained"

OPTIONS: list[Option] = [
    *SHARED,
    opt("s", "pretrain", "actor.model_name_or_path", part("pretrain", "model.path")),
    opt("s", "reward_pretrain", "reward.model_name_or_path", part("reward_pretrain", "reward.model")),
    opt("s", "remote_rm_url", "reward.remote_url", part("remote_rm_url", "reward.remote", "reward.function")),
    opt("s", "critic_pretrain", "critic.model_name_or_path", part("critic_pretrain", "critic.path")),
    opt("s", "prompt_data", "data.prompt_dataset", part("prompt_data", "data.train")),
    opt("s", "prompt_data_probs", "data.prompt_probs", part("prompt_data_probs", "data.train")),
    opt("s", "prompt_split", "data.prompt_split", part("prompt_split", "data.train", default="train")),
    opt("s", "input_key", "data.input_key", part("input_key", "data.prompt_key", default="input")),
    opt("s", "label_key", "data.label_key", part("label_key", "data.label_key")),
    opt("s", "input_template", "data.input_template", part("input_template", "data.prompt_format")),
    opt(
        "b",
        "apply_chat_template",
        "data.apply_chat_template",
        part("apply_chat_template", "data.template", default=False),
    ),
    opt("i", "max_samples", "data.max_samples", part("max_samples", "data.train")),
    opt("s", "eval_dataset", "eval.dataset", part("eval_dataset", "val.questions")),
    opt("s", "eval_split", "eval.split", part("eval_split", "val.questions", default="train")),
    opt("i", "eval_steps", "eval.steps", part("eval_steps", "val.every", default=-1)),
    opt("f", "eval_temperature", "eval.temperature", part("eval_temperature", "val.temperature", default=0.6)),
    opt(
        "i",
        "eval_n_samples_per_prompt",
        "eval.n_samples_per_prompt",
        part("eval_n_samples_per_prompt", "val.n", default=4),
    ),
    opt("i", "rollout_batch_size", "rollout.batch_size", same("rollout_batch_size", "batch.prompts", 1024)),
    *without_effect(
        "i:micro_rollout_batch_size:rollout.micro_batch_size "
        "i:vllm_generate_batch_size:rollout.vllm_generate_batch_size "
        "i:rollout_max_tokens_per_gpu:rollout.max_tokens_per_gpu i:rollout_tasks_per_gpu:",
        "how a pass is cut into pieces changes no number",
    ),
    opt(
        "i",
        "train_batch_size",
        "train.batch_size",
        part("train_batch_size", "batch.prompts_per_update", default=128, note="counts responses; ours counts prompts"),
    ),
    opt(
        "i",
        "micro_train_batch_size",
        "train.micro_batch_size",
        part("micro_train_batch_size", "batch.rows", "batch.tokens"),
    ),
    opt(
        "b", "use_dynamic_batch", "train.dynamic_batch_enable", part("use_dynamic_batch", "batch.tokens", default=False)
    ),
    opt(
        "i",
        "train_max_tokens_per_gpu",
        "train.max_tokens_per_gpu",
        part("train_max_tokens_per_gpu", "batch.tokens", default=16192),
    ),
    opt("i", "n_samples_per_prompt", "rollout.n_samples_per_prompt", same("n_samples_per_prompt", "rollout.n", 1)),
    opt("i", "num_episodes", "train.num_episodes", same("num_episodes", "run.epochs", 1)),
    opt("i", "max_epochs", "train.max_epochs", same("max_epochs", "algorithm.epochs", 1)),
    opt("i", "prompt_max_len", None, part("prompt_max_len", "data.max_prompt_tokens")),
    opt("i", "generate_max_len", None, part("generate_max_len", "rollout.max_tokens")),
    opt("i", "max_len", "data.max_len", part("max_len", "data.max_prompt_tokens", "rollout.max_tokens")),
    opt("i", None, "rollout.max_new_tokens", part("rollout.max_new_tokens", "rollout.max_tokens")),
    opt("f", "temperature", "rollout.temperature", same("temperature", "rollout.temperature", 1.0)),
    opt("f", "top_p", "rollout.top_p", part("top_p", "rollout.top_p", default=1.0)),
    opt(
        "s",
        "advantage_estimator",
        "algo.advantage.estimator",
        part("advantage_estimator", "method", "algorithm.advantage", default="gae"),
    ),
    opt("f", "gamma", "algo.advantage.gamma", part("gamma", "algorithm.gamma", default=1.0)),
    opt("f", "lambd", "algo.advantage.lambd", part("lambd", "algorithm.lam", default=1.0)),
    opt(
        "b",
        "no_advantage_std_norm",
        "algo.advantage.no_std_norm",
        part("no_advantage_std_norm", "algorithm.whiten.divide", default=False),
    ),
    opt(
        "f",
        "init_kl_coef",
        "algo.kl.init_coef",
        part("init_kl_coef", "algorithm.kl.coefficient", "algorithm.kl.where", default=0.01),
    ),
    opt("f", "kl_target", "algo.kl.target", part("kl_target", "algorithm.kl.target")),
    opt("i", "kl_horizon", "algo.kl.horizon", part("kl_horizon", "algorithm.kl.horizon", default=10000)),
    opt("s", "kl_estimator", "algo.kl.estimator", part("kl_estimator", "algorithm.kl.estimator", default="k1")),
    opt("b", "use_kl_loss", "algo.kl.use_loss", part("use_kl_loss", "algorithm.kl.where", default=False)),
    *cannot("b::algo.kl.unbiased_gradient", "the divergence's gradient is the estimator's own"),
    opt("f", "eps_clip", "actor.eps_clip", part("eps_clip", "algorithm.clip_low", "algorithm.clip_high", default=0.2)),
    opt(
        "ff",
        "eps_clip_low_high",
        "actor.eps_clip_low_high",
        part("eps_clip_low_high", "algorithm.clip_low", "algorithm.clip_high"),
    ),
    opt("f", "dual_clip", "actor.dual_clip", part("dual_clip", "algorithm.dual_clip")),
    opt("s", "policy_loss_type", "actor.policy_loss_type", part("policy_loss_type", "algorithm.loss", default="ppo")),
    opt("s", None, "actor.loss_agg_mode", part("actor.loss_agg_mode", "algorithm.aggregation", default="token-mean")),
    opt("f", "value_clip", "critic.value_clip", part("value_clip", "critic.clip")),
    opt("f", "entropy_loss_coef", "actor.entropy_coef", part("entropy_loss_coef", "algorithm.entropy")),
    opt(
        "ff", "reward_clip_range", "reward.clip_range", part("reward_clip_range", "reward.clip", default=[-10.0, 10.0])
    ),
    opt(
        "b",
        "normalize_reward",
        "reward.normalize_enable",
        part("normalize_reward", default=False, note="by score_stats.json of the reward model's folder"),
    ),
    opt(
        "f",
        "overlong_buffer_len",
        "reward.overlong_buffer_len",
        part("overlong_buffer_len", "algorithm.overlong.buffer"),
    ),
    opt(
        "f",
        "overlong_penalty_factor",
        "reward.overlong_penalty_factor",
        part("overlong_penalty_factor", "algorithm.overlong.factor", default=1.0),
    ),
    opt(
        "f",
        None,
        "reward.stop_properly_penalty_coef",
        part("reward.stop_properly_penalty_coef", "algorithm.overlong.cut"),
    ),
    opt(
        "b",
        "dynamic_filtering",
        "algo.dynamic_filtering_enable",
        part("dynamic_filtering", "algorithm.dynamic_sampling.rounds", default=False),
    ),
    opt(
        "ff",
        "dynamic_filtering_reward_range",
        "algo.dynamic_filtering_range",
        part("dynamic_filtering_reward_range", "algorithm.dynamic_sampling.between", default=[0.0, 1.0]),
    ),
    opt(
        "b",
        "enable_vllm_is_correction",
        "algo.advantage.is_correction_enable",
        part("enable_vllm_is_correction", "algorithm.correction.weight", default=False),
    ),
    opt(
        "f",
        "vllm_is_truncated_threshold",
        None,
        part("vllm_is_truncated_threshold", "algorithm.correction.cap", default=2.0),
    ),
    opt(
        "ff",
        None,
        "algo.advantage.is_correction_threshold",
        part("algo.advantage.is_correction_threshold", "algorithm.correction.cap", default=[0.5, 5.0]),
    ),
    opt(
        "s",
        None,
        "algo.advantage.is_correction_type",
        part("algo.advantage.is_correction_type", "algorithm.correction.mask", default="tis"),
    ),
    opt(
        "s",
        None,
        "algo.advantage.is_correction_level",
        part("algo.advantage.is_correction_level", "algorithm.correction.weight", default="off"),
    ),
    opt(
        "s",
        None,
        "algo.advantage.is_correction_mode",
        part("algo.advantage.is_correction_mode", "algorithm.correction.mask", default="mask"),
    ),
    opt("s", None, "algo.advantage.is_correction_gating", part("algo.advantage.is_correction_gating", default="ratio")),
    opt("f", "actor_learning_rate", "actor.adam.lr", part("actor_learning_rate", "optim.lr", default=1e-6)),
    opt("f", "critic_learning_rate", "critic.adam.lr", part("critic_learning_rate", "critic.lr", default=9e-6)),
    opt("ff", "adam_betas", "actor.adam.betas", same("adam_betas", "optim.betas", [0.9, 0.95])),
    opt("f", None, "actor.adam.eps", same("actor.adam.eps", "optim.eps", 1e-8)),
    opt("f", "l2", "actor.adam.weight_decay", same("l2", "optim.weight_decay", 0.0)),
    opt("f", "max_norm", "actor.max_norm", same("max_norm", "optim.clip", 1.0)),
    opt(
        "s", "lr_scheduler", "actor.lr_scheduler", part("lr_scheduler", "optim.schedule", default="cosine_with_min_lr")
    ),
    opt("f", "lr_warmup_ratio", "actor.lr_warmup_ratio", part("lr_warmup_ratio", "optim.warmup", default=0.03)),
    opt("f", None, "actor.min_lr_ratio", part("min_lr_ratio", "optim.min_lr_ratio", default=0.1)),
    *without_effect(
        "ff::critic.adam.betas f::critic.adam.eps f::critic.adam.weight_decay s::critic.lr_scheduler "
        "f::critic.lr_warmup_ratio f::critic.min_lr_ratio f::critic.max_norm",
        "schedule, decay and clip of the critic are the policy's",
    ),
    *cannot("s::actor.optim s::critic.optim", "AdamW is the optimizer", (None, "adam")),
    *without_effect(
        " ".join(
            f"{kind}::{who}.muon.{name}"
            for who in ("actor", "critic")
            for kind, name in (
                ("f", "lr"),
                ("f", "momentum"),
                ("i", "ns_steps"),
                ("b", "nesterov"),
                ("b", "no_nesterov"),
            )
        ),
        "read with muon only",
    ),
    opt(
        "b",
        "gradient_checkpointing",
        "actor.gradient_checkpointing_enable",
        same("gradient_checkpointing", "model.gradient_checkpointing", False),
    ),
    *cannot("f::actor.aux_loss_coef", "the balancing loss of expert models is not here", (None, 0, 0.0)),
    opt(
        "i", "freezing_actor_steps", "critic.freezing_steps", part("freezing_actor_steps", "critic.warmup", default=-1)
    ),
    *without_effect("f:ptx_coef:", "dead: there is no pretraining loss there either"),
    *cannot("b:enable_ema:train.enable_ema", "no running mean of the weights is kept"),
    *without_effect("f:ema_beta:train.ema_beta", "read with enable_ema only"),
    opt(
        "i",
        "actor_num_nodes",
        "actor.num_nodes",
        part("actor_num_nodes", default=1, note="torchrun's; the report says how"),
    ),
    opt(
        "i",
        "actor_num_gpus_per_node",
        "actor.num_gpus_per_node",
        part("actor_num_gpus_per_node", default=8, note="torchrun's; the report says how"),
    ),
    *without_effect(
        "i:ref_num_nodes:ref.num_nodes i:ref_num_gpus_per_node:ref.num_gpus_per_node "
        "i:reward_num_nodes:reward.num_nodes i:reward_num_gpus_per_node:reward.num_gpus_per_node "
        "i:critic_num_nodes:critic.num_nodes i:critic_num_gpus_per_node:critic.num_gpus_per_node "
        "b:colocate_actor_ref:train.colocate_actor_ref b:colocate_critic_reward:train.colocate_critic_reward "
        "b:colocate_all_models:train.colocate_all b:ref_reward_offload: b::ref.offload b::reward.offload "
        "b:actor_init_on_gpu: b:save_value_network:critic.save_value_network b:deepspeed_enable_sleep:ds.enable_sleep",
        PLACES,
    ),
    *without_effect(
        "i:vllm_num_engines:vllm.num_engines i:vllm_tensor_parallel_size:vllm.tensor_parallel_size "
        "f:vllm_gpu_memory_utilization:vllm.gpu_memory_utilization s:vllm_sync_backend:vllm.sync_backend "
        "b:vllm_sync_with_ray:vllm.sync_with_ray b:enable_prefix_caching:vllm.enable_prefix_caching "
        "b:enforce_eager:vllm.enforce_eager b:vllm_enable_sleep:vllm.enable_sleep",
        ENGINE,
    ),
    *without_effect("s:value_head_prefix:ds.value_head_prefix", "the head is called score, as in transformers"),
    *cannot("b:async_train:train.async_enable b::train.partial_rollout_enable", "generation and training take turns"),
    *without_effect("i:async_queue_size:train.async_queue_size", "read with async training only"),
    *cannot(
        "s:agent_func_path:train.agent_func_path",
        "agents of theirs do not run here; write the loop as rollout.function",
    ),
    *without_effect("s::ckpt.best_metric_key", "the newest checkpoints are kept"),
    *without_effect("s::data.image_key", "read with images only"),
    *cannot(
        "i::data.max_images_per_prompt b::actor.freeze_visual_encoder",
        "rows with images are not trained here",
        (None, False, 0),
    ),
]


def algorithm_rule(settings: Settings, done: Conversion) -> None:
    name = settings["advantage_estimator"]
    if name not in ESTIMATORS:
        done.refuse("advantage_estimator", f"{name} is not here", f"one of {', '.join(ESTIMATORS)}")
        return
    method, advantage, whitens = ESTIMATORS[name]
    done.write("method", method, "advantage_estimator")
    done.write("algorithm.advantage", advantage, "advantage_estimator")
    done.write("algorithm.whiten.over", "step" if whitens else "none", "advantage_estimator")
    if whitens:
        done.write("algorithm.whiten.biased", True, "advantage_estimator")
        done.write("algorithm.whiten.divide", not settings["no_advantage_std_norm"], "no_advantage_std_norm")
    loss = {"ppo": "clip", "gspo": "gspo"}.get(str(settings["policy_loss_type"]))
    if loss is None:
        done.refuse("policy_loss_type", f"{settings['policy_loss_type']} is not here", "ppo or gspo")
        return
    done.write("algorithm.loss", loss, "policy_loss_type")
    by_sequence = loss == "gspo" or settings["actor.loss_agg_mode"] == "seq-mean-token-mean"
    done.write("algorithm.aggregation", "seq_mean_token_mean" if by_sequence else "token_mean", "actor.loss_agg_mode")
    if settings["actor.loss_agg_mode"] not in (None, "token-mean", "seq-mean-token-mean"):
        done.refuse(
            "actor.loss_agg_mode", f"{settings['actor.loss_agg_mode']} is not here", "token-mean or seq-mean-token-mean"
        )
    if settings["eps_clip_low_high"]:
        low, high = settings["eps_clip_low_high"]
        done.write("algorithm.clip_low", low, "eps_clip_low_high")
        done.write("algorithm.clip_high", high, "eps_clip_low_high")
        if settings.says("eps_clip"):
            done.ignore("eps_clip", "eps_clip_low_high rules")
    else:
        done.write("algorithm.clip_low", settings.number("eps_clip"), "eps_clip")
        done.write("algorithm.clip_high", settings.number("eps_clip"), "eps_clip")
    if loss == "clip":
        done.write("algorithm.dual_clip", settings["dual_clip"], "dual_clip")
    done.write("algorithm.entropy", settings["entropy_loss_coef"] or 0.0, "entropy_loss_coef")
    if name in _GROUPS:
        done.write("algorithm.gamma", 1.0, "gamma", note="" if settings["gamma"] == 1 else "forced to 1 there too")
    else:
        done.write("algorithm.gamma", settings.number("gamma"), "gamma")
    if name == "gae":
        done.write("algorithm.lam", settings.number("lambd"), "lambd")
    _kl(settings, done)
    _correction(settings, done)
    if settings["dynamic_filtering"]:
        note = "10 rounds at most, then the step is filled with what there is; theirs goes on"
        done.write("algorithm.dynamic_sampling.rounds", 10, "dynamic_filtering", note=note)
        bounds = [float(bound) for bound in settings["dynamic_filtering_reward_range"]]
        done.write("algorithm.dynamic_sampling.between", bounds, "dynamic_filtering_reward_range")


def _kl(settings: Settings, done: Conversion) -> None:
    coefficient = settings.number("init_kl_coef")
    if coefficient <= 0:
        done.write("algorithm.kl.where", "none", "init_kl_coef")
        for key in ("use_kl_loss", "kl_estimator", "kl_target", "kl_horizon"):
            if settings.says(key):
                done.ignore(key, "the coefficient is 0, so there is no divergence, there neither")
        return
    done.write("algorithm.kl.where", "loss" if settings["use_kl_loss"] else "reward", "use_kl_loss", "init_kl_coef")
    done.write("algorithm.kl.coefficient", coefficient, "init_kl_coef")
    estimator = str(settings["kl_estimator"])
    if estimator not in ("k1", "k2", "k3"):
        done.refuse("kl_estimator", f"{estimator} is not here", "k1, k2 or k3")
        return
    group = settings["advantage_estimator"] in _GROUPS and not settings["use_kl_loss"]
    note = (
        "the divergence is a part of the score that a group compares; theirs is added after the comparison"
        if group
        else ""
    )
    done.write("algorithm.kl.estimator", estimator, "kl_estimator", note=note)
    if settings["kl_target"]:
        done.write("algorithm.kl.target", settings.number("kl_target"), "kl_target")
        done.write("algorithm.kl.horizon", settings.whole("kl_horizon"), "kl_horizon")
    elif settings.says("kl_horizon"):
        done.ignore("kl_horizon", "read with kl_target only")


def _correction(settings: Settings, done: Conversion) -> None:
    enable, level = "enable_vllm_is_correction", "algo.advantage.is_correction_level"
    bounds, kind = "algo.advantage.is_correction_threshold", "algo.advantage.is_correction_type"
    unread = [key for key in (bounds, kind, "vllm_is_truncated_threshold") if settings.says(key)]
    if settings.says(level) and settings[level] != "off":
        done.refuse(
            level, "the gated ratios of 0.11.2 are not here", "algorithm.correction.{weight, cap, mask, low, high}"
        )
    elif not settings[enable]:
        for key in unread:
            done.ignore(key, "the correction is off")
    elif "ds.param_dtype" not in settings.defaults:
        done.write("algorithm.correction.weight", "token", enable)
        done.write(
            "algorithm.correction.cap", settings.number("vllm_is_truncated_threshold"), "vllm_is_truncated_threshold"
        )
    elif settings[kind] == "seq-mask-tis":
        done.refuse(kind, "a mask of sequences with weights of tokens in a band is not here", "tis or icepop")
    else:
        low, high = settings[bounds]
        note = "" if settings[kind] == "icepop" else f"ratios below {low} are not raised to it"
        done.write("algorithm.correction.weight", "token", enable, note=note)
        done.write("algorithm.correction.cap", high, bounds)
        if settings[kind] == "icepop":
            masked = "tokens out of the band are left out of the mean too; theirs count in it with 0"
            done.write("algorithm.correction.mask", "token", kind, note=masked)
            done.write("algorithm.correction.low", low, bounds)
            done.write("algorithm.correction.high", high, bounds)


def data_and_model_rule(settings: Settings, done: Conversion) -> None:
    if not settings["pretrain"]:
        done.refuse("pretrain", "is not set", "name the model")
        return
    done.write("model.path", str(settings["pretrain"]), "pretrain")
    data_rule(settings, done, "data.train", "prompt_data", "prompt_data_probs", "prompt_split")
    done.write("data.prompt_key", str(settings["input_key"]), "input_key")
    if settings["label_key"]:
        done.write("data.label_key", str(settings["label_key"]), "label_key")
    template_rule(settings, done)
    _lengths(settings, done)
    done.write("optim.lr", settings.number("actor_learning_rate"), "actor_learning_rate")
    schedule_rule(settings, done)
    done.write("rollout.top_p", settings.number("top_p"), "top_p")
    if settings.number("top_p") < 1:
        done.write(
            "rollout.truncated",
            "ignore",
            "top_p",
            note="as there: the trainer scores the whole distribution, so ratios are off",
        )
    for key, name in (("actor_num_gpus_per_node", "devices"), ("actor_num_nodes", "nodes")):
        setattr(done, name, settings.whole(key))
        done.ignore(key, f"the number of {name} is torchrun's: see the end of the report")


def _lengths(settings: Settings, done: Conversion) -> None:
    drop = "longer prompts are dropped and counted; theirs are cut at the end"
    done.write(
        "data.overlong", "drop", *[key for key in ("prompt_max_len", "max_len") if settings.says(key)], note=drop
    )
    if "ds.param_dtype" not in settings.defaults:
        done.write("data.max_prompt_tokens", settings.whole("prompt_max_len"), "prompt_max_len")
        done.write("rollout.max_tokens", settings.whole("generate_max_len"), "generate_max_len")
        if settings.says("max_len"):
            done.ignore("max_len", "prompt_max_len and generate_max_len rule")
        return
    whole, new = settings.whole("max_len"), "rollout.max_new_tokens"
    if settings[new] is not None:
        done.write("rollout.max_tokens", settings.whole(new), new)
        done.write("data.max_prompt_tokens", whole - settings.whole(new), "max_len", new)
        return
    note = "prompt and response share max_len there; here each has a limit of its own, half each"
    done.write("rollout.max_tokens", whole // 2, "max_len", note=note)
    done.write("data.max_prompt_tokens", whole - whole // 2, "max_len", note=note)


def batch_rule(settings: Settings, done: Conversion) -> None:
    n, responses = settings.whole("n_samples_per_prompt"), settings.whole("train_batch_size")
    prompts = settings.whole("rollout_batch_size")
    if responses % n:
        done.refuse(
            "train_batch_size",
            f"{responses} responses are no whole number of prompts with {n} responses each",
            f"a multiple of {n}",
        )
        return
    whole = min(responses // n, prompts)
    note = (
        "all responses to a prompt are in one update; theirs are shuffled over the updates"
        if whole < prompts and n > 1
        else ""
    )
    if responses // n > prompts:
        note = f"{responses} responses are more than the step has: one update"
    done.write("batch.prompts_per_update", whole, "train_batch_size", note=note)
    if "rollout.max_tokens" not in done.recipe:
        return  # refused before
    longest = done.recipe["data.max_prompt_tokens"].value + done.recipe["rollout.max_tokens"].value
    if settings["use_dynamic_batch"]:
        tokens = max(settings.whole("train_max_tokens_per_gpu"), longest)
        done.write("batch.tokens", tokens, "train_max_tokens_per_gpu", "use_dynamic_batch")
        if settings.says("micro_train_batch_size"):
            done.ignore("micro_train_batch_size", "tokens are counted instead")
        return
    if settings.says("train_max_tokens_per_gpu"):
        done.ignore("train_max_tokens_per_gpu", "read with dynamic batches only")
    rows = settings.whole("micro_train_batch_size")
    if settings["packing_samples"]:
        done.write("batch.tokens", rows * longest, "micro_train_batch_size", "packing_samples")
    else:
        done.write("batch.rows", rows, "micro_train_batch_size")


def reward_rule(settings: Settings, done: Conversion) -> None:
    remote, model = settings["remote_rm_url"], settings["reward_pretrain"]
    if remote:
        _remote(settings, done, str(remote))
        if model:
            done.ignore("reward_pretrain", "remote_rm_url rules, there too")
    elif not model:
        done.refuse("reward_pretrain", "neither a reward model nor --remote_rm_url is set", "name one")
    elif "," in model:
        done.refuse("reward_pretrain", "one reward model is used", "name one, or add them up in a reward.function")
    else:
        done.write("reward.model", model, "reward_pretrain")
    if settings["normalize_reward"]:
        if model and not remote:
            done.fates["normalize_reward"] = (
                "changed",
                "by score_stats.json of the model's folder; write it from `mean` and `std` of its config.json",
            )
        else:
            done.ignore("normalize_reward", "the scores of a function or an endpoint are taken as they are, there too")
    name, clip = settings["advantage_estimator"], settings["reward_clip_range"]
    if name not in _GROUPS:
        done.write("reward.clip", [float(clip[0]), float(clip[1])], "reward_clip_range")
    elif settings.says("reward_clip_range"):
        done.ignore(
            "reward_clip_range", "there it bounds what is left after the group's comparison, which hardly reaches it"
        )
    if settings["overlong_buffer_len"]:
        done.write("algorithm.overlong.buffer", settings.whole("overlong_buffer_len"), "overlong_buffer_len")
        done.write("algorithm.overlong.factor", settings.number("overlong_penalty_factor"), "overlong_penalty_factor")
    if settings["reward.stop_properly_penalty_coef"] is not None:
        cut = "reward.stop_properly_penalty_coef"
        done.write("algorithm.overlong.cut", settings.number(cut), cut)
    if name == "gae":
        path = settings["critic_pretrain"] or (settings["pretrain"] if remote else model)
        done.write("critic.path", str(path).split(",")[0], "critic_pretrain")
        done.write("critic.lr", settings.number("critic_learning_rate"), "critic_learning_rate")
        done.write("critic.clip", settings.number("value_clip"), "value_clip")
        done.write("critic.warmup", max(0, settings.whole("freezing_actor_steps")), "freezing_actor_steps")
    else:
        for key in ("critic_pretrain", "critic_learning_rate", "value_clip", "freezing_actor_steps"):
            if settings.says(key):
                done.ignore(key, "the estimator has no critic")


def _remote(settings: Settings, done: Conversion, remote: str) -> None:
    """A file's function, or endpoints."""
    note = "a query is the prompt's text and the response, without the marks of a chat template; one response at a time"
    if remote.endswith(".py"):
        done.write("reward.function", f"{remote}:reward_func", "remote_rm_url", note=note)
        return
    addresses = [address.strip() for address in remote.split(",") if address.strip()]
    queries = "a query is the prompt's text and the response, without the marks of a chat template"
    done.write("reward.remote", addresses if len(addresses) > 1 else addresses[0], "remote_rm_url", note=queries)
    done.write("reward.remote_form", "openrlhf", "remote_rm_url")


def validation_rule(settings: Settings, done: Conversion) -> None:
    if not settings["eval_dataset"] or settings.whole("eval_steps") <= 0:
        for key in ("eval_dataset", "eval_split", "eval_steps", "eval_temperature", "eval_n_samples_per_prompt"):
            if settings.says(key):
                done.ignore(key, "without a data set and eval_steps nothing is validated")
        return
    paths = [source["path"] for source in sources(settings["eval_dataset"], None, settings["eval_split"])]
    done.write("val.questions", paths if len(paths) > 1 else paths[0], "eval_dataset")
    done.write("val.every", settings.whole("eval_steps"), "eval_steps")
    done.write("val.temperature", settings.number("eval_temperature"), "eval_temperature")
    done.write("val.n", settings.whole("eval_n_samples_per_prompt"), "eval_n_samples_per_prompt")
    if "rollout.max_tokens" in done.recipe:
        done.write("val.max_new_tokens", done.recipe["rollout.max_tokens"].value, "eval_dataset")


RULES_IN_ORDER: tuple[KeyRule, ...] = (
    run_rule,
    algorithm_rule,
    data_and_model_rule,
    batch_rule,
    reward_rule,
    validation_rule,
)
FLAT = {"prompt_max_len": 1024, "generate_max_len": 1024, "micro_train_batch_size": 4, "value_clip": 0.2}
DOTTED = {"max_len": 2048, "micro_train_batch_size": 1, "value_clip": 0.5}
