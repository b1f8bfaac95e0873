"""Where the device's time goes in one SFT update of ours: a table by kernel, and the step's parts on the host's clock.

python bench/profile_sft.py --shape qwen2.5-0.5b --rows 16 --length 1024 --tokens 16384 --out table.txt
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.device.select import select
from lockstep.recipe.schema import Optim
from shapes import SHAPES, write_model
from sides import SFT, Ours, Work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of all linear layers")
    parser.add_argument("--experts", action="store_true", help="with --lora: adapters of attention and of the experts")
    parser.add_argument("--no-masters", action="store_true", help="bf16 weights alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = select(args.device)
    draw = random.Random(0)
    pool = [[draw.randrange(SHAPES[args.shape].vocabulary) for _ in range(args.length)] for _ in range(args.rows)]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.shape, device.name)
        work = Work(device, folder, "bf16", not args.no_masters, args.rows, args.tokens, Optim(lr=1e-5), pool=pool)
        side = Ours(replace(work, lora=args.lora, experts=args.experts))
    for _ in range(3):
        side.train_pass()
    lines = [_parts(side)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        side.train_pass()
    lines.append(found.key_averages().table(sort_by="self_device_time_total", row_limit=60, max_name_column_width=90))
    text = "\n".join(lines)
    print(text if args.out is None else lines[0])
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


def _parts(side: Ours, steps: int = 5) -> str:
    """Medians of each part; only the whole step waits for the device at its ends."""
    found: dict[str, list[float]] = {"pack": [], "forward_backward": [], "optim_step": [], "left over": [], "step": []}
    for _ in range(steps):
        side.work.device.synchronise()
        clock = [time.perf_counter()]
        batches = side._micro_batches(side.work.pool)
        clock.append(time.perf_counter())
        side.learner.forward_backward(batches, SFT)
        clock.append(time.perf_counter())
        side.learner.optim_step(1e-5)
        clock.append(time.perf_counter())
        side.work.device.synchronise()
        clock.append(time.perf_counter())
        for name, before, after in zip(found, clock[:-1], clock[1:], strict=False):
            found[name].append(after - before)
        found["step"].append(clock[-1] - clock[0])
    medians = {name: float(torch.tensor(values).median()) * 1e3 for name, values in found.items()}
    return "on the host's clock: " + ", ".join(f"{name} {value:.2f} ms" for name, value in medians.items())


if __name__ == "__main__":
    main()
