"""QLoRA by TRL, PEFT and bitsandbytes, on the rows and the shape of a case of `low_memory.py`."""

from __future__ import annotations

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lockstep.device.base import Device
from lockstep.device.select import select
from plan_fit import Case, write_recipe
from shapes import Shape, write_model

# TRL's own settings beside its defaults.
TRL_SETTINGS: dict[str, dict[str, Any]] = {"trl-qlora-7b": {}, "trl-liger-7b": {"use_liger_kernel": True}}


def train_trl(
    settings: dict[str, Any], device: str, case: Case, shape: str | Shape, folder: Path, keep: Path | None
) -> dict[str, Any]:
    """Trains with nf4, double quantisation and an adapter of rank 16 on all linear layers. The model is written to
    `keep`, if it does not exist there."""
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import SFTTrainer

    chosen, model = select(device), keep or folder / "model"
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            chosen.synchronise()
            ends.append(time.perf_counter())

    if not (model / "config.json").is_file():
        write_model(model, shape, chosen.name)
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
