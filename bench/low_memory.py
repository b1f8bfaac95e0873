"""Memory and speed of quantised, long and low-precision training: the goals on one H200, in parts of under ten minutes.

    python bench/low_memory.py qlora --out FOLDER             # one part, on CUDA; writes FOLDER/qlora.json
    python bench/low_memory.py all --out FOLDER               # all parts that need no files
    python bench/low_memory.py gsm8k-bf16 --model MODEL --gsm8k GSM8K --out FOLDER   # a real model, one run per part
    python bench/low_memory.py all --device cpu --tiny --out FOLDER   # the same code, tiny models

A case of a part is a process of its own. Most cases are recipes that train a model of a real shape with the weights of
`random_weights.py` for a few steps. Torch may allocate no more than the GB of the case, and lockstep sees a device of
this size. The peak memory is that of the whole run, from loading to the last update. Tokens/s is the median of the
steps after the first two. `predicted_gb` is the peak of `lockstep plan`. The case `trl-qlora-7b` trains the same rows
with TRL's SFTTrainer, PEFT and bitsandbytes (`trl_qlora.py`).

A call ends after `--budget` seconds. A case that the file of its part already has is not measured again (`--again`
measures it), so call it again to go on. A repeat of the run `gsm8k-bf16` has other micro-batches.
Each file ends with the goals of the part, and whether they are met.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.commands.plan import open_outlook
from lockstep.device.select import select
from lockstep.preflight.fit_plan import device_to_fit
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from plan_fit import LORA, NF4, Case, train_within, write_recipe
from random_weights import write_hollow
from report import machine, write_record
from shapes import SHAPES, Shape
from trl_qlora import TRL_SETTINGS, train_trl

BENCH, BEGAN = Path(__file__).parent, time.perf_counter()
# Seconds of a call, and the seconds that must be left when a case starts.
BUDGET, LEAST = 570, 20
AGAIN, OFFLOAD = "model.gradient_checkpointing=true", "model.activation_offload=true"
SEVEN, EIGHT, SEVENTY = "qwen2.5-7b", "qwen3-8b", "llama3-70b"
# The row of 4,096 tokens has a separator and an end token.
ROW = (2047, 2047)
ADAPTER = Case(140, SEVEN, "sft", ROW, 4, (LORA, AGAIN, "batch.tokens=4096"), 8)
# The state of AdamW in fp32 would not fit beside the fp32 master weights.
FULL = Case(149, SEVEN, "sft", ROW, 8, (AGAIN, "batch.tokens=8192", "optim.name=adamw8bit"), 8)
LONG = (LORA, AGAIN)
GROUPS = ("model.lora.rank=32", NF4, AGAIN, "rollout.n=8", "batch.tokens=2560")
CASES = {
    "lora-7b": ADAPTER,
    "qlora-7b": replace(ADAPTER, limit=10, words=(*ADAPTER.words, NF4)),
    "int8-7b": replace(ADAPTER, limit=24, words=(*ADAPTER.words, "model.quantize=int8")),
    "bf16-7b": FULL,
    "fp8-7b": replace(FULL, words=(*FULL.words, "model.matmul=fp8")),
    "long-32k": Case(80, SEVEN, "sft", (16383, 16383), 1, (*LONG, "batch.tokens=32768"), 3),
    "tiled-32k": Case(80, SEVEN, "sft", (16383, 16383), 1, (*LONG, "batch.tokens=32768", "model.tiled_mlp=4096"), 3),
    "long-128k": Case(
        80, SEVEN, "sft", (65535, 65535), 1, (*LONG, OFFLOAD, "batch.tokens=131072", "model.tiled_mlp=4096"), 1
    ),
    "grpo-8b": Case(22, EIGHT, "grpo", (512, 2048), 1, GROUPS, 2),
    "qlora-70b": Case(80, SEVENTY, "sft", ROW, 1, (LORA, NF4, AGAIN, "batch.tokens=4096"), 3),
}
TINY = Shape(3, 64, 4, 2, 16, 176, 300, context=131072)
# Cases that are calls of other benchmarks: arguments on CUDA, and in a trial with tiny models.
TRIAL_WORK = ("--shape", "tiny", "--prompts", "4", "--prompt", "16", "--response", "8", "--repeats", "1")
CALLS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "engine-7b": ("engine.py", ("--shape", SEVEN), TRIAL_WORK),
    "engine-7b-cache": ("engine.py", ("--shape", SEVEN), TRIAL_WORK),
    "plan-fit": ("plan_fit.py", ("--budget", "400"), ("--tiny", "--cases", "2", "4")),
    "dtypes": (
        "precision.py",
        ("--prompts", "64", "--n", "2", "--tokens", "256"),
        ("--prompts", "2", "--n", "1", "--tokens", "4", "--runs", "1"),
    ),
}
ALWAYS = {"engine-7b": ("--precision", "fp8", "int8"), "engine-7b-cache": ("--precision", "fp8", "--kv-cache", "fp8")}
# GRPO of a real model (`gsm8k_tools.py`). An adapter needs a larger learning rate than all weights.
ADAPTED = ("model.lora={rank: 32}", "optim.lr=5e-5", "batch.tokens=16384")
# Low-precision rollouts are corrected by default. `compare` refuses a pair of which only one run is corrected.
CORRECTED = "algorithm.rollout_correction.weight=token"
SIDES: dict[str, tuple[str, ...]] = {
    "gsm8k-bf16": (CORRECTED, "batch.tokens=16384"),
    "gsm8k-bf16-again": (CORRECTED, "batch.tokens=12288"),
    "gsm8k-bf16-third": (CORRECTED, "batch.tokens=24576"),
    "gsm8k-fp8": ("rollout.precision=fp8", "batch.tokens=16384"),
    "gsm8k-int8": ("rollout.precision=int8", "batch.tokens=16384"),
    "gsm8k-lora": ADAPTED,
    "gsm8k-nf4": (*ADAPTED, NF4),
}

REPEATS = ("gsm8k-bf16-again", "gsm8k-bf16-third")

Found = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A number of the cases of a part and its bound. `value` gets the cases of the part; it is not called before all
    of `cases` were measured."""

    what: str
    cases: tuple[str, ...]
    value: Callable[[Found], float]
    at_least: float = -math.inf
    at_most: float = math.inf

    def judged(self, found: Found) -> dict[str, Any]:
        bounds = {"at_least": self.at_least, "at_most": self.at_most}
        told: dict[str, Any] = {"goal": self.what, **{k: v for k, v in bounds.items() if math.isfinite(v)}}
        missing = [name for name in self.cases if "error" in found.get(name, {"error": ""})]
        if missing:
            return told | {"value": None, "met": False, "without": missing}
        try:
            value = self.value(found)
        except KeyError as missing_number:  # a processor measures no memory
            return told | {"value": None, "met": False, "without": [str(missing_number.args[0])]}
        return told | {"value": value, "met": self.at_least <= value <= self.at_most}


