"""What online methods learn at equal compute: accuracy on held-out questions, with several seeds.

    python bench/learning.py --folder DIR --out bench/results/learning_cpu.json --svg docs/learning.svg
    python bench/learning.py --figure bench/results/learning_cpu.json --svg docs/learning.svg      # trains nothing
    python bench/learning.py --folder DIR --base grpo-gsm8k-lora --prompts 64 --n 8 --steps 100 --every 25 --out FILE \
        device=cuda model.path=MODEL data.train=TRAIN val.questions=TEST ...

Without --base, all methods start from one tiny model, which `warmup-arithmetic` trains first, and learn sums of
two-digit numbers. Equal compute means an equal number of generated responses: `--steps` x `--prompts` x `--n`. DAPO's
dynamic sampling generates up to three times as many in a step, so it makes fewer updates: the last validation within
the budget counts. KEY=VALUE changes the recipe of all methods. A finished run in DIR is not repeated.

The interval is that of the mean over seeds (95 %, Student's t). It contains the randomness of training, and that of the
held-out questions only as far as the seeds answer them differently.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figure import Line, Panel, document
from lockstep.device.select import select
from lockstep.run.metrics import read_metrics
from report import machine, write_record

# Keys of each method. One response per prompt, where the method compares no responses of a group.
GROUPED, SINGLE = "group", "single"
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": (GROUPED, ()),
    "dapo": (GROUPED, ()),
    "gspo": (GROUPED, ()),
    "reinforce_pp": (SINGLE, ()),
    # Two updates per step, as PPO is used; its critic starts without knowledge.
    "ppo": (SINGLE, ("critic.lr=1e-3",)),
}
COLORS = {"grpo": "#1f77b4", "dapo": "#d62728", "gspo": "#2ca02c", "reinforce_pp": "#9467bd", "ppo": "#ff7f0e"}
FIGURE = (720, 380)
# Student's t for 95 % and n - 1 degrees of freedom.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


def lockstep(*words: object, log: Path | None = None) -> None:
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    with (log or Path("/dev/null")).open("w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise SystemExit(
            f"learning: {' '.join(command[1:])} ended with exit code {code}" + (f": see {log}" if log else "")
        )


def warm_model(folder: Path) -> list[str]:
    """The keys of the arithmetic task: its rows, and a model that answers some of the questions."""
    export = folder / "runs" / "warmup-arithmetic" / "export"
    rows = folder / "data"
    if not export.is_dir():
        lockstep("tiny", folder / "model")
        lockstep("data", "arithmetic", rows, "--difficulty", 2)
        given = [f"run.folder={folder / 'runs'}", f"model.path={folder / 'model'}"]
        given += [f"data.train={rows / 'sft_train.parquet'}", f"val.questions={rows / 'val.parquet'}"]
        lockstep("train", "warmup-arithmetic", *given, log=folder / "warmup.log")
    return [f"model.path={export}", f"data.train={rows / 'train.parquet'}", f"val.questions={rows / 'val.parquet'}"]


def train(folder: Path, method: str, seed: int, base: str, words: Sequence[str], args: argparse.Namespace) -> Path:
    """Trains one run, unless it is finished; returns its folder."""
    name = f"{method}-{seed}"
    run, done = folder / "runs" / name, folder / f"{name}.seconds"
    if done.exists():
        return run
    grouping, keys = METHODS[method]
    n = args.n if grouping == GROUPED else 1
    prompts = args.prompts * args.n // n
    sizes = [
        f"rollout.n={n}",
        f"batch.prompts={prompts}",
        f"batch.prompts_per_update={prompts // (2 if method == 'ppo' else 1)}",
    ]
    began = time.monotonic()
    lockstep(
        *("train", base, f"method={method}", f"run.name={name}", f"run.folder={folder / 'runs'}", f"run.seed={seed}"),
        *(f"run.steps={args.steps}", "run.export=false", "run.resume=never", f"val.every={args.every}"),
        *("val.at_start=true", f"checkpoint.every={args.steps}", "checkpoint.keep_best=0", *sizes, *keys, *words),
        log=folder / f"{name}.log",
    )
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    done.write_text(f"{time.monotonic() - began:.1f}\n", encoding="utf-8")
    return run


def curve(run: Path, responses: int) -> list[tuple[int, float]]:
    """Responses generated so far and the accuracy, at each validation."""
    points, generated = [], 0
    for _, metrics in read_metrics(run / "metrics.jsonl"):
        if "critic/score/mean" in metrics:
            generated += round(responses * metrics.get("train/num_gen_batches", 1))
        if "val/accuracy" in metrics:
            points.append((generated, metrics["val/accuracy"]))
    return points


def within(points: Sequence[tuple[int, float]], budget: int) -> float:
    """The accuracy of the last validation within the budget of responses."""
    return [accuracy for generated, accuracy in points if generated <= budget][-1]


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean."""
    return STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def learning_figure(record: Mapping[str, Any]) -> str:
    """The mean accuracy of each method over generated responses, with the runs as thin lines, and the budget at which
    the methods are compared."""
    methods = record["methods"]
    lines = []
    for number, (method, found) in enumerate(methods.items()):
        runs = [[(x, y) for x, y in run] for run in found["curves"]]
        lines += [Line(run, COLORS[method], 0.5) for run in runs if len(runs) > 1]
        at_once = zip(*runs, strict=True)
        mean = [(statistics.fmean(x for x, _ in at), statistics.fmean(y for _, y in at)) for at in at_once]
        start = f"{mean[0][1]:.2f} at the start" if number == 0 else ""
        lines.append(Line(mean, COLORS[method], 2.2, method, start))
    budget, seeds = record["budget"], record["settings"]["seeds"]
    title = f"Accuracy on held-out questions, mean of {seeds} seeds (thin: each seed)"
    marks = [(budget, f"{budget:,}: the table")]
    panel = Panel(title, "generated responses", "greedy accuracy (share of questions)", lines, marks)
    return document([panel], FIGURE)


