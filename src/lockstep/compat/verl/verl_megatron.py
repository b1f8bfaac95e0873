"""Conversion rules for verl's Megatron backend: parallel layout, offloading, recomputation, precision and optimizer.

A layout decides on which device a tensor is; it does not change the numbers of an update. Megatron's optimizer differs
from that of FSDP: it applies no weight decay to biases and norms, and it has its own learning-rate schedule.
"""

from __future__ import annotations

from lockstep.compat.key_table import Conversion

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
ACTOR, REFERENCE, CRITIC = f"{A}.megatron", f"{R}.megatron", "critic.megatron"
STRATEGY = f"{A}.strategy"
# A key that only Megatron's engine has. verl's configuration of Megatron has a default for it.
_MARK = "use_distributed_optimizer"
_SHARDED = "lockstep shards the weights over all devices instead, which gives the same results"
_PIPELINE = f"lockstep has no pipeline parallelism; {_SHARDED}. parallel.offload saves more device memory"


def is_megatron(done: Conversion, group: str = ACTOR, strategy: str = STRATEGY) -> bool:
    """Returns whether Megatron trains the model. `group` is the prefix of Megatron's keys."""
    own = (
        done.below(group)
        if group == ACTOR
        else [f"{group}.{name}" for name in _SIZES if done.is_set(f"{group}.{name}")]
    )
    named = (done[strategy], done["model_engine"], done["engine"])
    return "megatron" in named or done[f"{group}.{_MARK}"] is not None or bool(own)


# Layout --------------------------------------------------------------------------------------------------------------

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
          "expert_model_parallel_size", "virtual_pipeline_model_parallel_size", "use_mbridge")  # fmt: skip


def context_size(done: Conversion, group: str = ACTOR) -> int:
    """Returns the number of devices that split each sequence, or 1."""
    key = f"{group}.context_parallel_size"
    return max(1, done.integer(key)) if done[key] else 1


def megatron_rule(done: Conversion) -> None:
    """Converts layout and offloading of `main_ppo` with Megatron. It runs last, because it reads the recipe so far."""
    done.ignore("lockstep shards the weights with FSDP2", STRATEGY)
    if not is_megatron(done):
        return
    layout_rule(done, ACTOR, f"{A}.optim")
    advantage = done.recipe.get("algorithm.advantage")
    if advantage is not None and advantage.value == "gae":
        _offload(done, "parallel.offload_critic", CRITIC, "critic.optim")
    _offload_reference(done)


def layout_rule(done: Conversion, group: str, optim: str) -> None:
    """Converts the sizes of tensor, context, expert and pipeline parallelism, recomputation and offloading."""
    tensor, context = f"{group}.tensor_model_parallel_size", context_size(done, group)
    size = done.integer(tensor) if done[tensor] else 1
    if context > 1:
        done.write("parallel.context_parallel", context, f"{group}.context_parallel_size")
    if size > 1:
        reason = _not_tensor(done, context)
        if reason:
            done.ignore(f"{reason}; {_SHARDED}", tensor)
        else:
            done.write("parallel.tensor_parallel", size, tensor)
    _experts(done, f"{group}.expert_model_parallel_size")
    pipeline = f"{group}.pipeline_model_parallel_size"
    stages = done.integer(pipeline) if done[pipeline] else 1
    done.ignore(_PIPELINE if stages > 1 else "1 means no pipeline parallelism", pipeline)
    _recompute(done, group, stages)
    loads, path = f"{group}.use_dist_checkpointing", f"{group}.dist_checkpointing_path"
    if done[loads]:
        why = "lockstep loads the Hugging Face folder, from which verl's converter makes this checkpoint"
        done.ignore(why, loads, path)
    else:
        done.ignore("verl reads this path only with use_dist_checkpointing", path)
    _offload(done, "parallel.offload", group, optim)


def _not_tensor(done: Conversion, context: int) -> str:
    """Returns why lockstep cannot train this command with tensor parallelism, or ""."""
    if context > 1:
        return "tensor and context parallelism cannot be combined"
    if "rollout.max_staleness" in done.recipe:
        return "asynchronous generation needs the whole model on one device"
    if {"rollout.tools", "rollout.environment"} & done.recipe.keys():
        return "tensor parallelism does not support tools and environments"
    engine = done.recipe.get("rollout.engine")
    if engine is not None and engine.value == "hf":
        return "the engine hf does not support tensor parallelism"
    return ""


def _experts(done: Conversion, key: str) -> None:
    """Converts expert parallelism. In both frameworks, it is how many devices divide the experts of a layer."""
    size = done.integer(key) if done[key] else 1
    tensor = done.recipe.get("parallel.tensor_parallel")
    shards = done.devices * done.nodes // (1 if tensor is None else int(tensor.value))
    if size == 1:
        done.ignore("1 means that experts are not divided over devices", key)
    elif shards % size:
        why = f"{size} does not divide the {shards} devices that share one copy of the model in lockstep"
        done.ignore(f"the experts are not divided over devices: {why}; {_SHARDED}", key)
    else:
        done.write("parallel.expert_parallel", size, key)


def _recompute(done: Conversion, group: str, stages: int) -> None:
    """Converts the recomputation of activations, which saves memory and does not change results."""
    granularity = f"{group}.override_transformer_config.recompute_granularity"
    recomputes = done[granularity] is not None
    note = "" if recomputes or stages == 1 else "recomputation saves the memory that pipeline parallelism saved"
    sources = [key for key in (granularity,) if done.is_set(key)]
    done.write("model.gradient_checkpointing", recomputes or stages > 1, *sources, note=note)
    done.ignore("recomputation covers every layer, or no layer", *_others(done, group, "recompute_"))


