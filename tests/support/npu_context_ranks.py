"""What each of two NPUs of tests/ascend/test_parts.py does: `npu_context_ranks.py FOLDER`, started by torchrun.

Attention divided over both of them is held against whole attention, in fp32. A rank that finds a difference ends with
an error, and so does one whose attention is not the device's. Rank 0 writes which fused operators ran in each layout.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu

from ascend_emulator import report
from context_ranks import Case, check_attention
from lockstep.parallel.context import ContextGroup

# Packed ones with single tokens, and some that are too short to have a chunk on every rank.
PACKINGS: list[tuple[int, ...]] = [(1, 13, 2, 30), (3, 1, 1)]
# As many heads of keys as of queries, fewer, and one.
SHAPES = [(4, 4, 8, 8), (4, 2, 8, 8), (8, 1, 4, 4)]


def main(folder: Path) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch_npu.npu.set_device(rank)
    dist.init_process_group("hccl")
    found = {}
    warnings.filterwarnings("error", message=".*plain torch")
    for layout in ("zigzag", "gather"):
        group = ContextGroup(rank, 2, layout, (0, 1), dist.group.WORLD)
        report.clear()
        for number, (lengths, shape) in enumerate(product(PACKINGS, SHAPES)):
            window = 4 if layout == "gather" and number % 3 == 0 else None
            case = Case(lengths, *shape, window=window, sinks=number % 2 == 1)
            check_attention(case, group, torch.float32, number, "npu_fusion", f"npu:{rank}")
        found[layout] = sorted(operator.name for operator in report.operators() if "::npu_fusion" in operator.name)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
