"""Asynchronous training for several values of `rollout.max_staleness`, beside synchronous training (`turns`).

python bench/async_rl.py                              # the embedded tiny model on a CPU, responses of 192 tokens
python bench/async_rl.py --device cuda --model FOLDER --dtype bf16 --max-tokens 1024 --out result.json
python bench/async_rl.py --learn --staleness turns 2 --seeds 0 1 2 --val-rows 1000 --val-every 10
                                    # the quickstart's task: accuracy and time
python bench/async_rl.py --device cuda --model FOLDER --dtype bf16 --train train.parquet --val test.parquet \\
    --folder WORK --staleness turns 0 1 2 3 4 --steps 100 --prompts 32 --n 8 --max-tokens 512 --out result.json
                                    # a real model on rows such as GSM8K's: accuracy and time per step

With `--train`, a call ends after `--minutes` (9 by default). The same command continues in the next call, until all
runs are finished; `--out` then has all of them. Keys after a comma belong to one side only (`2,optim.lr=1e-5`), and
`--set` has keys of all sides. Without `--train` and `--learn`, weights are random, so that all responses have the same
length and every run has the same number of tokens.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lockstep.device.select import select
from lockstep.run.metrics import read_metrics
from report import Table, machine, spread, summary, write_record

# The first steps load kernels, record passes and fill the worker's queue.
UNTIMED = 2
# Steps before those whose rewards are compared: a staleness of S trains S + 1 steps on what the first weights drew.
EARLY = 10
# What only --learn reads.
LEARNING = ("seeds", "val_rows", "val_every")
SHOWN = {
    "step, s": ("timing_s/step", ".2f"),
    "generation, s": ("timing_s/gen", ".2f"),
    "worker busy": ("async/worker_busy", ".0%"),
    "trainer busy": ("async/trainer_busy", ".0%"),
    "hand-over, s": ("timing_s/hand_over", ".2f"),
    "staleness": ("async/staleness_mean", ".2f"),
    "tokens/s": ("perf/throughput", ",.0f"),
}


def lockstep(*words: object) -> None:
    command = [sys.executable, "-m", "lockstep", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)


def words_of(staleness: str) -> list[str]:
    """`turns`, or a staleness; then keys that this side alone has."""
    bound, *words = staleness.split(",")
    return words if bound == "turns" else [f"rollout.max_staleness={bound}", *words]


def name_of(staleness: str) -> str:
    """Fit for a folder."""
    return "".join(letter if letter.isalnum() else "-" for letter in staleness)


def measured(folder: Path, recipe: Path, staleness: str, words: list[str]) -> dict[str, dict[str, float]]:
    name = f"staleness-{name_of(staleness)}"
    lockstep("train", recipe, f"run.name={name}", *words_of(staleness), *words)
    steps = [metrics for step, metrics in read_metrics(folder / "runs" / name / "metrics.jsonl") if step > UNTIMED]
    return {
        shown: summary([metrics[metric] for metrics in steps])
        for shown, (metric, _) in SHOWN.items()
        if metric in steps[0]
    }


def recipe_in(folder: Path, given: argparse.Namespace) -> Path:
    """Made-up sums, a reward that costs nothing, and a model whose random weights never end a response."""
    model = given.model or folder / "model"
    if given.model is None:
        lockstep("tiny", model)
    lockstep("data", "arithmetic", folder / "data")
    (folder / "reward.py").write_text(
        "def letters(data_source, solution_str, ground_truth, extra_info):\n    return len(set(solution_str)) / 100\n"
    )
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
method: grpo
device: {given.device}
run: {{folder: {folder / "runs"}, steps: {given.steps + UNTIMED}, export: false}}
model: {{path: {model}, dtype: {given.dtype}}}
data: {{train: {folder / "data" / "train.parquet"}}}
batch: {{prompts: {given.prompts}, tokens: {given.tokens}}}
rollout: {{n: {given.n}, max_tokens: {given.max_tokens}}}
reward: {{function: "{folder / "reward.py"}:letters"}}
algorithm: {{kl: {{where: none}}}}
optim: {{lr: 1e-6}}
"""
    )
    return path


