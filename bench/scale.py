"""Strong and weak scaling of an SFT update over what there is: CPU processes over gloo, or the devices of this machine.

    python bench/scale.py --out bench/results/scale_cpu.json
    python bench/scale.py --device cuda --shape qwen2.5-1.5b --dtype bf16 --length 1024 --rows 32 --tokens 16384

Strong: the same update on 1, 2, ... ranks. Weak: an update that grows with them. Each is a real `lockstep train` with
`parallel.devices`; the time of a step is the median of its log, without the first two. CPU ranks have a thread each.
The CPU time of the whole command is told too, start included: a busy machine changes it little.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.device.select import select
from lockstep.model.tiny import write_tiny
from lockstep.run.metrics import read_metrics
from report import machine, write_record
from shapes import SHAPES, write_model

WARM = 2


def main() -> None:
    args = _arguments()
    device = select(args.device)
    most = args.ranks or (2 if device.name == "cpu" else device.count())
    counts = [count for count in (1, 2, 4, 8, 16) if count <= most]
    record: dict[str, Any] = {"settings": vars(args).copy(), "machine": machine(device), "strong": {}, "weak": {}}
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        write_scene(Path(folder), args, args.rows * most)
        for count in counts:
            record["strong"][count] = run(Path(folder), f"strong-{count}", count, args.rows, args)
        record["weak"][1] = record["strong"][1]
        for count in counts[1:]:
            record["weak"][count] = run(Path(folder), f"weak-{count}", count, args.rows * count, args)
    for kind in ("strong", "weak"):
        one = record[kind][1]["seconds"]
        for count, found in record[kind].items():
            ideal = one / count if kind == "strong" else one
            found["efficiency"] = ideal / found["seconds"]
            print(
                f"{kind:6} {count:2} ranks: {found['seconds']:.3f} s, {found['tokens_per_second']:,.0f} tokens/s, "
                f"efficiency {found['efficiency']:.0%}; {found['cpu_seconds']:.1f} s of CPU time in all"
            )
    if args.out:
        write_record(record, args.out)


def write_scene(folder: Path, args: argparse.Namespace, rows: int) -> None:
    """Random rows of `length` tokens; the tiny tokenizer has one for each character."""
    if args.shape == "tiny":
        write_tiny(folder / "model")
    else:
        write_model(folder / "model", args.shape, select(args.device).name)
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(26, (rows, args.length), generator=draw)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for row in letters.tolist():
            file.write(json.dumps({"text": "".join(chr(97 + letter) for letter in row)}) + "\n")
    (folder / "recipe.yaml").write_text(
        f"""
method: sft
device: {args.device}
run: {{name: run, steps: {args.steps}, export: false}}
model: {{path: {folder / "model"}, dtype: {args.dtype}}}
data: {{train: {folder / "rows.jsonl"}, require_end: false}}
batch: {{tokens: {args.tokens}}}
optim: {{lr: 1e-5, schedule: constant}}
""",
        encoding="utf-8",
    )


def run(folder: Path, name: str, ranks: int, rows: int, args: argparse.Namespace) -> dict[str, Any]:
    words = [f"run.folder={folder / name}", f"batch.rows_per_update={rows}", f"parallel.devices={ranks}"]
    # One thread each, also for one rank: otherwise it would have all cores to itself.
    threads = {"OMP_NUM_THREADS": "1"} if select(args.device).name == "cpu" else {}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", str(folder / "recipe.yaml"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, **threads},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    steps = [metrics["timing_s/step"] for _, metrics in read_metrics(folder / name / "run" / "metrics.jsonl")][WARM:]
    seconds = statistics.median(steps)
    return {
        "ranks": ranks,
        "rows": rows,
        "seconds": seconds,
        "steps": steps,
        "tokens_per_second": rows * args.length / seconds,
        "whole_run_seconds": time.monotonic() - began,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda, npu or auto")
    parser.add_argument("--shape", choices=["tiny", *SHAPES], default="tiny", help="size of the model, random weights")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--ranks", type=int, help="the most ranks; default: 2 on a CPU, else all devices")
    parser.add_argument("--rows", type=int, default=32, help="rows of an update; in the weak case for each rank")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row, about")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", help="write versions, settings and numbers to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
