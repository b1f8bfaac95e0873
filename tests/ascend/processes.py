"""Child interpreters: they inherit the emulated NPU through the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hang import HANG


def python(*words: object, timeout: float = HANG, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS`. A variable set to None is taken out of the environment."""
    merged: dict[str, str | None] = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={key: value for key, value in merged.items() if value is not None},
        check=False,
    )


def torchrun(
    script: Path, *words: object, ranks: int = 2, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return python(*launcher, script, *words, **environment)
