"""GRPO with a serving engine beside the built-in one: seconds of a step, of generation, of the hand-over of weights.

    python bench/server_engine.py MODEL PROMPTS --python .venv-vllm/bin/python --dtype bf16 --out result.json
    python bench/server_engine.py MODEL PROMPTS --url http://127.0.0.1:8000

The same recipe runs twice, from the same weights on the same prompts (rows of the RL schema); only `rollout.engine`
differs. The medians leave out the first step, which warms up. Words behind `--` go to both recipes:
`-- batch.prompts=64 rollout.n=8 rollout.max_tokens=400`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from tempfile import mkdtemp

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lockstep.recipe import load_recipe
from lockstep.run.metrics import read_metrics
from lockstep.train.start import run_recipe

TOLD = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/sync",
    "timing_s/update_actor",
    "perf/throughput",
    "critic/score/mean",
    "response_length/mean",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "rollout_corr/ratio_max",
)


def main() -> None:
    args = _arguments()
    results = {}
    for engine in ("native", args.engine):
        results[engine] = _run(args, engine)
        print(engine, json.dumps(results[engine], indent=2))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _run(args: argparse.Namespace, engine: str) -> dict[str, float]:
    folder = Path(mkdtemp(prefix=f"bench-{engine}-"))
    recipe = folder / "recipe.yaml"
    said = {
        "method": "grpo",
        "device": args.device,
        "run": {"name": "run", "folder": str(folder), "steps": args.steps, "export": False},
        "model": {"path": str(args.model), "dtype": args.dtype},
        "data": {"train": str(args.prompts)},
        "rollout": {"engine": engine, **(_server(args) if engine == args.engine else {})},
        "algorithm": {"kl": {"where": "none"}},
    }
    recipe.write_text(json.dumps(said), encoding="utf-8")
    run = run_recipe(load_recipe(str(recipe), args.words))
    steps = [metrics for _, metrics in read_metrics(run / "metrics.jsonl")][1:]
    return {name: statistics.median(step[name] for step in steps) for name in TOLD if name in steps[0]}


def _server(args: argparse.Namespace) -> dict[str, object]:
    if args.url:
        return {"url": args.url}
    return {"server": {"python": args.python, "args": args.server_args, "env": dict(args.env)}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--url", nargs="*")
    parser.add_argument("--python")
    parser.add_argument("--server-args", nargs="*", default=[], help="such as=this: --server-args=--enforce-eager")
    parser.add_argument("--env", nargs="*", default=[], type=lambda text: tuple(text.split("=", 1)))
    parser.add_argument("--out", type=Path)
    parser.add_argument("words", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
