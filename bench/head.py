"""Log-probabilities and entropies over a large vocabulary, forward and backward, beside the bare matrix products.

    python bench/head.py --out bench/results/head_h200.json

The bare products are logits = hidden W^T, d hidden = d logits W and dW = d logits^T hidden, over all positions at once
where memory allows it. Extra memory is the peak without inputs and their gradients. *Foreseen*: a loss with
`token_grads`, whose gradient at a token depends on no other token; it is computed in the forward pass.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch

from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.kernels.logprob import Head, token_scores
from report import machine, summary, write_record
from shapes import SHAPES
from sides import Stopwatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2.5-0.5b", "qwen2.5-1.5b"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out")
    args = parser.parse_args()
    device = select(args.device)
    record: dict[str, Any] = {"settings": vars(args), "machine": machine(device), "rows": {}}
    for name in args.shapes:
        for entropy, foreseen in itertools.product((True, False), (True, False)):
            found = measure(device, name, args.tokens, args.repeats, entropy=entropy, foreseen=foreseen)
            label = f"{name}{' with entropy' if entropy else ''}{', foreseen' if foreseen else ''}"
            record["rows"][label] = found
            print(
                f"{label}: {found['seconds']['median'] * 1e3:.2f} ms, bare products "
                f"{found['bare']['median'] * 1e3:.2f} ms, ratio {found['ratio']:.3f}, "
                f"extra {found['extra_gib']:.2f} GiB",
                flush=True,
            )
    if args.out:
        write_record(record, args.out)


def measure(device: Device, name: str, tokens: int, repeats: int, *, entropy: bool, foreseen: bool) -> dict[str, Any]:
    shape, torch_device = SHAPES[name], device.torch_device()
    torch.manual_seed(0)
    hidden = torch.randn(tokens, shape.hidden, device=torch_device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(shape.vocabulary, shape.hidden, device=torch_device) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(shape.vocabulary, (tokens,), device=torch_device)
    upstream = torch.randn(tokens, device=torch_device)

    def token_grads(
        logprobs: torch.Tensor, entropies: torch.Tensor | None, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return upstream[part], 0.01 * upstream[part] if entropy else None

    def ours() -> None:
        hidden.grad = weight.grad = None
        scores = token_scores(
            hidden, Head(weight), targets, entropy=entropy, token_grads=token_grads if foreseen else None
        )
        loss = (scores.logprobs_K * upstream).sum()
        if scores.entropies_K is not None:
            loss = loss + 0.01 * (scores.entropies_K * upstream).sum()
        loss.backward()

    bare_seconds = _bare(device, hidden.detach(), weight.detach(), repeats)
    seconds = _timed(device, ours, repeats)
    device.synchronise()
    hidden.grad = weight.grad = None
    before = device.memory().allocated
    device.reset_peak()
    ours()
    device.synchronise()
    results = 2 * (hidden.numel() + weight.numel())
    return {
        "tokens": tokens,
        "seconds": summary(seconds),
        "bare": summary(bare_seconds),
        "ratio": summary(seconds)["median"] / summary(bare_seconds)["median"],
        "extra_gib": (device.memory().peak - before - results) / 2**30,
    }


def _bare(device: Device, hidden: torch.Tensor, weight: torch.Tensor, repeats: int) -> list[float]:
    grad_logits = hidden @ weight.t()

    def products() -> None:
        for made in (lambda: hidden @ weight.t(), lambda: grad_logits @ weight, lambda: grad_logits.t() @ hidden):
            made()

    return _timed(device, products, repeats)


def _timed(device: Device, work: Any, repeats: int) -> list[float]:
    work()
    work()
    found = []
    for _ in range(repeats):
        watch = Stopwatch(device)
        work()
        found.append(watch.read().wall)
    return found


if __name__ == "__main__":
    main()
