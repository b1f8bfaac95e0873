"""What proof costs: the overhead of recording a tape, and the time of a comparison.

    python bench/parity.py                             # the embedded tiny model
    python bench/parity.py --device cuda --shape qwen2.5-0.5b --dtype bf16 --out result.json

Overhead: the same run three ways in one process, taking turns: without a tape, with one and no snapshot but the first,
with a snapshot (digests by module and parameter, weights where they are kept) every ten steps. A step's time is the
wall clock from the end of one step to the end of the next, so that what is written between steps counts too; the first
step, which warms up and is always a snapshot, is left out. Comparison: two logs of 10,000 steps and 50 metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


from half_billion import write_half_billion
from lockstep.data.prepare.generated import write_arithmetic
from lockstep.device.select import select
from lockstep.model.tiny import write_tiny
from lockstep.parity.compare.compare_runs import compare
from lockstep.parity.compare.logs import read_log
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.train.offline import open_offline
from lockstep.train.offline import train_step as offline_step
from lockstep.train.online import open_online
from lockstep.train.online import train_step as online_step
from lockstep.train.training import Training
from online_work import temporary_folder
from report import machine, write_record

WAYS = {"no tape": ["tape=false"], "tape": ["tape=true", "tape.every=1000000"], "digests": ["tape=true"]}
STEPS, METRICS = 10_000, 50


@contextmanager
def opened(recipe: Recipe) -> Iterator[tuple[Training, Callable[[int], dict[str, float]]]]:
    """A run that leaves nothing behind, and its step."""
    if recipe.method in ONLINE:
        with open_online(recipe, Console.silent(), keeps=False) as online:
            yield online.training, lambda step: online_step(online.take_rollouts(), online, step)
    else:
        with open_offline(recipe, Console.silent(), keeps=False) as offline:
            yield offline.training, lambda step: offline_step(offline.loader.take(step), offline, step)


def seconds_a_step(recipe: Path, words: list[str]) -> tuple[float, float]:
    """The mean over all steps but the first, by the clock and in CPU time."""
    ends: list[float] = []
    worked: list[float] = []
    with opened(load_recipe(str(recipe), words)) as (training, train):
        for step in training.steps():
            with training.step(step + 1):
                metrics = train(step)
            training.finish_step(step + 1, metrics)
            training.run.device.synchronise()
            ends.append(time.perf_counter())
            worked.append(time.process_time())
    by_clock, own = ((times[-1] - times[0]) / (len(times) - 1) for times in (ends, worked))
    return by_clock, own


def write_recipe(folder: Path, method: str, words: argparse.Namespace) -> Path:
    online = method in ONLINE
    rows = "train.parquet" if online else "sft_train.parquet"
    batch = f"prompts: {words.rows // 2}" if online else f"rows_per_update: {words.rows}"
    recipe = folder / f"{method}.yaml"
    recipe.write_text(
        f"""
method: {method}
device: {words.device}
run: {{folder: {folder / "runs"}, steps: {words.steps}}}
model: {{path: {folder / "model"}, dtype: {words.dtype}}}
data: {{train: {folder / "data" / rows}}}
batch: {{{batch}, tokens: 8192}}
optim: {{lr: 1.0e-5, schedule: constant}}
tape: {{record: false, steps: {words.steps}}}
"""
        + ("rollout: {n: 8, max_tokens: 48}\nalgorithm: {kl: {where: none}}\n" if online else ""),
        encoding="utf-8",
    )
    return recipe


def overhead(folder: Path, method: str, words: argparse.Namespace) -> dict[str, object]:
    recipe = write_recipe(folder, method, words)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(words.repeats):
        # Another one goes first in each turn: who does has the machine's ear.
        ways = list(WAYS)[turn % len(WAYS) :] + list(WAYS)[: turn % len(WAYS)]
        for way in ways:
            name = f"run.name={method}-{way.replace(' ', '-')}-{turn}"
            times[way].append(seconds_a_step(recipe, [*WAYS[way], name]))
    result: dict[str, object] = {"seconds_a_step": times}
    print(f"{method}: {statistics.median(by for by, _ in times['no tape']) * 1e3:.1f} ms a step without a tape")
    for way in ("tape", "digests"):
        for number, what in enumerate(("by the clock", "in CPU time")):
            shares = [b[number] / a[number] - 1 for a, b in zip(times["no tape"], times[way], strict=True)]
            result[f"overhead {way} {what}"] = {"median": statistics.median(shares), "each": shares}
            spread = f"{min(shares):+.1%} to {max(shares):+.1%}"
            print(f"  {way:8}{what:13} {statistics.median(shares):+.1%} ({spread})")
    return result


def write_log(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    names = ["train/loss", *(f"part/metric_{i}" for i in range(METRICS - 1))]
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            line = {"step": step, "data": {name: 1 + draw.random() / 100 for name in names}}
            file.write(json.dumps(line) + "\n")


def comparison(folder: Path, repeats: int) -> dict[str, object]:
    """Reading both logs and every figure of every metric; the page is written besides."""
    paths = [folder / "a.jsonl", folder / "b.jsonl"]
    for seed, path in enumerate(paths):
        write_log(path, seed)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = compare(read_log(str(paths[0])), read_log(str(paths[1])))
        times.append(time.perf_counter() - start)
        assert len(found.metrics) == METRICS
    middle = statistics.median(times)
    print(f"compare, {STEPS:,} steps x {METRICS} metrics: median {middle:.2f} s, best {min(times):.2f} s")
    return {"seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--shape", choices=("tiny", "qwen2.5-0.5b"), default="tiny")
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--rows", type=int, default=32, help="of an SFT update; a GRPO step has half as many prompts")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=["sft", "grpo"])
    parser.add_argument("--out")
    words = parser.parse_args()
    results: dict[str, object] = {}
    device = select(words.device)
    record = {"settings": {k: v for k, v in vars(words).items() if k != "out"}, "machine": machine(device)}
    with temporary_folder() as name:
        folder = Path(name)
        (write_tiny if words.shape == "tiny" else write_half_billion)(folder / "model")
        write_arithmetic(folder / "data", train_rows=2000, val_rows=10, difficulty=2, seed=0)
        for method in words.methods:
            results[method] = overhead(folder, method, words)
        results["compare"] = comparison(folder, words.repeats)
    if words.out:
        write_record(record | {"results": results}, words.out)


if __name__ == "__main__":
    main()