def ratio(name: str, other: str) -> Callable[[Found], float]:
    return lambda found: float(found[name]["tokens_per_second"] / found[other]["tokens_per_second"])


def peak(name: str) -> Callable[[Found], float]:
    return lambda found: float(found[name]["measured_gb"])


def misprediction(name: str) -> Callable[[Found], float]:
    return lambda found: abs(float(found[name]["ratio"]) - 1)


def loss_error(name: str, other: str) -> Callable[[Found], float]:
    """Mean difference of the losses of all steps, in percent, as in `lockstep compare`."""

    def value(found: Found) -> float:
        pairs = zip(found[name]["train/loss"], found[other]["train/loss"], strict=True)
        return 100 * statistics.fmean(abs(a - b) for a, b in pairs)

    return value


def engine_ratio(name: str, precision: str) -> Callable[[Found], float]:
    def value(found: Found) -> float:
        ((_, works),) = found[name]["shapes"].items()
        return min(float(work[precision]["ratio"]) for work in works.values())

    return value


def worst_of_fit(found: Found) -> float:
    results = found["plan-fit"]["results"]
    failed = [one for one in results if "error" in one]
    return math.inf if failed else max(abs(one["ratio"] - 1) for one in results)


def accuracy_gap(name: str, base: str) -> Callable[[Found], float]:
    return lambda found: float(found[name]["after"]["accuracy"] - found[base]["after"]["accuracy"])


