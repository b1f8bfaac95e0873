"""Recipes of scripts of public projects, key by key against the settings that the peer itself reads.

Hydra composes verl's configuration from verl's own files; OpenRLHF's own parser reads its flags. The expected recipe
values are written here once more, and use nothing of the converter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.recipe import Recipe
from real_scripts import RealScript, real_scripts, recorded

from . import peers

pytestmark = pytest.mark.peers

CONVERTED = [
    script for name, script in real_scripts().items() if script.group == "released" and recorded()[name] == "converted"
]
ESTIMATORS = {"gae": "gae", "grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce_pp", "remax": "remax"}
Expected = Iterator[tuple[str, Any, tuple[str, ...]]]


def verl_expected(cfg: Any) -> Expected:
    """Recipe key, value, and the keys of verl that decide it."""
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    yield "optim.lr", float(actor.optim.lr), ("actor_rollout_ref.actor.optim.lr",)
    yield "batch.prompts", cfg.data.train_batch_size, ("data.train_batch_size",)
    mini = min(actor.ppo_mini_batch_size, cfg.data.train_batch_size)
    yield "batch.prompts_per_update", mini, ("actor_rollout_ref.actor.ppo_mini_batch_size",)
    if cfg.algorithm.adv_estimator != "gae" or rollout.n > 1:
        yield "rollout.n", rollout.n, ("actor_rollout_ref.rollout.n",)
    yield "rollout.max_tokens", cfg.data.max_response_length, ("data.max_response_length",)
    yield "data.max_prompt_tokens", cfg.data.max_prompt_length, ("data.max_prompt_length",)
    yield "rollout.temperature", float(rollout.temperature), ("actor_rollout_ref.rollout.temperature",)
    yield "algorithm.gamma", float(cfg.algorithm.gamma), ("algorithm.gamma",)
    yield "algorithm.entropy", float(actor.entropy_coeff), ("actor_rollout_ref.actor.entropy_coeff",)
    yield "algorithm.clip_low", float(actor.clip_ratio_low), ("actor_rollout_ref.actor.clip_ratio_low",)
    yield "algorithm.clip_high", float(actor.clip_ratio_high), ("actor_rollout_ref.actor.clip_ratio_high",)
    yield "algorithm.epochs", actor.ppo_epochs, ("actor_rollout_ref.actor.ppo_epochs",)
    if actor.use_kl_loss and not cfg.algorithm.use_kl_in_reward:
        yield "algorithm.kl.where", "loss", ("actor_rollout_ref.actor.use_kl_loss",)
        yield "algorithm.kl.coefficient", float(actor.kl_loss_coef), ("actor_rollout_ref.actor.kl_loss_coef",)
    if cfg.algorithm.adv_estimator in ESTIMATORS and cfg.algorithm.norm_adv_by_std_in_grpo:
        yield "algorithm.advantage", ESTIMATORS[cfg.algorithm.adv_estimator], ("algorithm.adv_estimator",)
    if cfg.trainer.total_training_steps is not None:
        yield "run.steps", cfg.trainer.total_training_steps, ("trainer.total_training_steps",)
    else:
        yield "run.epochs", cfg.trainer.total_epochs, ("trainer.total_epochs",)
    if cfg.actor_rollout_ref.model.get("lora_rank", 0):
        yield "model.lora.rank", cfg.actor_rollout_ref.model.lora_rank, ("actor_rollout_ref.model.lora_rank",)


def openrlhf_expected(args: Any) -> Expected:
    if args.n_samples_per_prompt > 1:
        yield "rollout.n", args.n_samples_per_prompt, ("--n_samples_per_prompt",)
    yield "optim.lr", args.actor_learning_rate, ("--actor_learning_rate",)
    yield "batch.prompts", args.rollout_batch_size, ("--rollout_batch_size",)
    per_update = args.train_batch_size // args.n_samples_per_prompt
    yield "batch.prompts_per_update", min(per_update, args.rollout_batch_size), ("--train_batch_size",)
    yield "rollout.max_tokens", args.generate_max_len, ("--generate_max_len",)
    yield "data.max_prompt_tokens", args.prompt_max_len, ("--prompt_max_len",)
    yield "rollout.temperature", args.temperature, ("--temperature",)
    yield "algorithm.gamma", args.gamma, ("--gamma",)
    yield "algorithm.epochs", args.max_epochs, ("--max_epochs",)
    if args.init_kl_coef:
        yield "algorithm.kl.coefficient", args.init_kl_coef, ("--init_kl_coef",)
    yield "optim.clip", args.max_norm, ("--max_norm",)
    if args.lora_rank:
        yield "model.lora.rank", args.lora_rank, ("--lora_rank",)


def value_of(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def differences(script: RealScript, expected: Expected) -> list[str]:
    """Compares the values that the script itself sets; defaults belong to the release, and other tests compare them."""
    recipe = checked(script.convert())
    written = {word.lstrip("+").partition("=")[0] for word in script.words}
    return [
        f"{key}: {value_of(recipe, key)} instead of {value}"
        for key, value, keys in expected
        if written & set(keys) and value_of(recipe, key) != pytest.approx(value)
    ]


def composed(words: tuple[str, ...]) -> Any:
    """verl's configuration as Hydra composes it. `++` forces the keys of older releases, which both versions refuse."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    overrides = [word for word in words if not word.startswith("-")]
    forced = [word if "." not in word.partition("=")[0] else f"++{word.lstrip('+')}" for word in overrides]
    for version, given in ((peers.VERL[0], overrides), (peers.VERL[1], overrides), (peers.VERL[0], forced)):
        folder = peers.FOLDER / f"verl-{version}" / "verl" / "trainer" / "config"
        with initialize_config_dir(str(folder), version_base=None):
            try:
                return compose("ppo_trainer", given)
            except (HydraException, OmegaConfBaseException):
                continue
    return None


def test_verl_scripts_have_the_values_that_hydra_composes() -> None:
    compared, wrong = 0, []
    for script in [one for one in CONVERTED if one.peer == "verl" and one.program == "main_ppo"]:
        cfg = composed(script.words)
        if cfg is not None:
            compared += 1
            wrong += [f"{script.name}: {text}" for text in differences(script, verl_expected(cfg))]
    assert not wrong, "\n".join(wrong)
    assert compared >= 100


def test_openrlhf_scripts_have_the_values_that_its_parser_reads() -> None:
    compared, wrong = 0, []
    for script in [one for one in CONVERTED if one.peer == "openrlhf" and one.program == "train_ppo_ray"]:
        try:
            args = peers.openrlhf_arguments("0.7.5", "train_ppo_ray", script.words)
        except (SystemExit, AssertionError, ValueError):
            args = None  # flags of another release
        if args is None:
            continue
        compared += 1
        wrong += [f"{script.name}: {text}" for text in differences(script, openrlhf_expected(args))]
    assert not wrong, "\n".join(wrong)
    assert compared >= 15
