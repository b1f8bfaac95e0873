"""What a type checker sees of `import lockstep`. `make lint` checks it; it is never run.

Where a name were `Any`, nothing would be wrong in the last two lines, and mypy names an ignore that ignores nothing.
"""

from __future__ import annotations

from pathlib import Path

import lockstep

run: Path = lockstep.train("sft-arithmetic", run={"steps": 1})
texts: list[str] = [rollout.text for rollout in lockstep.load("m").sample(["a"], n=2)]
verdict: str = lockstep.compare("a", "b").verdict
no_number: int = lockstep.load("m")  # type: ignore[assignment]
none_either: int = lockstep.train("r")  # type: ignore[assignment]
