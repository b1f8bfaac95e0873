"""verl's `main_ppo`: GRPO, PPO, RLOO, ReMax, REINFORCE++, GSPO, CISPO, SAPO, GPG, DAPO."""

from __future__ import annotations

from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, KeyRow, KeyRule, idle, other, part, refused, same
from lockstep.compat.verl.shared import (
    TRAINER_ROWS,
    checkpoint_rows,
    files,
    keep_rule,
    lora_rows,
    lora_rule,
    precision_rule,
    trainer_rule,
)

A, F, M, R = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "model", "rollout"))

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
}
# These losses are averaged over sequences whatever loss_agg_mode says.
_BY_SEQUENCE = ("gspo", "sapo", "geo_mean")
_CLIPPED = ("clip", "gspo", "cispo", "geo_mean", "clip_cov")
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
# Their rules by data source that are also ours.
RULES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}
SPEED = "memory and speed, not results"
PASS = "how the pass is cut into pieces: one division over all of it, so no number changes"
MEGATRON = "Megatron's layout of the model over devices does not exist here; the FSDP form of the script converts"
IMAGES = "rows with images are not trained here"
TURNS = "tools and turns of verl's own do not run here; write the loop as rollout.function"

ROWS: list[KeyRow] = [
    # What is estimated and minimised
    part("algorithm.adv_estimator", "method", "algorithm.advantage", default="gae"),
    part("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage", default=True, note="False: advantage dr_grpo"),
    same("algorithm.gamma", "algorithm.gamma", 1.0, convert=float),
    part("algorithm.lam", "algorithm.lam", default=1.0, note="of gae"),
    part("algorithm.use_kl_in_reward", "algorithm.kl.where", default=False),
    part("algorithm.kl_penalty", "algorithm.kl.estimator", default="kl", note="with use_kl_in_reward"),
    part("algorithm.kl_ctrl.type", "algorithm.kl.target", default="fixed", note="adaptive: target and horizon count"),
    part("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient", default=0.001, note="with use_kl_in_reward"),
    part("algorithm.kl_ctrl.horizon", "algorithm.kl.horizon", default=10000, note="when adaptive"),
    part("algorithm.kl_ctrl.target_kl", "algorithm.kl.target", default=0.1, note="when adaptive"),
    *refused("algorithm.use_pf_ppo", "resampling responses by their reward (PF-PPO) is not here"),
    *idle("algorithm.pf_ppo.*", "read with use_pf_ppo only"),
    part("algorithm.rollout_correction.rollout_is", "algorithm.correction.weight"),
    part("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction.cap", default=2.0),
    *refused(
        "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold",
        "rejection by its k1, k2 and k3 criteria is not here; algorithm.correction.mask rejects by a band of ratios",
    ),
    *refused("algorithm.rollout_correction.bypass_mode", "old log-probs are always the trainer's own here"),
    *refused("algorithm.rollout_correction.rollout_is_batch_normalize", "weights are not divided by their mean here"),
    *idle("algorithm.rollout_correction.loss_type", "read with bypass_mode only"),
    part("algorithm.filter_groups.enable", "algorithm.dynamic_sampling.rounds", default=False),
    part("algorithm.filter_groups.max_num_gen_batches", "algorithm.dynamic_sampling.rounds", default=0),
    *idle("algorithm.filter_groups.metric", "a group is replaced when all its rewards are equal"),
    part(f"{A}.policy_loss.loss_mode", "algorithm.loss", default="vanilla"),
    part(f"{A}.loss_agg_mode", "algorithm.aggregation", default="token-mean"),
    part(f"{A}.clip_ratio_low", "algorithm.clip_low", default=0.2),
    part(f"{A}.clip_ratio_high", "algorithm.clip_high", default=0.2),
    *idle(f"{A}.clip_ratio", "clip_ratio_low and clip_ratio_high rule, with defaults of their own (0.2)"),
    part(f"{A}.clip_ratio_c", "algorithm.dual_clip", default=3.0, note="of the vanilla loss"),
    part(f"{A}.policy_loss.clip_cov_ratio", "algorithm.cov_share", default=0.0002),
    part(f"{A}.policy_loss.clip_cov_lb", "algorithm.cov_low", default=1.0),
    part(f"{A}.policy_loss.clip_cov_ub", "algorithm.cov_high", default=5.0),
    part(f"{A}.policy_loss.kl_cov_ratio", "algorithm.cov_share", default=0.0002),
    part(f"{A}.policy_loss.ppo_kl_coef", "algorithm.cov_kl", default=0.1, note="0.1 there, 1 here"),
    part(f"{A}.tau_pos", "algorithm.sapo_positive", default=1.0),
    part(f"{A}.tau_neg", "algorithm.sapo_negative", default=1.05),
    part(f"{A}.policy_loss.tau_pos", "algorithm.sapo_positive"),
    part(f"{A}.policy_loss.tau_neg", "algorithm.sapo_negative"),
    same(f"{A}.entropy_coeff", "algorithm.entropy", 0.0, convert=float),
    part(f"{A}.use_kl_loss", "algorithm.kl.where", default=False),
    part(f"{A}.kl_loss_coef", "algorithm.kl.coefficient", default=0.001, note="with use_kl_loss"),
    part(f"{A}.kl_loss_type", "algorithm.kl.estimator", default="low_var_kl", note="with use_kl_loss"),
    same(f"{A}.ppo_epochs", "algorithm.epochs", 1, convert=int),
    *refused(f"{A}.shuffle", "prompts of a step keep their order over its updates"),
    # Rows
    part("data.train_files", "data.train"),
    part("data.val_files", "val.questions"),
    part("data.train_batch_size", "batch.prompts", default=1024),
    *idle("data.gen_batch_size", "rounds of dynamic sampling take the prompts that the step still lacks"),
    *idle("data.val_batch_size", "questions are answered as many at once as fit"),
    same("data.max_prompt_length", "data.max_prompt_tokens", 512, convert=int),
    part("data.max_response_length", "rollout.max_tokens", "val.max_new_tokens", default=512),
    part("data.filter_overlong_prompts", "data.overlong", default=False),
    part("data.truncation", "data.overlong", default="error"),
    part("data.prompt_key", note="the column is called prompt here", default="prompt"),
    part("data.reward_fn_key", note="the column is called data_source here", default="data_source"),
    same("data.shuffle", "data.shuffle", True, convert=bool),
    part("data.seed", "run.seed"),
    *idle(
        "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.return_multi_modal_inputs "
        "data.dataloader_num_workers data.use_shm data.filter_overlong_prompts_workers data.validation_shuffle "
        "data.tokenizer",
        "plumbing",
    ),
    *idle(
        f"data.trust_remote_code {M}.trust_remote_code critic.model.trust_remote_code "
        "reward_model.model.trust_remote_code",
        "code that comes with a model is never run; a model that needs it is refused when it is loaded",
    ),
    *refused("data.image_key data.video_key", IMAGES, off=(None,)),
    *refused("data.apply_chat_template_kwargs.*", "the chat template is rendered without arguments of its own"),
    *refused("data.custom_cls.*", "write data.reader, a function that yields the rows"),
    *refused("data.sampler.* data.datagen.*", "rows come in a seeded order or in their own; sort the file instead"),
    # Model and optimiser
    part(f"{M}.path", "model.path"),
    part(f"{M}.use_remove_padding", "batch.tokens", note="packed micro-batches"),
    same(f"{M}.enable_gradient_checkpointing", "model.gradient_checkpointing", True, convert=bool),
    *lora_rows(M),
    *idle(
        f"{M}.use_liger {M}.use_fused_kernels {M}.fused_kernel_options.* {M}.tiled_mlp.* {M}.use_shm {M}.torch_dtype "
        f"{M}.enable_activation_offload {M}.hf_config_path {A}.use_fused_kernels {A}.use_torch_compile "
        f"{A}.entropy_from_logits_with_chunking {A}.entropy_checkpointing {A}.calculate_sum_pi_squared "
        f"{A}.use_prefix_grouper {A}.use_remove_padding {A}.data_loader_seed",
        f"{SPEED}: the output head is run in chunks, fused kernels are chosen by model.attention",
    ),
    *refused(f"{M}.external_lib", "code that is imported for its side effects"),
    *refused(f"{M}.override_config.*", "a model is taken as its config.json says; edit that file"),
    *refused(
        f"{M}.custom_chat_template {M}.tokenizer_path", "put the template or the tokenizer into the model's folder"
    ),
    *refused(f"{M}.mtp.*", "heads that predict several tokens are not trained here", off=(None, False)),
    *refused(f"{A}.freeze_vision_tower", IMAGES),
    *refused(
        f"{A}.router_replay.* {R}.enable_rollout_routing_replay",
        "experts are not replayed",
        off=(None, False, "disabled"),
    ),
    part(f"{A}.optim.lr", "optim.lr", default=1e-6),
    part(f"{A}.optim.lr_warmup_steps", "optim.warmup", default=-1),
    part(f"{A}.optim.lr_warmup_steps_ratio", "optim.warmup", default=0.0),
    part(f"{A}.optim.warmup_style", "optim.schedule", default="constant"),
    part(f"{A}.optim.lr_scheduler_type", "optim.schedule", default="constant"),
    part(f"{A}.optim.lr_decay_style", "optim.schedule"),
    part(f"{A}.optim.min_lr_ratio", "optim.min_lr_ratio", default=0.0, note="of cosine"),
    *refused(f"{A}.optim.num_cycles", "the cosine has half a cycle", off=(None, 0.5)),
    *refused(
        f"{A}.optim.optimizer {A}.optim.optimizer_impl", "AdamW is the optimizer", off=(None, "AdamW", "torch.optim")
    ),
    *idle(f"{A}.optim.total_training_steps", "the run's own steps"),
    same(f"{A}.optim.weight_decay", "optim.weight_decay", 0.01, "on biases and norms too", convert=float),
    part(f"{A}.optim.betas", "optim.betas", default=[0.9, 0.999]),
    part(f"{A}.optim.clip_grad", "optim.clip"),
    part(f"{A}.grad_clip", "optim.clip", default=1.0),
    part(f"{A}.ppo_mini_batch_size", "batch.prompts_per_update", default=256),
    part(f"{A}.ppo_micro_batch_size", "batch.rows"),
    part(f"{A}.ppo_micro_batch_size_per_gpu", "batch.rows", "batch.tokens"),
    part(f"{A}.use_dynamic_bsz", "batch.tokens", default=False),
    part(f"{A}.ppo_max_token_len_per_gpu", "batch.tokens", default=16384, note="with use_dynamic_bsz"),
    part(f"{A}.fsdp_config.model_dtype", "model.master_weights", default="fp32"),
    part(f"{A}.fsdp_config.dtype", "model.dtype"),
    part(f"{A}.fsdp_config.mixed_precision.param_dtype", "model.dtype"),
    *idle(
        f"{A}.fsdp_config.mixed_precision.reduce_dtype {A}.fsdp_config.mixed_precision.buffer_dtype",
        "gradients are added up in fp32",
    ),
    *refused(f"{A}.strategy {F}.strategy critic.strategy", MEGATRON, off=(None, "fsdp", "fsdp2", "veomni")),
    *idle(
        f"{A}.fsdp_config.* {F}.fsdp_config.* {F}.strategy {F}.use_torch_compile {F}.entropy_from_logits_with_chunking "
        f"{F}.entropy_checkpointing",
        f"{SPEED}: offloading and sharding; `lockstep plan` says whether it fits",
    ),
    *idle(
        f"{A}.ulysses_sequence_parallel_size {F}.ulysses_sequence_parallel_size", f"{SPEED}: the sequence stays whole"
    ),
    *idle(
        f"{F}.log_prob_micro_batch_size {F}.log_prob_micro_batch_size_per_gpu {F}.log_prob_use_dynamic_bsz "
        f"{F}.log_prob_max_token_len_per_gpu {R}.log_prob_micro_batch_size {R}.log_prob_micro_batch_size_per_gpu "
        f"{R}.log_prob_use_dynamic_bsz {R}.log_prob_max_token_len_per_gpu",
        PASS,
    ),
    *refused(f"{F}.model.path {F}.model", "the reference is the model that training starts from", off=(None,)),
    *idle(
        f"{A}.checkpoint.* critic.checkpoint.*", "a checkpoint holds weights, optimizer and position; export/ the model"
    ),
    *idle(
        f"{A}.profiler.* {F}.profiler.* {R}.profiler.* critic.profiler.* reward_model.profiler.*",
        "timing_s/* are always measured",
    ),
    *refused(f"{A}.megatron.* {F}.megatron.* critic.megatron.* reward_model.megatron.*", MEGATRON, off=()),
    *refused(f"{A}.optim.override_optimizer_config.* critic.optim.override_optimizer_config.*", MEGATRON, off=()),
    *idle(
        "actor_rollout_ref.hybrid_engine actor_rollout_ref.nccl_timeout", "one set of weights, one group of processes"
    ),
    # Generation
    part(f"{R}.name", "rollout.engine", default="vllm"),
    *idle(f"{R}.mode", "the engine runs in the trainer's own processes"),
    same(f"{R}.n", "rollout.n", 1, convert=int),
    same(f"{R}.temperature", "rollout.temperature", 1.0, convert=float),
    part(f"{R}.top_p", "rollout.top_p", default=1.0),
    part(f"{R}.top_k", "rollout.top_k", default=-1, note="-1 there is 0 here"),
    *refused(f"{R}.do_sample", "a policy that always answers alike has nothing to compare", off=(None, True)),
    *refused(f"{R}.ignore_eos", "a response ends at the end token"),
    *refused(f"{R}.over_sample_rate", "every response is awaited", off=(None, 0, 0.0)),
    *refused(f"{R}.multi_turn.enable {R}.multi_turn.tool_config_path {R}.multi_turn.interaction_config_path", TURNS),
    *idle(f"{R}.multi_turn.*", "read where tools or turns are switched on"),
    *idle(f"{R}.agent.num_workers {R}.agent.default_agent_loop", "one engine a process"),
    *refused(f"{R}.agent.*", TURNS),
    *refused(f"{R}.quantization", "weights are not quantised for generation"),
    *refused(f"{R}.skip_rollout {R}.skip.enable", "responses are drawn anew"),
    *idle(f"{R}.skip_dump_dir {R}.skip.*", "read with skip only"),
    other(f"{R}.max_num_seqs", "rollout.max_sequences", "of the built-in engine: how many are decoded at once"),
    other(f"{R}.max_num_batched_tokens", "rollout.prefill_tokens", "of the built-in engine: prompt tokens of one pass"),
    same(f"{R}.free_cache_engine", "rollout.free_cache", convert=bool),
    *idle(
        f"{R}.tensor_model_parallel_size {R}.data_parallel_size {R}.expert_parallel_size "
        f"{R}.pipeline_model_parallel_size {R}.gpu_memory_utilization {R}.enforce_eager {R}.enable_chunked_prefill "
        f"{R}.enable_prefix_caching {R}.max_model_len {R}.load_format {R}.layered_summon {R}.disable_log_stats "
        f"{R}.multi_stage_wake_up {R}.cudagraph_capture_sizes {R}.engine_kwargs.* {R}.dtype {R}.prompt_length "
        f"{R}.response_length {R}.update_weights_bucket_megabytes {R}.checkpoint_engine.* {R}.skip_tokenizer_init "
        f"{R}.calculate_log_probs {R}.logprobs_mode {R}.seed {R}.full_determinism {R}.trace.* {R}.prometheus.* "
        f"{R}.nnodes {R}.n_gpus_per_node",
        "of the engine: the built-in one generates with the weights that are trained, with a cache by its own measure "
        "(rollout.cache_gb)",
    ),
    part(f"{R}.val_kwargs.n", "val.n", default=1),
    part(f"{R}.val_kwargs.do_sample", "val.temperature", default=False),
    part(f"{R}.val_kwargs.temperature", "val.temperature", default=0.0, note="with do_sample"),
    part(f"{R}.val_kwargs.top_p", "val.top_p", default=1.0),
    part(f"{R}.val_kwargs.top_k", "val.top_k", default=-1),
    # Critic
    part("critic.model.path", "critic.path"),
    part("critic.optim.lr", "critic.lr", default=1e-5),
    part("critic.cliprange_value", "critic.clip", default=0.5),
    part("trainer.critic_warmup", "critic.warmup", default=0, note="they count the step that ends it: one less here"),
    *idle("critic.optim.*", "the schedule, decay and clip of the critic are the policy's"),
    *idle(
        "critic.model.* critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu "
        "critic.ppo_max_token_len_per_gpu "
        "critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu critic.forward_max_token_len_per_gpu "
        "critic.use_dynamic_bsz critic.ulysses_sequence_parallel_size critic.rollout_n critic.enable critic.grad_clip "
        "critic.ppo_epochs critic.ppo_mini_batch_size critic.loss_agg_mode critic.shuffle",
        "the critic is trained as the policy is",
    ),
    # Rewards
    part("reward_model.enable", "reward.model", default=False),
    part("reward_model.model.path", "reward.model"),
    *idle("reward_model.model.input_tokenizer", "the reward model's own chat template renders its input"),
    *idle(
        "reward_model.model.* reward_model.micro_batch_size reward_model.micro_batch_size_per_gpu "
        "reward_model.max_length reward_model.use_dynamic_bsz reward_model.forward_max_token_len_per_gpu "
        "reward_model.strategy reward_model.ulysses_sequence_parallel_size reward_model.rollout.* "
        "reward_model.use_reward_loop reward_model.num_workers reward_model.enable_resource_pool "
        "reward_model.n_gpus_per_node reward_model.nnodes reward_model.launch_reward_fn_async",
        "placement of the reward model: it shares the devices of the policy",
    ),
    part("reward_model.reward_manager", "algorithm.overlong.buffer", default="naive", note="naive and dapo"),
    part("reward_model.reward_kwargs.overlong_buffer_cfg.enable", "algorithm.overlong.buffer", default=False),
    part("reward_model.reward_kwargs.overlong_buffer_cfg.len", "algorithm.overlong.buffer", default=0),
    part("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", "algorithm.overlong.factor", default=1.0),
    *idle("reward_model.reward_kwargs.overlong_buffer_cfg.log", "the part is always in the samples and metrics"),
    part(
        "reward_model.reward_kwargs.max_resp_len", "algorithm.overlong.buffer", note="rollout.max_tokens is the limit"
    ),
    *refused(
        "reward_model.sandbox_fusion.url",
        "code is not run in a sandbox of others; write reward.function or reward.remote",
    ),
    *idle("reward_model.sandbox_fusion.*", "read with its url only"),
    part("custom_reward_function.path", "reward.function"),
    part("custom_reward_function.name", "reward.function", default="compute_score"),
    *refused(
        "custom_reward_function.reward_kwargs.*", "a reward function gets no arguments besides; set them in its file"
    ),
    # The run
    *TRAINER_ROWS,
    *checkpoint_rows("trainer.max_actor_ckpt_to_keep"),
    *idle("trainer.max_critic_ckpt_to_keep", "policy and critic are saved together"),
    part("trainer.test_freq", "val.every", default=-1),
    part("trainer.val_before_train", "val.at_start", default=True),
    *refused("trainer.val_only", "use `lockstep eval MODEL DATA`"),
    part(
        "trainer.log_val_generations", "log.samples", note="answers of a validation are always stored in samples.jsonl"
    ),
    *idle("trainer.rollout_data_dir trainer.validation_data_dir", "samples.jsonl in the run's folder holds responses"),
    *refused("trainer.v1.trainer_mode", "generation and training take turns", off=(None, "sync")),
]
# 0.9 spells some keys otherwise; a command in its words is read in these.
RENAMED = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_model.": "reward_model.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.sandbox_fusion.": "reward_model.sandbox_fusion.",
    "reward_manager.name": "reward_model.reward_manager",
}


