"""Settings of `lockstep plan --fit` on a device whose memory is limited: predicted against measured peak memory.

    python bench/plan_fit.py --out bench/results/plan_fit_h200.json      # twelve cases
    python bench/plan_fit.py --device cpu --tiny --out /tmp/plan_fit.json   # the same code on tiny models, no memory

Each case is a recipe with rows of equal length and a model with random weights (`random_weights.py`). `plan --fit`
chooses the setting: its fastest one that trains what the case trains. A process of its own trains two steps with this
setting, while torch may allocate no more than the limit (`set_per_process_memory_fraction`). A case that runs out of
memory counts as a failure. Several cases run at once (`--room`), because only memory is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.commands.plan import open_outlook
from lockstep.device.base import Device, Memory
from lockstep.device.select import select
from lockstep.preflight.cluster_plan import Outlook
from lockstep.preflight.fit_plan import FitSearch, FittingSetting, device_to_fit
from lockstep.preflight.model_sizes import count_parameters
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from random_weights import draw_weights, write_hollow
from report import machine, write_record
from shapes import SHAPES, Shape

STEPS = 2
# No case starts after this many seconds.
BUDGET = 420
# GB of the device that the cases of one moment may take together.
ROOM = 125.0
MODELS: dict[str, Any] = {
    "0.5b": SHAPES["qwen2.5-0.5b"],
    "1.5b": SHAPES["qwen2.5-1.5b"],
    "8b": SHAPES["qwen3-8b"],
    "tiny": Shape(2, 64, 4, 2, 16, 176, 300),
}
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True)
class Case:
    """A recipe on a device with `limit` GB. `row` is the tokens of a row, or of a prompt and of a response."""

    limit: float
    model: str
    method: str
    row: tuple[int, int]
    rows: int
    words: tuple[str, ...] = ()
    """Recipe keys that the search starts from."""
    steps: int = STEPS

    @property
    def name(self) -> str:
        return f"{self.method} {self.model} {self.limit:g} GB" + "".join(f" {word}" for word in self.words)


LORA, NF4 = "model.lora.rank=16", "model.quantize=nf4"
FIXED = ("model.lora.rank=", "model.quantize=", "optim.name=")
# `plan` predicts the peak of a full micro-batch. So the rows fill micro-batches: a row of SFT has an end token, and a
# pair of DPO and a group of GRPO have their prompt once.
ROW, LONG_ROW, PAIR = (511, 511), (2047, 2047), (681, 682)
CASES = (
    Case(24, "0.5b", "sft", ROW, 16, ("batch.tokens=8192",)),
    Case(24, "1.5b", "sft", ROW, 16, (LORA, "batch.tokens=8192")),
    Case(24, "8b", "sft", LONG_ROW, 4, (LORA, NF4, "batch.tokens=4096")),
    Case(24, "1.5b", "dpo", PAIR, 8, (LORA, "batch.tokens=4096")),
    Case(24, "0.5b", "grpo", (256, 256), 8, ("rollout.n=8", "batch.tokens=9216")),
    Case(48, "1.5b", "sft", ROW, 32, ("batch.tokens=16384",)),
    Case(48, "8b", "sft", LONG_ROW, 4, (LORA, "batch.tokens=16384")),
    Case(48, "8b", "dpo", PAIR, 8, (LORA, NF4, "batch.tokens=4096")),
    Case(48, "1.5b", "grpo", (256, 256), 8, (LORA, "rollout.n=8", "batch.tokens=9216")),
    Case(80, "8b", "sft", (16383, 16383), 1, (LORA, "batch.tokens=32768", "model.gradient_checkpointing=true")),
    Case(80, "1.5b", "grpo", (256, 256), 8, ("rollout.n=8", "batch.tokens=9216")),
    Case(80, "8b", "grpo", (256, 128), 8, (LORA, NF4, "rollout.n=4", "batch.tokens=6144")),
)


def tiny(case: Case) -> Case:
    """The case with short rows and a limit that a tiny model reaches."""
    first, second = (max(4, length // 64) for length in case.row)
    words = ["batch.tokens=512" if word.startswith("batch.tokens=") else word for word in case.words]
    return replace(case, model="tiny", limit=case.limit / 1000, row=(first, second), words=tuple(words))


def write_recipe(folder: Path, case: Case, models: Path, device: str) -> Path:
    """The recipe file with rows whose texts have one byte per token."""
    draw = random.Random(0)
    online = case.method == "grpo"
    rows = folder / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for _ in range(case.steps * case.rows):
            first, second, third = ("".join(draw.choices(LETTERS, k=n)) for n in (*case.row, case.row[1]))
            row: dict[str, Any] = {"prompt": first, "response": second}
            if case.method == "dpo":
                row = {"prompt": first, "chosen": second, "rejected": third}
            if online:
                row = {"data_source": "openai/gsm8k", "prompt": first, "reward_model": {"ground_truth": "1"}}
            print(json.dumps(row), file=file)
    values: dict[str, Any] = {
        "method": case.method,
        "device": device,
        "run": {"name": "run", "folder": str(folder / "runs"), "steps": case.steps, "export": False},
        "model": {"path": str(models / case.model), "dtype": "bf16"},
        "data": {"train": str(rows), "template": "none"},
        "batch": {"prompts": case.rows} if online else {"rows_per_update": case.rows},
    }
    if online:
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        values["reward"] = {"function": f"{folder / 'reward.py'}:letters", "workers": 1}
        values["rollout"] = {"max_tokens": case.row[1], "n": 4}
        values["algorithm"] = {"kl": {"where": "none"}}
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    return file


REWARD = """
def letters(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 8
"""


def chosen(file: Path, case: Case) -> tuple[FittingSetting, list[str]]:
    """The fastest setting that fits, and all arguments of its run. The engine would take half of the whole device, so
    the predicted size of its KV cache is an argument too."""
    target = device_to_fit(f"{case.limit} GB")
    recipe = load_recipe(str(file), list(case.words))
    _, outlook = open_outlook(recipe, target, None, Console.silent())
    found = FitSearch(outlook, target, lambda words: load_recipe(str(file), [*case.words, *words])).settings()
    # The case decides which weights are trained and in which format.
    setting = next(one for one in found if not any(word.startswith(FIXED) for word in one.words))
    words = [*case.words, *setting.words]
    if case.method == "grpo" and not any(word.startswith("rollout.cache_gb=") for word in words):
        words.append(f"rollout.cache_gb={_cache(outlook, file, words, target) / 1e9:.6g}")
    return setting, words


def _cache(outlook: Outlook, file: Path, words: Sequence[str], target: Any) -> int:
    recipe = load_recipe(str(file), list(words))
    counted = count_parameters(recipe, outlook.models.config)
    changed = replace(outlook, recipe=recipe, models=replace(outlook.models, counted=counted))
    return max(1, changed.memory(target).cache)


def train_within(file: str, words: Sequence[str], limit: float) -> dict[str, Any]:
    """Train in this process on a device of `limit` GB; returns the peak of allocated and of reserved bytes, and the
    throughput and loss of each step."""
    from lockstep.train.checkpointing import Checkpointer
    from lockstep.train.start import run_recipe

    Checkpointer.save = lambda *_, **__: None  # type: ignore[method-assign]  # gigabytes that nobody reads
    recipe = load_recipe(file, list(words))
    device = select(recipe.device)
    draw_weights(device.torch_device(0))
    counts = device.torch_device(0).type != "cpu"
    if counts:
        api = torch.get_device_module(device.torch_device(0))
        api.set_per_process_memory_fraction(min(1.0, limit * 1e9 / device.memory().total))
        _shrink(type(device), round(limit * 1e9))
    began = time.perf_counter()
    folder = run_recipe(recipe)
    found: dict[str, Any] = {"train_s": time.perf_counter() - began, "allocated": None, "reserved": None}
    if counts:
        found |= {"allocated": api.max_memory_allocated(), "reserved": api.max_memory_reserved()}
    history = [metrics for _, metrics in read_metrics(folder / "metrics.jsonl")]
    for name in ("perf/throughput", "train/loss", "timing_s/gen", "timing_s/update_actor"):
        found[name] = [metrics[name] for metrics in history if name in metrics]
    return found


def _shrink(kind: type[Device], limit: int) -> None:
    """Lets lockstep see a device with `limit` bytes, as a smaller card would be."""
    whole = kind.memory

    def memory(self: Device) -> Memory:
        seen = whole(self)
        return replace(seen, total=min(seen.total, limit), free=max(0, min(seen.free, limit - seen.allocated)))

    kind.memory = memory  # type: ignore[method-assign]


def measure(case: Case, folder: Path, models: Path, device: str) -> dict[str, Any]:
    """Choose the setting and train, in this process."""
    file = write_recipe(folder, case, models, device)
    setting, words = chosen(file, case)
    record = {
        **asdict(case),
        "setting": setting.label,
        "arguments": words,
        "phase": setting.peak.name,
        "predicted_gb": setting.peak.total / 1e9,
        **train_within(str(file), words, case.limit),
    }
    if record.get("allocated"):
        record["measured_gb"] = record["allocated"] / 1e9
        record["ratio"] = record["predicted_gb"] / record["measured_gb"]
    return record


def run_cases(cases: Sequence[Case], device: str, budget: float, room: float) -> list[dict[str, Any]]:
    """Each case in its own process, as many at once as `room` GB hold together, the largest first."""
    began, results = time.perf_counter(), {}
    waiting = sorted(range(len(cases)), key=lambda number: -cases[number].limit)
    running: dict[int, Child] = {}
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        for model in {case.model for case in cases}:
            write_hollow(models / model, MODELS[model].config())
        while waiting or running:
            over = time.perf_counter() - began > budget
            taken = sum(cases[number].limit for number in running)
            for number in list(waiting):
                if over:
                    results[number] = {**asdict(cases[number]), "error": "not started: the time is over"}
                elif not running or taken + cases[number].limit <= room:
                    running[number] = Child(cases[number], models, device)
                    taken += cases[number].limit
                else:
                    continue
                waiting.remove(number)
            for number in [number for number, child in running.items() if child.process.poll() is not None]:
                results[number] = running.pop(number).result()
                print(_line(cases[number], results[number]), flush=True)
            time.sleep(0.2)
    return [results[number] for number in range(len(cases))]


class Child:
    """A process that measures one case."""

    def __init__(self, case: Case, models: Path, device: str):
        self.case, self.folder = case, tempfile.TemporaryDirectory()
        place = Path(self.folder.name)
        (place / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
        self.errors = (place / "errors.txt").open("w+", encoding="utf-8")
        command = [sys.executable, __file__, "--one", str(place), "--models", str(models), "--device", device]
        self.process = subprocess.Popen(command, stdout=self.errors, stderr=self.errors)

    def result(self) -> dict[str, Any]:
        out = Path(self.folder.name) / "measured.json"
        if out.is_file():
            found = json.loads(out.read_text(encoding="utf-8"))
        else:
            self.errors.seek(0)
            found = {**asdict(self.case), "error": self.errors.read()[-2000:]}
        self.errors.close()
        self.folder.cleanup()
        return found


def _line(case: Case, found: dict[str, Any]) -> str:
    measured = f"{found['measured_gb']:6.1f} measured, {found['ratio'] - 1:+.1%}" if "ratio" in found else ""
    failed = found["error"].strip().splitlines()[-1:] if "error" in found else ""
    predicted = f"{found['predicted_gb']:6.1f} predicted" if "predicted_gb" in found else ""
    return f"{case.name:70} {predicted} {measured} {failed} ({found.get('setting')})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and short rows")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases, from 0 [all]")
    parser.add_argument("--budget", type=float, default=BUDGET, help="no case starts after this many seconds")
    parser.add_argument("--room", type=float, default=ROOM, help="GB that the cases of one moment take together")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        given = json.loads((args.one / "case.json").read_text(encoding="utf-8"))
        case = Case(**{**given, "row": tuple(given["row"]), "words": tuple(given["words"])})
        found = measure(case, args.one, args.models, args.device)
        (args.one / "measured.json").write_text(json.dumps(found), encoding="utf-8")
        return
    cases = [CASES[number] for number in args.cases] if args.cases else list(CASES)
    cases = [tiny(case) for case in cases] if args.tiny else cases
    record: dict[str, Any] = {"machine": machine(select(args.device)), "results": []}
    record["results"] = run_cases(cases, args.device, args.budget, args.room)
    write_record(record, str(args.out))


if __name__ == "__main__":
    main()
