"""Asynchronous command lines of verl: steps, staleness, old log-probs and devices of the recipe.

A step of lockstep is the time between two weight syncs of verl. The numbers of prompts and steps are computed by hand.
"""

from __future__ import annotations

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.compat.key_table import Conversion
from lockstep.compat.migrate import migrated
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal
from lockstep.recipe import Recipe

A, R, T = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "async_training"
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP = "verl.experimental.one_step_off_policy.main_ppo"
BASE = (
    "algorithm.adv_estimator=grpo",
    "data.train_files=t.parquet",
    "actor_rollout_ref.model.path=m",
    f"{R}.n=4",
    f"{A}.ppo_mini_batch_size=32",
)


def convert(program: str, *words: str) -> Conversion:
    return convert_verl(program, [*BASE, *words])


def recipe(program: str, *words: str) -> Recipe:
    return checked(convert(program, *words))


def fully(*words: str) -> Recipe:
    return recipe(
        FULLY, "data.train_batch_size=0", "data.gen_batch_size=1", "rollout.total_rollout_steps=51200", *words
    )


def test_a_step_has_the_prompts_between_two_weight_syncs() -> None:
    """32 prompts x 2 batches x 4 = 256 prompts; floor(51200 / 256) = 200 steps; 8 updates of 32 prompts."""
    made = fully(f"{T}.require_batches=2", f"{T}.trigger_parameter_sync_step=4", f"{T}.staleness_threshold=0.5")
    assert (made.batch.prompts, made.batch.prompts_per_update, made.run.steps, made.run.epochs) == (256, 32, 200, None)
    assert made.rollout.max_staleness == 1
    defaults = fully()  # require_batches 1, trigger_parameter_sync_step 4, staleness_threshold 0.1
    assert (defaults.batch.prompts, defaults.run.steps, defaults.rollout.max_staleness) == (128, 400, 1)


@pytest.mark.parametrize(("threshold", "steps"), [("0", None), ("0.1", 1), ("1", 1), ("1.5", 2), ("3", 3)])
def test_the_threshold_is_rounded_up_to_steps(threshold: str, steps: int | None) -> None:
    assert fully(f"{T}.staleness_threshold={threshold}").rollout.max_staleness == steps


@pytest.mark.slow
def test_old_log_probs_come_from_the_engine_unless_they_are_recomputed() -> None:
    correction = fully().algorithm.rollout_correction
    assert (correction.bypass, correction.weight) == (True, "none")
    for words in (
        (f"{T}.use_rollout_log_probs=True", f"{T}.compute_prox_log_prob=True"),
        ("algorithm.rollout_correction.bypass_mode=False",),
        (f"{T}.use_rollout_log_probs=False",),
    ):
        correction = fully(*words).algorithm.rollout_correction
        assert (correction.bypass, correction.weight) == (False, "none")
    weighted = fully("algorithm.rollout_correction.bypass_mode=False", "algorithm.rollout_correction.rollout_is=token")
    assert weighted.algorithm.rollout_correction.weight == "token"


def test_a_warmup_counts_steps_between_two_syncs() -> None:
    made = fully(f"{T}.trigger_parameter_sync_step=4", f"{A}.optim.lr_warmup_steps=10")
    assert made.optim.warmup == 3  # 10 / 4, rounded up


def test_too_few_prompts_for_a_step_are_refused() -> None:
    with pytest.raises(Refusal, match="total_rollout_steps"):
        fully("rollout.total_rollout_steps=100")


def test_one_step_off_policy() -> None:
    done = convert(ONE_STEP, "data.train_batch_size=64", "trainer.n_gpus_per_node=6", "rollout.n_gpus_per_node=2")
    made = checked(done)
    assert (made.rollout.max_staleness, made.batch.prompts, made.batch.prompts_per_update) == (1, 64, 32)
    assert (made.algorithm.rollout_correction.bypass, made.rollout.worker_device) == (True, None)
    assert (done.devices, done.nodes) == (8, 1)  # 6 + 2: each device trains and generates


@pytest.mark.slow
def test_as_many_devices_generate_as_train() -> None:
    done = convert(ONE_STEP, "data.train_batch_size=64", "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4")
    assert (checked(done).rollout.worker_device, done.devices) == (4, 4)
    other = convert(ONE_STEP, "data.train_batch_size=64", "trainer.n_gpus_per_node=8", "rollout.n_gpus_per_node=8")
    assert (checked(other).rollout.worker_device, other.devices, other.nodes) == (None, 8, 2)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_the_asynchronous_trainers_of_verl_09(mode: str) -> None:
    words = ("data.train_batch_size=128", f"trainer.v1.trainer_mode={mode}", f"trainer.v1.{mode}.num_warmup_batches=2")
    made = recipe("verl.trainer.main_ppo", *words)  # parameter_sync_step 4 x 32 = 128
    assert (made.rollout.max_staleness, made.batch.prompts, made.batch.prompts_per_update) == (2, 128, 32)
    assert (made.algorithm.rollout_correction.bypass, made.algorithm.rollout_correction.weight) == (False, "none")


def test_batches_that_verl_refuses_are_refused() -> None:
    with pytest.raises(Refusal, match="parameter_sync_step"):
        recipe("main_ppo", "data.train_batch_size=100", "trainer.v1.trainer_mode=separate_async")
    with pytest.raises(Refusal, match="trainer_mode"):
        recipe("main_ppo", "trainer.v1.trainer_mode=later")


def test_keys_of_the_asynchronous_program_do_not_pass_silently() -> None:
    with pytest.raises(Refusal) as refused:
        recipe("main_ppo", f"+{T}.staleness_threshold=0.5")
    assert [(problem.where, problem.code) for problem in refused.value.problems] == [
        (f"{T}.staleness_threshold", "unknown-key")
    ]


@pytest.mark.slow
def test_tensor_parallelism_gives_way_to_asynchronous_generation() -> None:
    sizes = (f"{A}.strategy=megatron", f"{A}.megatron.tensor_model_parallel_size=4")
    assert fully(*sizes).parallel.tensor_parallel == 1
    assert fully(*sizes, f"{T}.staleness_threshold=0").parallel.tensor_parallel == 4


@pytest.mark.parametrize(
    ("command", "staleness"),
    [
        (f"python3 -m {FULLY} data.train_batch_size=0 rollout.total_rollout_steps=512", 1),
        ("python -m recipe.fully_async_policy.fully_async_main rollout.total_rollout_steps=512", 1),
        ("python recipe/one_step_off_policy/main_ppo.py data.train_batch_size=64", 1),
        ("python3 -m recipe.one_step_off_policy.main_ppo data.train_batch_size=64", 1),
        ("python3 -m verl.trainer.main_ppo data.train_batch_size=64", None),
        ("python3 /opt/verl/trainer/main_ppo.py data.train_batch_size=64", None),
    ],
)
def test_the_module_decides(command: str, staleness: int | None) -> None:
    (found,), problems, _ = migrated(f"{command} {' '.join(BASE)}")
    assert not problems
    assert checked(found.done).rollout.max_staleness == staleness