def algorithm_rule(settings: Settings, done: Conversion) -> None:
    name = settings["algorithm.adv_estimator"]
    if name not in ESTIMATORS:
        done.refuse("algorithm.adv_estimator", f"{name} is not here", f"one of {', '.join(ESTIMATORS)}")
        return
    method, advantage = ESTIMATORS[name]
    done.write("method", method, "algorithm.adv_estimator")
    if advantage == "grpo" and not settings["algorithm.norm_adv_by_std_in_grpo"]:
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
    kind = settings["algorithm.rollout_correction.rollout_is"]
    if kind in ("token", "sequence"):
        done.write("algorithm.correction.weight", kind, "algorithm.rollout_correction.rollout_is")
        threshold = "algorithm.rollout_correction.rollout_is_threshold"
        done.write("algorithm.correction.cap", settings.number(threshold), threshold)
    elif kind is not None:
        done.refuse("algorithm.rollout_correction.rollout_is", f"{kind} is not here", "token, sequence or null")
    if settings["algorithm.filter_groups.enable"]:
        rounds = settings.whole("algorithm.filter_groups.max_num_gen_batches") or 10
        keys = ("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches")
        note = (
            "groups whose rewards are all equal are replaced; when the rounds are used up the step is filled with them"
        )
        done.write("algorithm.dynamic_sampling.rounds", rounds, *keys, note=note)


