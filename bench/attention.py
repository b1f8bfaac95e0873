"""Attention of training, forward and backward: packed rows, and groups of responses that share their prompt.

    python bench/attention.py --out bench/results/attention_h200.json
    python bench/attention.py --shape qwen2.5-7b --lengths --out bench/results/attention_lengths_h200.json

Rows: flash over the packed line as we run it, and torch's cuDNN attention on the same line and on the same rows as a
dense batch, where it takes them. Groups, three ways: every sequence whole on the line, prompts once with every sequence
made whole for the kernel, and prompts once in two parts (`flash.py`), which is what a device with flash
attention does. All are first compared with the plain-torch reference in fp32.

With `--lengths`, it measures only our flash over a packed line of equal rows, for each length: the forward pass, and
both passes together, with their speed relative to large matmuls (`chips.py`). 6 Hq d S² FLOPs per row are counted, as
in `lockstep plan --cluster`. The default lengths take less than a minute on an H200.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lockstep.device.base import Device
from lockstep.device.chips import CHIPS
from lockstep.device.select import select
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.varlen import KERNELS, varlen_attention
from report import machine, summary, write_record
from shapes import SHAPES, Shape
from sides import Stopwatch

# The lengths of the table in `chips.py`.
LENGTHS = (1024, 4096, 16384, 65536, 131072)
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--lengths", type=int, nargs="*", metavar="TOKENS", help="default: 1,024 to 131,072")
    parser.add_argument("--line", type=int, default=65536, help="tokens of a line of --lengths, at least one row")
    parser.add_argument("--out")
    args = parser.parse_args()
    device, shape = select(args.device), SHAPES[args.shape]
    record: dict[str, Any] = {"settings": vars(args), "machine": machine(device), "rows": {}}
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    if args.lengths is not None:
        record["lengths"] = {}
        for length in args.lengths or LENGTHS:
            record["lengths"][str(length)] = found = of_length(device, shape, length, args.line, args.repeats)
            print(f"{length:,}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
            # Of a call that is ended early, the lengths so far remain.
            if args.out:
                write_record(record, args.out)
        return
    for name, ways, counts in (rows(device, shape, args), groups(device, shape, args)):
        print(f"{args.shape}, {name}", flush=True)
        record["rows"][name] = {}
        for way, (attention, tokens) in ways.items():
            found = measure(device, shape, attention, tokens, args.repeats) | {"error": counts[way]}
            record["rows"][name][way] = found
            print(f"  {way}: {found['seconds']['median'] * 1e3:.3f} ms, off by {counts[way]:.1e}", flush=True)
    if args.out:
        write_record(record, args.out)


Ways = dict[str, tuple[Attention, int]]


def rows(device: Device, shape: Shape, args: argparse.Namespace) -> tuple[str, Ways, dict[str, float]]:
    torch_device, tokens = device.torch_device(), args.rows * args.length
    layout, reference = (
        make_layout([args.length] * args.rows, torch_device, kernel) for kernel in (device.attention, "sdpa")
    )
    ways: Ways = {"packed": (lambda q, k, v: varlen_attention(q, k, v, layout, scale=shape.head**-0.5), tokens)}

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (rows.unflatten(0, (args.rows, -1)).transpose(1, 2) for rows in (query, key, value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.head**-0.5, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def ragged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        bounds, longest = layout.bounds, args.length
        return torch.ops.aten._cudnn_attention_forward(
            query, key, value, None, bounds, bounds, longest, longest, True, 0.0, True, False, scale=shape.head**-0.5
        )[0]

    if device.name == "cuda":
        ways |= {"packed cuDNN": (ragged, tokens), "dense cuDNN": (dense, tokens)}
    inputs = drawn(device, shape, tokens)
    exact = in_single(lambda q, k, v: varlen_attention(q, k, v, reference, scale=shape.head**-0.5), inputs)
    return f"{args.rows} x {args.length}", *_taken(ways, inputs, exact)


def of_length(device: Device, shape: Shape, length: int, line: int, repeats: int) -> dict[str, float]:
    """The median seconds of attention over a line of rows of one length, and its speed relative to large matmuls."""
    count = max(1, line // length)
    layout = make_layout([length] * count, device.torch_device(), device.attention)
    inputs = drawn(device, shape, count * length)
    upstream = torch.randn_like(inputs[0])

    def forward() -> torch.Tensor:
        return varlen_attention(*inputs, layout, scale=shape.head**-0.5)

    seconds: dict[str, list[float]] = {"forward": [], "both": []}
    for repeat in range(repeats + 2):
        for kind, found in seconds.items():
            watch = Stopwatch(device)
            if kind == "forward":
                with torch.no_grad():
                    forward()
            else:
                torch.autograd.grad(forward(), inputs, upstream)
            if repeat > 1:
                found.append(watch.read().wall)
    chip = CHIPS["h200" if device.name == "cuda" else "cpu"]
    matmuls = chip.flops(inputs[0].element_size())
    assert matmuls is not None
    least = 6 * shape.queries * shape.head * count * length**2 / matmuls
    forward_seconds, both = (statistics.median(seconds[kind]) for kind in ("forward", "both"))
    return {
        "rows": count,
        "forward_seconds": forward_seconds,
        "seconds": both,
        "forward_efficiency": least / 3 / forward_seconds,
        "efficiency": least / both,
    }


def _taken(ways: Ways, inputs: list[torch.Tensor], exact: list[torch.Tensor]) -> tuple[Ways, dict[str, float]]:
    """Those that this torch runs, each with how far it is off."""
    errors: dict[str, float] = {}
    for name, (attention, _) in ways.items():
        try:
            errors[name] = off(attention, inputs, exact)
        except (RuntimeError, TypeError) as refused:
            print(f"  {name} is not taken: {str(refused).splitlines()[0][:100]}")
    return {name: ways[name] for name in errors}, errors


def groups(device: Device, shape: Shape, args: argparse.Namespace) -> tuple[str, Ways, dict[str, float]]:
    torch_device, scale = device.torch_device(), shape.head**-0.5
    line: list[int] = []
    used = 0
    for _ in range(args.groups):
        begun, used = used, used + args.prompt
        for _ in range(args.n):
            line += [*range(begun, begun + args.prompt), *range(used, used + args.response)]
            used += args.response
    packed_index_E = torch.tensor(line)
    lengths = [args.prompt + args.response] * (args.groups * args.n)
    reference, shared = (
        make_layout(lengths, torch_device, kernel, packed_index_E) for kernel in ("sdpa", device.attention)
    )
    apart = make_layout(lengths, torch_device, device.attention)
    spread = packed_index_E.to(torch_device)
    fused = KERNELS[device.attention]

    def copied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert fused is not None
        KERNELS[device.attention] = fused._replace(shared=None)
        try:
            return varlen_attention(query, key, value, shared, scale=scale)
        finally:
            KERNELS[device.attention] = fused

    ways: Ways = {
        "every sequence whole": (lambda q, k, v: varlen_attention(q, k, v, apart, scale=scale), len(line)),
        "prompts once": (lambda q, k, v: varlen_attention(q, k, v, shared, scale=scale), used),
    }
    if fused is not None:
        ways["prompts once, made whole"] = copied, used
    inputs = drawn(device, shape, used)
    exact = in_single(lambda q, k, v: varlen_attention(q, k, v, reference, scale=scale), inputs)
    errors = {name: off(ways[name][0], inputs, exact) for name in ways if name != "every sequence whole"}
    assert shared.sharing is not None
    first = shared.sharing.first_T
    errors["every sequence whole"] = off(
        lambda q, k, v: varlen_attention(q[spread], k[spread], v[spread], apart, scale=scale)[first], inputs, exact
    )
    return f"{args.groups} x {args.n} x ({args.prompt} + {args.response})", ways, errors


def drawn(device: Device, shape: Shape, tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    dtype = torch.float32 if device.name == "cpu" else torch.bfloat16
    return [
        torch.randn(tokens, heads, shape.head, device=device.torch_device(), dtype=dtype, requires_grad=True)
        for heads in (shape.queries, shape.keys, shape.keys)
    ]


def gradients(attention: Attention, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attention(*inputs)
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def in_single(attention: Attention, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return gradients(attention, [tensor.detach().float().requires_grad_() for tensor in inputs])


def off(attention: Attention, inputs: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The worst of output and gradients, as a share of the exact one's norm."""
    found = gradients(attention, inputs)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def measure(device: Device, shape: Shape, attention: Attention, tokens: int, repeats: int) -> dict[str, Any]:
    inputs = drawn(device, shape, tokens)
    seconds = []
    for repeat in range(repeats + 2):
        watch = Stopwatch(device)
        gradients(attention, inputs)
        if repeat > 1:
            seconds.append(watch.read().wall)
    return {"tokens": tokens, "seconds": summary(seconds)}


if __name__ == "__main__":
    main()
