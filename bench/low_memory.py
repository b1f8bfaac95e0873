"""Memory and speed of quantised, long and low-precision training on models of real shapes with random weights.

    python bench/low_memory.py qlora-7b lora-7b trl-qlora-7b --out result.json     # on CUDA
    python bench/low_memory.py --device cpu --tiny qlora-7b grpo-8b --out /tmp/x.json   # the same code, tiny models

A case is a recipe that a process of its own trains for a few steps, with the weights of `random_weights.py`. Torch may
allocate no more than the GB of the case, and lockstep sees a device of this size. The peak memory is that of the whole
run, from loading to the last update. Tokens/s is the median of the steps after the first two. `predicted_gb` is the
peak of `lockstep plan`. The cases `trl-*` are the same rows in TRL's SFTTrainer with PEFT and bitsandbytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lockstep.commands.plan import open_outlook
from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.preflight.fit_plan import device_to_fit
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from plan_fit import LORA, NF4, Case, train_within, write_recipe
from random_weights import write_hollow
from report import machine, write_record
from shapes import SHAPES, Shape, write_model

AGAIN, OFFLOAD = "model.gradient_checkpointing=true", "model.activation_offload=true"
SEVEN, EIGHT, SEVENTY = "qwen2.5-7b", "qwen3-8b", "llama3-70b"
# The row of 4,096 tokens has a separator and an end token.
ROW = (2047, 2047)
ADAPTER = Case(140, SEVEN, "sft", ROW, 4, (LORA, AGAIN, "batch.tokens=4096"), 8)
# The state of AdamW in fp32 would not fit beside the fp32 master weights.
FULL = Case(149, SEVEN, "sft", ROW, 8, (AGAIN, "batch.tokens=8192", "optim.name=adamw8bit"), 8)
LONG = (LORA, AGAIN)
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
    "grpo-8b": Case(
        22,
        EIGHT,
        "grpo",
        (512, 2048),
        1,
        ("model.lora.rank=32", NF4, AGAIN, "rollout.n=8", "batch.tokens=2560"),
        2,
    ),
    "qlora-70b": Case(80, SEVENTY, "sft", ROW, 1, (LORA, NF4, AGAIN, "batch.tokens=4096"), 3),
}
# TRL's own settings beside its defaults.
TRL = {"trl-qlora-7b": {}, "trl-liger-7b": {"use_liger_kernel": True}}
TINY = Shape(2, 64, 4, 2, 16, 176, 300, context=131072)


def shape_of(case: Case, tiny: bool) -> Any:
    return TINY if tiny else replace(SHAPES[case.model], context=max(32768, sum(case.row) + 2))  # type: ignore[type-var]


def shortened(case: Case) -> Case:
    """The case with short rows, for a trial on a processor."""
    row = tuple(max(4, length // 128) for length in case.row)
    words = ["batch.tokens=1024" if word.startswith("batch.tokens=") else word for word in case.words]
    return replace(case, row=row, steps=min(case.steps, 3), words=tuple(words), limit=8.0)


def measure(name: str, device: str, tiny: bool, folder: Path, keep: Path | None) -> dict[str, Any]:
    """Predict and train, in this process. `folder` is empty."""
    if name in TRL:
        return train_trl(TRL[name], device, tiny, folder, keep or folder / "model")
    case = shortened(CASES[name]) if tiny else CASES[name]
    parameters = write_hollow(folder / case.model, shape_of(case, tiny).config())
    file = write_recipe(folder, case, folder, device)
    target = device_to_fit(f"{case.limit} GB")
    _, outlook = open_outlook(load_recipe(str(file), list(case.words)), target, None, Console.silent())
    peak = outlook.memory(target).peak
    found = {**asdict(case), "parameters": parameters, "phase": peak.name, "predicted_gb": peak.total / 1e9}
    found |= train_within(str(file), case.words, case.limit)
    later = found["perf/throughput"][2:] or found["perf/throughput"][-1:]
    found["tokens_per_second"] = statistics.median(later)
    if found["allocated"]:
        found["measured_gb"] = found["allocated"] / 1e9
        found["ratio"] = found["predicted_gb"] / found["measured_gb"]
    return found


def train_trl(settings: dict[str, Any], device: str, tiny: bool, folder: Path, model: Path) -> dict[str, Any]:
    """QLoRA by TRL, PEFT and bitsandbytes: nf4 with double quantisation, an adapter of rank 16 on all linear layers.
    The folder `model` is written if it does not exist."""
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import SFTTrainer

    case, chosen = shortened(ADAPTER) if tiny else ADAPTER, select(device)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            chosen.synchronise()
            ends.append(time.perf_counter())

    if not (model / "config.json").is_file():
        write_model(model, TINY if tiny else case.model, chosen.name)
    if chosen.name != "cpu":
        torch.get_device_module(chosen.torch_device()).empty_cache()
    chosen.reset_peak()
    write_recipe(folder, case, folder, device)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(row["prompt"] + row["response"])["input_ids"] for row in rows]
    trainer = SFTTrainer(
        **trl_arguments(model, folder / "out", case, chosen, settings),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    tokens = sum(map(len, ids)) / case.steps
    found = {
        "side": "TRL + PEFT + bitsandbytes",
        "settings": settings,
        "tokens_of_a_step": tokens,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "tokens_per_second": tokens / statistics.median(b - a for a, b in pairwise(ends[1:])),
    }
    if chosen.name != "cpu":
        found["measured_gb"] = chosen.memory().peak / 1e9
    return found


def trl_arguments(path: Path, out: Path, case: Case, device: Device, settings: dict[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        path,
        quantization_config=quantization,
        dtype=torch.bfloat16,
        device_map={"": device.name},
        trust_remote_code=False,
    )
    arguments = SFTConfig(
        output_dir=str(out),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=case.rows,
        max_steps=case.steps,
        max_length=None,
        gradient_checkpointing=True,
        bf16=True,
        optim="adamw_torch_fused" if device.fused_optimizer else "adamw_torch",
        use_cpu=device.name == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        **settings,
    )
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return {"model": model, "args": arguments, "peft_config": adapter}


def in_own_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        command = [sys.executable, __file__, name, "--one", place, "--device", args.device]
        command += ["--tiny"] * args.tiny + (["--keep", str(args.keep)] if args.keep else [])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if out.is_file():
            return dict(json.loads(out.read_text(encoding="utf-8")))
        return {"error": (done.stdout + done.stderr)[-4000:]}


def _line(name: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name:14} failed: {found['error'].strip().splitlines()[-1:]}"
    predicted = f", predicted {found['predicted_gb']:.2f} GB" if "predicted_gb" in found else ""
    measured = f", peak {found['measured_gb']:.2f} GB" if "measured_gb" in found else ""
    return f"{name:14} {found['tokens_per_second']:,.0f} tokens/s{measured}{predicted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=[*CASES, *TRL])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and short rows")
    parser.add_argument("--keep", type=Path, help="the folder of TRL's model, which is written once")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        found = measure(args.cases[0], args.device, args.tiny, args.one, args.keep)
        (args.one / "found.json").write_text(json.dumps(found), encoding="utf-8")
        return
    record: dict[str, Any] = {"machine": machine(select(args.device)), "cases": {}}
    for name in args.cases:
        record["cases"][name] = in_own_process(name, args)
        print(_line(name, record["cases"][name]), flush=True)
        write_record(record, str(args.out))


if __name__ == "__main__":
    main()
