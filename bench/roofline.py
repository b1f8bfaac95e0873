"""The least time that a device needs for a step, by its matrix FLOP/s and its memory bandwidth.

    python bench/roofline.py --shape qwen2.5-0.5b --batch 256 --context 512

F FLOP/s, BW bytes/s, N multiplied weights in two bytes each, B sequences, S tokens, L layers, H heads of size d.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from shapes import SHAPES, Shape

# Measured on one H200 with torch: a large bf16 product, and a copy (read and write counted).
FLOPS, BANDWIDTH = 790e12, 4.3e12


def cache_bytes(shape: Shape) -> int:
    """Keys and values of a token in all layers, two bytes a number: 4 L Hkv d."""
    return 4 * shape.layers * shape.keys * shape.head


def decode_seconds(
    shape: Shape, batch: int, context: float, flops: float = FLOPS, bandwidth: float = BANDWIDTH
) -> float:
    """A token for each of `batch` sequences: max(2 N / BW, 2 N B / F) + B S kv / BW."""
    weights = max(2 * shape.multiplied / bandwidth, 2 * shape.multiplied * batch / flops)
    return weights + batch * context * cache_bytes(shape) / bandwidth


def generation_seconds(
    shape: Shape, batch: int, prompt: int, response: int, flops: float = FLOPS, bandwidth: float = BANDWIDTH
) -> float:
    """Decoding alone, at the mean context of a response: what is before it has other limits."""
    return response * decode_seconds(shape, batch, prompt + response / 2, flops, bandwidth)


def training_flops(shape: Shape, lengths: Sequence[int], *, frozen: bool = False) -> float:
    """Forward and backward of causal sequences: 6 N S + 6 L Hq d S^2 each.

    Weights that are `frozen` have no gradients of their own, 4 N S; an adapter's few are not counted.
    """
    linear, quadratic = (4 if frozen else 6) * shape.multiplied, 6 * shape.layers * shape.queries * shape.head
    return float(sum(linear * length + quadratic * length**2 for length in lengths))


def forward_flops(shape: Shape, lengths: Sequence[int]) -> float:
    return training_flops(shape, lengths) / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tflops", type=float, default=FLOPS / 1e12)
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH / 1e12, help="TB/s")
    args = parser.parse_args()
    shape, peaks = SHAPES[args.shape], (args.tflops * 1e12, args.bandwidth * 1e12)
    step = decode_seconds(shape, args.batch, args.context, *peaks)
    trained = training_flops(shape, [args.context] * args.batch) / peaks[0]
    tokens = args.batch * args.context
    print(f"{args.shape}: {shape.multiplied:,} multiplied weights, {cache_bytes(shape):,} bytes of cache a token")
    print(
        f"decode step of {args.batch} at context {args.context}: {step * 1e3:.3f} ms, {args.batch / step:,.0f} tokens/s"
    )
    print(f"update on {args.batch} x {args.context}: {trained * 1e3:.1f} ms, {tokens / trained:,.0f} tokens/s")


if __name__ == "__main__":
    main()
