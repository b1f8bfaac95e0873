"""Who and where the run is that an engine generates for: what a serving engine must know besides the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.parallel.world import World


@dataclass(frozen=True)
class RunPlace:
    """The ranks, the model's folder (or hub name), and a folder that logs may be written to."""

    world: World
    model: str
    folder: Path