# Two accuracies of 1,319 questions near 0.4 differ by chance by no more than two standard deviations of a difference.
NOISE = 2 * math.sqrt(2 * 0.4 * 0.6 / 1319)


@dataclass(frozen=True)
class Part:
    cases: tuple[str, ...]
    goals: tuple[Goal, ...] = ()


PARTS = {
    "qlora": Part(
        ("lora-7b", "qlora-7b", "int8-7b", *TRL_SETTINGS),
        (
            Goal("QLoRA SFT of the 7B shape, 4,096 tokens: peak GB", ("qlora-7b",), peak("qlora-7b"), at_most=10),
            Goal(
                "QLoRA over bf16 LoRA: tokens/s",
                ("qlora-7b", "lora-7b"),
                ratio("qlora-7b", "lora-7b"),
                at_least=0.75,
            ),
        ),
    ),
    "fp8": Part(
        ("bf16-7b", "fp8-7b"),
        (
            Goal("fp8 over bf16 training: tokens/s", ("fp8-7b", "bf16-7b"), ratio("fp8-7b", "bf16-7b"), at_least=1.2),
            Goal("mean loss error in %", ("fp8-7b", "bf16-7b"), loss_error("fp8-7b", "bf16-7b"), at_most=2),
        ),
    ),
    "rollouts": Part(
        ("engine-7b", "engine-7b-cache"),
        (
            Goal("fp8 over bf16 engine: tokens/s", ("engine-7b",), engine_ratio("engine-7b", "fp8"), at_least=1.4),
            Goal("int8 over bf16 engine: tokens/s", ("engine-7b",), engine_ratio("engine-7b", "int8"), at_least=1.4),
        ),
    ),
    "grpo": Part(
        ("grpo-8b",),
        (
            Goal(
                "GRPO of the 8B shape, nf4, 8 x (512 + 2,048): peak GB",
                ("grpo-8b",),
                peak("grpo-8b"),
                at_most=22,
            ),
        ),
    ),
    "long": Part(
        ("long-32k", "tiled-32k", "long-128k"),
        tuple(
            goal
            for name in ("long-32k", "tiled-32k", "long-128k")
            for goal in (
                Goal(f"{name}: peak GB", (name,), peak(name), at_most=80),
                Goal(f"{name}: relative error of the predicted peak", (name,), misprediction(name), at_most=0.1),
            )
        ),
    ),
    "large": Part(
        ("qlora-70b",),
        (Goal("70B shape, nf4, LoRA SFT: peak GB", ("qlora-70b",), peak("qlora-70b"), at_most=80),),
    ),
    "fit": Part(
        ("plan-fit",),
        (Goal("plan --fit: worst relative error of a peak", ("plan-fit",), worst_of_fit, at_most=0.1),),
    ),
    "dtypes": Part(("dtypes",)),
    **{name: Part((name,)) for name in SIDES},
}
# Accuracies are compared between the files of parts.
ACROSS = (
    *(
        Goal(f"GSM8K accuracy, {name} minus {base}", (name, base), accuracy_gap(name, base), at_least=-NOISE)
        for name, base in (
            ("gsm8k-fp8", "gsm8k-bf16"),
            ("gsm8k-int8", "gsm8k-bf16"),
            ("gsm8k-nf4", "gsm8k-lora"),
        )
    ),
)


def shape_of(case: Case, tiny: bool) -> Any:
    return TINY if tiny else replace(SHAPES[case.model], context=max(32768, sum(case.row) + 2))  # type: ignore[type-var]