def _loss(settings: Settings, done: Conversion) -> None:
    mode = settings[f"{A}.policy_loss.loss_mode"]
    if mode not in LOSSES:
        done.refuse(f"{A}.policy_loss.loss_mode", f"{mode} is not here", f"one of {', '.join(LOSSES)}")
        return
    loss = LOSSES[mode]
    done.write("algorithm.loss", loss, f"{A}.policy_loss.loss_mode")
    aggregation = f"{A}.loss_agg_mode"
    if mode in _BY_SEQUENCE:
        note = f"{mode} is a mean over sequences there too; here the KL and entropy terms follow it"
        done.write("algorithm.aggregation", "seq_mean_token_mean", f"{A}.policy_loss.loss_mode", aggregation, note=note)
    elif settings[aggregation] in AGGREGATIONS:
        done.write("algorithm.aggregation", AGGREGATIONS[settings[aggregation]], aggregation)
    else:
        done.refuse(aggregation, f"{settings[aggregation]} is not here", f"one of {', '.join(AGGREGATIONS)}")
    if loss in _CLIPPED:
        done.write("algorithm.clip_low", settings.number(f"{A}.clip_ratio_low"), f"{A}.clip_ratio_low")
        done.write("algorithm.clip_high", settings.number(f"{A}.clip_ratio_high"), f"{A}.clip_ratio_high")
    if loss == "clip":
        done.write("algorithm.dual_clip", settings.number(f"{A}.clip_ratio_c"), f"{A}.clip_ratio_c")
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


