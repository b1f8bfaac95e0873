r"""What stages of post-training learn one after another: SFT then GRPO, a reward model then PPO with it, and DPO.

    python bench/learning_stages.py --folder DIR --out bench/results/learning_stages_cpu.json \
        --svg docs/learning-stages.svg

The recipes are those of `lockstep recipes`. A seed gives the random weights at the start (`lockstep tiny --seed`) and
`run.seed`. RM, DPO and PPO train a smaller model, which needs less time. A finished run in DIR is not repeated.
`interval` is half of the 95 % interval of the mean over seeds (Student's t).
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figure import Line, Panel, document
from learning import interval, lockstep
from lockstep.device.select import select
from lockstep.model.tiny import write_tiny
from lockstep.run.metrics import read_metrics
from report import machine, write_record

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Stage:
    """A run of a recipe. `{sums}`, `{pairs}`, `{tiny}` and `{small}` in `keys` are folders with rows or a model, and
    `{sft}` is the model that the stage `sft` trained. The curve of `metric` starts where that of stage `after` ends."""

    recipe: str
    metric: str
    keys: str
    after: str = ""


PAIRS = "data.train={pairs}/pairs_train.parquet data.val={pairs}/pairs_val.parquet model.path={small} val.every=5"
STAGES = {
    "rm": Stage("rm-brevity", "val/pair_accuracy", f"{PAIRS} run.steps=40 optim.lr=1e-3"),
    # The pairs alone: no likelihood that could teach the preference too.
    "dpo": Stage("dpo-brevity", "val/pair_accuracy", f"{PAIRS} run.steps=40 optim.lr=1e-3 preference.nll=0.0"),
    "warmup": Stage(
        "warmup-brevity",
        "train/loss",
        "data.train.0.path={pairs}/pairs_train.parquet data.train.1.path={pairs}/pairs_train.parquet "
        "model.path={small}",
    ),
    "ppo": Stage(
        "ppo-brevity",
        "val/reward",
        "model.path={warmup} reward.model={rm} critic.path={rm} data.train={pairs}/prompts_train.parquet "
        "val.questions={pairs}/prompts_val.parquet val.every=5 run.steps=40",
    ),
    "sft": Stage(
        "warmup-arithmetic",
        "val/accuracy",
        "model.path={tiny} data.train={sums}/sft_train.parquet val.questions={sums}/val.parquet val.every=50 "
        "val.at_start=true",
    ),
    "grpo": Stage(
        "grpo-arithmetic",
        "val/accuracy",
        "model.path={sft} data.train={sums}/train.parquet val.questions={sums}/val.parquet val.every=15 run.steps=45",
        "sft",
    ),
}
COLORS = {"sft": "#7f7f7f", "grpo": "#1f77b4", "rm": "#8c564b", "dpo": "#2ca02c", "ppo": "#ff7f0e"}
PANELS = {
    "SFT, then GRPO: accuracy on held-out sums": ("sft", "grpo"),
    "RM and DPO: accuracy on held-out pairs": ("rm", "dpo"),
    "PPO: score of the reward model": ("ppo",),
}


def train(folder: Path, seed: int, name: str) -> Curve:
    """Trains a stage, unless it is finished; returns the curve of its metric."""
    own, stage = folder / f"seed-{seed}", STAGES[name]
    places = {"sums": folder / "sums", "pairs": folder / "pairs", "tiny": own / "tiny", "small": own / "small"}
    places |= {other: own / "runs" / other / "export" for other in STAGES}
    if not places[name].is_dir():
        lockstep("data", "arithmetic", places["sums"], "--difficulty", 2)
        lockstep("data", "preferences", places["pairs"])
        write_tiny(places["tiny"], seed=seed)
        write_tiny(places["small"], seed=seed, hidden=64, layers=2)
        keys = [f"run.name={name}", f"run.folder={own / 'runs'}", f"run.seed={seed}", "run.resume=never"]
        keys += [word.format(**places) for word in stage.keys.split()]
        lockstep("train", stage.recipe, *keys, log=own / f"{name}.log")
    return curve(own / "runs" / name, stage.metric)


def curve(run: Path, metric: str) -> Curve:
    """Step and value of each line of the log that has the metric."""
    return [(step, metrics[metric]) for step, metrics in read_metrics(run / "metrics.jsonl") if metric in metrics]


def stages_figure(curves: dict[str, list[Curve]]) -> str:
    """A panel per subject: the mean over seeds, the seeds as thin lines, and the steps of all stages of the panel."""
    panels = []
    for title, names in PANELS.items():
        lines = []
        for name in names:
            after = STAGES[name].after
            shift = curves[after][0][-1][0] if after in names else 0
            runs = [[(step + shift, value) for step, value in run] for run in curves[name]]
            mean = [(at[0][0], statistics.fmean(value for _, value in at)) for at in zip(*runs, strict=True)]
            lines += [Line(run, COLORS[name], 0.6) for run in runs] + [Line(mean, COLORS[name], 2.4, name)]
        what, unit = title.split(": ")
        panels.append(Panel(what, "updates", unit, lines))
    return document(panels, (300, 260), len(panels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"machine": machine(select("cpu")), "seeds": args.seeds, "stages": {}}
    curves: dict[str, list[Curve]] = {name: [] for name in STAGES}
    for names in (("rm", "dpo", "warmup", "ppo"), ("sft", "grpo")):
        for seed in range(args.seeds):
            for name in names:
                curves[name].append(train(args.folder, seed, name))
                print(f"{name} seed {seed}: {curves[name][-1][-1][1]:.3f}", flush=True)
    for name, runs in curves.items():
        ends = [run[-1][1] for run in runs]
        found = {
            "metric": STAGES[name].metric,
            "start": statistics.fmean(run[0][1] for run in runs),
            "end": statistics.fmean(ends),
            "interval": interval(ends),
            "ends": ends,
            "curves": runs,
        }
        record["stages"][name] = found
        change = f"{found['start']:.3f} -> {found['end']:.3f} +- {found['interval']:.3f}"
        print(f"{name:8} {found['metric']:18} {change}  {ends}")
    write_record(record, str(args.out))
    if args.svg:
        args.svg.write_text(stages_figure(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
