"""GRPO with a serving engine beside the built-in one: seconds of a step, of generation, of the hand-over of weights.

    python bench/server_engine.py MODEL PROMPTS --python .venv-vllm/bin/python --dtype bf16 --out result.json
    python bench/server_engine.py MODEL PROMPTS --url http://127.0.0.1:8000
    python bench/server_engine.py --shape half-billion --prompt-tokens 256 --own --python ... -- rollout.max_tokens=256

The same recipe runs twice, from the same weights on the same prompts (rows of the RL schema); only `rollout.engine`
differs. The medians leave out the first step, which warms up. Words behind `--` go to both recipes:
`-- batch.prompts=64 rollout.n=8 rollout.max_tokens=400`. Without a MODEL, weights and prompts are random. `--own` times
vLLM's own `generate` on the same prompts, in the server's Python. `--pushes` hands weights over, and trains nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from lockstep.data.prompts import load_prompts
from lockstep.device.select import select
from lockstep.model.load import DTYPES, load_policy, load_tokenizer
from lockstep.parallel.world import World
from lockstep.recipe import load_recipe
from lockstep.rollout.place import RunPlace
from lockstep.rollout.server.engine import open_engine
from lockstep.run.metrics import read_metrics
from lockstep.train.start import run_recipe
from random_lengths import write_questions, write_random_lengths
from shapes import SHAPES, write_model

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


HERE = Path(__file__).parent


def main() -> None:
    args = _arguments()
    if args.shape:
        _write_random(args)
    results: dict[str, dict[str, float]] = {}
    if args.pushes:
        results["pushes"] = _pushes(args)
        print("pushes", json.dumps(results["pushes"], indent=2), flush=True)
    for engine in () if args.pushes else ("native", args.engine):
        results[engine] = _run(args, engine)
        print(engine, json.dumps(results[engine], indent=2), flush=True)
    if args.own:
        results["generate"] = _own(args)
        print("its own generate", json.dumps(results["generate"], indent=2), flush=True)
    if args.out:
        facts = {"torch": torch.__version__, "transformers": transformers.__version__, **select(args.device).facts()}
        said = {"command": sys.argv[1:], "versions": facts, "results": results}
        args.out.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _write_random(args: argparse.Namespace) -> None:
    folder = Path(mkdtemp(prefix="bench-model-"))
    args.model, args.prompts = folder / "model", folder / "prompts.jsonl"
    device = str(select(args.device).torch_device(0))
    if args.shape in SHAPES:
        write_model(args.model, args.shape, device)
    else:
        write_random_lengths(args.model, args.shape, None, DTYPES[args.dtype], device=device)
    write_questions(args.prompts, args.rows, args.prompt_tokens, args.prompt_tokens, seed=0)


def _pushes(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a hand-over with its probe, without a trainer beside it: the first is pushed twice, and left out."""
    device, folder = select(args.device), Path(mkdtemp(prefix="bench-pushes-"))
    recipe = load_recipe(str(_recipe(args, args.engine, folder)), args.words)
    policy = load_policy(recipe.model, device.torch_device(0), device.attention, 0, frozen=True)
    tokenizer = load_tokenizer(str(args.model))
    engine = open_engine(policy, device, recipe.rollout, tokenizer, RunPlace(World(), str(args.model), folder))
    seconds = []
    try:
        for number in range(args.pushes + 1):
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.mul_(1.0 + 2.0**-6)
            engine.updates = number
            engine.sync(policy.stored.named_parameters())
            seconds.append(engine.sync_seconds)
            print(f"push {number}: {engine.sync_seconds:.2f} s, {engine.told()}", flush=True)
    finally:
        engine.close()
    size = sum(weight.numel() * weight.element_size() for weight in policy.parameters())
    return {"timing_s/sync": statistics.median(seconds[1:]), "gib": size / 2**30}


def _own(args: argparse.Namespace) -> dict[str, float]:
    """Of the prompts of one step, as the recipe has them."""
    recipe = load_recipe(str(_recipe(args, "native", Path(mkdtemp(prefix="bench-own-")))), args.words)
    prompts = load_prompts(recipe.data.train, recipe.data, load_tokenizer(str(args.model)), 10**6)
    ids = [list(prompt.ids) for prompt in prompts.items[: recipe.batch.prompts]]
    asked = {"n": recipe.rollout.n, "tokens": recipe.rollout.max_tokens, "prompts": ids, "dtype": args.dtype}
    env = {**os.environ, **dict(args.env)}
    command = [args.python or sys.executable, str(HERE / "vllm_side.py"), str(args.model)]
    said = subprocess.run(command, input=json.dumps(asked), text=True, stdout=subprocess.PIPE, env=env, check=True)
    return dict(json.loads(said.stdout.splitlines()[-1]))


def _run(args: argparse.Namespace, engine: str) -> dict[str, float]:
    recipe = _recipe(args, engine, Path(mkdtemp(prefix=f"bench-{engine}-")))
    run = run_recipe(load_recipe(str(recipe), args.words))
    steps = [metrics for _, metrics in read_metrics(run / "metrics.jsonl")][1:]
    return {name: statistics.median(step[name] for step in steps) for name in TOLD if name in steps[0]}


def _recipe(args: argparse.Namespace, engine: str, folder: Path) -> Path:
    recipe = folder / "recipe.yaml"
    said = {
        "method": "grpo",
        "device": args.device,
        "run": {"name": "run", "folder": str(folder), "steps": args.steps, "export": False},
        "model": {"path": str(args.model), "dtype": args.dtype},
        "data": {"train": str(args.prompts)},
        "rollout": {"engine": engine, **(_server(args) if engine == args.engine else {})},
        "algorithm": {"kl": {"where": "none"}},
        **({"reward": {"function": f"{HERE / 'reward.py'}:vowels"}} if args.shape else {}),
    }
    recipe.write_text(json.dumps(said), encoding="utf-8")
    return recipe


def _server(args: argparse.Namespace) -> dict[str, object]:
    if args.url:
        return {"url": args.url}
    return {"server": {"python": args.python, "args": args.server_args, "env": dict(args.env)}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("prompts", type=Path, nargs="?")
    parser.add_argument("--shape", choices=("tiny", "half-billion", *SHAPES))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--own", action="store_true", help="vLLM's own generate too")
    parser.add_argument("--pushes", type=int, default=0, help="only so many hand-overs of changed weights")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--url", nargs="*")
    parser.add_argument("--python")
    parser.add_argument("--server-args", action="append", default=[], help="each as --server-args=--enforce-eager")
    parser.add_argument("--env", nargs="*", default=[], type=lambda text: tuple(text.split("=", 1)))
    parser.add_argument("--out", type=Path)
    said = sys.argv[1:]
    mine = said.index("--") if "--" in said else len(said)
    args = parser.parse_args(said[:mine])
    args.words = said[mine + 1 :]
    if args.shape is None and args.prompts is None:
        parser.error("MODEL and PROMPTS, or --shape")
    return args


if __name__ == "__main__":
    main()