def _others(done: Conversion, group: str, name: str) -> list[str]:
    keys = done.below(f"{group}.override_transformer_config")
    return [key for key in keys if key.rsplit(".", 1)[1].startswith(name) and not key.endswith("recompute_granularity")]


# Offloading ----------------------------------------------------------------------------------------------------------


def _offload(done: Conversion, to: str, group: str, optim: str) -> None:
    """Converts the offloading of weights and optimizer state to host memory."""
    moments = [f"{group}.optimizer_offload", f"{optim}.override_optimizer_config.optimizer_cpu_offload"]
    optimizer, weights = [key for key in moments if done[key]], f"{group}.param_offload"
    params = bool(done[weights])
    if params and (divided := _divided(done)):
        done.ignore(f"lockstep does not offload {divided} weights; its engine has no second copy of them", weights)
        params = False
    elif params and done.devices * done.nodes == 1:
        done.ignore("one device keeps its weights; the engine has no second copy of them", weights)
        params = False
    if optimizer or params:
        kept = "all" if optimizer and params else "optimizer" if optimizer else "params"
        done.write(to, kept, *optimizer, *([weights] if params else []))
    done.ignore("lockstep offloads gradients together with the weights", f"{group}.grad_offload")


def _divided(done: Conversion) -> str:
    """Returns the parallelism that keeps weights from being offloaded, or ""."""
    kinds = (kind for kind in ("tensor", "expert") if f"parallel.{kind}_parallel" in done.recipe)
    return next((f"{kind}-parallel" for kind in kinds), "")


def _offload_reference(done: Conversion) -> None:
    key, where = f"{REFERENCE}.param_offload", done.recipe.get("algorithm.kl.where")
    if not done[key]:
        return
    if where is None or where.value == "none" or "model.lora.rank" in done.recipe:
        done.ignore("the run has no separate reference model", key)
    elif divided := _divided(done):
        done.ignore(f"lockstep does not offload {divided} weights", key)
    else:
        done.write("parallel.offload_reference", True, key)


# Precision and optimizer ---------------------------------------------------------------------------------------------


def megatron_precision(done: Conversion, group: str) -> None:
    """Megatron computes in bf16 or fp16, and its optimizer keeps fp32 weights."""
    key = f"{group}.dtype"
    names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
    if str(done[key] or "bfloat16") not in names:
        done.refuse(key, f"{done[key]} is not supported", "use bfloat16 or float16")
        return
    done.write("model.dtype", names[str(done[key] or "bfloat16")], *([key] if done.is_set(key) else []))
    done.write("model.master_weights", True)


def megatron_optimizer(done: Conversion, group: str) -> None:
    """Converts Megatron's Adam and its schedule. Biases and norms have no weight decay."""
    name, over = f"{group}.optimizer", f"{group}.override_optimizer_config"
    if done.is_set(name) and str(done[name]).lower() not in ("adam", "adamw"):
        done.refuse(name, f"lockstep does not have Megatron's optimizer {done[name]}", "use adam")
    done.write_number("optim.lr", f"{group}.lr")
    done.write("optim.decay_all", False, f"{group}.weight_decay")
    clip = f"{group}.clip_grad"
    done.write("optim.clip", done.number(clip) if done[clip] is not None else 1.0, clip)
    betas = {f"{over}.adam_beta1": 0.9, f"{over}.adam_beta2": 0.999}
    values = [default if done[key] is None else done.number(key) for key, default in betas.items()]
    done.write("optim.betas", values, *(key for key in betas if done.is_set(key)))
    done.ignore("verl does not pass these betas to Megatron, which uses 0.9 and 0.999", f"{group}.betas")
    if done[f"{over}.adam_eps"] is not None:
        done.write_number("optim.eps", f"{over}.adam_eps")
    _schedule(done, group)


def _schedule(done: Conversion, group: str) -> None:
    style, steps = f"{group}.lr_decay_style", f"{group}.lr_decay_steps"
    kind = done.lookup(style, done[style] or "constant")
    if kind is None:
        return
    done.write("optim.schedule", kind, style)
    least = f"{group}.min_lr"
    if kind == "constant":
        done.ignore("a constant learning rate has no minimum", least, steps)
    else:
        done.write("optim.min_lr_ratio", (done[least] or 0.0) / done.number(f"{group}.lr"), least)
        if done[steps] not in (None, done["trainer.total_training_steps"]):
            remedy = "remove the key, or set trainer.total_training_steps to the same value"
            done.refuse(steps, "in lockstep the schedule ends with the last step of the run", remedy)
        else:
            done.ignore("the schedule ends with the last step of the run", steps)
    count, ratio = f"{group}.lr_warmup_steps", f"{group}.lr_warmup_steps_ratio"
    if done[count] is not None and done.integer(count) > 0:
        done.write("optim.warmup", done.integer(count), count)
        done.ignore("lr_warmup_steps takes precedence", ratio)
    else:
        share = done.number(ratio) if done[ratio] else 0.0
        done.write("optim.warmup", share, ratio)
        done.ignore("a value that is not over 0 selects lr_warmup_steps_ratio", count)
    start = f"{group}.lr_warmup_init"
    if done.recipe["optim.warmup"].value:
        done.write("optim.warmup_start", (done[start] or 0.0) / done.number(f"{group}.lr"), start)
        done.write("optim.warmup_rounding", "down", ratio)
    else:
        done.ignore("there is no warmup", start)