def data_rule(settings: Settings, done: Conversion) -> None:
    if settings["data.train_files"] is None:
        done.refuse("data.train_files", "is not set, and verl's default is a folder of its authors'", "name the rows")
        return
    done.write("data.train", files(settings["data.train_files"]), "data.train_files")
    done.write("data.drop_last", True)
    for key, name in (("data.prompt_key", "prompt"), ("data.reward_fn_key", "data_source")):
        if settings[key] != name:
            done.refuse(key, f"the column {settings[key]} must be called {name}", "rename the column")
        elif settings.says(key):
            done.ignore(key, f"the column is called {name} here too")
    keys = ("data.filter_overlong_prompts", "data.truncation")
    if settings[keys[0]]:
        done.write("data.overlong", "drop", keys[0])
        if settings.says(keys[1]):
            done.ignore(keys[1], "prompts that are too long are dropped before they could be cut")
    elif settings[keys[1]] in ("error", "left"):
        done.write("data.overlong", {"error": "error", "left": "truncate_left"}[settings[keys[1]]], keys[1])
    else:
        done.refuse(keys[1], f"a prompt cut on the {settings[keys[1]]} asks something else", "error or left")
    if settings["data.seed"] is not None:
        done.write("run.seed", settings.whole("data.seed"), "data.seed")


