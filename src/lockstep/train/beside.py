"""Generation beside training: on which device, by which way the weights go there, and what it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.model.load import DTYPES
from lockstep.recipe import Recipe
from lockstep.rollout.native.prefill import prefill_bytes
from lockstep.train.plan_layers import kv_bytes
from lockstep.train.plan_memory import MemoryPlan, Phase

KEY = "rollout.max_staleness"
_TURNS = "remove the key: generation and training then take turns"


def refuse_beside(recipe: Recipe, device: Device, devices: int) -> None:
    """Where it is not made for, or cannot be."""
    rollout = recipe.rollout
    if rollout.max_staleness is None:
        return
    if devices > 1:
        raise Refusal.at(KEY, f"generation beside training is made for one process, and these are {devices}", _TURNS)
    there, alone = rollout.worker_device or 0, device.count()
    if there >= alone:
        raise Refusal.at(
            "rollout.worker_device",
            f"{device.name} device {there} is asked for, and {alone} can be seen, counted from 0",
            "choose one of them, or remove the key: the worker then shares the device that trains",
        )
    if not there and not device.generates_beside:
        raise Refusal.at(
            KEY,
            f"two processes on one {device.name} device, one of which trains and one generates, are not supported",
            "set rollout.worker_device to another device, or " + _TURNS,
        )
    if not there and rollout.hand_over == "collective" and not device.meets_itself:
        raise Refusal.at(
            "rollout.hand_over",
            f"{device.collective} does not join two processes on one {device.name} device",
            "set it to memory, or rollout.worker_device to another device",
        )


def collective_of(recipe: Recipe, device: Device) -> str | None:
    """The collective by which weights are handed over; None where they go through the host's memory."""
    way = recipe.rollout.hand_over
    own_device = bool(recipe.rollout.worker_device)
    return device.collective if way == "collective" or (way == "auto" and own_device) else None


def with_worker(
    plan: MemoryPlan, recipe: Recipe, config: Any, longest: int, prefill_tokens: int, *, on_host: bool
) -> MemoryPlan:
    """The worker's copy of the model, its cache and its pass over prompts: beside every phase of the run where it is on
    the same device, for itself where it has its own. `on_host`: the device's memory is the host's, in which weights
    that are handed over lie once more."""
    rollout, size = recipe.rollout, DTYPES[recipe.model.dtype].itemsize
    if rollout.max_staleness is None:
        return plan
    steps = rollout.max_staleness + 1
    sequences = min(rollout.max_sequences, steps * recipe.batch.prompts * rollout.n)
    cached = sequences * longest * kv_bytes(config, size)
    cache = min(cached, int(rollout.cache_gb * 1e9)) if rollout.cache_gb else cached
    prompts = steps * recipe.batch.prompts * max(0, longest - rollout.max_tokens)
    passes = prefill_bytes(config.get_text_config(), min(prefill_tokens, prompts), size)
    worker = Phase("rollout worker", plan.parameters * size, activations=cache + passes)
    if rollout.worker_device:
        return replace(plan, phases=(*plan.phases, worker))
    handed = plan.trained * size if on_host and rollout.hand_over != "collective" else 0
    beside = tuple(
        replace(
            phase, weights=phase.weights + worker.weights + handed, activations=phase.activations + worker.activations
        )
        for phase in plan.phases
    )
    return replace(plan, phases=(*beside, worker))
