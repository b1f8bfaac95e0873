"""verl's `main_ppo`: GRPO, PPO, RLOO, ReMax, REINFORCE++, GSPO, CISPO, SAPO, GPG, DAPO. Its rules; the keys are in
`online_keys.py`, what they compute in `algorithm.py`."""

from __future__ import annotations

from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, KeyRule
from lockstep.compat.verl.algorithm import AGGREGATIONS, algorithm_rule
from lockstep.compat.verl.online_keys import A, M, R
from lockstep.compat.verl.shared import files, keep_rule, lora_rule, precision_rule, template_rule, trainer_rule

# Their rules by data source that are also ours.
RULES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}


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
    template_rule(settings, done)
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
    kind = settings["critic.loss_agg_mode"] or settings[f"{A}.loss_agg_mode"]
    if kind in AGGREGATIONS:
        done.write("critic.aggregation", AGGREGATIONS[kind], "critic.loss_agg_mode", f"{A}.loss_agg_mode")
    else:
        done.refuse("critic.loss_agg_mode", f"{kind} is not here", f"one of {', '.join(AGGREGATIONS)}")
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
        group = "custom_reward_function.reward_kwargs"
        if given := settings.below(group):
            done.write("reward.arguments", {key[len(group) + 1 :]: settings[key] for key in given}, *given)
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
