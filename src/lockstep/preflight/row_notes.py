"""What is worth saying of a run's rows although nothing is wrong with any of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.data.array_store import item_digests
from lockstep.data.dataset import Dataset
from lockstep.data.encode.prompt_rows import PromptSet
from lockstep.preflight.batch_plan import make_loader
from lockstep.recipe import Recipe


def repeated_rows(recipe: Recipe, read: Dataset[Any] | PromptSet) -> list[str]:
    """An update that holds a row twice, because there are fewer rows than it takes."""
    key, what = ("batch.prompts", "prompts") if isinstance(read, PromptSet) else ("batch.rows_per_update", "rows")
    taken, different = make_loader(recipe, read).different()
    if different == taken:
        return []
    rows = sum(len(source) for source in read.sources)
    short = f"there are {rows:,}" if rows < taken else "a source has fewer than its weight takes of an update"
    return [
        f"some {what} come several times into one update: of its {taken:,} only {different:,} are different, because "
        f"{short}; lower {key}, or add {what}"
    ]


def seen_in_training(train: Sequence[Any], held_out: Sequence[Any], key: str) -> list[str]:
    """Rows that are to measure what was never trained on, and are trained on."""
    both = int(np.isin(item_digests(held_out), item_digests(train)).sum())
    if not both:
        return []
    return [
        f"{key}: {both:,} of {len(held_out):,} are in data.train too, token for token: "
        "what is measured on them is memory, not skill"
    ]
