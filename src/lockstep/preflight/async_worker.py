"""Checks and plans the rollout worker of asynchronous generation: its device, its weight sync and its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.model.load_folder import DTYPES
from lockstep.model.text_model import text_config
from lockstep.preflight.memory_plan import MemoryPlan, Phase
from lockstep.preflight.state_sizes import kv_bytes
from lockstep.recipe import Recipe
from lockstep.rollout.native.native_engine import FREE_SHARE, prefill_bytes

KEY = "rollout.max_staleness"
WORKER = "rollout worker"
"""The name of the memory phase of a rollout worker."""
DEVICE_KEY = "rollout.worker_device"
_TURNS = "remove rollout.max_staleness, so that generation and training take turns"


def refuse_beside(recipe: Recipe, device: Device | type[Device], ranks: int, seen: int | None) -> None:
    """Refuses an asynchronous rollout worker that the devices do not support. `ranks` is the number of ranks on this
    machine. `seen` is the number of visible devices, or None if it is unknown."""
    rollout = recipe.rollout
    if rollout.max_staleness is None:
        return
    if recipe.parallel.tensor_parallel > 1:
        raise Refusal.at(
            KEY,
            f"the asynchronous rollout worker needs the whole model on one device, and "
            f"parallel.tensor_parallel={recipe.parallel.tensor_parallel} divides it",
            "remove parallel.tensor_parallel (the weights are sharded over the ranks in any case), or " + _TURNS,
            code="unsupported-combination",
        )
    there = rollout.worker_device or 0
    if there and seen is not None:
        _refuse_devices(there, ranks, seen, device.name)
    if not there and not device.generates_beside:
        raise Refusal.at(
            KEY,
            f"a training process and a generating process cannot share one {device.name} device",
            f"set {DEVICE_KEY} to another device, or {_TURNS}",
            code="unsupported-combination",
        )
    if not there and rollout.weight_sync == "collective" and not device.meets_itself:
        raise Refusal.at(
            "rollout.weight_sync",
            f"{device.collective} cannot connect two processes on one {device.name} device",
            f"set rollout.weight_sync to memory, or {DEVICE_KEY} to another device",
            code="unsupported-combination",
        )


def _refuse_devices(first: int, ranks: int, seen: int, name: str) -> None:
    """Refuses devices of rollout workers that also train or do not exist. The worker of local rank r uses device
    `first` + r."""
    asked = f"device {first} is" if ranks == 1 else f"devices {first} to {first + ranks - 1} are"
    if first < ranks:
        raise Refusal.at(
            DEVICE_KEY,
            f"{name} {asked} requested for rollout workers, but the {ranks} ranks of this machine train on devices "
            f"0 to {ranks - 1}",
            f"use {ranks} or more, or remove the key, so that each worker shares the device of its rank",
            code="device-in-use",
        )
    if first + ranks > seen:
        raise Refusal.at(
            DEVICE_KEY,
            f"{name} {asked} requested for rollout workers, but only {seen} are visible (counted from 0)",
            "choose visible devices, or remove the key, so that each worker shares the device of its rank",
            code="too-few-devices",
        )


def device_of_worker(recipe: Recipe, local_rank: int) -> int:
    """Returns the device index of the rollout worker of a local rank."""
    return (recipe.rollout.worker_device or 0) + local_rank


def collective_of(recipe: Recipe, device: Device) -> str | None:
    """Returns the collective library (such as NCCL) of the weight sync to the rollout worker, or None if weights go
    through host memory."""
    way = recipe.rollout.weight_sync
    own_device = bool(recipe.rollout.worker_device)
    return device.collective if way == "collective" or (way == "auto" and own_device) else None


def with_worker(
    plan: MemoryPlan,
    recipe: Recipe,
    config: Any,
    ranks: int,
    longest: int,
    prefill_tokens: int,
    *,
    on_host: bool,
    memory: int,
) -> MemoryPlan:
    """Adds the rollout worker's model, KV cache and prefill activations to the memory plan. If the worker shares the
    device of its rank, the worker's bytes are added to every phase except load. In any case, the plan also gets a
    separate phase for the worker. `on_host` is true if the device uses host memory, which then also contains the synced
    weights. The KV cache takes a fraction of the free part of `memory`."""
    rollout, size = recipe.rollout, DTYPES[recipe.model.dtype].itemsize
    if rollout.max_staleness is None:
        return plan
    asked = (rollout.max_staleness + 1) * -(-recipe.batch.prompts // ranks)
    sequences = min(rollout.max_sequences, asked * rollout.n)
    cached = sequences * longest * kv_bytes(config, size)
    standing = next(phase for phase in plan.phases if phase.name == "validation")
    held = 0 if rollout.worker_device else standing.total - standing.activations
    room = int(FREE_SHARE * max(0, memory - held - plan.weight_bytes))
    cache = min(
        cached, int(rollout.cache_gb * 1e9) if rollout.cache_gb else max(room, longest * kv_bytes(config, size))
    )
    prompts = asked * max(0, longest - rollout.max_tokens)
    passes = prefill_bytes(text_config(config), min(prefill_tokens, prompts), size)
    worker = Phase(WORKER, plan.weight_bytes, activations=cache + passes)
    through_memory = rollout.weight_sync == "memory" or (rollout.weight_sync == "auto" and not rollout.worker_device)
    plan = replace(plan, handed_bytes=plan.trained * size if through_memory else 0)
    if rollout.worker_device:
        return replace(plan, phases=(*plan.phases, worker))
    handed = plan.handed_bytes if on_host else 0
    beside = tuple(
        # The rollout worker starts after the models of the training process are loaded.
        phase
        if phase.name == "load"
        else replace(
            phase, weights=phase.weights + worker.weights + handed, activations=phase.activations + worker.activations
        )
        for phase in plan.phases
    )
    return replace(plan, phases=(*beside, worker))


def handed_lines(plan: MemoryPlan, ranks: int) -> list[str]:
    """Returns console lines on the host memory that the weight sync needs on a host with `ranks` ranks."""
    if not plan.handed_bytes:
        return []
    each = f"{plan.handed_bytes / 2**20:,.1f} MiB of the host's memory"
    return [f"weights for the rollout worker take {each}" + (f", for each of {ranks} ranks" if ranks > 1 else "")]