def model_rule(settings: Settings, done: Conversion) -> None:
    if settings[f"{M}.path"] is None:
        done.refuse(f"{M}.path", "is not set, and verl's default is a folder of its authors'", "name the model")
        return
    done.write("model.path", str(settings[f"{M}.path"]), f"{M}.path")
    lora_rule(settings, done, M)
    precision_rule(settings, done, (f"{A}.fsdp_config.model_dtype", f"{A}.fsdp_config.dtype"))


def optim_rule(settings: Settings, done: Conversion) -> None:
    done.write("optim.lr", settings.number(f"{A}.optim.lr"), f"{A}.optim.lr")
    done.write("optim.betas", [float(beta) for beta in settings[f"{A}.optim.betas"]], f"{A}.optim.betas")
    done.write("optim.decay_all", True, f"{A}.optim.weight_decay")
    clip = f"{A}.optim.clip_grad" if settings.says(f"{A}.optim.clip_grad") else f"{A}.grad_clip"
    done.write("optim.clip", settings.number(clip), clip)
    schedule_rule(settings, done, f"{A}.optim")


def schedule_rule(settings: Settings, done: Conversion, group: str) -> None:
    styles = [f"{group}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style", "lr_scheduler")]
    style = next((key for key in styles if settings.says(key)), next(key for key in styles if settings[key]))
    if settings[style] not in ("constant", "cosine", "wsd"):
        done.refuse(style, f"{settings[style]} is not here", "constant, cosine or wsd")
        return
    done.write("optim.schedule", settings[style], style)
    if settings[style] != "constant":
        floor = settings[f"{group}.min_lr_ratio"]
        done.write("optim.min_lr_ratio", float(floor or 0.0), f"{group}.min_lr_ratio")
    steps = settings[f"{group}.lr_warmup_steps"]
    shares = [f"{group}.lr_warmup_steps_ratio", f"{group}.warmup_steps_ratio"]
    share = next((key for key in shares if settings.says(key)), next(k for k in shares if settings[k] is not None))
    if steps is not None and int(steps) >= 0 and settings.says(f"{group}.lr_warmup_steps"):
        done.write("optim.warmup", int(steps), f"{group}.lr_warmup_steps", note="rises from lr / steps; theirs from 0")
    else:
        done.write(
            "optim.warmup",
            settings.number(share),
            share,
            note="" if not settings[share] else "rises from lr / steps; theirs from 0",
        )


