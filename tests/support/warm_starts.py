"""The start of learning tests: a tiny model after a short SFT."""

from __future__ import annotations

from pathlib import Path

from commands import lockstep
from hang import HANG


def warm_started(folder: Path) -> Path:
    """Writes data and a model that answers some of the held-out sums, but far from all. Returns the folder."""
    assert lockstep("tiny", folder / "model").returncode == 0
    assert lockstep("data", "arithmetic", folder / "data", "--difficulty", "2").returncode == 0
    done = lockstep(
        "train",
        "warmup-arithmetic",
        f"run.folder={folder / 'runs'}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'data' / 'sft_train.parquet'}",
        f"val.questions={folder / 'data' / 'val.parquet'}",
        timeout=4 * HANG,
    )
    assert done.returncode == 0, done.stderr
    return folder
