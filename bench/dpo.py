"""Pairs per second of our DPO step beside TRL's DPOTrainer, in one run.

    python bench/dpo.py                                  # the embedded tiny model, both cases
    python bench/dpo.py --device cuda --shape qwen2.5-0.5b --dtype bf16 --case mixed --out result.json

Full fine-tuning against a frozen reference, sigmoid loss. Every side gets the same token ids, rows an update, optimizer
settings, precision and threads, and keeps its own models. Before anything is timed each TRL side trains some updates
from the fresh weights, and ours trains the same pairs in the same order: every loss and gradient norm must agree. An
untimed pass warms up, then the sides take turns: A B A B ... A side that precomputed the reference is compared with
ours that did so too.
"""

from __future__ import annotations

import argparse
import math
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As lockstep sets it for itself; here it must come before torch, and for every side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers

from dpo_sides import SIDES, Ours, Pair, Side, Trl, Work, ours_for, sides_for
from lockstep.device.select import select
from lockstep.model.load_folder import DTYPES
from lockstep.model.tiny import write_tiny
from lockstep.recipe.schema import Optim
from memory import SHAPE
from online_work import settle, temporary_folder
from report import machine, spread, summary, write_record
from sides import Seconds, has_trl

SHAPES = ("tiny", "qwen2.5-0.5b")
# How far loss and gradient norm (relative) of the first updates may lie from ours for the work to count as equal. In
# bf16 this is coarse: TRL runs autocast over fp32 weights, we run in bf16 beside fp32 masters, and an update reaches
# our weights only where it has moved the master by half a bf16 step.
TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (5e-2, 1e-1)}
# The loss must move by so many tolerances: where nothing moves, agreement says nothing.
MOVES = 5
# The loss while policy and reference are the same model.
START = math.log(2)


def main() -> None:
    args = _arguments()
    settle(args.threads)
    if not has_trl():
        raise SystemExit("TRL is not installed (pip install -e '.[bench]')")
    device = select(args.device)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    record: dict[str, Any] = {"settings": settings, "machine": machine(device), "cases": {}}
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    with temporary_folder() as folder:
        model = args.model or _write_model(Path(folder) / "model", args.shape, DTYPES[args.dtype])
        for case in ("equal", "mixed") if args.case == "all" else (args.case,):
            # Equal lengths leave nothing to draw that would change the work.
            seeds = args.seeds if case == "mixed" else args.seeds[:1]
            runs = {seed: run_workload(case, _work(case, model, seed, args), seed, args) for seed in seeds}
            together = _together(list(runs.values()))
            _conclude(case, together, len(seeds), on_cpu=device.name == "cpu")
            record["cases"][case] = {"seeds": runs, "ratio": together}
    if args.out:
        write_record(record, args.out)