def batch_rule(settings: Settings, done: Conversion) -> None:
    prompts, mini = settings.whole("data.train_batch_size"), settings.whole(f"{A}.ppo_mini_batch_size")
    done.write("batch.prompts", prompts, "data.train_batch_size")
    note = ""
    if mini > prompts:
        note = f"{mini} is more than the {prompts} prompts of a step: one update with all of them (0.4.1 refuses this)"
    done.write("batch.prompts_per_update", min(mini, prompts), f"{A}.ppo_mini_batch_size", note=note)
    _micro_batch(settings, done)
    longest = settings.whole("data.max_prompt_length") + settings.whole("data.max_response_length")
    tokens = done.recipe.get("batch.tokens")
    if tokens is not None and tokens.value < longest:
        done.refuse(
            tokens.sources[0], f"{tokens.value} tokens hold no sequence of {longest} (prompt and response)", "raise it"
        )


def _micro_batch(settings: Settings, done: Conversion) -> None:
    dynamic, most = f"{A}.use_dynamic_bsz", f"{A}.ppo_max_token_len_per_gpu"
    per_device, overall = f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_micro_batch_size"
    ulysses = f"{A}.ulysses_sequence_parallel_size"
    unread = [key for key in (per_device, overall) if settings.says(key)]
    if settings[dynamic]:
        ranks = int(settings[ulysses] or 1)
        done.write("batch.tokens", settings.whole(most) * ranks, most, dynamic, *([ulysses] if ranks > 1 else []))
        for key in unread:
            done.ignore(key, "use_dynamic_bsz counts tokens instead")
        return
    if settings.says(most):
        done.ignore(most, "read with use_dynamic_bsz only")
    if settings.says(per_device):
        rows, key = settings.whole(per_device), per_device
    elif settings[overall] is not None:
        rows, key = max(1, settings.whole(overall) // max(1, done.devices * done.nodes)), overall
    else:
        return
    if settings[f"{M}.use_remove_padding"]:
        longest = settings.whole("data.max_prompt_length") + settings.whole("data.max_response_length")
        note = f"packed: as many tokens as {rows} of the longest sequences"
        done.write("batch.tokens", rows * longest, key, f"{M}.use_remove_padding")
        done.fates.setdefault(key, ("taken", note))
    else:
        done.write("batch.rows", rows, key, f"{M}.use_remove_padding")


def rollout_rule(settings: Settings, done: Conversion) -> None:
    engine = settings[f"{R}.name"]
    if engine == "hf":
        done.write("rollout.engine", "hf", f"{R}.name")
    elif engine in ("vllm", "sglang", "trtllm"):
        note = f"the built-in engine generates, with the weights that are trained; {engine} is not started"
        done.write("rollout.engine", "native", f"{R}.name", note=note)
    else:
        done.refuse(f"{R}.name", f"{engine} is no engine here", "vllm, sglang, trtllm or hf")
    done.write("rollout.max_tokens", settings.whole("data.max_response_length"), "data.max_response_length")
    top_p, top_k = settings.number(f"{R}.top_p"), max(0, settings.whole(f"{R}.top_k"))
    done.write("rollout.top_p", top_p, f"{R}.top_p")
    done.write("rollout.top_k", top_k, f"{R}.top_k")
    if top_p < 1 or top_k:
        keys = [key for key, on in ((f"{R}.top_p", top_p < 1), (f"{R}.top_k", bool(top_k))) if on]
        done.write(
            "rollout.truncated",
            "ignore",
            *keys,
            note="as there: the trainer scores the whole distribution, so ratios are off",
        )


def validation_rule(settings: Settings, done: Conversion) -> None:
    every, start = settings.whole("trainer.test_freq"), bool(settings["trainer.val_before_train"])
    if settings["data.val_files"] is None or (every <= 0 and not start):
        if settings.says("data.val_files"):
            done.ignore("data.val_files", "nothing asks for a validation: test_freq -1, val_before_train False")
        return
    paths = files(settings["data.val_files"])
    done.write("val.questions", paths if len(paths) > 1 else paths[0], "data.val_files")
    done.write("val.at_start", start, "trainer.val_before_train")
    if every > 0:
        done.write("val.every", every, "trainer.test_freq")
    done.write("val.max_new_tokens", settings.whole("data.max_response_length"), "data.max_response_length")
    group = f"{R}.val_kwargs"
    if settings[f"{group}.do_sample"] and settings[f"{group}.temperature"]:
        done.write(
            "val.temperature", settings.number(f"{group}.temperature"), f"{group}.temperature", f"{group}.do_sample"
        )
        done.write("val.n", settings.whole(f"{group}.n"), f"{group}.n")
        done.write("val.top_p", settings.number(f"{group}.top_p"), f"{group}.top_p")
        done.write("val.top_k", max(0, settings.whole(f"{group}.top_k")), f"{group}.top_k")
    else:
        for key in settings.below(group):
            done.ignore(key, "answers are greedy without do_sample")
    if settings["trainer.log_val_generations"]:
        done.write(
            "log.samples",
            settings.whole("trainer.log_val_generations"),
            "trainer.log_val_generations",
            note="of every step; answers of a validation are stored besides",
        )


def critic_rule(settings: Settings, done: Conversion) -> None:
    if done.recipe.get("algorithm.advantage") is None or done.recipe["algorithm.advantage"].value != "gae":
        for key in (
            *settings.below("critic"),
            *(["trainer.critic_warmup"] if settings.says("trainer.critic_warmup") else []),
        ):
            done.ignore(key, "the estimator has no critic")
        return
    if settings["critic.model.path"] is None:
        done.refuse(
            "critic.model.path", "is not set, and verl's default is a folder of its authors'", "name the critic's model"
        )
        return
    note = "its head starts at zero: every value is 0 at first; theirs is drawn"
    done.write("critic.path", str(settings["critic.model.path"]), "critic.model.path", note=note)
    done.write("critic.lr", settings.number("critic.optim.lr"), "critic.optim.lr")
    done.write("critic.clip", settings.number("critic.cliprange_value"), "critic.cliprange_value")
    done.write("critic.warmup", max(0, settings.whole("trainer.critic_warmup") - 1), "trainer.critic_warmup")


def reward_rule(settings: Settings, done: Conversion) -> None:
    manager = settings["reward_model.reward_manager"]
    if manager not in ("naive", "dapo"):
        done.refuse("reward_model.reward_manager", f"{manager} is not here", "naive or dapo")
    elif settings.says("reward_model.reward_manager"):
        done.ignore("reward_model.reward_manager", "each response is scored by itself")
    if settings["custom_reward_function.path"] is not None:
        keys = ("custom_reward_function.path", "custom_reward_function.name")
        done.write("reward.function", f"{settings[keys[0]]}:{settings[keys[1]]}", *keys)
    elif not settings["reward_model.enable"]:
        done.write("reward.rules", dict(RULES))
    if settings["reward_model.enable"]:
        if settings["reward_model.model.path"] is None:
            done.refuse("reward_model.enable", "reward_model.model.path is not set", "name the reward model")
        else:
            done.write(
                "reward.model",
                str(settings["reward_model.model.path"]),
                "reward_model.model.path",
                "reward_model.enable",
            )
    group = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if settings[f"{group}.enable"]:
        done.write("algorithm.overlong.buffer", settings.whole(f"{group}.len"), f"{group}.len", f"{group}.enable")
        done.write("algorithm.overlong.factor", settings.number(f"{group}.penalty_factor"), f"{group}.penalty_factor")
        limit = "reward_model.reward_kwargs.max_resp_len"
        if settings[limit] not in (None, settings["data.max_response_length"]):
            done.refuse(limit, f"{settings[limit]} is another limit than data.max_response_length", "set both alike")
    for key in settings.below("reward_model.reward_kwargs"):
        if key not in done.fates and not any(key in written.sources for written in done.recipe.values()):
            done.ignore(
                key, "max_response_length is the limit" if settings[f"{group}.enable"] else "the overlong buffer is off"
            )


def last_rule(settings: Settings, done: Conversion) -> None:
    keep_rule(settings, done, "trainer.max_actor_ckpt_to_keep")


RULES_IN_ORDER: tuple[KeyRule, ...] = (
    trainer_rule,
    algorithm_rule,
    data_rule,
    model_rule,
    optim_rule,
    batch_rule,
    rollout_rule,
    validation_rule,
    critic_rule,
    reward_rule,
    last_rule,
)
