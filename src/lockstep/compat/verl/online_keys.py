"""verl's `main_ppo`, key by key: what each becomes. Keys that decide together are worked out in `online.py`."""

from __future__ import annotations

from lockstep.compat.table import KeyRow, idle, other, part, refused, same
from lockstep.compat.verl import correction
from lockstep.compat.verl.shared import TRAINER_ROWS, checkpoint_rows, lora_rows

A, F, M, R = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "model", "rollout"))

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
    part("algorithm.use_pf_ppo", "algorithm.filtration.method", default=False, note="with gae, as there"),
    part("algorithm.pf_ppo.reweight_method", "algorithm.filtration.method", default="pow", note="with use_pf_ppo"),
    part("algorithm.pf_ppo.weight_pow", "algorithm.filtration.power", default=2.0, note="with use_pf_ppo"),
    part("algorithm.gdpo_reward_keys", "algorithm.gdpo_rewards", note="of the numbers that your function returns"),
    part("algorithm.gdpo_reward_weights", "algorithm.gdpo_rewards", note="1 for each where nothing is said"),
    part(correction.WEIGHT, "algorithm.correction.weight", "algorithm.ratio_of"),
    part(correction.BOUND, "algorithm.correction.cap", default=2.0, note="lower_upper: zero out of the band"),
    part(correction.REJECT, "algorithm.correction.reject", note="criteria with commas, all of which must hold"),
    part(correction.BOUNDS, "algorithm.correction.reject", note="of k1 they are of the engine's over the trainer's"),
    part(correction.BYPASS, "algorithm.correction.bypass", default=False),
    part(correction.NORMALIZE, "algorithm.correction.normalize", default=False),
    part(correction.LOSS, "algorithm.loss", default="ppo_clip", note="with bypass_mode; reinforce: loss importance"),
    part("algorithm.filter_groups.enable", "algorithm.dynamic_sampling.rounds", default=False),
    part("algorithm.filter_groups.max_num_gen_batches", "algorithm.dynamic_sampling.rounds", default=0),
    part(
        "algorithm.filter_groups.metric", "algorithm.dynamic_sampling.metric", note="score and reward: the whole score"
    ),
    part(f"{A}.policy_loss.loss_mode", "algorithm.loss", default="vanilla"),
    part(f"{A}.loss_agg_mode", "algorithm.aggregation", "algorithm.penalty_aggregation", default="token-mean"),
    part(f"{A}.loss_scale_factor", note="must be max_response_length, by which the sums are divided"),
    part(f"{A}.clip_ratio_low", "algorithm.clip_low", default=0.2),
    part(f"{A}.clip_ratio_high", "algorithm.clip_high", default=0.2),
    *idle(f"{A}.clip_ratio", "clip_ratio_low and clip_ratio_high rule, with defaults of their own (0.2)"),
    part(
        f"{A}.clip_ratio_c",
        "algorithm.dual_clip",
        "algorithm.ratio_cap",
        default=3.0,
        note="of the vanilla loss; of dppo_tv and dppo_kl the largest weight",
    ),
    part(f"{A}.policy_loss.clip_cov_ratio", "algorithm.cov_share", default=0.0002),
    part(f"{A}.policy_loss.clip_cov_lb", "algorithm.cov_low", default=1.0),
    part(f"{A}.policy_loss.clip_cov_ub", "algorithm.cov_high", default=5.0),
    part(f"{A}.policy_loss.kl_cov_ratio", "algorithm.cov_share", default=0.0002),
    part(f"{A}.policy_loss.ppo_kl_coef", "algorithm.cov_kl", default=0.1, note="0.1 there, 1 here"),
    part(f"{A}.policy_loss.dro_beta", "algorithm.dro_beta", note="of dro, which asks for it"),
    part(f"{A}.loss_scale_factor", note="of seq-mean-token-sum-norm: the longest response here"),
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
    part("data.apply_chat_template_kwargs.*", "data.template_arguments", note="for every prompt of the run"),
    *refused("data.custom_cls.*", "write data.reader, a function that yields the rows"),
    *refused("data.sampler.* data.datagen.*", "rows come in a seeded order or in their own; sort the file instead"),
    # Model and optimiser
    part(f"{M}.path", "model.path"),
    part(f"{M}.use_remove_padding", "batch.tokens", note="packed micro-batches"),
    same(f"{M}.enable_gradient_checkpointing", "model.gradient_checkpointing", True, convert=bool),
    same(f"{M}.enable_activation_offload", "model.activation_offload", False, "the critic's too", convert=bool),
    *lora_rows(M),
    *idle(
        f"{M}.use_liger {M}.use_fused_kernels {M}.fused_kernel_options.* {M}.tiled_mlp.* {M}.use_shm {M}.torch_dtype "
        f"{M}.hf_config_path {A}.use_fused_kernels {A}.use_torch_compile "
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
    part("critic.loss_agg_mode", "critic.aggregation", note="as the policy's where nothing is said"),
    part("trainer.critic_warmup", "critic.warmup", default=0, note="they count the step that ends it: one less here"),
    *idle("critic.optim.*", "the schedule, decay and clip of the critic are the policy's"),
    *idle(
        "critic.model.* critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu "
        "critic.ppo_max_token_len_per_gpu "
        "critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu critic.forward_max_token_len_per_gpu "
        "critic.use_dynamic_bsz critic.ulysses_sequence_parallel_size critic.rollout_n critic.enable critic.grad_clip "
        "critic.ppo_epochs critic.ppo_mini_batch_size critic.shuffle",
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
    part("custom_reward_function.reward_kwargs.*", "reward.arguments"),
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
