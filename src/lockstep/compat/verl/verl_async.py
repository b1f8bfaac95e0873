"""Conversion rules for verl's asynchronous trainers: `fully_async_main`, `one_step_off_policy` and `trainer.v1`.

A step of lockstep is the time between two weight syncs: its responses come from weights that are at most
`rollout.max_staleness` steps old, and its updates follow one another.
"""

from __future__ import annotations

import math

from lockstep.compat.key_table import Conversion

A = "actor_rollout_ref.actor"
MODE, TRAINER = "async_training.program", "trainer.v1.trainer_mode"
"""`MODE` is not a key of verl: the table `program_defaults` sets it for the asynchronous programs."""
THRESHOLD, PARTIAL = "async_training.staleness_threshold", "async_training.partial_rollout"
REQUIRED, SYNC = "async_training.require_batches", "async_training.trigger_parameter_sync_step"
TOTAL = "rollout.total_rollout_steps"
BYPASS, WEIGHT = "algorithm.rollout_correction.bypass", "algorithm.rollout_correction.weight"
_OLD = ("async_training.use_rollout_log_probs", "async_training.compute_prox_log_prob")
_MACHINE = 8  # devices of a machine


def async_mode(done: Conversion) -> str | None:
    """Returns `fully_async`, `one_step_off`, `colocate_async` or `separate_async`; None for synchronous training."""
    if done[MODE] is not None:
        return str(done[MODE])
    return None if done[TRAINER] in (None, "sync") else str(done[TRAINER])


def step_prompts(done: Conversion) -> tuple[int, tuple[str, ...]]:
    """Returns the number of prompts of a step, and the keys that decide it."""
    if async_mode(done) != "fully_async":
        return done.integer("data.train_batch_size"), ("data.train_batch_size",)
    mini = f"{A}.ppo_mini_batch_size"
    done.ignore("the fully asynchronous trainer reads prompts one by one", "data.train_batch_size")
    return done.integer(mini) * done.integer(REQUIRED) * done.integer(SYNC), (mini, REQUIRED, SYNC)


def async_rule(done: Conversion) -> None:
    mode = async_mode(done)
    if mode is None:
        for key in [*done.below("async_training"), *done.below("rollout")]:
            why = "verl reads this key only in fully_async_main and one_step_off_policy"
            done.refuse(key, why, "remove the key, or run the asynchronous program", "unknown-key")
        return
    if mode == "fully_async":
        _fully_async(done)
    elif mode == "one_step_off":
        note = "as in verl, responses come from the weights of the step before; unfinished ones continue with new ones"
        _write(done, 1, (), note)
    elif mode in ("colocate_async", "separate_async"):
        _version_one(done, mode)
    else:
        done.refuse(TRAINER, f"{mode} is not a trainer of verl", "use sync, colocate_async or separate_async")
        return
    _correction(done)
    _places(done)


def _write(done: Conversion, steps: int, keys: tuple[str, ...], note: str) -> None:
    given = [key for key in keys if done.is_set(key)]
    done.write("rollout.max_staleness", steps, *given, note=note)


def _fully_async(done: Conversion) -> None:
    """A step has `require_batches` x `trigger_parameter_sync_step` updates between two weight syncs. verl generates at
    most `staleness_threshold` of a step's prompts ahead, so a threshold of at most 1 means one step."""
    threshold = done.number(THRESHOLD)
    if threshold > 0:
        note = (
            "lockstep may generate all responses of a step with older weights; verl at most the fraction "
            "threshold / (1 + threshold) of them"
        )
        _write(done, math.ceil(threshold), (THRESHOLD, PARTIAL), note)
        if not done[PARTIAL]:
            done.decided[PARTIAL] = ("changed", "in lockstep unfinished responses continue with the newer weights")
    else:
        done.ignore(
            "a threshold of 0 is lockstep's synchronous loop: all responses come from current weights", THRESHOLD
        )
        done.ignore("no response is generated ahead", PARTIAL)
    _length(done)
    every = "rollout.test_freq"
    if done[every] and done.integer(every) > 0 and "val.questions" in done.recipe:
        done.write_integer("val.every", every)
    if done.recipe["optim.schedule"].value != "constant" or done.recipe["optim.warmup"].value:
        note = f"a step of lockstep has {done[SYNC]} steps of verl's schedule"
        done.decided[SYNC] = ("changed", note)
        steps = f"{A}.optim.lr_warmup_steps"
        if done[steps] is not None and done.integer(steps) > 0:
            done.write("optim.warmup", math.ceil(done.integer(steps) / done.integer(SYNC)), steps, note=note)


