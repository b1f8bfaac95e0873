"""Plans the slots for the states of recurrent layers: one per running sequence and one per prompt prefix."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.errors import Refusal
from lockstep.kernels.mixer_states import RESERVED

# Fraction of the memory for caches that the states may use. Keys and values use the rest.
STATE_SHARE = 0.5
# Slots for one sequence: its own, two for prompts, and one that stays free.
LEAST = RESERVED + 4


@dataclass(frozen=True)
class StatePlan:
    """How many sequences run at once, and the number of slots for their states and those of their prompts. `slots` is
    None for a model without recurrent layers."""

    rows: int
    slots: int | None = None
    bytes: int = 0
    """Bytes of all slots."""


def plan_states(size: int, room: float, rows: int, samples_per_prompt: int, key: str, sessions: int = 0) -> StatePlan:
    """Plans slots of `size` bytes for at most `rows` sequences at once and for `sessions` parked sessions, within
    `room` bytes. If memory is short, fewer sessions keep their states, then fewer sequences run at once. `key` is the
    setting of the memory limit."""
    if not size:
        return StatePlan(rows)
    most = math.inf
    if math.isfinite(room):
        most = int(STATE_SHARE * room // size) - RESERVED
        # A prompt keeps the states after its last token until its last sample ends.
        rows = min(rows, (most - 2) * samples_per_prompt // (samples_per_prompt + 1))
    if rows < 1:
        raise Refusal.at(
            key,
            f"the states of recurrent layers need {size / 1e9:.3g} GB per sequence, and at least {LEAST} of them; "
            f"{STATE_SHARE * room / 1e9:.3g} GB are available",
            "raise rollout.cache_gb, or use a device with more free memory",
            code="not-enough-memory",
        )
    slots = rows + -(-rows // samples_per_prompt) + 1
    slots += max(0, int(min(sessions, most - slots)))
    return StatePlan(rows, slots, (slots + RESERVED) * size)
