"""Tokens per second of our SFT step beside TRL's SFTTrainer, in one run.

    python bench/sft.py                                  # the embedded tiny model, both cases
    python bench/sft.py --model FOLDER --dtype bf16 --case mixed --out result.json
    python bench/sft.py --shape qwen2.5-1.5b --dtype bf16 --case equal --rows 16 --length 1024 --tokens 16384
    python bench/sft.py --shape qwen2.5-7b --lora 16 --sides lockstep --dtype bf16 --case equal --rows 16 --length 1024
    python bench/sft.py --shape olmoe-7b-a1.3b --sides lockstep --dtype bf16 --no-masters --case equal --rows 16 \
        --length 2048 --tokens 32768 --tflops 790           # a mixture of experts; tiny-moe is its shape for a CPU
    python bench/sft.py --shape olmoe-7b-a1.3b --sides lockstep --dtype bf16 --lora 16 --experts --case equal \
        --rows 16 --length 2048 --tokens 32768 --tflops 790

Every side gets the same token ids, optimizer settings, precision, threads and micro-batch budget, keeps its own copy
of the model and takes every row once in a pass. One update from the fresh weights is compared first (loss and gradient
norm), an untimed pass warms up, then the sides take turns: A B A B ... Only real tokens are counted, not padding.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As lockstep sets it for itself; here it must come before torch, and for every side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers

from lockstep.device.select import select
from lockstep.model.load_folder import DTYPES
from lockstep.model.tiny import write_tiny
from lockstep.preflight.cluster import model_cost
from lockstep.recipe.schema import Optim
from report import machine, spread, summary
from roofline import training_flops
from shapes import SHAPES, write_model
from sides import SIDES, Ours, Seconds, Side, Work, has_trl, sides_for

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "lockstep-rl")
# How far loss and gradient norm (relative) may lie from ours for the work to count as equal. In bf16 this is coarse:
# the peers run autocast over fp32 weights and keep the residual stream in fp32, we run in bf16 beside fp32 masters.
TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 5e-2)}


def main() -> None:
    args = _arguments()
    transformers.logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape is not None:
            write_model(Path(folder) / "model", args.shape, select(args.device).name)
        elif args.model is None:
            write_tiny(Path(folder) / "model")
        model = args.model or f"{folder}/model"
        record = {"settings": vars(args), "machine": machine(select(args.device)), "cases": {}}
        print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
        if not has_trl():
            print("TRL is not installed: the peer is a plain transformers loop, NOT TRL (pip install -e '.[bench]')")
        for case in ("equal", "mixed") if args.case == "all" else (args.case,):
            record["cases"][case] = run_case(case, model, args)
    record["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    if args.out:
        Path(args.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"written to {args.out}")


def run_case(case: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    work = _work(case, model, args)
    tokens = sum(len(row) for row in work.pool)
    lengths = sorted({len(row) for row in work.pool})
    print(f"\n{case}: {len(work.pool)} rows of {lengths[0]} to {lengths[-1]} tokens, {tokens} in all; ", end="")
    print(f"{work.rows} rows an update, {work.tokens} tokens a micro-batch, {args.dtype}", flush=True)
    names = args.sides or sides_for(case)
    sides: dict[str, Side] = {name: SIDES[name](work) for name in names}
    checks = check_equal_work(sides, args.dtype)
    for side in sides.values():
        side.train_pass()
    work.device.reset_peak()
    seconds: dict[str, list[Seconds]] = {name: [] for name in names}
    for _ in range(args.repeats):
        for name, side in sides.items():
            seconds[name].append(side.train_pass())
    found = {name: _numbers(tokens, seconds[name], seconds["lockstep"]) for name in names}
    _report(sides, found)
    efficiency = _efficiency(work, found, tokens, args.tflops)
    return {
        **efficiency,
        "rows": len(work.pool),
        "tokens": tokens,
        "shortest": lengths[0],
        "longest": lengths[-1],
        "sides": {name: {"about": side.about} | found[name] for name, side in sides.items()},
        "first_update": checks,
    }


def _efficiency(work: Work, found: dict[str, dict[str, Any]], tokens: int, tflops: float | None) -> dict[str, Any]:
    """Model FLOP/s over the peak, and the peak of memory: that of one side only where it runs alone."""
    peak = tflops * 1e12 if tflops else work.device.peak_flops(DTYPES[work.dtype])
    cost = model_cost(transformers.AutoConfig.from_pretrained(work.model))
    flops = training_flops(cost, [len(row) for row in work.pool], frozen=work.lora is not None)
    record: dict[str, Any] = {"flops_per_token": flops / tokens, "peak_flops": peak}
    if peak:
        record["share_of_peak"] = {
            name: flops / tokens * numbers["tokens_per_second"]["median"] / peak for name, numbers in found.items()
        }
        shares = ", ".join(f"{name} {share:.1%}" for name, share in record["share_of_peak"].items())
        print(f"  model FLOP/s of {peak / 1e12:.0f} TFLOP/s: {shares}")
    if work.device.name != "cpu":
        record["peak_gb"] = work.device.memory().peak / 1e9
        print(f"  peak memory {record['peak_gb']:.1f} GB of {'one side' if len(found) == 1 else 'all sides together'}")
    return record


def _numbers(tokens: int, theirs: list[Seconds], ours: list[Seconds]) -> dict[str, Any]:
    """Tokens per second, and how much faster ours was in the same repeat."""
    return {
        "seconds": [value.wall for value in theirs],
        "cpu_seconds": [value.cpu for value in theirs],
        "tokens_per_second": summary([tokens / value.wall for value in theirs]),
        "ratio": summary([a.wall / b.wall for a, b in zip(theirs, ours, strict=True)]),
        "cpu_ratio": summary([a.cpu / b.cpu for a, b in zip(theirs, ours, strict=True)]),
    }


def check_equal_work(sides: dict[str, Side], dtype: str) -> dict[str, Any]:
    """The first update of each side against ours on the same rows, from the same weights."""
    ours = sides["lockstep"]
    assert isinstance(ours, Ours)
    allowed_loss, allowed_norm = TOLERANCE[dtype]
    checks: dict[str, Any] = {}
    for name, side in sides.items():
        theirs = side.first_update()
        mine = ours.look_at(theirs.rows)
        checks[name] = {"loss": theirs.loss, "our_loss": mine.loss, "norm": theirs.norm, "our_norm": mine.norm}
        if abs(theirs.loss - mine.loss) > allowed_loss or abs(theirs.norm / mine.norm - 1) > allowed_norm:
            raise SystemExit(f"{side.name} computes something else than we do in its first update: {checks[name]}")
    return checks


def _work(case: str, model: str, args: argparse.Namespace) -> Work:
    draw = random.Random(args.seed)
    words = transformers.AutoConfig.from_pretrained(model).vocab_size
    low, high = math.log(args.shortest), math.log(args.longest)
    pool = []
    for _ in range(args.rows * args.updates):
        length = args.length if case == "equal" else round(math.exp(draw.uniform(low, high)))
        pool.append([draw.randrange(words) for _ in range(length)])
    if max(len(row) for row in pool) > args.tokens:
        raise SystemExit(f"--tokens {args.tokens} is less than the longest row of {max(len(row) for row in pool)}")
    return Work(
        device=select(args.device),
        model=model,
        dtype=args.dtype,
        masters=args.dtype == "bf16" and not args.no_masters,
        pool=pool,
        rows=args.rows,
        tokens=args.tokens,
        optim=Optim(lr=1e-5, schedule="constant"),
        lora=args.lora,
        experts=args.experts,
    )


def _report(sides: dict[str, Side], found: dict[str, dict[str, Any]]) -> None:
    width = max(len(side.name) for side in sides.values())
    for name, side in sides.items():
        line = f"  {side.name:{width}}  {spread(found[name]['tokens_per_second'], '.0f')} tokens/s"
        if name != "lockstep":
            line += f"   ratio {spread(found[name]['ratio'], '.2f')}"
        if name != "lockstep" and side.work.device.name == "cpu":
            line += f", in CPU time {spread(found[name]['cpu_ratio'], '.2f')}"
        print(f"{line}\n  {'':{width}}  {side.about}")
    medians = {name: found[name]["ratio"]["median"] for name in sides if name != "lockstep"}
    if not medians:
        return
    default, hardest = next(iter(medians)), min(medians, key=lambda name: medians[name])
    parts = [f"ratio {medians[default]:.2f} against {sides[default].name} (its default)"]
    if hardest != default:
        parts.append(f"{medians[hardest]:.2f} against {sides[hardest].name} (its fastest here)")
    print(f"  {', '.join(parts)}; medians")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: the embedded tiny model")
    parser.add_argument("--shape", choices=SHAPES, help="instead of a folder: random weights of this configuration")
    parser.add_argument("--tflops", type=float, help="matrix TFLOP/s that count as the peak; default: the maker's")
    parser.add_argument("--device", default="auto", help="cpu, cuda, npu or auto")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 keeps fp32 master weights")
    parser.add_argument("--no-masters", action="store_true", help="bf16 weights alone, on every side")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter on all linear layers; ours alone")
    parser.add_argument("--experts", action="store_true", help="with --lora: adapters of attention and of the experts")
    parser.add_argument("--case", choices=["equal", "mixed", "all"], default="all")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), help="default: ours and what is installed")
    parser.add_argument("--rows", type=int, default=32, help="rows of one update")
    parser.add_argument("--updates", type=int, default=2, help="updates of one pass")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of one micro-batch, padding included")
    parser.add_argument("--length", type=int, default=256, help="row length of the case equal")
    parser.add_argument("--shortest", type=int, default=32, help="shortest row of the case mixed (log-uniform)")
    parser.add_argument("--longest", type=int, default=1024, help="longest row of the case mixed")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each side")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write versions, settings and numbers to this JSON file")
    args = parser.parse_args()
    if args.sides and args.sides[0] != "lockstep":
        parser.error("--sides begins with lockstep, which the others are compared with")
    if args.experts and not args.lora:
        parser.error("--experts goes with --lora RANK")
    if args.lora and args.sides != ["lockstep"]:
        parser.error("--lora goes with --sides lockstep: the others train all weights")
    return args


if __name__ == "__main__":
    main()