def _length(done: Conversion) -> None:
    """Converts the length of the run. verl counts prompts, and stops at the end of the last epoch, too."""
    prompts, _ = step_prompts(done)
    epochs = "rollout.total_epochs" if done.is_set("rollout.total_epochs") else "trainer.total_epochs"
    if done[TOTAL] is None:
        done.recipe.pop("run.steps", None)
        done.write_integer("run.epochs", epochs)
        return
    steps = done.integer(TOTAL) // prompts
    if not steps:
        why = f"{done[TOTAL]} prompts are fewer than the {prompts} prompts between two weight syncs"
        done.refuse(TOTAL, why, f"{TOTAL}={prompts} or more")
        return
    done.recipe.pop("run.epochs", None)
    note = f"{done[TOTAL]} prompts, {prompts} per step; verl also stops after total_epochs"
    done.write("run.steps", steps, TOTAL, note=note)
    done.ignore("total_rollout_steps sets the length of the run", epochs, "trainer.total_training_steps")


def _version_one(done: Conversion, mode: str) -> None:
    """Converts `trainer.v1`: `num_warmup_batches` batches are generated ahead of the training."""
    ahead = f"trainer.v1.{mode}.num_warmup_batches"
    batches = done.integer(ahead) if done[ahead] is not None else 1
    note = (
        "lockstep trains on prompts in the order of the data; verl trains on the responses that finish first, and "
        "drops those with more than max_off_policy_threshold versions"
    )
    _write(done, batches, (TRAINER, ahead), note)
    if mode == "separate_async":
        sync = "trainer.v1.separate_async.parameter_sync_step"
        every = done.integer(sync) if done[sync] is not None else 4
        batch, mini = done.integer("data.train_batch_size"), done.integer(f"{A}.ppo_mini_batch_size")
        if batch != every * mini:
            why = f"verl needs train_batch_size = parameter_sync_step x ppo_mini_batch_size = {every * mini}"
            done.refuse(
                sync, why, f"{sync}={batch // mini}" if batch % mini == 0 else f"data.train_batch_size={every * mini}"
            )
        else:
            done.ignore("the weight sync follows the updates of a step, as in verl", sync)


def _correction(done: Conversion) -> None:
    """Writes the old log-probs explicitly, because `rollout.max_staleness` changes lockstep's default."""
    uses_engine, recomputed = _OLD
    keys = [key for key in (*_OLD, "algorithm.rollout_correction.bypass_mode", TRAINER) if done.is_set(key)]
    if done.is_set(*_OLD) and (done[recomputed] or done[uses_engine] is False):
        done.write(BYPASS, False, *keys)
    done.ignore(
        "engine log-probs are the old log-probs unless they are recomputed", *(k for k in _OLD if k not in keys)
    )
    if BYPASS not in done.recipe:
        done.write(BYPASS, False, *keys)
    if WEIGHT not in done.recipe and not done.recipe[BYPASS].value:
        done.write(WEIGHT, "none", *keys)


def _places(done: Conversion) -> None:
    """Converts the devices that generate. A rank of lockstep generates on its own device or on one other device."""
    group = "actor_rollout_ref.rollout" if async_mode(done) == "separate_async" else "rollout"
    each, nodes = f"{group}.n_gpus_per_node", f"{group}.nnodes"
    if async_mode(done) == "colocate_async" or not isinstance(done[each], int) or not isinstance(done[nodes], int):
        return
    there, machines = int(done[each]), int(done[nodes])
    if "rollout.max_staleness" not in done.recipe:
        pass
    elif done.nodes == machines == 1 and there == done.devices and 2 * there <= _MACHINE:
        done.write("rollout.worker_device", done.devices, *(key for key in (each, nodes) if done.is_set(key)))
        return
    if done.nodes == machines == 1 and there + done.devices <= _MACHINE:
        done.devices += there
    elif there == done.devices:
        done.nodes += machines
    why = "every rank generates on its training device; the command at the end of the report uses all devices"
    done.ignore(why, each, nodes)
