"""Settings of `lockstep plan --fit` on a device whose memory is limited: predicted against measured peak memory.

    python bench/plan_fit.py --out bench/results/plan_fit_h200.json      # twelve cases, under 8 minutes on an H200
    python bench/plan_fit.py --device cpu --tiny --out /tmp/plan_fit.json   # the same code on tiny models, no memory

Each case is a recipe with rows of equal length and a model with random weights. `plan --fit` chooses the setting: its
fastest one that trains what the case trains. A process of its own trains two steps with this setting, while torch may
allocate no more than the limit (`set_per_process_memory_fraction`). A case that runs out of memory counts as a failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.commands.plan import open_outlook
from lockstep.device.select import select
from lockstep.model.tiny import write_tiny
from lockstep.preflight.cluster_plan import Outlook
from lockstep.preflight.fit_plan import FitSearch, FittingSetting, device_to_fit
from lockstep.preflight.model_sizes import count_parameters
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from report import machine, write_record
from shapes import SHAPES, Shape

STEPS = 2
# No case starts after this many seconds.
BUDGET = 420
EIGHT_BILLION = Shape(36, 4096, 32, 8, 128, 12288, 151936, tied=False, kind="qwen3")
MODELS: dict[str, Any] = {
    "0.5b": SHAPES["qwen2.5-0.5b"],
    "1.5b": SHAPES["qwen2.5-1.5b"],
    "8b": EIGHT_BILLION,
}
TINY = Shape(2, 64, 4, 2, 16, 176, 300)


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

    @property
    def name(self) -> str:
        return f"{self.method} {self.model} {self.limit:g} GB" + "".join(f" {word}" for word in self.words)


LORA, NF4 = "model.lora.rank=16", "model.quantize=nf4"
FIXED = ("model.lora.rank=", "model.quantize=", "optim.name=")
CASES = (
    Case(24, "0.5b", "sft", (512, 512), 16, ("batch.tokens=8192",)),
    Case(24, "1.5b", "sft", (512, 512), 16, (LORA, "batch.tokens=8192")),
    Case(24, "8b", "sft", (2000, 2000), 4, (LORA, NF4, "batch.tokens=4096")),
    Case(24, "1.5b", "dpo", (512, 512), 8, (LORA, "batch.tokens=4096")),
    Case(24, "0.5b", "grpo", (256, 256), 8, ("rollout.n=8", "batch.tokens=8192")),
    Case(48, "1.5b", "sft", (512, 512), 32, ("batch.tokens=16384",)),
    Case(48, "8b", "sft", (2000, 2000), 4, (LORA, "batch.tokens=16384")),
    Case(48, "8b", "dpo", (512, 512), 8, (LORA, NF4, "batch.tokens=4096")),
    Case(48, "1.5b", "grpo", (256, 256), 8, (LORA, "rollout.n=8", "batch.tokens=8192")),
    Case(80, "8b", "sft", (16000, 16000), 1, (LORA, "batch.tokens=32768", "model.gradient_checkpointing=true")),
    Case(80, "1.5b", "grpo", (256, 256), 8, ("rollout.n=8", "batch.tokens=8192")),
    Case(80, "8b", "grpo", (256, 128), 8, (LORA, NF4, "rollout.n=4", "batch.tokens=8192")),
)


def tiny(case: Case) -> Case:
    """The case with short rows and a limit that a tiny model reaches."""
    first, second = (max(4, length // 64) for length in case.row)
    words = ["batch.tokens=512" if word.startswith("batch.tokens=") else word for word in case.words]
    return replace(case, model="tiny", limit=case.limit / 1000, row=(first, second), words=tuple(words))


def write_model(folder: Path, shape: Any, device: str) -> None:
    """A model with random weights and the byte tokenizer. A rank draws billions of numbers on the device."""
    write_tiny(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def write_recipe(folder: Path, case: Case, models: Path, device: str) -> Path:
    """The recipe file with rows whose texts have one byte per token."""
    first, second = "a" * case.row[0], "b" * case.row[1]
    row: dict[str, Any] = {"prompt": first, "response": second}
    if case.method == "dpo":
        row = {"prompt": first, "chosen": second, "rejected": "c" * case.row[1]}
    online = case.method == "grpo"
    if online:
        row = {"data_source": "openai/gsm8k", "prompt": first, "reward_model": {"ground_truth": "1"}}
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(STEPS * case.rows)), encoding="utf-8")
    values: dict[str, Any] = {
        "method": case.method,
        "device": device,
        "run": {"name": "run", "folder": str(folder / "runs"), "steps": STEPS, "export": False},
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
    """Train in this process, within `limit` GB; returns the peak of allocated and of reserved bytes."""
    from lockstep.train.checkpointing import Checkpointer
    from lockstep.train.start import run_recipe

    Checkpointer.save = lambda *_: None  # type: ignore[method-assign]  # gigabytes that nobody reads
    recipe = load_recipe(file, list(words))
    device = select(recipe.device)
    counts = device.torch_device(0).type != "cpu"
    if counts:
        api = torch.get_device_module(device.torch_device(0))
        api.set_per_process_memory_fraction(limit * 1e9 / device.memory().total)
    began = time.perf_counter()
    run_recipe(recipe)
    found: dict[str, Any] = {"train_s": time.perf_counter() - began, "allocated": None, "reserved": None}
    if counts:
        found |= {"allocated": api.max_memory_allocated(), "reserved": api.max_memory_reserved()}
    return found


def measure(case: Case, models: Path, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_recipe(folder, case, models, device)
        setting, words = chosen(file, case)
        out = folder / "measured.json"
        command = [sys.executable, __file__, "--train", str(file), "--limit", str(case.limit), "--out", str(out)]
        done = subprocess.run([*command, "--words", *words], capture_output=True, text=True, check=False)
        found = json.loads(out.read_text()) if done.returncode == 0 else {"error": done.stderr[-2000:]}
    record = {
        **asdict(case),
        "setting": setting.label,
        "arguments": words,
        "phase": setting.peak.name,
        "predicted_gb": setting.peak.total / 1e9,
        **found,
    }
    if found.get("allocated"):
        record["measured_gb"] = found["allocated"] / 1e9
        record["ratio"] = record["predicted_gb"] / record["measured_gb"]
    return record


def run_cases(cases: Sequence[Case], device: str, budget: float) -> list[dict[str, Any]]:
    began, results = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as name:
        models = Path(name)
        for case in sorted(cases, key=lambda one: one.model):
            if time.perf_counter() - began > budget:
                results.append({**asdict(case), "error": "not started: the time is over"})
                continue
            if not (models / case.model).exists():
                write_model(models / case.model, MODELS.get(case.model, TINY), device)
            results.append(measure(case, models, device))
            print(_line(case, results[-1]), flush=True)
    return results


def _line(case: Case, found: dict[str, Any]) -> str:
    measured = f"{found['measured_gb']:6.1f} measured, {found['ratio'] - 1:+.1%}" if "ratio" in found else ""
    failed = found["error"].strip().splitlines()[-1:] if "error" in found else ""
    return f"{case.name:70} {found['predicted_gb']:6.1f} predicted {measured} {failed} ({found['setting']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and short rows")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of cases, from 0 [all]")
    parser.add_argument("--budget", type=float, default=BUDGET, help="no case starts after this many seconds")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--words", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.train:
        args.out.write_text(json.dumps(train_within(args.train, args.words, args.limit)), encoding="utf-8")
        return
    cases = [CASES[number] for number in args.cases] if args.cases else list(CASES)
    record = {"machine": machine(select(args.device)), "results": []}
    record["results"] = run_cases([tiny(case) for case in cases] if args.tiny else cases, args.device, args.budget)
    write_record(record, str(args.out))


if __name__ == "__main__":
    main()
