"""Shows that a refactoring changed no number: the same short runs with this checkout and with another, bit for bit.

    python tools/same_numbers.py OTHER_CHECKOUT [--python .venv/bin/python] [--only grpo,ppo]

Each run trains a few steps of a tiny model on the CPU. Metrics (without times, speed and memory) and samples of both
checkouts must be equal to the last bit. The exit status is 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
SETUP: tuple[tuple[str, ...], ...] = (
    ("tiny", "quickstart/model"),
    ("data", "arithmetic", "quickstart/carry", "--difficulty", "2"),
    ("data", "preferences", "quickstart/preferences"),
    ("train", "warmup-arithmetic", "run.steps=30"),
    ("train", "warmup-brevity", "run.steps=30"),
    ("train", "rm-brevity", "run.steps=6", "optim.warmup=2"),
)
SHORT = ("val.every=2", "optim.warmup=0", "val.question_rows=8", "log.samples=8")
ONLINE = ("run.steps=4", "batch.prompts=8", "rollout.n=4", "checkpoint.every=null", *SHORT)
RUNS: dict[str, tuple[str, ...]] = {
    "sft": ("warmup-arithmetic", "run.steps=6", *SHORT),
    "sft-lora-bf16": ("warmup-arithmetic", "run.steps=4", "model.lora.rank=4", "model.dtype=bf16", *SHORT),
    "sft-rows": ("warmup-arithmetic", "run.steps=4", "batch.tokens=null", "batch.rows=4", *SHORT),
    "dpo": ("dpo-brevity", "run.steps=4", *SHORT[:2]),
    "simpo": ("simpo-brevity", "run.steps=4", *SHORT[:2]),
    "orpo": ("orpo-brevity", "run.steps=4", *SHORT[:2]),
    "kto": ("kto-brevity", "run.steps=4", *SHORT[:2]),
    "prm": ("prm-steps", "run.steps=4", *SHORT[:2]),
    "distill": (
        *(
            "distill-arithmetic",
            "run.steps=4",
            "model.path=quickstart/model",
            "data.train=quickstart/carry/sft_train.parquet",
        ),
        *(
            "data.val=[]",
            "distill.teacher=runs/warmup-arithmetic/export",
            "val.questions=null",
            "val.every=null",
            "val.at_start=false",
            "optim.warmup=0",
        ),
    ),
    "grpo": ("grpo-arithmetic", *ONLINE),
    "grpo-kl-lora": ("grpo-arithmetic", *ONLINE, "algorithm.kl.where=loss", "model.lora.rank=4"),
    "dapo": ("grpo-arithmetic", *ONLINE, "method=dapo"),
    "reinforce_pp": ("grpo-arithmetic", *ONLINE, "method=reinforce_pp"),
    "rloo-updates": ("grpo-arithmetic", *ONLINE, "method=rloo", "batch.prompts_per_update=4", "algorithm.loss=clip"),
    "ppo": ("ppo-brevity", *ONLINE, "batch.prompts_per_update=4", "algorithm.loss=clip"),
    "two-ranks": ("grpo-arithmetic", *ONLINE, "parallel.devices=2"),
}
VARIES = ("timing", "perf/", "time", "seconds", "memory", "_s/", "tokens_per")
"""Parts of metric names that measure the machine and not the training."""


def steady(value: Any) -> Any:
    """Without what measures the machine."""
    if isinstance(value, dict):
        return {name: steady(one) for name, one in value.items() if not any(part in name for part in VARIES)}
    return [steady(one) for one in value] if isinstance(value, list) else value


def numbers(run: Path) -> dict[str, list[Any]]:
    """The metrics and samples of a run folder, one entry per line."""
    found = {}
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = run / name
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        found[name] = [steady(json.loads(line)) for line in lines]
    return found


def lockstep(python: Path, checkout: Path, folder: Path, words: Sequence[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "LOCKSTEP_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [str(python), "-m", "lockstep", *words],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: lockstep {' '.join(words)} failed\n{done.stderr[-3000:]}")


def first_difference(ours: dict[str, list[Any]], theirs: dict[str, list[Any]]) -> str:
    """Empty where all lines are equal."""
    for name in ours:
        if len(ours[name]) != len(theirs[name]):
            return f"{name}: {len(ours[name])} and {len(theirs[name])} lines"
        for number, (a, b) in enumerate(zip(ours[name], theirs[name], strict=True), 1):
            for key in sorted(a.keys() | b.keys()):
                if a.get(key) != b.get(key):
                    return f"{name} line {number}: {key}: {a.get(key)} and {b.get(key)}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--only", default=",".join(RUNS))
    options = parser.parse_args()
    differing = 0
    with tempfile.TemporaryDirectory() as parent:
        folders = {checkout: Path(parent) / str(n) for n, checkout in enumerate((HERE, options.other.resolve()))}
        for checkout, folder in folders.items():
            folder.mkdir()
            for words in SETUP:
                lockstep(options.python, checkout, folder, words)
        for name in options.only.split(","):
            recipe, *overrides = RUNS[name]
            for checkout, folder in folders.items():
                lockstep(options.python, checkout, folder, ["train", recipe, f"run.name={name}", *overrides])
            ours, theirs = (numbers(folder / "runs" / name) for folder in folders.values())
            difference = first_difference(ours, theirs)
            count = sum(len(line) for lines in ours.values() for line in lines)
            print(f"{name:16}{'DIFFERS: ' + difference if difference else f'equal ({count} values)'}", flush=True)
            differing += bool(difference)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