def steps_figure(record: Mapping[str, Any]) -> str:
    """The validations of a single run, whose record has the metrics of every step."""
    points = [(step["step"], step["val/accuracy"]) for step in record["steps"] if "val/accuracy" in step]
    line = Line(points, COLORS["grpo"], 2.2, "grpo, one run", f"{points[0][1]:.3f} at the start")
    title = "Accuracy on held-out questions"
    return document([Panel(title, "training step", "greedy accuracy (share of questions)", [line])], FIGURE)


def write_figure(record: Mapping[str, Any], file: Path) -> None:
    drawn = learning_figure(record) if "methods" in record else steps_figure(record)
    file.write_text(drawn, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="changes of all recipes")
    parser.add_argument("--folder", type=Path, help="the folder of the runs")
    parser.add_argument("--base", help="a recipe that is not the arithmetic task")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two validations")
    parser.add_argument("--device", default="cpu", help="the device that the record names")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--figure", type=Path, metavar="RECORD", help="train nothing: draw --svg from this record")
    args = parser.parse_intermixed_args()
    if args.figure and args.svg:
        write_figure(json.loads(args.figure.read_text(encoding="utf-8")), args.svg)
        return
    if args.figure or not args.folder or not args.out:
        parser.error("--folder and --out, or --figure and --svg")
    args.folder.mkdir(parents=True, exist_ok=True)
    words = [*([] if args.base else warm_model(args.folder)), *args.words]
    responses = args.prompts * args.n
    budget = responses * args.steps
    record: dict[str, Any] = {
        "machine": machine(select(args.device)),
        "settings": {
            key: str(value) for key, value in vars(args).items() if key not in ("folder", "out", "svg", "figure")
        },
        "responses_per_step": responses,
        "budget": budget,
        "methods": {},
    }
    curves: dict[str, list[list[tuple[int, float]]]] = {}
    # Seed by seed, so that an interrupted call has equal numbers of seeds.
    for seed in range(args.seeds):
        for method in args.methods:
            run = train(args.folder, method, seed, args.base or "grpo-arithmetic", words, args)
            curves.setdefault(method, []).append(curve(run, responses))
            print(f"{method} seed {seed}: {within(curves[method][-1], budget):.3f}", flush=True)
    for method, runs in curves.items():
        ends = [within(run, budget) for run in runs]
        seconds = [float((args.folder / f"{method}-{seed}.seconds").read_text()) for seed in range(args.seeds)]
        record["methods"][method] = {
            "start": statistics.fmean(run[0][1] for run in runs),
            "end": statistics.fmean(ends),
            "interval": interval(ends),
            "ends": ends,
            "seconds": statistics.median(seconds),
            "curves": runs,
        }
        found = record["methods"][method]
        print(
            f"{method:14} {found['start']:.3f} -> {found['end']:.3f} +- {found['interval']:.3f}"
            f"  {found['seconds']:.0f} s per run"
        )
    write_record(record, str(args.out))
    if args.svg:
        write_figure(record, args.svg)


if __name__ == "__main__":
    main()