def learnt(folder: Path, staleness: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """The quickstart's GRPO run: accuracy on sums it was not trained on, and the seconds of all steps together."""
    name = f"learn-{name_of(staleness)}-{seed}"
    lockstep(
        "train",
        "grpo-arithmetic",
        f"run.name={name}",
        f"run.folder={folder / 'runs'}",
        f"run.steps={given.steps}",
        f"run.seed={seed}",
        f"device={given.device}",
        f"model.path={folder / 'runs' / 'warmup-arithmetic' / 'export'}",
        f"data.train={folder / 'data' / 'train.parquet'}",
        f"val.questions={folder / 'data' / 'val.parquet'}",
        *("run.export=false", f"val.every={given.val_every}", "checkpoint.every=1000"),
        *words_of(staleness),
        *given.set,
    )
    history = read_metrics(folder / "runs" / name / "metrics.jsonl")
    timed = [metrics for _, metrics in history if "timing_s/step" in metrics]
    # Steps behind it, their seconds without validation, accuracy.
    reached: list[tuple[int, float, float]] = []
    seconds = 0.0
    for step, metrics in history:
        seconds += metrics.get("timing_s/step", 0.0)
        if "val/accuracy" in metrics:
            reached.append((step, seconds, metrics["val/accuracy"]))
    found: dict[str, Any] = {"reached": reached, "rewards": [metrics["critic/score/mean"] for metrics in timed]}
    for shown in ("step, s", "generation, s", "worker busy", "trainer busy", "staleness"):
        values = [metrics[SHOWN[shown][0]] for metrics in timed[UNTIMED:] if SHOWN[shown][0] in metrics]
        found |= {shown: summary(values)} if values else {}
    told = ", ".join(f"{accuracy:.3f} after {step} steps, {passed:.0f} s" for step, passed, accuracy in reached)
    print(f"{staleness:>6}, seed {seed}: {told}", flush=True)
    return found


# Steps between checkpoints of `--train`: the most that a new part repeats.
CHECKPOINT_STEPS = 5
# Seconds in which an interrupted run ends.
ENDING_SECONDS = 60.0


def history_of(run: Path) -> list[tuple[int, dict[str, float]]]:
    return read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []


def is_finished(run: Path, steps: int) -> bool:
    return any(step == steps and "val/accuracy" in metrics for step, metrics in history_of(run))


def trained_until(deadline: float, *words: object) -> None:
    """Trains until the run is finished or the deadline has come. The same command continues the run."""
    command = [sys.executable, "-m", "lockstep", "train", *map(str, words)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            status = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return
        if status:
            errors.seek(0)
            sys.exit(errors.read())


def reported(run: Path) -> dict[str, Any]:
    """Accuracy before and after training, the reward of each step, and the medians of the steps."""
    history = history_of(run)
    timed = [metrics for step, metrics in history if "timing_s/step" in metrics and step > UNTIMED]
    found: dict[str, Any] = {
        "accuracy": {str(step): metrics["val/accuracy"] for step, metrics in history if "val/accuracy" in metrics},
        "rewards": [metrics["critic/score/mean"] for _, metrics in history if "critic/score/mean" in metrics],
    }
    for shown, (metric, _) in SHOWN.items():
        values = [metrics[metric] for metrics in timed if metric in metrics]
        found |= {shown: summary(values)} if values else {}
    return found


def real(folder: Path, given: argparse.Namespace, record: dict[str, Any]) -> None:
    """Trains a model on rows of the user, a run for each staleness and seed, for at most `--minutes`."""
    deadline = time.monotonic() + 60 * given.minutes
    sides = [(staleness, seed) for seed in given.seeds for staleness in given.staleness]
    record["results"] = results = {staleness: {} for staleness in given.staleness}
    for staleness, seed in sides:
        run = folder / "runs" / f"real-{name_of(staleness)}-{seed}"
        if not is_finished(run, given.steps) and time.monotonic() < deadline:
            trained_until(
                deadline,
                *("grpo-arithmetic", f"run.folder={folder / 'runs'}", f"run.name={run.name}", f"run.seed={seed}"),
                *(f"run.steps={given.steps}", "run.export=false", f"device={given.device}"),
                *(f"model.path={given.model}", f"model.dtype={given.dtype}", f"data.train={given.train}"),
                *(f"batch.prompts={given.prompts}", f"batch.tokens={given.tokens}"),
                *(f"rollout.n={given.n}", f"rollout.max_tokens={given.max_tokens}", "optim.lr=1e-6"),
                *(f"val.questions={given.val}", f"val.every={given.val_every}", "val.at_start=true"),
                *(f"val.max_new_tokens={given.max_tokens}", f"checkpoint.every={CHECKPOINT_STEPS}"),
                *words_of(staleness),
                *given.set,
            )
        if is_finished(run, given.steps):
            results[staleness][str(seed)] = reported(run)
    table = Table({"staleness": "<12", "seed": ">4", "before": ">7", "after": ">7", "step, s": ">8", "reward": ">22"})
    print(table.header())
    for staleness, found in results.items():
        for seed, one in found.items():
            first, *_, last = one["accuracy"].values()
            base = results[given.staleness[0]].get(seed)
            beside = "" if base is None or base is one else beside_first({seed: one}, {seed: base})
            cells = f"{first:.3f}", f"{last:.3f}", f"{one['step, s']['median']:.2f}"
            print(table.line(staleness, seed, *cells, beside))
    done = sum(map(len, results.values()))
    print(f"{done} of {len(sides)} runs are finished" + ("" if done == len(sides) else "; repeat the same command"))


def learning(folder: Path, given: argparse.Namespace, record: dict[str, Any]) -> None:
    """By staleness and seed. Seeds change the order of the prompts and what is drawn; all begin with one warm-up."""
    lockstep("tiny", folder / "model")
    lockstep("data", "arithmetic", folder / "data", "--difficulty", 2, "--val-rows", given.val_rows)
    lockstep(
        "train",
        "warmup-arithmetic",
        f"run.folder={folder / 'runs'}",
        f"device={given.device}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'data' / 'sft_train.parquet'}",
        f"val.questions={folder / 'data' / 'val.parquet'}",
    )
    # Seed by seed: what else the machine does falls on all of them alike.
    results: dict[str, dict[str, Any]] = {one: {} for one in given.staleness}
    record["results"] = results
    for seed in given.seeds:
        for staleness, found in results.items():
            found[str(seed)] = learnt(folder, staleness, seed, given)
            if given.out:
                write_record(record, given.out)  # Runs take minutes each: what is known is kept.
    for staleness, found in results.items():
        ends = [one["reached"][-1] for one in found.values()]
        told = [f"accuracy {told_of([end[2] for end in ends], '.3f')}", f"{told_of([end[1] for end in ends], '.0f')} s"]
        if staleness != given.staleness[0]:
            told.append(f"reward beside {given.staleness[0]} {beside_first(found, results[given.staleness[0]])}")
        print(f"{staleness:>6}: {', '.join(told)}")


def told_of(values: list[float], form: str) -> str:
    deviation = f" (deviation {statistics.stdev(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{deviation}"


def beside_first(found: dict[str, Any], first: dict[str, Any]) -> str:
    """Step by step: runs of a seed have the same prompts in a step, most of what rewards differ by."""
    apart = [
        ours - theirs
        for seed, one in found.items()
        for ours, theirs in zip(one["rewards"][EARLY:], first[seed]["rewards"][EARLY:], strict=True)
    ]
    if len(apart) < 2:
        return "not told: too few steps"
    return f"{statistics.fmean(apart):+.4f} (error {statistics.stdev(apart) / len(apart) ** 0.5:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--staleness", nargs="+", default=["turns", "0", "1", "2"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--set", nargs="*", default=[], help="further keys, as rollout.worker_device=1")
    parser.add_argument("--learn", action="store_true", help="the quickstart's task in place of random weights")
    parser.add_argument("--train", type=Path, help="rows to train on; needs --model, --val and --folder")
    parser.add_argument("--val", type=Path, help="with --train: questions whose accuracy is measured")
    parser.add_argument("--folder", type=Path, help="with --train: of the runs, which the next call continues")
    parser.add_argument("--minutes", type=float, default=9.0, help="with --train: the longest time of a call")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="with --learn or --train: a run of each")
    parser.add_argument("--val-rows", type=int, default=200, help="with --learn: sums that the accuracy is taken on")
    parser.add_argument(
        "--val-every", type=int, default=1000, help="with --learn or --train: steps between measurements"
    )
    parser.add_argument("--out")
    given = parser.parse_args()
    if given.train is not None and None in (given.model, given.val, given.folder):
        parser.error("--train needs --model, --val and --folder")
    # The quickstart's recipe says the rest.
    others = ("model", "dtype", "prompts", "n", "max_tokens", "tokens") if given.learn else LEARNING
    unread = {"out", "folder", "minutes", *("val_rows",)} if given.train else {"out", "folder", "minutes", *others}
    asked = {
        name: value if isinstance(value, int | list) else str(value)
        for name, value in vars(given).items()
        if name not in unread
    }
    record: dict[str, Any] = {"machine": machine(select(given.device)), "asked": asked}
    with tempfile.TemporaryDirectory() if given.train is None else nullcontext(given.folder) as name:
        folder = Path(name).absolute()
        if given.train is not None:
            real(folder, given, record)
        elif given.learn:
            learning(folder, given, record)
        else:
            recipe = recipe_in(folder, given)
            record["results"] = {one: measured(folder, recipe, one, given.set) for one in given.staleness}
            for staleness, found in record["results"].items():
                told = ", ".join(f"{shown} {spread(values, SHOWN[shown][1])}" for shown, values in found.items())
                print(f"{staleness:>6}: {told}")
    if given.out:
        write_record(record, given.out)


if __name__ == "__main__":
    main()
