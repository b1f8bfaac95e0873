"""What a number format does to the curve of a run, ours beside plain torch.

    python bench/precision.py MODEL ROWS.parquet                     # CPU
    python bench/precision.py MODEL ROWS.parquet --device cuda --steps 30 --rows 64 --lr 1e-4

The same rows in the same order go through SFT in five ways: ours in fp32 and in bf16, and a plain loop over
transformers' model with torch's AdamW in fp32, under autocast, and with bf16 weights beside fp32 masters. A pair of
formats that is out of step here is so by its rounding where plain torch parts in the same way, and by a fault where
ours parts alone. `lockstep data arithmetic FOLDER` writes rows (`sft_train.parquet`).
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM

import lockstep
from lockstep.device.select import select
from report import machine, write_record

WARM_UP = 5
PLAIN = ("fp32", "autocast", "bf16 + masters")
Curve = tuple[list[float], list[float]]
"""Losses and gradient norms."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out")
    args = parser.parse_args()
    table = pq.read_table(args.data).to_pylist()
    random.Random(0).shuffle(table)
    updates: list[list[Any]] = []
    curves: dict[str, Curve] = {}
    for dtype in ("fp32", "bf16"):
        handle = lockstep.load(args.model, device=args.device, dtype=dtype, lr=args.lr)
        if not updates:
            texts = [[message["content"] for message in row["messages"]] for row in table]
            rows = [handle.example(question, answer) for question, answer in texts[: args.steps * args.rows]]
            updates = [rows[at : at + args.rows] for at in range(0, len(rows), args.rows)]
        curves[f"ours, {dtype}"] = ours(handle, updates, args.lr)
        del handle
    for way in PLAIN:
        curves[f"plain torch, {way}"] = plain(args.model, args.device, way, updates, args.lr)
    report(curves)
    if args.out:
        settings = {key: value for key, value in vars(args).items() if key != "out"}
        write_record({"settings": settings, "machine": machine(select(args.device)), "curves": curves}, args.out)


def rate(peak: float, step: int) -> float:
    return peak * min(1.0, (step + 1) / WARM_UP)


def ours(handle: Any, updates: Sequence[Sequence[Any]], peak: float) -> Curve:
    losses, norms = [], []
    for step, rows in enumerate(updates):
        losses.append(handle.forward_backward(rows, "nll")["loss"])
        metrics = handle.optim_step(lr=rate(peak, step))
        norms.append(next(value for name, value in metrics.items() if name.endswith("grad_norm")))
    return losses, norms


def plain(folder: str, device: str, way: str, updates: Sequence[Sequence[Any]], peak: float) -> Curve:
    half = way == "bf16 + masters"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if half else torch.float32)
    model = model.to(device).train()
    weights = list(model.parameters())
    masters = [weight.detach().float().clone() for weight in weights] if half else weights
    adamw = torch.optim.AdamW(masters, lr=peak, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses, norms = [], []
    for step, rows in enumerate(updates):
        ids, trained, seen = padded(rows, device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=way == "autocast"):
            logits = model(input_ids=ids, attention_mask=seen).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * trained[:, 1:]).sum() / trained[:, 1:].sum()
        loss.backward()
        if half:
            for weight, master in zip(weights, masters, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters, 1.0)))
        for group in adamw.param_groups:
            group["lr"] = rate(peak, step)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        if half:
            with torch.no_grad():
                for weight, master in zip(weights, masters, strict=True):
                    weight.copy_(master)
        losses.append(float(loss))
    return losses, norms


def padded(rows: Sequence[Any], device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, what is trained, and what is no padding."""
    examples = [row.sequences[0] for row in rows]
    width = max(len(example) for example in examples)

    def column(numbers: Callable[[Any], Sequence[int]]) -> torch.Tensor:
        lines = [[*numbers(one), *[0] * (width - len(one))] for one in examples]
        return torch.tensor(lines, device=device)

    return column(lambda one: one.ids), column(lambda one: one.loss_mask).bool(), column(lambda one: [1] * len(one))


def report(curves: dict[str, Curve]) -> None:
    base = curves["ours, fp32"][0]
    print(f"{'':28}{'mean':>8} {'|error|':>8} {'drift':>8}   every {max(1, len(base) // 6)}th loss")
    for name, (losses, _) in curves.items():
        apart = [one - other for one, other in zip(losses, base, strict=True)]
        size, drift = (sum(numbers) / len(base) for numbers in (map(abs, apart), apart))
        shown = " ".join(f"{loss:.3f}" for loss in losses[:: max(1, len(base) // 6)])
        print(f"{name:28}{sum(losses) / len(losses):8.4f} {size:8.4f} {drift:+8.4f}   {shown}")


if __name__ == "__main__":
    main()
