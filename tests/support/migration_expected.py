"""Commands of the example scripts that cannot be converted, and the settings that are in the way."""

from __future__ import annotations

REFUSED: dict[str, list[str]] = {
    "generation/run_deepseek7b_mutli_node": ["verl main_generation"],
    "generation/run_deepseek_v2_lite_math": ["verl main_generation"],
    "gmpo_trainer/test_dapo_7b_math": ["actor_rollout_ref.model.override_config.max_position_embeddings"],
    "gpg_trainer/run_qwen2-7b_math": ["batch.prompts_per_update (from actor_rollout_ref.actor.ppo_mini_batch_size)"],
    "gpg_trainer/run_qwen2-7b_math_megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "grpo_trainer/run_deepseek671b_math_megatron_80gb": [
        "actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "grpo_trainer/run_deepseek671b_math_megatron_96gb": [
        "actor_rollout_ref.actor.megatron.use_mbridge",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction",
    ],
    "grpo_trainer/run_deepseek7b_llm_math_megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "grpo_trainer/run_glm41v_9b": ["data.image_key"],
    "grpo_trainer/run_gptoss_20b": ["data.apply_chat_template_kwargs.reasoning_effort"],
    "grpo_trainer/run_minicpmo2_6": ["data.image_key", "data.custom_cls.path"],
    "grpo_trainer/run_moonlight16b_math_megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "grpo_trainer/run_qwen2-7b_math_megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "grpo_trainer/run_qwen2-7b_math_megatron_lora": [
        "actor_rollout_ref.actor.megatron.use_mbridge",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "grpo_trainer/run_qwen2-7b_math_megatron_trtllm": [
        "actor_rollout_ref.actor.megatron.use_mbridge",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
    ],
    "grpo_trainer/run_qwen2-7b_seq_balance_math_megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.param_offload",
    ],
    "grpo_trainer/run_qwen2-7b_sgl_megatron": ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"],
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora_from_adapter": ["actor_rollout_ref.model.lora_adapter_path"],
    "grpo_trainer/run_qwen2_5-7b_math_megatron_diff_tp": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "grpo_trainer/run_qwen2_5_vl-7b-megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "grpo_trainer/run_qwen2_5_vl-7b-sglang": ["data.image_key"],
    "grpo_trainer/run_qwen2_5_vl-7b": ["data.image_key"],
    "grpo_trainer/run_qwen2_5_vl-7b_freeze_vision": ["data.image_key", "actor_rollout_ref.actor.freeze_vision_tower"],
    "grpo_trainer/run_qwen2_5_vl-7b_lora": ["data.image_key", "actor_rollout_ref.model.exclude_modules"],
    "grpo_trainer/run_qwen2_5_vl-7b_seq_balance": ["data.image_key"],
    "grpo_trainer/run_qwen2_5_vl_32b_npu": ["data.image_key"],
    "grpo_trainer/run_qwen2_5_vl_3b_npu": ["data.image_key"],
    "grpo_trainer/run_qwen2_5_vl_7b_npu": ["data.image_key"],
    "grpo_trainer/run_qwen3-235b_megatron_96gb": [
        "actor_rollout_ref.actor.megatron.use_mbridge",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction",
    ],
    "grpo_trainer/run_qwen3_vl-235b-megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.param_offload",
        "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction",
    ],
    "grpo_trainer/run_qwen3_vl-30b-megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.param_offload",
        "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction",
    ],
    "grpo_trainer/run_qwen3_vl-8b-megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.param_offload",
        "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction",
    ],
    "grpo_trainer/run_qwen3moe-30b_megatron_96gb": [
        "actor_rollout_ref.model.override_config.model_config.max_position_embeddings",
        "actor_rollout_ref.actor.megatron.use_mbridge",
        "actor_rollout_ref.ref.megatron.use_dist_checkpointing",
        "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction",
    ],
    "grpo_trainer/run_qwen3moe-30b_megatron_lora": [
        "actor_rollout_ref.actor.megatron.use_mbridge",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
    ],
    "gspo_trainer/run_qwen30b_gspo": ["rollout.n"],
    "gspo_trainer/test_gspo_qwen30b_a3b_ep": [
        "actor_rollout_ref.actor.megatron.param_offload",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "mtp_trainer/test_dapo_mimo_7b_with_mtp_math_megatron": [
        "actor_rollout_ref.model.mtp.enable",
        "actor_rollout_ref.actor.megatron.param_offload",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "otb_trainer/run_qwen2_5-7b": ["algorithm.adv_estimator"],
    "ppo_trainer/run_deepseek7b_llm_pfppo": ["algorithm.use_pf_ppo"],
    "ppo_trainer/run_deepseek7b_llm_sandbox_fusion": ["reward_model.sandbox_fusion.url"],
    "ppo_trainer/run_deepseek_math_gsm8k_megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "ppo_trainer/run_deepseek_math_gsm8k_megatron_nsys": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "ppo_trainer/run_moonlight16b_a3b_gsm8k_megatron": [
        "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
        "critic.megatron.pipeline_model_parallel_size",
    ],
    "ppo_trainer/run_qwen1.5_moe_a2.7b-gsm8k_megatron": [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size",
        "critic.megatron.tensor_model_parallel_size",
    ],
    "ppo_trainer/run_qwen2-7b_math_gsm8k_megatron": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "rollout_correction/run_with_rollout_corr": [
        "algorithm.rollout_correction.bypass_mode",
        "algorithm.rollout_correction.rollout_is_batch_normalize",
    ],
    "rollout_correction/run_with_rollout_corr_multi_rs": [
        "algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_rs_threshold",
        "algorithm.rollout_correction.bypass_mode",
    ],
    "router_replay/run_qwen30_a3b_megatron_sglang": [
        "actor_rollout_ref.actor.router_replay.mode",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "router_replay/run_qwen30_a3b_megatron_vllm": [
        "actor_rollout_ref.actor.router_replay.mode",
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
    ],
    "sapo_trainer/run_qwen30b_sapo": ["rollout.n"],
    "sglang_multiturn/geo3k/run_qwen2.5-3b_geo3k_multiturn": ["actor_rollout_ref.rollout.multi_turn.tool_config_path"],
    "sglang_multiturn/geo3k/run_qwen2.5-3b_geo3k_multiturn_4xgpu": [
        "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    ],
    "sglang_multiturn/geo3k/run_qwen2.5-3b_megatron_geo3k_multiturn": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    ],
    "sglang_multiturn/gsm8k_toolcall_shaping/run_gsm8k_grpo_toolcall_shaping": [
        "data.sampler.class_name",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    ],
    "sglang_multiturn/run_qwen0.5b_gsm8k_multiturn_curriculum": [
        "data.sampler.class_name",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    ],
    "sglang_multiturn/run_qwen2.5-0.5b_gsm8k_multiturn_w_interaction": [
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
    ],
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn": [
        "actor_rollout_ref.rollout.over_sample_rate",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    ],
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn_4xgpu": [
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    ],
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn_4xgpu_server": [
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    ],
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn_server": ["actor_rollout_ref.rollout.multi_turn.tool_config_path"],
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn_vllm_fsdp": [
        "actor_rollout_ref.rollout.multi_turn.enable",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    ],
    "sglang_multiturn/run_qwen2.5-3b_gsm8k_tool_agent_mlflow": [
        "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    ],
    "sglang_multiturn/run_qwen2.5-3b_megatron_gsm8k_multiturn": [
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    ],
    "sglang_multiturn/run_qwen3-4b_gsm8k_multiturn": [
        "actor_rollout_ref.rollout.over_sample_rate",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    ],
    "sglang_multiturn/run_qwen3_4b_dapo_multiturn": [
        "data.custom_cls.path",
        "actor_rollout_ref.rollout.multi_turn.enable",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    ],
    "sglang_multiturn/search_r1_like/run_qwen2.5-3b_instruct_search_multiturn": [
        "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    ],
    "tuning/0.5b/qwen2-0.5b_grpo-lora_1_h100_fsdp_vllm": ["rollout.n (from actor_rollout_ref.rollout.n)"],
    "tuning/32b/qwen2_32B_grpo_8_h20_megatron_vllm": [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        "actor_rollout_ref.ref.megatron.param_offload",
    ],
    "quickstart, GRPO on 8 NPUs": ["actor_rollout_ref.model.path"],
    "flat 0 scripts/train_conditional_llama": ["openrlhf batch_inference"],
    "flat 1 scripts/train_conditional_llama": ["--output_key"],
    "flat 7 scripts/train_iterative_dpo_llama": ["openrlhf batch_inference"],
    "flat 8 scripts/train_iterative_dpo_llama": ["openrlhf batch_inference"],
    "flat 17 scripts/train_ppo_llama_with_remote_rm": ["--remote_rm_url"],
    "flat 18 scripts/train_ppo_llama_with_reward_fn": ["--remote_rm_url"],
    "flat 23 scripts/train_rejection_sampling_llama": ["openrlhf batch_inference"],
    "flat 24 scripts/train_rejection_sampling_llama": ["openrlhf batch_inference"],
    "flat 25 scripts/train_rejection_sampling_llama": ["--output_key"],
    "flat 29 scripts/train_sft_mixtral_lora": ["--aux_loss_coef"],
    "dotted 0 scripts/train_dapo_ray_hybrid_engine": ["--reward.remote_url"],
    "dotted 3 scripts/train_ppo_with_reward_fn": ["--reward.remote_url"],
    "dotted 4 scripts/train_prorlv2_math_hybrid_engine": ["--reward.remote_url"],
    "dotted 7 scripts/train_sft_mixtral_lora": ["--model.aux_loss_coef"],
    "dotted 8 scripts/train_vlm_math_hybrid_engine": ["--data.max_images_per_prompt", "--actor.freeze_visual_encoder"],
}
