"""Conversion rules for the offload keys of verl's FSDP backend."""

from __future__ import annotations

from lockstep.compat.key_table import Conversion
from lockstep.compat.offload_keys import frozen_offload_rule, offload_rule, separate_reference

_ACTOR, _REFERENCE = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"
# verl 0.4 and verl 0.9 have different names for the critic's settings.
_CRITICS = ("critic.model.fsdp_config", "critic.fsdp")
_REWARD = "reward_model.model.fsdp_config"


def _names(name: str, *groups: str) -> list[str]:
    return [f"{group}.{name}" for group in groups]


def offload_keys_rule(done: Conversion) -> None:
    """Converts the offload keys of `main_ppo`. It reads the recipe so far, so it runs late."""
    offload_rule(
        done,
        "parallel.offload",
        _names("param_offload", _ACTOR),
        _names("optimizer_offload", _ACTOR),
        _names("offload_policy", _ACTOR),
    )
    if "critic.path" in done.recipe:
        offload_rule(
            done,
            "parallel.offload_critic",
            _names("param_offload", *_CRITICS),
            _names("optimizer_offload", *_CRITICS),
            _names("offload_policy", *_CRITICS),
        )
    reference = _names("param_offload", _REFERENCE) + _names("offload_policy", _REFERENCE)
    frozen_offload_rule(done, "parallel.offload_reference", reference, "reference model", separate_reference(done))
    reward = _names("param_offload", _REWARD)
    frozen_offload_rule(done, "parallel.offload_reward", reward, "reward model", "reward.model" in done.recipe)


def sft_offload_rule(done: Conversion) -> None:
    """Converts the offload keys of the SFT trainers. `cpu_offload` of `fsdp_sft_trainer` acts only together with
    `offload_params`, and then also keeps the optimizer state in host memory."""
    switch, weights = "model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params"
    both = ["engine.offload_policy"]
    if done[switch] and done[weights]:
        both += [switch, weights]
    else:
        for key in (switch, weights):
            if done.is_set(key):
                done.ignore("verl offloads only if cpu_offload and offload_params are both true", key)
    offload_rule(done, "parallel.offload", ["engine.param_offload"], ["engine.optimizer_offload"], both)
