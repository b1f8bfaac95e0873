"""Several runs, one after another, in the processes of one start: a file holds their recipes and keys.

Started by torchrun, which is what takes the time, by test_world_sizes.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from lockstep.recipe import load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.progress import Console
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online


def train(recipe_file: str, words: list[str]) -> None:
    recipe = load_recipe(recipe_file, words)
    (train_online if recipe.method in ONLINE else train_offline)(recipe, Console.silent())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (file, words) in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        # As after a restart: the ranks of this run must not meet those of the one before in the launcher's store.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        print(" ".join(words), file=sys.stderr, flush=True)
        train(file, words)
