"""What each of two NPUs does in tests/ascend/hccl_ranks.py: attention divided over both against whole attention.

A rank that finds a difference ends with an error, and so does one whose attention is not the device's.
"""

from __future__ import annotations

import warnings
from itertools import product

import torch
import torch.distributed as dist

from ascend_emulator import report
from context_ranks import Case, check_attention
from lockstep.parallel.context import ContextGroup

# Packed ones with single tokens, and some that are too short to have a chunk on every rank.
PACKINGS: list[tuple[int, ...]] = [(1, 13, 2, 30), (3, 1, 1)]
# As many heads of keys as of queries, fewer, and one.
SHAPES = [(4, 4, 8, 8), (4, 2, 8, 8), (8, 1, 4, 4)]


def divided_attention() -> dict[str, list[str]]:
    """Outputs and gradients in fp32, in the layouts that attend in parts; which fused operators ran in each."""
    rank, found = dist.get_rank(), {}
    for layout in ("zigzag", "gather"):
        group = ContextGroup(rank, 2, layout, (0, 1), dist.group.WORLD)
        report.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*plain torch")
            for number, (lengths, shape) in enumerate(product(PACKINGS, SHAPES)):
                window = 4 if layout == "gather" and number % 3 == 0 else None
                case = Case(lengths, *shape, window=window, sinks=number % 2 == 1)
                check_attention(case, group, torch.float32, number, "npu_fusion", f"npu:{rank}")
        found[layout] = sorted(operator.name for operator in report.operators() if "::npu_fusion" in operator.name)
    return found
