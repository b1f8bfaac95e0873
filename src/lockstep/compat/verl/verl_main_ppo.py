"""Conversion rules of verl's `main_ppo` for data, model, optimizer, batch, rollout, validation, critic and reward."""

from __future__ import annotations

from lockstep.compat.key_table import Conversion, KeyRule
from lockstep.compat.verl.verl_agents import agents_rule
from lockstep.compat.verl.verl_algorithm import SUM_NORM, algorithm_rule
from lockstep.compat.verl.verl_async import async_rule, step_prompts
from lockstep.compat.verl.verl_megatron import (
    ACTOR,
    context_size,
    is_megatron,
    megatron_optimizer,
    megatron_precision,
    megatron_rule,
)
from lockstep.compat.verl.verl_offload import offload_keys_rule
from lockstep.compat.verl.verl_rewards import model_and_function_rule, own_rewards_rule, reward_rule
from lockstep.compat.verl.verl_rules import (
    files,
    group_rule,
    keep_rule,
    lora_rule,
    optimizer_rule,
    precision_rule,
    schedule_rule,
    trainer_rule,
)

A, M, R = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
UNSET = "is not set, and verl's default is a folder on its authors' machines"
EARLY_SCHEDULE = "the learning rate of the policy follows its schedule in these steps too; in verl the schedule waits"
FULL_RATIO = "as in verl: the trainer uses log-probs of the untruncated distribution, so ratios are inexact"


def data_rule(done: Conversion) -> None:
    if not done.require("data.train_files", "give the paths of the training files", UNSET):
        return
    done.write("data.train", files(done["data.train_files"]), "data.train_files")
    done.write("data.drop_last", True)
    for key, name in (("data.prompt_key", "prompt"), ("data.reward_fn_key", "data_source")):
        if done[key] != name:
            done.refuse(key, f"the column {done[key]} must have the name {name}", "rename the column")
        else:
            done.ignore(f"the column has the name {name} in lockstep, too", key)
    images_rule(done)
    drops, cuts = "data.filter_overlong_prompts", "data.truncation"
    if done[drops]:
        done.write("data.overlong", "drop", drops)
        done.ignore("overlong prompts are dropped, so no prompt is truncated", cuts)
    else:
        done.write_lookup("data.overlong", cuts)
    group_rule(done, "data.template_arguments", "data.apply_chat_template_kwargs")
    if done["data.seed"] is not None:
        done.write_integer("run.seed", "data.seed")


def images_rule(done: Conversion) -> None:
    """A command that names the column of images trains on them. verl trains the vision tower, unless it is frozen or
    LoRA freezes all weights."""
    column, freeze = "data.image_key", f"{A}.freeze_vision_tower"
    adapted = any(done[f"{M}.{name}"] for name in ("lora_rank", "lora.rank", "lora_adapter_path"))
    if not done.is_set(column, freeze) or done[column] is None:
        done.ignore("lockstep trains on images only if the command names their column", column, freeze)
    elif done[column] != "images":
        done.refuse(column, f"the column {done[column]} must have the name images", "rename the column")
    else:
        done.write("model.vision", "freeze" if done[freeze] or adapted else "train", column, freeze)


def model_rule(done: Conversion) -> None:
    if not done.require(f"{M}.path", "give the path of the model", UNSET):
        return
    done.write_text("model.path", f"{M}.path")
    lora_rule(done, M)
    if is_megatron(done):
        megatron_precision(done, ACTOR)
    else:
        precision_rule(done, (f"{A}.fsdp_config.model_dtype", f"{A}.fsdp_config.dtype"))


def optim_rule(done: Conversion) -> None:
    if is_megatron(done):
        megatron_optimizer(done, f"{A}.optim")
        done.ignore("Megatron's optimizer reads optim.clip_grad instead", f"{A}.grad_clip")
        return
    done.write_number("optim.lr", f"{A}.optim.lr")
    done.write("optim.betas", done.numbers(f"{A}.optim.betas"), f"{A}.optim.betas")
    done.write("optim.decay_all", True, f"{A}.optim.weight_decay")
    clip_rule(done)
    optimizer_rule(done, f"{A}.optim")
    schedule_rule(done, f"{A}.optim")


