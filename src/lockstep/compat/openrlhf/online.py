"""OpenRLHF's `train_ppo_ray`: PPO, GRPO, REINFORCE++, RLOO. Its rules; the flags are in `online_flags.py`."""

from __future__ import annotations

from lockstep.compat.openrlhf.correction import correction_rule
from lockstep.compat.openrlhf.shared import data_rule, run_rule, schedule_rule, sources, template_rule
from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, KeyRule

# Their estimators: method, advantage, and whether they whiten over the step (RLOO in the flat dialect alone).
ESTIMATORS: dict[str, tuple[str, str, bool]] = {
    "gae": ("ppo", "gae", True),
    "reinforce": ("reinforce_pp", "reinforce_pp", True),
    "reinforce_baseline": ("reinforce_pp_baseline", "reinforce_pp_baseline", True),
    "rloo": ("rloo", "rloo", True),
    "group_norm": ("grpo", "grpo", False),
    "dr_grpo": ("dr_grpo", "dr_grpo", False),
    "flash_reinforce": ("reinforce", "flash_reinforce", False),
}
# Their scores are compared before a divergence in the reward is taken off, and their gamma is 1.
_GROUPS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce")


def algorithm_rule(settings: Settings, done: Conversion) -> None:
    name = settings["advantage_estimator"]
    if name not in ESTIMATORS:
        done.refuse("advantage_estimator", f"{name} is not here", f"one of {', '.join(ESTIMATORS)}")
        return
    method, advantage, whitens = ESTIMATORS[name]
    if name == "rloo" and settings.peer.endswith("0.11"):
        whitens = False
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
    if by_sequence:
        done.write("algorithm.penalty_aggregation", "token_mean", "actor.loss_agg_mode")
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
    correction_rule(settings, done)
    if settings["dynamic_filtering"]:
        note = "10 rounds at most, then the step is filled with what there is; theirs goes on"
        done.write("algorithm.dynamic_sampling.rounds", 10, "dynamic_filtering", note=note)
        bounds = [float(bound) for bound in settings["dynamic_filtering_reward_range"]]
        done.write("algorithm.dynamic_sampling.between", bounds, "dynamic_filtering_reward_range")


def _kl(settings: Settings, done: Conversion) -> None:
    coefficient = settings.number("init_kl_coef")
    if coefficient <= 0:
        done.write("algorithm.kl.where", "none", "init_kl_coef")
        for key in ("use_kl_loss", "kl_estimator", "kl_target", "kl_horizon", "algo.kl.unbiased_gradient"):
            if settings.says(key):
                done.ignore(key, "the coefficient is 0, so there is no divergence, there neither")
        return
    done.write("algorithm.kl.where", "loss" if settings["use_kl_loss"] else "reward", "use_kl_loss", "init_kl_coef")
    done.write("algorithm.kl.coefficient", coefficient, "init_kl_coef")
    estimator = str(settings["kl_estimator"])
    if estimator not in ("k1", "k2", "k3"):
        done.refuse("kl_estimator", f"{estimator} is not here", "k1, k2 or k3")
        return
    unbiased = "algo.kl.unbiased_gradient"
    if settings[unbiased] and settings["use_kl_loss"]:
        done.write("algorithm.kl.estimator", f"{estimator}+", "kl_estimator", unbiased)
        done.write("algorithm.kl.weighted", True, unbiased)
    else:
        done.write("algorithm.kl.estimator", estimator, "kl_estimator")
        if settings.says(unbiased):
            done.ignore(unbiased, "read with a divergence in the loss only")
    if settings["advantage_estimator"] in _GROUPS and not settings["use_kl_loss"]:
        done.write("algorithm.kl.compared", False, "advantage_estimator")
    if settings["kl_target"]:
        done.write("algorithm.kl.target", settings.number("kl_target"), "kl_target")
        done.write("algorithm.kl.horizon", settings.whole("kl_horizon"), "kl_horizon")
    elif settings.says("kl_horizon"):
        done.ignore("kl_horizon", "read with kl_target only")


def async_rule(settings: Settings, done: Conversion) -> None:
    """Generation beside training, from weights that are a few steps old."""
    queue = "async_queue_size"
    if settings["async_train"]:
        note = "responses are at most so many steps old; theirs one more, as the next are drawn while they wait"
        done.write("rollout.max_staleness", settings.whole(queue), "async_train", queue, note=note)
        if "algorithm.correction.weight" not in done.recipe:
            done.write("algorithm.correction.weight", "none", "async_train")
    elif settings.says(queue):
        done.ignore(queue, "read with async training only")


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
        models = [name.strip() for name in str(model).split(",") if name.strip()]
        done.write("reward.model", models, "reward_pretrain", note="their scores are added up (reward.model_weights)")
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
    async_rule,
    data_and_model_rule,
    batch_rule,
    reward_rule,
    validation_rule,
)
FLAT = {"prompt_max_len": 1024, "generate_max_len": 1024, "micro_train_batch_size": 4, "value_clip": 0.2}
DOTTED = {"max_len": 2048, "micro_train_batch_size": 1, "value_clip": 0.5}
