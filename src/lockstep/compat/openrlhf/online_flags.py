"""OpenRLHF's `train_ppo_ray`, flag by flag: what each becomes. What flags decide together is in `online.py`."""

from __future__ import annotations

from lockstep.compat.openrlhf.options import Option, cannot, opt, without_effect
from lockstep.compat.openrlhf.shared import BALANCED, SHARED
from lockstep.compat.table import other, part, same

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
    opt(
        "b",
        None,
        "algo.kl.unbiased_gradient",
        part("algo.kl.unbiased_gradient", "algorithm.kl.weighted", default=False, note="with use_loss"),
    ),
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
        "f*",
        None,
        "algo.advantage.is_correction_threshold",
        part(
            "algo.advantage.is_correction_threshold",
            "algorithm.correction.cap",
            "algorithm.correction.reject",
            default=[0.5, 5.0],
        ),
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
    opt(
        "s",
        None,
        "algo.advantage.is_correction_gating",
        part("algo.advantage.is_correction_gating", "algorithm.correction.reject", default="ratio"),
    ),
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
    opt("f", None, "actor.aux_loss_coef", other("aux_loss_coef", "model.aux_loss_coef", BALANCED, 0.0)),
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
    opt("b", "async_train", "train.async_enable", part("async_train", "rollout.max_staleness", default=False)),
    opt(
        "i",
        "async_queue_size",
        "train.async_queue_size",
        part("async_queue_size", "rollout.max_staleness", default=1, note="with async training"),
    ),
    *cannot("b::train.partial_rollout_enable", "a response is drawn to its end by the weights that began it"),
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