def clip_rule(done: Conversion) -> None:
    """Up to 0.7, verl reads `actor.grad_clip`. The engines of 0.8 and 0.9 read only `actor.optim.clip_grad`."""
    new, old = f"{A}.optim.clip_grad", f"{A}.grad_clip"
    if done.is_set(new) or not done.since("0.8"):
        done.write_number("optim.clip", new if done.is_set(new) else old)
        return
    done.write("optim.clip", 1.0, new)
    if done.is_set(old):
        why = (
            "the engines of verl 0.8 and 0.9 read only actor.optim.clip_grad, which is 1.0; if your verl is older, use "
        )
        done.ignore(f"{why}`lockstep migrate --peer-version 0.7`", old)


def batch_rule(done: Conversion) -> None:
    (prompts, keys), mini = step_prompts(done), done.integer(f"{A}.ppo_mini_batch_size")
    done.write("batch.prompts", prompts, *keys)
    note = f"{mini} is more than the {prompts} prompts of a step, so a step has one update (verl 0.4.1 refuses this)"
    done.write(
        "batch.prompts_per_update", min(mini, prompts), f"{A}.ppo_mini_batch_size", note=note if mini > prompts else ""
    )
    _micro_batch(done)
    longest, tokens = _longest(done), done.recipe.get("batch.tokens")
    if tokens is not None and tokens.value * context_size(done) < longest:
        why = f"{tokens.value} tokens are fewer than the longest sequence: {longest} (prompt and response)"
        done.refuse(tokens.sources[0], why, f"raise the value to {longest} or more")


def _longest(done: Conversion) -> int:
    return done.integer("data.max_prompt_length") + done.integer("data.max_response_length")


