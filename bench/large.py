"""Plans, loads, trains, saves, resumes and pushes a large model at a fraction of its width, on CPU processes over gloo.

    python bench/large.py --shape qwen3-32b --out bench/results/large_qwen3-32b_cpu.json
    python bench/large.py --shape qwen3-235b-a22b --lora --out bench/results/large_qwen3-235b-a22b_cpu.json

The model has all layers, experts and heads of its original, and 1/8 of the widths (hidden size, feed-forward, head
size). Its random weights are written as sharded safetensors, one tensor at a time, and read shard by shard. The ranks
train one step and write a sharded checkpoint; a second command resumes from it and trains the second step. Then the
ranks push all weights in buckets to two receivers, which draw each tensor again by its name in the files and compare,
and write them tensor by tensor to the files of a push by files.

Memory is the anonymous resident memory of a rank (RssAnon), sampled in each phase, above what the process had before it
loaded the model. It is reported beside the prediction of `lockstep plan`. The phase `read` is the part of `load` that
reads the weights; the rest of `load` is a first pass, which gathers layers. `--compare` also trains on one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.device.select import select
from lockstep.model.export_folder import saved_names
from lockstep.model.load import load_config
from lockstep.model.streamed import conversions_of
from lockstep.model.tiny import write_tiny
from lockstep.preflight.memory_plan import MemoryPlan, plan_memory
from lockstep.recipe import load_recipe
from lockstep.run import tensor_file
from lockstep.run.metrics import read_metrics
from report import machine, write_record

# The widths are divided by --width; the numbers of layers, heads and experts are not.
QWEN3_32B = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "head_dim": 128,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
QWEN3_235B_A22B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "head_dim": 128,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim")
ADAPTER = "lora: {rank: 8, targets: [q_proj, k_proj, v_proj, o_proj]}, "
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-32b": ("qwen3", QWEN3_32B),
    "qwen3-235b-a22b": ("qwen3_moe", QWEN3_235B_A22B),
}
POOL = 2**24 + 1
RANKS_PROGRAM = Path(__file__).with_name("large_ranks.py")


def drawn(name: str, shape: torch.Size, pool: torch.Tensor) -> torch.Tensor:
    """The tensor of a name: part of a pool of normal numbers, at a place that follows from the name. Billions of draws
    would take minutes."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=pool.dtype)
    count = shape.numel()
    start = zlib.crc32(name.encode()) % POOL
    repeated = [pool[start:], *([pool] * (count // POOL + 1))]
    return torch.cat(repeated)[:count].view(shape) if start + count > POOL else pool[start : start + count].view(shape)


def drawn_pool(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(POOL).normal_(0, 0.02, generator=torch.Generator().manual_seed(0)).to(dtype)


def write_large(folder: Path, config: Any, dtype: torch.dtype, file_bytes: int) -> dict[str, int]:
    """Writes a Hugging Face folder with random weights, one tensor at a time. Experts are separate tensors, as in the
    files of the original model."""
    write_tiny(folder)
    (folder / tensor_file.ALONE).unlink()
    config.dtype = dtype
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model._weight_conversions = conversions_of(model)
    names = saved_names(model, {name: one.shape for name, one in model.named_parameters()})
    assert names is not None
    tensor_file.FILE_BYTES = file_bytes
    pool = drawn_pool(dtype)
    tensor_file.write_model(folder, names.shapes, dtype, lambda name: drawn(name, names.shapes[name], pool))
    return {
        "parameters": sum(shape.numel() for shape in names.shapes.values()),
        "tensors": len(names.shapes),
        "files": len(list(folder.glob("*.safetensors"))),
        "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    }


def layout_of(shape: str, ranks: int) -> str:
    if shape == "qwen3-32b":
        return f"shard: {ranks // 2}, tensor_parallel: 2"
    return f"shard: {ranks}, expert_parallel: {max(2, ranks // 2)}"


def write_recipe(folder: Path, args: argparse.Namespace) -> Path:
    layout, adapter = layout_of(args.shape, args.ranks), ADAPTER if args.lora else ""
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(26, (args.rows, args.length), generator=draw)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for row in letters.tolist():
            file.write(json.dumps({"text": "".join(chr(97 + letter) for letter in row)}) + "\n")
    recipe = folder / "recipe.yaml"
    model = f"path: {folder / 'model'}, dtype: {args.dtype}, {adapter}gradient_checkpointing: true"
    recipe.write_text(
        f"""
method: sft
device: cpu
run: {{name: run, folder: {folder / "runs"}, export: false}}
model: {{{model}}}
data: {{train: {folder / "rows.jsonl"}, require_end: false}}
batch: {{rows_per_update: {args.rows}, tokens: {args.tokens}}}
optim: {{name: {args.optimizer}, lr: 1e-4, schedule: constant}}
checkpoint: {{every: 1, asynchronous: false}}
parallel: {{devices: {args.ranks}, {layout}}}
""",
        encoding="utf-8",
    )
    return recipe


def predicted(recipe_file: Path, args: argparse.Namespace) -> MemoryPlan:
    recipe = load_recipe(str(recipe_file), [])
    config = load_config(recipe.model.path)
    return plan_memory(recipe, config, args.ranks, args.length + 1, args.rows, device=select("cpu"))


def on_ranks(folder: Path, args: argparse.Namespace, *words: str) -> list[dict[str, Any]]:
    """What each rank has measured."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    # Freed memory goes back to the system at once, so that resident memory is that of living tensors.
    limits = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launch, str(RANKS_PROGRAM), str(folder), *words],
        env={**os.environ, **limits},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
    return [json.loads((folder / f"rank.{rank}.json").read_text()) for rank in range(args.ranks)]


def train(folder: Path, recipe: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Two steps, by two commands; the second one resumes."""
    found: dict[str, Any] = {}
    for step in (1, 2):
        began = time.monotonic()
        ranks = on_ranks(folder, args, "train", str(recipe), f"run.steps={step}")
        found[f"command_{step}"] = {"seconds": time.monotonic() - began, "peak_bytes_of_ranks": ranks}
        print(f"step {step}: {time.monotonic() - began:.0f} s", flush=True)
    metrics = [one for _, one in read_metrics(folder / "runs" / "run" / "metrics.jsonl")]
    found["loss"] = [one["train/loss"] for one in metrics]
    found["grad_norm"] = [one["train/grad_norm"] for one in metrics]
    checkpoint = folder / "runs" / "run" / "checkpoints"
    found["checkpoint_bytes"] = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    return found


def alone(folder: Path, recipe: Path) -> dict[str, Any]:
    words = ["run.name=alone", "run.steps=2", "parallel.devices=1", "parallel.shard=null"]
    words += ["parallel.tensor_parallel=1", "parallel.expert_parallel=1"]
    command = [sys.executable, "-m", "lockstep", "train", str(recipe), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"one process ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    metrics = [one for _, one in read_metrics(folder / "runs" / "alone" / "metrics.jsonl")]
    return {"loss": [one["train/loss"] for one in metrics], "grad_norm": [one["train/grad_norm"] for one in metrics]}


def against_plan(plan: MemoryPlan, trained: dict[str, Any]) -> dict[str, Any]:
    """The measured memory of each rank, the larger one of both commands, beside the plan."""
    commands = [trained[name]["peak_bytes_of_ranks"] for name in ("command_1", "command_2")]
    measured = {
        phase: [max(told[phase] for told in rank) for rank in zip(*commands, strict=True)]
        for phase in ("read", "load", "update", "save")
    }
    planned = {phase.name: phase.total for phase in plan.phases}
    load = planned.pop("load")
    # An update has the phases forward and backward, and the optimizer step.
    planned.pop("validation")
    return {
        "weights_of_all_bytes": plan.weight_bytes,
        "read": _beside(measured["read"], plan.weight_bytes // len(measured["read"])),
        "load": _beside(measured["load"], load),
        "update": _beside(measured["update"], max(planned.values())),
        "save": {"measured": max(measured["save"])},
    }


def _beside(measured: list[int], planned: int) -> dict[str, Any]:
    ratios = [size / planned for size in measured]
    return {"measured": max(measured), "planned": planned, "ratio": max(ratios), "ratio_of_ranks": ratios}


def main() -> None:
    args = _arguments()
    kind, settings = SHAPES[args.shape]
    sizes = {name: size // args.width if name in WIDTHS else size for name, size in settings.items()}
    sizes |= {"num_hidden_layers": args.layers or sizes["num_hidden_layers"]}
    sizes |= {"vocab_size": args.vocabulary or sizes["vocab_size"]}
    config = transformers.AutoConfig.for_model(kind, tie_word_embeddings=False, max_position_embeddings=4096, **sizes)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    record: dict[str, Any] = {"settings": vars(args).copy(), "sizes": sizes, "machine": machine(select("cpu"))}
    with tempfile.TemporaryDirectory(prefix="bench-large-", dir=args.folder) as name:
        folder = Path(name)
        began = time.monotonic()
        record["model"] = write_large(folder / "model", config, dtype, args.file_bytes)
        record["model"]["write_seconds"] = time.monotonic() - began
        print(f"{args.shape}: {record['model']}", flush=True)
        recipe = write_recipe(folder, args)
        plan = predicted(recipe, args)
        record["train"] = train(folder, recipe, args)
        record["memory"] = against_plan(plan, record["train"])
        print(json.dumps(record["memory"], indent=1), record["train"]["loss"], flush=True)
        if args.compare:
            record["one_process"] = alone(folder, recipe)
        record["push"] = on_ranks(folder, args, "push", str(recipe))[0]
        print(record["push"], flush=True)
    if args.out:
        write_record(record, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--width", type=int, default=8, help="divides the widths of the model")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--vocabulary", type=int, help="default: that of the model")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--optimizer", default="adamw8bit")
    parser.add_argument("--lora", action="store_true", help="train an adapter of the attention instead of all weights")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--file-bytes", type=int, default=5 * 10**8, help="size of a safetensors file")
    parser.add_argument("--compare", action="store_true", help="also train on one process")
    parser.add_argument("--folder", help="where the model is written; default: the temporary folder")
    parser.add_argument("--out", help="write versions, settings and numbers to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
