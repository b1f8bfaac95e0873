"""Keys that say how the processes of a run divide its work."""

from __future__ import annotations

from typing import Literal

from lockstep.recipe.effects import MICRO
from lockstep.recipe.section import Field, Section


class Parallel(Section):
    context: int = Field(
        1,
        ge=1,
        description="Processes that divide every micro-batch between them, for sequences too long for one device: each "
        "holds `batch.tokens` of it. Must divide the number of processes.",
        effect=MICRO,
        resumable=True,
    )
    context_layout: Literal["zigzag", "gather", "ulysses"] = Field(
        "zigzag",
        description="How they divide it. `zigzag`: keys and values travel along a ring, and all have as much to do; "
        "`gather`: a stretch for each, with gathered keys and values, also with sliding windows; `ulysses`: tokens are "
        "exchanged for heads, which must divide by `parallel.context`; for every kind of attention.",
        effect=MICRO,
        resumable=True,
    )
