"""Every program of verl's and OpenRLHF's repositories converts, or its refusal says what to use instead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.compat.key_table import load_tables
from lockstep.compat.migrate import migrated
from lockstep.errors import Problem

WORDS = "data.train_files=t.parquet actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo"
# Modules in the history of verl's repository and of its repository of recipes.
EXPLAINED = [
    "recipe.prime.main_prime",
    "recipe.spin.main_spin",
    "recipe.sppo.main_sppo",
    "recipe.flowrl.main_flowrl",
    "recipe.gkd.main_gkd",
    "recipe.gvpo.gvpo_main_ppo",
    "recipe.spo.spo_main_ppo",
    "recipe.rep_exp.main_rep_exp",
    "recipe.disco.main_disco",
    "recipe.tppo.main_tppo",
    "recipe.sapo.main_sapo",
    "recipe.mopps.main_our",
    "recipe.atropos.main_atropos",
    "recipe.vla.main_ppo",
    "recipe.gym_agent.main_agent_ppo",
    "recipe.rstar2_agent.src.main_rstar2_agent",
    "recipe.async_flow.grpo_main",
    "recipe.agent_lightning_like.main_lightning",
    "recipe.dance_grpo.main_dance",
    "verl.experimental.vla.main_ppo",
    "recipe.partial_rollout.main_ppo",
    "recipe.reward_queue.main",
    "recipe.async_reward_agent.main_ppo",
    "recipe.specRL.main_ppo",
    "recipe.specRL.histoSpec.main_ppo",
    "recipe.req_sched.main_sched_ppo",
    "recipe.reorder_rollout.main_reorder_ppo",
    "recipe.dynamo.main_dynamo",
    "recipe.dynrl.main_ppo",
    "recipe.dist_data_proto.main_ppo",
    "recipe.async.async_main_ppo",
    "recipe.moe_routing_replay.main_dapo",
    "recipe.asft.fsdp_sft_trainer_asft",
    "recipe.multi_step_policy.main_ppo",
]
CONVERTED = [
    "verl.trainer.main_ppo",
    "verl.trainer.main_ppo_sync",
    "recipe.dapo.main_dapo",
    "recipe.dapo.src.main_dapo",
    "recipe.one_step_off_policy.main_ppo",
    "recipe.one_step_off_policy.async_main_ppo",
    "verl.experimental.transfer_queue.main_ppo",
    "recipe.transfer_queue.main_ppo",
    "recipe.r1_ascend.main_ppo",
]


def problems_of(module: str) -> list[Problem]:
    return migrated(f"python3 -m {module} {WORDS}")[1]


@pytest.mark.parametrize("module", EXPLAINED)
def test_a_program_with_its_own_trainer_is_explained(module: str) -> None:
    (problem,) = problems_of(module)
    assert problem.code == "unknown-name"
    assert problem.where.rsplit(" ", 1)[1] in (module, *(".".join(module.split(".")[-n:]) for n in (1, 2)))
    assert len(problem.why.split()) > 3
    assert len(problem.remedy.split()) > 3


@pytest.mark.parametrize("module", CONVERTED)
def test_a_program_with_the_trainer_of_verl_converts(module: str) -> None:
    found, problems, _ = migrated(f"python3 -m {module} {WORDS}")
    assert not problems
    assert not found[0].done.problems


def test_the_recipe_of_entropy_needs_its_reward_function() -> None:
    done = migrated(f"python3 -m recipe.entropy.main_entropy {WORDS}")[0][0].done
    assert [problem.where for problem in done.problems] == ["custom_reward_function.path"]
    function = "custom_reward_function.path=f.py actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"
    done = migrated(f"python3 -m recipe.entropy.main_entropy {WORDS} {function}")[0][0].done
    assert not done.problems
    assert (done.recipe["algorithm.loss"].value, done.recipe["log.project"].value) == ("clip_cov", "verl-entropy")


@pytest.mark.parametrize(
    "module", ["recipe.mine.main_ppo", "verl.trainer.main_mine", "verl.experimental.mine.main_ppo"]
)
def test_an_unknown_program_is_not_taken_for_a_known_one(module: str) -> None:
    (problem,) = problems_of(module)
    assert (problem.where, problem.code) == (f"line 1: verl {module}", "unknown-name")
    assert "main_ppo" in problem.remedy


def test_no_program_is_both_converted_and_explained() -> None:
    for peer, explained in load_tables("programs").items():
        assert not explained.keys() & load_tables(peer)["programs"].keys()
        assert all(row.keys() == {"because", "do"} for row in explained.values())


@pytest.mark.parametrize(
    ("module", "status", "said"),
    [
        ("recipe.prime.main_prime", 2, "PRIME"),
        pytest.param("experimental.one_step_off_policy.main_ppo", 2, "verl's default is", marks=pytest.mark.slow),
        pytest.param("recipe.mine.main_ppo", 2, "recipe.mine.main_ppo", marks=pytest.mark.slow),
    ],
)
def test_a_program_that_runs_directly_takes_the_same_path(module: str, status: int, said: str) -> None:
    command = [sys.executable, "-m", f"lockstep.compat.verl.{module}", "algorithm.adv_estimator=grpo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, said in " ".join((done.stdout + done.stderr).split())) == (status, True)
