"""Plans the slots for the states of recurrent layers: one per running sequence and one per prompt prefix."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.errors import Refusal
from lockstep.kernels.mixer_states import RESERVED

# Maximum fraction of the cache memory for the states of recurrent layers. The KV cache uses the other part.
STATE_SHARE = 0.5
# The minimum number of slots, with which one sequence can run: the reserved slots, one slot for the sequence, two for
# prompts, and one that stays free.
LEAST = RESERVED + 4


@dataclass(frozen=True)
class StatePlan:
    """How many sequences run at once, and the number of slots for the recurrent states of sequences and prompts.
    `slots` is None for a model without recurrent layers."""

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
            f"a slot for the states of recurrent layers needs {size / 1e9:.3g} GB, and {LEAST} slots are the minimum; "
            f"{STATE_SHARE * room / 1e9:.3g} GB are available",
            "raise rollout.cache_gb, or use a device with more free memory",
            code="not-enough-memory",
        )
    slots = rows + -(-rows // samples_per_prompt) + 1
    slots += max(0, int(min(sessions, most - slots)))
    return StatePlan(rows, slots, (slots + RESERVED) * size)
