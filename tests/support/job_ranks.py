"""What each rank of runs that share their processes does: `job_ranks.py FILE`, a JSON list of `[recipe, key, ...]`.

It trains them one after the other, which costs one start for all of them. The first that fails ends them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.recipe import load_recipe
from lockstep.train.start import run_recipe

PROGRAM = Path(__file__)


def train(words: Sequence[str]) -> None:
    """A recipe and keys, as `lockstep train` takes them."""
    run_recipe(load_recipe(words[0], list(words[1:])))


def write_jobs(folder: Path, jobs: Sequence[Sequence[str]]) -> Path:
    """The file that the ranks are given."""
    file = folder / "jobs.json"
    file.write_text(json.dumps([list(job) for job in jobs]), encoding="utf-8")
    return file


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(*job, file=sys.stderr, flush=True)
        train(job)
