"""What each rank of test_cuda_tensor.py does: two of them divide models on one NVIDIA device.

    torchrun --nproc-per-node 2 tensor_cuda.py [--device cpu] [WORDS]

NCCL wants a device for each rank, so gloo carries what they say. With words it is `lockstep`. On a CPU the same goes
through the same gathering, so that this program can be tried where there is no such device.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from lockstep.device.base import Device
from lockstep.device.cpu import Cpu
from lockstep.device.cuda import Cuda
from lockstep.device.select import DEVICES
from lockstep.model.division.tensor_trial import try_division
from lockstep.parallel.sharding import sharding_of
from lockstep.parallel.world import joined
from lockstep.recipe.keys_parallel import Parallel
from tensor_ranks import MODELS, check_engine

gathered = [0]
"""How often tensors went through the host."""


class Shared(Cuda):
    collective = "gloo"


def gathered_on_host(tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """In place of torch's own operator, by which ranks make a divided tensor whole: gloo's would read the device's
    memory as if it were the host's, and die. Its other collectives, which training needs, copy to the host first."""
    gathered[0] += 1
    group = dist.distributed_c10d._resolve_process_group(name)
    here = tensor.cpu()
    rows = len(here) if here.ndim else 1
    found = here.new_empty(size * rows, *here.shape[1:])
    dist.all_gather(list(found.chunk(size)), here.reshape(rows, *here.shape[1:]), group=group)
    return found.to(tensor.device)


def check_models(own: Device) -> None:
    with joined(own) as world:
        sharding = sharding_of(Parallel(tensor_parallel=world.size), own, world)
        assert sharding is not None
        assert sharding.tensor is not None
        for one in (MODELS["qwen2"], MODELS["qwen3"]):
            try_division(one, own.attention, sharding.device, sharding.tensor)
            check_engine(one, own, sharding.device, sharding.tensor)


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    on_cpu = sys.argv[1:3] == ["--device", "cpu"]
    if on_cpu:
        del sys.argv[1:3]
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gathered_on_host, "CPU" if on_cpu else "CUDA")
    if sys.argv[1:]:
        from lockstep.cli import main

        DEVICES["cuda"] = Shared
        main()
    else:
        check_models(Cpu() if on_cpu else Shared())
        assert gathered[0]