def run_workload(case: str, work: Work, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    tokens = sum(pair.tokens for pair in work.pool)
    print(
        f"\n{case}, seed {seed}: {len(work.pool)} pairs of {tokens} tokens, the longest sequence {work.longest}; ",
        end="",
    )
    print(f"{work.rows} pairs an update, {work.tokens} tokens a micro-batch, {work.dtype}", flush=True)
    sides: dict[str, Side] = {name: SIDES[name](work) for name in args.sides or sides_for(case)}
    checks = {name: check_equal_work(side, args.checked) for name, side in sides.items() if isinstance(side, Trl)}
    for side in sides.values():
        side.train_pass()
    seconds: dict[str, list[Seconds]] = {name: [] for name in sides}
    for _ in range(args.repeats):
        for name, side in sides.items():
            seconds[name].append(side.train_pass())
    found = {name: _numbers(len(work.pool), seconds[name], seconds[ours_for(name)]) for name in sides}
    _report(sides, found, checks)
    return {
        "pairs": len(work.pool),
        "tokens": tokens,
        "longest": work.longest,
        "sides": {name: {"about": side.about} | found[name] for name, side in sides.items()},
        "first_updates": checks,
    }


def check_equal_work(theirs: Trl, count: int) -> dict[str, list[float]]:
    """TRL's first updates from the fresh weights, and ours on the same pairs: one trajectory, or the run stops."""
    work = theirs.work
    allowed_loss, allowed_norm = TOLERANCE[work.dtype]
    peer = theirs.first_updates(count)
    mine = Ours(work, precomputed=theirs.precomputed).replay(peer)
    found = {
        "loss": [update.loss for update in peer],
        "our_loss": [update.loss for update in mine],
        "norm": [update.norm for update in peer],
        "our_norm": [update.norm for update in mine],
    }
    if any(abs(one.loss - START) > allowed_loss for one in (peer[0], mine[0])):
        raise SystemExit(f"{theirs.name}: the first loss is not log 2 on both sides: {found}")
    if max(abs(update.loss - START) for update in mine) < MOVES * allowed_loss:
        raise SystemExit(f"{theirs.name}: the loss hardly moves; raise --lr or --checked: {found}")
    for a, b in zip(peer, mine, strict=True):
        if abs(a.loss - b.loss) > allowed_loss or abs(a.norm / b.norm - 1) > allowed_norm:
            raise SystemExit(f"{theirs.name} computes something else than we do on the same pairs: {found}")
    return found


def _numbers(pairs: int, theirs: list[Seconds], ours: list[Seconds]) -> dict[str, Any]:
    """Pairs per second, and how much faster ours was in the same repeat."""
    return {
        "seconds": [value.wall for value in theirs],
        "cpu_seconds": [value.cpu for value in theirs],
        "pairs_per_second": summary([pairs / value.wall for value in theirs]),
        "ratios": [a.wall / b.wall for a, b in zip(theirs, ours, strict=True)],
        "cpu_ratios": [a.cpu / b.cpu for a, b in zip(theirs, ours, strict=True)],
    }


def _together(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The ratios of all repeats and all draws of lengths, by side."""
    names = [name for name in runs[0]["sides"] if name != ours_for(name)]
    return {
        name: {
            clock: summary([ratio for run in runs for ratio in run["sides"][name][key]])
            for clock, key in (("wall", "ratios"), ("cpu", "cpu_ratios"))
        }
        for name in names
    }


def _report(
    sides: dict[str, Side], found: dict[str, dict[str, Any]], checks: dict[str, dict[str, list[float]]]
) -> None:
    width = max(len(side.name) for side in sides.values())
    for name, side in sides.items():
        line = f"  {side.name:{width}}  {spread(found[name]['pairs_per_second'], '.1f')} pairs/s"
        if isinstance(side, Trl):
            line += f"   ratio {spread(summary(found[name]['ratios']), '.2f')}"
            if side.work.device.name == "cpu":
                line += f", in CPU time {spread(summary(found[name]['cpu_ratios']), '.2f')}"
        print(f"{line}\n  {'':{width}}  {side.about}")
    for name, check in checks.items():
        losses = ", ".join(f"{a:.6f}/{b:.6f}" for a, b in zip(check["loss"], check["our_loss"], strict=True))
        print(f"  first losses, {sides[name].name}/ours: {losses}")


def _conclude(case: str, together: dict[str, dict[str, Any]], draws: int, *, on_cpu: bool) -> None:
    print(f"\n{case}, all {draws} draws of lengths together:" if draws > 1 else f"\n{case}:")
    for ours in ("lockstep", "lockstep-precomputed"):
        against = {name: values for name, values in together.items() if ours_for(name) == ours}
        if not against:
            continue
        for name, values in against.items():
            line = f"  {name:24}  ratio {spread(values['wall'], '.2f')}"
            print(line + f", in CPU time {spread(values['cpu'], '.2f')}" * on_cpu)
        hardest = min(against, key=lambda name: against[name]["wall"]["median"])
        print(
            f"  {ours}: ratio {against[hardest]['wall']['median']:.2f} against {hardest}, its fastest peer here; median"
        )


def _work(case: str, model: str, seed: int, args: argparse.Namespace) -> Work:
    draw = random.Random(seed)
    words = transformers.AutoConfig.from_pretrained(model).vocab_size

    def some(equal: int, shortest: int, longest: int) -> list[int]:
        length = equal if case == "equal" else round(math.exp(draw.uniform(math.log(shortest), math.log(longest))))
        return [draw.randrange(words) for _ in range(length)]

    def pair() -> Pair:
        prompt = some(args.prompt, args.shortest_prompt, args.longest_prompt)
        chosen, rejected = (some(args.response, args.shortest, args.longest) for _ in range(2))
        return Pair(prompt, chosen, rejected)

    pool = [pair() for _ in range(args.rows * args.updates)]
    if max(pair.tokens for pair in pool) > args.tokens:
        raise SystemExit(f"--tokens {args.tokens} is less than a pair of {max(pair.tokens for pair in pool)}")
    return Work(
        device=select(args.device),
        model=model,
        dtype=args.dtype,
        masters=args.dtype == "bf16" and not args.no_masters,
        pool=pool,
        rows=args.rows,
        tokens=args.tokens,
        optim=Optim(lr=args.lr, schedule="constant"),
        beta=args.beta,
    )


def _write_model(folder: Path, shape: str, dtype: torch.dtype) -> str:
    """Random weights in the precision of the run: a side that rounds them on loading would start from other ones."""
    write_tiny(folder)
    load = transformers.AutoModelForCausalLM
    if shape == "tiny":
        model = load.from_pretrained(folder, dtype=dtype)
    else:
        torch.manual_seed(0)
        model = load.from_config(transformers.Qwen2Config(**SHAPE), dtype=dtype)
    model.save_pretrained(folder)
    return str(folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder, instead of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="size of the model, with random weights")
    parser.add_argument("--device", default="auto", help="cpu, cuda, npu or auto")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 keeps fp32 master weights")
    parser.add_argument("--no-masters", action="store_true", help="bf16 weights alone, on every side")
    parser.add_argument("--case", choices=["equal", "mixed", "all"], default="all")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), help="default: those that suit the case")
    parser.add_argument("--rows", type=int, default=16, help="pairs of one update")
    parser.add_argument("--updates", type=int, default=2, help="updates of one pass")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of one micro-batch, padding included")
    parser.add_argument("--prompt", type=int, default=64, help="prompt length of the case equal")
    parser.add_argument("--response", type=int, default=192, help="response length of the case equal")
    parser.add_argument(
        "--shortest-prompt", type=int, default=16, help="shortest prompt of the case mixed (log-uniform)"
    )
    parser.add_argument("--longest-prompt", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=32, help="shortest response of the case mixed (log-uniform)")
    parser.add_argument("--longest", type=int, default=768)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-5, help="high enough that a wrong update shows in the next loss")
    parser.add_argument("--checked", type=int, default=3, help="updates whose loss and gradient norm are compared")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of each side")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="draws of lengths in the case mixed")
    parser.add_argument("--out", help="write versions, settings and numbers to this JSON file")
    args = parser.parse_args()
    named = set(args.sides or [])
    lacking = sorted({ours_for(name) for name in named} - named)
    if lacking:
        parser.error(f"--sides lacks {', '.join(lacking)}, which others in it are compared with")
    return args


if __name__ == "__main__":
    main()
