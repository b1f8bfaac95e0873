"""What each rank of test_emulator_worlds.py does: `world_ranks.py FILE`, a JSON list of `[recipe, key, key, ...]`.

It trains them one after the other in the same processes, which costs one start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep.recipe import load_recipe
from lockstep.train.start import run_recipe


def train(words: list[str]) -> None:
    """A recipe and keys, as `lockstep train` takes them."""
    run_recipe(load_recipe(words[0], words[1:]))


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        train(job)
