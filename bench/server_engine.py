"""GRPO with a serving engine beside the built-in one: seconds of a step, of generation, of the hand-over of weights.

    python bench/server_engine.py MODEL PROMPTS --python .venv-vllm/bin/python --dtype bf16 --out result.json
    python bench/server_engine.py MODEL PROMPTS --url http://127.0.0.1:8000
    python bench/server_engine.py --shape half-billion --prompt-tokens 256 --own --python ... -- rollout.max_tokens=256

The same recipe runs twice, from the same weights on the same prompts (rows of the RL schema); only `rollout.engine`
differs (`--sides vllm` leaves the built-in engine out). The medians leave out the first step, which warms up. Words
behind `--` go to both recipes: `-- batch.prompts=64 rollout.n=8 rollout.max_tokens=400`. Without a MODEL, weights and
prompts are random.

Parts of it, each alone where `--steps 0` leaves the recipe out:

--pushes N   hands changed weights over, and says how long each part of it took
--samples N  generates the responses of a step through the server, of the same server as the pushes
--own        vLLM's own `generate` of the same prompts in the server's Python, with and without seeds and log-probs
             (in the same process; `--env VLLM_ENABLE_V1_MULTIPROCESSING=1` has its engine in one of its own)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from lockstep.data.encode.prompt_rows import load_prompts
from lockstep.device.select import select
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.load_folder import DTYPES
from lockstep.parallel.world import World
from lockstep.recipe import load_recipe
from lockstep.recipe.schema import Recipe
from lockstep.rollout.engine import RunPlace
from lockstep.rollout.servers.server_engine import ServerEngine, open_engine
from lockstep.run.metrics import read_metrics
from lockstep.train.start import run_recipe
from lockstep.types import Request, Sampling
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
    results: dict[str, Any] = {}

    def done(name: str, said: Any) -> None:
        results[name] = said
        print(name, json.dumps(said, indent=2), flush=True)

    if args.pushes or args.samples:
        for name, said in _served(args):
            done(name, said)
    for engine in args.sides or ("native", args.engine) if args.steps else ():
        done(engine, _run(args, engine))
    if args.own:
        done("generate", _own(args))
    if args.out:
        facts = {"torch": torch.__version__, "transformers": transformers.__version__, **select(args.device).facts()}
        said = {"command": sys.argv[1:], "versions": facts, "results": results}
        args.out.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _write_random(args: argparse.Namespace) -> None:
    folder = Path(mkdtemp(prefix="bench-model-"))
    args.model, args.prompts = folder / "model", folder / "prompts.jsonl"
    device = str(select(args.device).torch_device(0))
    if args.shape in SHAPES:
        write_model(args.model, args.shape, device, args.init)
    else:
        write_random_lengths(args.model, args.shape, None, DTYPES[args.dtype], device=device)
    write_questions(args.prompts, args.rows, args.prompt_tokens, args.prompt_tokens, seed=0)


def _served(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Hand-overs and samples of one server, without a trainer beside it."""
    device, folder = select(args.device), Path(mkdtemp(prefix="bench-served-"))
    recipe = load_recipe(str(_recipe(args, args.engine, folder)), args.words)
    policy = load_policy(recipe.model, device.torch_device(0), device.attention, 0, frozen=True)
    tokenizer = load_tokenizer(str(args.model))
    begun = time.perf_counter()
    engine = open_engine(policy, device, recipe.rollout, tokenizer, RunPlace(World(), str(args.model), folder))
    try:
        print(f"the server started in {time.perf_counter() - begun:.0f} s", flush=True)
        yield "pushes", _pushes(args, engine)
        if args.samples:
            yield "samples", _samples(args, engine, recipe)
    finally:
        engine.close()


def _pushes(args: argparse.Namespace, engine: ServerEngine) -> dict[str, Any]:
    """Seconds of a hand-over with its probe, and of its parts: the first is pushed twice, and left out."""
    told: list[dict[str, float]] = []
    for number in range(args.pushes + 1):
        with torch.no_grad():
            for weight in engine.policy.parameters():
                weight.mul_(1.0 + 2.0**-6)
        engine.updates = number
        engine.sync(engine.policy.stored.named_parameters())
        told.append({"timing_s/sync": engine.sync_seconds, **engine.sync_parts})
        print(f"push {number}: {_brief(told[-1])}, {engine.metadata()}", flush=True)
    size = sum(weight.numel() * weight.element_size() for weight in engine.policy.parameters())
    kept = told[1:] or told
    medians = {part: statistics.median(one.get(part, 0.0) for one in kept) for part in kept[-1]}
    return {**medians, "gib": size / 2**30, "way": engine.weight_sync.transport}


def _samples(args: argparse.Namespace, engine: ServerEngine, recipe: Recipe) -> dict[str, float]:
    """The responses of one step, as long as they may be: the first time warms up."""
    how = recipe.rollout
    requests = [Request(ids, number, how.n) for number, ids in enumerate(_prompts(args, recipe))]
    seconds, processor = [], []
    for number in range(args.samples + 1):
        begun, spent = time.perf_counter(), time.process_time()
        made = list(engine.generate(requests, Sampling(max_tokens=how.max_tokens, seed=number)))
        seconds.append(time.perf_counter() - begun)
        processor.append(time.process_time() - spent)
        tokens = sum(len(one.ids) for one in made)
        print(f"samples {number}: {seconds[-1]:.3f} s, {tokens / seconds[-1]:,.0f} tokens/s", flush=True)
    median = statistics.median(seconds[1:])
    return {
        "timing_s/gen": median,
        "tokens": tokens,
        "tokens/s": tokens / median,
        "processor seconds of the run": statistics.median(processor[1:]),
    }


def _brief(seconds: dict[str, float]) -> str:
    return ", ".join(f"{part} {value:.3f}" for part, value in seconds.items())


def _prompts(args: argparse.Namespace, recipe: Recipe) -> list[list[int]]:
    """Of one step, as the recipe has them."""
    prompts = load_prompts(recipe.data.train, recipe.data, load_tokenizer(str(args.model)), 10**6)
    return [list(prompt.ids) for prompt in prompts.items[: recipe.batch.prompts]]


def _own(args: argparse.Namespace) -> dict[str, Any]:
    recipe = load_recipe(str(_recipe(args, "native", Path(mkdtemp(prefix="bench-own-")))), args.words)
    rollout, ids = recipe.rollout, _prompts(args, recipe)
    asked = {"n": rollout.n, "tokens": rollout.max_tokens, "prompts": ids, "dtype": args.dtype}
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
        "run": {"name": "run", "folder": str(folder), "steps": args.steps or 1, "export": False},
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
    parser.add_argument(
        "--init", type=float, default=0.02, help="spread of random weights: 0.01 for 7B, whose own is noise"
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--own", action="store_true", help="vLLM's own generate too")
    parser.add_argument("--pushes", type=int, default=0, help="hand-overs of changed weights")
    parser.add_argument("--samples", type=int, default=0, help="generations of a step through the server")
    parser.add_argument("--sides", nargs="*", help="engines that the recipe runs with")
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
