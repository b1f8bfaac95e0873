"""Responses travel once: from the rank that generated them to the rank, or the group of ranks, that trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lockstep.parallel.world import World
from lockstep.train.annotate import UpdateLines
from lockstep.train.experience import Experience
from lockstep.types import Origin, Prompt, Question, Rollout

# Every rank knows the prompts: a response travels without its own.
_KNOWN = Prompt(Question("", [], "", Origin("", 0)), ())


def moved(experience: Experience, updates: Sequence[UpdateLines], world: World) -> Experience:
    """The step with the responses here that this rank trains on, and no other."""
    if world.size == 1:
        return experience
    owner = {number: share for update in updates for share, number in update.owners()}
    parcels: list[list[tuple[int, Rollout]]] = [[] for _ in range(world.size)]
    for number, rollout in zip(experience.numbers, experience.rollouts, strict=True):
        for rank in world.ranks_of(owner[number]):
            parcels[rank].append((number, replace(rollout, prompt=_KNOWN)))
    arrived = [pair for parcel in world.exchange(parcels) for pair in parcel]
    return experience.with_own(
        {number: replace(rollout, prompt=experience.prompts[rollout.prompt_index]) for number, rollout in arrived}
    )