def _micro_batch(done: Conversion) -> None:
    dynamic, most = f"{A}.use_dynamic_bsz", f"{A}.ppo_max_token_len_per_gpu"
    per_device, overall = f"{A}.ppo_micro_batch_size_per_gpu", f"{A}.ppo_micro_batch_size"
    # Newer releases have the size in fsdp_config, with the older key as its default.
    sizes = [f"{A}.fsdp_config.ulysses_sequence_parallel_size", f"{A}.ulysses_sequence_parallel_size"]
    ulysses, packed = next((key for key in sizes if done.is_set(key)), sizes[1]), f"{M}.use_remove_padding"
    if done[dynamic]:
        ranks = done.integer(ulysses) if done[ulysses] else 1
        done.write("batch.tokens", done.integer(most) * ranks, most, dynamic, *([ulysses] if ranks > 1 else []))
        done.ignore("use_dynamic_bsz counts tokens instead of rows", per_device, overall)
        return
    done.ignore("verl reads this key only with use_dynamic_bsz", most)
    if done.is_set(per_device):
        rows, key = done.integer(per_device), per_device
    elif done[overall] is not None:
        rows, key = max(1, done.integer(overall) // max(1, done.devices * done.nodes)), overall
    else:
        return
    if done[packed]:
        done.write("batch.tokens", -(-rows * _longest(done) // context_size(done)), key, packed)
        done.decided.setdefault(
            key, ("mapped", f"a packed micro-batch has as many tokens as {rows} sequences of maximum length")
        )
    else:
        done.write("batch.micro_batch_size", rows, key, packed)


def rollout_rule(done: Conversion) -> None:
    engine = done[f"{R}.name"]
    if (ours := done.lookup(f"{R}.name")) is not None:
        note = f"the built-in engine generates with the trained weights; {engine} is not started"
        done.write("rollout.engine", ours, f"{R}.name", note=note if ours == "native" else "")
    done.write_integer("rollout.max_tokens", "data.max_response_length")
    top_p, top_k = done.number(f"{R}.top_p"), max(0, done.integer(f"{R}.top_k"))
    done.write("rollout.top_p", top_p, f"{R}.top_p")
    done.write("rollout.top_k", top_k, f"{R}.top_k")
    if keys := [key for key, on in ((f"{R}.top_p", top_p < 1), (f"{R}.top_k", bool(top_k))) if on]:
        done.write("rollout.truncated_sampling", "ignore", *keys, note=FULL_RATIO)


def validation_rule(done: Conversion) -> None:
    every, start = done.integer("trainer.test_freq"), bool(done["trainer.val_before_train"])
    if done["data.val_files"] is None or (every <= 0 and not start):
        done.ignore("test_freq and val_before_train request no validation", "data.val_files")
        return
    paths = files(done["data.val_files"])
    done.write("val.questions", paths if len(paths) > 1 else paths[0], "data.val_files")
    done.write("val.at_start", start, "trainer.val_before_train")
    if every > 0:
        done.write("val.every", every, "trainer.test_freq")
    done.write_integer("val.max_new_tokens", "data.max_response_length")
    group = f"{R}.val_kwargs"
    if done[f"{group}.do_sample"] and done[f"{group}.temperature"]:
        done.write_number("val.temperature", f"{group}.temperature", f"{group}.do_sample")
        done.write_integer("val.n", f"{group}.n")
        done.write_number("val.top_p", f"{group}.top_p")
        done.write("val.top_k", max(0, done.integer(f"{group}.top_k")), f"{group}.top_k")
    else:
        done.ignore("answers are greedy without do_sample", *done.below(group))
    key = "trainer.log_val_generations"
    if done[key]:
        note = "lockstep logs this many responses per training step; it always stores the answers of a validation"
        done.write("log.samples", done.integer(key), key, note=note)


def critic_rule(done: Conversion) -> None:
    advantage = done.recipe.get("algorithm.advantage")
    if advantage is None or advantage.value != "gae":
        done.ignore("the estimator has no critic", *done.below("critic"), "trainer.critic_warmup")
        return
    if not done.require("critic.model.path", "give the path of the critic's model", UNSET):
        return
    note = "the value head starts with random weights and a bias, as in verl; the random numbers are others"
    done.write("critic.path", str(done["critic.model.path"]), "critic.model.path", note=note)
    done.write("critic.head_init", "random", "critic.model.path")
    done.write_number("critic.lr", "critic.optim.lr")
    done.write_number("critic.clip", "critic.cliprange_value")
    kind = done.lookup("critic.loss_agg_mode", done["critic.loss_agg_mode"] or done[f"{A}.loss_agg_mode"])
    if kind is not None:
        note = SUM_NORM["0.9" if done.since("0.8") else "0.4"] if kind == "seq_mean_token_sum_norm" else ""
        done.write("critic.aggregation", kind, "critic.loss_agg_mode", f"{A}.loss_agg_mode", note=note)
    steps = max(0, done.integer("trainer.critic_warmup") - 1)
    written = {key: done.recipe[key].value for key in ("optim.schedule", "optim.warmup") if key in done.recipe}
    changes = written.get("optim.schedule") != "constant" or bool(written.get("optim.warmup"))
    done.write("critic.warmup", steps, "trainer.critic_warmup", note=EARLY_SCHEDULE if steps and changes else "")


def ppo_keep_rule(done: Conversion) -> None:
    if done["trainer.remove_previous_ckpt_in_save"]:
        done.write("checkpoint.keep_last", 1, "trainer.remove_previous_ckpt_in_save")
        return
    keep_rule(done, "trainer.max_actor_ckpt_to_keep")


PPO_RULES: tuple[KeyRule, ...] = (
    trainer_rule, algorithm_rule, data_rule, model_rule, optim_rule, batch_rule, rollout_rule, agents_rule,
    validation_rule, critic_rule, reward_rule, model_and_function_rule, own_rewards_rule, ppo_keep_rule, async_rule,
    offload_keys_rule, megatron_rule,
)  # fmt: skip