def shortened(case: Case) -> Case:
    """The case with short rows, for a trial on a processor."""
    row = tuple(max(4, length // 128) for length in case.row)
    words = ["batch.tokens=1024" if word.startswith("batch.tokens=") else word for word in case.words]
    return replace(case, row=row, steps=min(case.steps, 3), words=tuple(words), limit=8.0)


def measure(name: str, device: str, tiny: bool, folder: Path, keep: Path | None) -> dict[str, Any]:
    """Predict and train, in this process. `folder` is empty."""
    if name in TRL_SETTINGS:
        case = shortened(ADAPTER) if tiny else ADAPTER
        return train_trl(TRL_SETTINGS[name], device, case, TINY if tiny else case.model, folder, keep)
    case = shortened(CASES[name]) if tiny else CASES[name]
    parameters = write_hollow(folder / case.model, shape_of(case, tiny).config())
    file = write_recipe(folder, case, folder, device)
    target = device_to_fit(f"{case.limit} GB")
    _, outlook = open_outlook(load_recipe(str(file), list(case.words)), target, None, Console.silent())
    highest = outlook.memory(target).peak
    found = {**asdict(case), "parameters": parameters, "phase": highest.name, "predicted_gb": highest.total / 1e9}
    found |= train_within(str(file), case.words, case.limit)
    later = found["perf/throughput"][2:] or found["perf/throughput"][-1:]
    found["tokens_per_second"] = statistics.median(later)
    if found["allocated"]:
        found["measured_gb"] = found["allocated"] / 1e9
        found["ratio"] = found["predicted_gb"] / found["measured_gb"]
    return found


def command_of(name: str, args: argparse.Namespace, place: Path) -> list[str]:
    """The command that writes the result of a case to `place`/found.json."""
    device, out = ["--device", args.device], ["--out", str(place / "found.json")]
    if name in CALLS:
        script, real, trial = CALLS[name]
        given = (*(trial if args.tiny else real), *ALWAYS.get(name, ()))
        model = ["--model", str(args.model)] if script == "precision.py" and args.model else []
        return [sys.executable, str(BENCH / script), *given, *model, *device, *out]
    if name in SIDES:
        few = ["--steps", "2", "--prompts", "2", "--n", "2", "--max-tokens", "8", "--rows", "4"]
        steps = few if args.tiny else ["--steps", str(args.steps), "--max-tokens", "400"]
        script = str(BENCH / "gsm8k_tools.py")
        kept = ["--keep", str(args.out / "runs" / name)]
        given = [str(args.model), str(args.gsm8k), *SIDES[name], *args.set, "--side", "plain", *steps, *kept]
        return [sys.executable, script, *given, *device, *out]
    kept = ["--keep", str(args.keep)] if args.keep else []
    return [sys.executable, __file__, name, "--one", str(place), *device, *["--tiny"] * args.tiny, *kept]


def in_own_process(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        out = Path(place) / "found.json"
        # Processes that a case starts end with it.
        child = subprocess.Popen(command_of(name, args, Path(place)), stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return {"error": f"not finished after {seconds:.0f} s (--budget)"}
        if out.is_file() and not code:
            return dict(json.loads(out.read_text(encoding="utf-8")))
        log.seek(0)
        return {"error": log.read()[-4000:]}


def _line(name: str, found: Mapping[str, Any]) -> str:
    if "error" in found:
        return f"{name:16} failed: {found['error'].strip().splitlines()[-1:]}"
    predicted = f", predicted {found['predicted_gb']:.2f} GB" if "predicted_gb" in found else ""
    measured = f", peak {found['measured_gb']:.2f} GB" if "measured_gb" in found else ""
    speed = f"{found['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in found else "measured"
    return f"{name:16} {speed}{measured}{predicted}"


def _goal_line(goal: Mapping[str, Any]) -> str:
    bound = " ".join(f"{key.replace('_', ' ')} {goal[key]:.4g}" for key in ("at_least", "at_most") if key in goal)
    if goal["value"] is None:
        return f"  {goal['goal']}: not measured ({', '.join(goal['without'])}); {bound}"
    return f"  {goal['goal']}: {goal['value']:.4g}, {bound}: {'met' if goal['met'] else 'MISSED'}"


def run_part(name: str, args: argparse.Namespace) -> None:
    """Measures what the file of the part does not have, and writes the file after each case."""
    part, file = PARTS[name], args.out / f"{name}.json"
    record: dict[str, Any] = {"machine": machine(select(args.device)), "tiny": args.tiny, "cases": {}}
    if file.is_file() and not args.again:
        record["cases"] = json.loads(file.read_text(encoding="utf-8"))["cases"]
    for case in part.cases:
        left = args.budget - (time.perf_counter() - BEGAN)
        if "error" not in record["cases"].get(case, {"error": ""}):
            print(f"{case:16} is measured already", flush=True)
        elif left < LEAST:
            print(f"{case:16} not started: {args.budget:g} s are over (--budget); call again to go on", flush=True)
        else:
            record["cases"][case] = in_own_process(case, args, left)
            print(_line(case, record["cases"][case]), flush=True)
        record["goals"] = [goal.judged(record["cases"]) for goal in part.goals]
        write_record(record, str(file))
    for goal in record["goals"]:
        print(_goal_line(goal), flush=True)


def across_parts(out: Path) -> None:
    """Prints and writes what needs the files of several parts, as far as they were measured: accuracies, and the
    verdict of `lockstep compare` on the rewards of low-precision rollouts, with repeats."""
    found: dict[str, Any] = {}
    for name in SIDES:
        if (out / f"{name}.json").is_file():
            found |= json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    if not found:
        return
    goals = [goal.judged(found) for goal in ACROSS]
    print("\n".join(map(_goal_line, goals)))
    runs = {name: out / "runs" / name for name in SIDES if (out / "runs" / name).is_dir()}
    repeats = [word for name in REPEATS if name in runs for word in ("--repeat", str(runs[name]))]
    verdicts = {}
    for name in ("gsm8k-fp8", "gsm8k-int8"):
        if name in runs and "gsm8k-bf16" in runs:
            command = [sys.executable, "-m", "lockstep", "compare", str(runs["gsm8k-bf16"]), str(runs[name]), *repeats]
            told = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False).stdout
            verdicts[name] = json.loads(told)
            print(f"  {name} beside gsm8k-bf16 with {len(repeats) // 2} repeats: {verdicts[name]['verdict']}")
    record = {"goals": goals, "compared": verdicts}
    (out / "gsm8k-goals.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for name in PARTS if name not in SIDES]
    parser.add_argument(
        "parts",
        nargs="+",
        choices=["all", *PARTS, *CASES, *TRL_SETTINGS],
        metavar="PART",
        help=", ".join(["all", *PARTS]),
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and short rows")
    parser.add_argument("--out", type=Path, help="the folder of the results, one JSON file per part")
    parser.add_argument("--again", action="store_true", help="measure cases again that the files have")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds of the whole call [{BUDGET}]")
    parser.add_argument("--model", type=Path, help="the model of gsm8k-* and dtypes")
    parser.add_argument("--gsm8k", type=Path, help="the folder of train.jsonl and test.jsonl, for gsm8k-*")
    parser.add_argument("--steps", type=int, default=100, help="GRPO steps of gsm8k-*")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="recipe keys of gsm8k-*")
    parser.add_argument("--keep", type=Path, help="the folder of TRL's model, which is written once")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        found = measure(args.parts[0], args.device, args.tiny, args.one, args.keep)
        (args.one / "found.json").write_text(json.dumps(found), encoding="utf-8")
        return
    chosen = list(dict.fromkeys(one for name in args.parts for one in (every if name == "all" else [name])))
    if args.out is None:
        parser.error("--out is missing")
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"{', '.join(unknown)} is a case; parts are {', '.join(PARTS)}")
    if set(chosen) & set(SIDES) and not (args.model and args.gsm8k):
        parser.error("gsm8k-* need --model and --gsm8k")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        run_part(name, args)
    across_parts(args.out)


if __name__ == "__main__":
    main()
