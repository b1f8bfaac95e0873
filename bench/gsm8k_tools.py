"""Greedy accuracy on all test questions of GSM8K, with and without the `python` tool, before and after a short GRPO.

    python bench/gsm8k_tools.py MODEL GSM8K --side plain --out plain.json      # GSM8K: train.jsonl and test.jsonl
    python bench/gsm8k_tools.py MODEL GSM8K --side python --out python.json    # runs code of the model in a sandbox

A side is one `lockstep train`, which validates before its first and after its last step. Both sides have the same
questions, reward, steps and token limits, and one solved example in the prompt: the example of `plain` computes in
words, the example of `python` calls the tool. Words such as optim.lr=1e-6 at the end of the command
change the recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lockstep.data.prepare.generated import GSM8K_SOURCE, INSTRUCTION, write_gsm8k
from lockstep.data.sources.read import read_rows
from lockstep.device.select import select
from lockstep.run.metrics import read_metrics
from report import machine, write_record

EXAMPLE = "A box holds 12 pencils. A school buys 15 boxes and gives 4 pencils to each of 37 pupils. How many are left?"
CODE = "print(12 * 15 - 4 * 37)"
SOLVED: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {
            "role": "assistant",
            "content": "The boxes hold 12 * 15 = 180 pencils. The pupils get 4 * 37 = 148 pencils. "
            "So 180 - 148 = 32 pencils are left.\n#### 32",
        }
    ],
    "python": [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "python", "arguments": {"code": CODE}}}],
        },
        {"role": "tool", "name": "python", "content": "32"},
        {"role": "assistant", "content": "32 pencils are left.\n#### 32"},
    ],
}
# Means are over this many steps at either end of the run.
ENDS = 5


def main() -> None:
    args = _arguments()
    record: dict[str, Any] = {
        "settings": {name: str(value) for name, value in vars(args).items()},
        "machine": machine(select(args.device)),
    }
    if args.side == "python":
        from lockstep.environments.sandbox import chosen_isolation

        record["isolation"] = chosen_isolation()
    with tempfile.TemporaryDirectory(prefix="bench-gsm8k-") as folder:
        write_questions(Path(folder), args)
        record |= train(Path(folder), args)
    for name in ("before", "after"):
        print(f"{args.side} {name}: " + "  ".join(f"{key} {value:.4g}" for key, value in record[name].items()))
    if args.out:
        write_record(record, args.out)


def write_questions(folder: Path, args: argparse.Namespace) -> None:
    """Writes the questions of the side, with the solved example before each of them."""
    write_gsm8k(folder, source=Path(args.gsm8k), check_counts=args.rows is None)
    shots = [user(EXAMPLE), *SOLVED[args.side]] if args.examples else []
    for split in ("train", "test"):
        rows = read_rows(str(folder / f"{split}.parquet"))
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(len(rows)):
                info = rows[number]["extra_info"]
                row = {
                    "data_source": GSM8K_SOURCE,
                    "prompt": [*shots, user(info["question"])],
                    "reward_model": {"ground_truth": rows[number]["reward_model"]["ground_truth"]},
                }
                print(json.dumps(row, ensure_ascii=False), file=file)


def user(question: str) -> dict[str, Any]:
    return {"role": "user", "content": f"{question} {INSTRUCTION}"}


def recipe_words(folder: Path, args: argparse.Namespace) -> list[str]:
    """Returns the keys that differ from the built-in recipe `grpo-gsm8k-lora`: all weights are trained."""
    words = [
        f"run.folder={folder}",
        f"run.name={args.side}",
        f"run.steps={args.steps}",
        "run.export=false",
        f"device={args.device}",
        f"model.path={args.model}",
        f"model.dtype={args.dtype}",
        "model.lora=null",
        f"data.train={folder / 'train.jsonl'}",
        "data.max_prompt_tokens=1024",
        f"batch.prompts={args.prompts}",
        f"batch.prompts_per_update={max(1, args.prompts // 2)}",
        "batch.tokens=32768",
        f"rollout.n={args.n}",
        f"rollout.max_tokens={args.max_tokens}",
        f"rollout.max_sequences={min(512, args.prompts * args.n)}",
        f"optim.lr={args.lr}",
        f"optim.warmup={min(5, args.steps // 2)}",
        f"val.questions={folder / 'test.jsonl'}",
        f"val.question_rows={'null' if args.rows is None else args.rows}",
        f"val.max_new_tokens={args.max_tokens}",
        f"val.every={args.steps}",
        "checkpoint.every=1000000",
    ]
    if args.side == "python":
        words += ["rollout.tools=[python]", "rollout.max_turns=4"]
        words += [f"rollout.environment_workers={args.workers}", "rollout.max_concurrent=512"]
    return [*words, *args.words]


def train(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    command = [sys.executable, "-m", "lockstep", "train", "grpo-gsm8k-lora", *recipe_words(folder, args)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise SystemExit(code)
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        for name in ("recipe.yaml", "env.json", "metrics.jsonl"):
            shutil.copy(folder / args.side / name, args.keep / name)
    history = [metrics for _, metrics in read_metrics(folder / args.side / "metrics.jsonl")]
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "words": args.words}
    before, *_, after = [metrics for metrics in history if "val/accuracy" in metrics]
    found |= {"before": _validation(before), "after": _validation(after)}
    for name in ("critic/rewards/mean", "reward/rule/mean", "environment/tool_calls", "timing_s/gen"):
        values = [metrics[name] for metrics in history if name in metrics]
        if values:
            found[name] = [round(sum(end) / len(end), 4) for end in (values[:ENDS], values[-ENDS:])]
    return found


def _validation(metrics: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("val/"): value for name, value in metrics.items() if name.startswith("val/")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder whose chat template has tools")
    parser.add_argument("gsm8k", help="the folder of train.jsonl and test.jsonl")
    parser.add_argument("words", nargs="*", help="KEY=VALUE: changes of the recipe")
    parser.add_argument("--side", choices=SOLVED, required=True)
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--max-tokens", type=int, default=512, help="of all turns and tool results of an answer")
    parser.add_argument("--examples", type=int, choices=(0, 1), default=1, help="solved examples in the prompt")
    parser.add_argument("--rows", type=int, help="test questions [all]")
    parser.add_argument("--workers", type=int, default=8, help="processes that run the tool")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--keep", type=Path, help="a folder for the recipe and the metrics of the run")
    parser.add_argument("--out", help="the file of the result")
    return parser.parse_intermixed_args()


if __name__ == "__main__":
    main()
