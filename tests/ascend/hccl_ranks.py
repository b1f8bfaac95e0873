"""What each rank of test_emulator_hccl.py does: `hccl_ranks.py FOLDER`.

Rank 0 writes what it found to FOLDER/collectives.json and FOLDER/training.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

STEPS = 4


def collectives() -> dict[str, Any]:
    from npu_context_ranks import divided_attention

    rank, device = dist.get_rank(), torch.device("npu", dist.get_rank())

    def full(value: float, count: int = 2) -> torch.Tensor:
        return torch.full((count,), float(value), device=device)

    found: dict[str, Any] = {}
    gathered = [full(0), full(0)]
    dist.all_gather(gathered, full(rank + 5))
    found["all_gather"] = [x.tolist() for x in gathered]
    shared = full(rank + 1)
    dist.broadcast(shared, 1)
    found["broadcast"] = shared.tolist()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    found["all_gather_object"] = objects
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(4.0, device=device) * (rank + 1))
    dist.all_gather(gathered, part)
    found["reduce_scatter"] = [x.tolist() for x in gathered]
    swapped = torch.empty(4, device=device)
    dist.all_to_all_single(swapped, torch.arange(4.0, device=device) + 10 * rank)
    found["all_to_all"] = swapped.tolist()
    received = full(-1)
    exchange = [
        dist.P2POp(dist.isend, full(rank + 3), 1 - rank),
        dist.P2POp(dist.irecv, received, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    found["exchange"] = received.tolist()
    scattered = full(0)
    dist.scatter(scattered, [full(8), full(9)] if rank == 0 else None, src=0)
    dist.all_gather(gathered, scattered)
    found["scatter"] = [x.tolist() for x in gathered]
    large = full(rank + 1, 700_001)  # more than one piece of the transport, and not a whole number of pieces
    dist.all_reduce(large, async_op=True).wait()
    found["large"] = [large.min().item(), large.max().item()]
    dist.barrier(group=dist.new_group([0, 1]))
    found["reduce"] = reduce_operators(device)
    found["host tensor"] = refusal(lambda: dist.all_reduce(torch.ones(1)))
    found["divided attention"] = divided_attention()
    return found


def reduce_operators(device: torch.device) -> dict[str, dict[str, Any]]:
    """The all-reduce of 2 and 3 for each operator and type: a number, or the refusal."""
    table: dict[str, dict[str, Any]] = {}
    for operator in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND"):
        table[operator] = {}
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8):
            x = torch.full((3,), dist.get_rank() + 2, device=device).to(dtype)
            error = refusal(partial(dist.all_reduce, x, op=getattr(dist.ReduceOp, operator)))
            table[operator][str(dtype).split(".")[1]] = error or x.tolist()[0]
    return table


def refusal(function: Callable[[], Any]) -> str | None:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def training() -> dict[str, list[float]]:
    """Losses of the same small training on both devices, in each way of being parallel."""
    ways: dict[str, Callable[[torch.nn.Module, torch.device], torch.nn.Module]] = {
        "ddp": data_parallel,
        "fsdp2": sharded,
        "fsdp2 bf16": lambda model, device: sharded(
            model, device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        ),
        "fsdp2 offload": lambda model, device: sharded(model, device, offload_policy=CPUOffloadPolicy()),
    }
    devices = [torch.device("cpu"), torch.device("npu", dist.get_rank())]
    return {f"{name} {device.type}": train(wrap, device) for name, wrap in ways.items() for device in devices}


def data_parallel(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    ids = [device.index] if device.index is not None else None
    return torch.nn.parallel.DistributedDataParallel(model.to(device), device_ids=ids)


def sharded(
    model: torch.nn.Module,
    device: torch.device,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> torch.nn.Module:
    mesh = init_device_mesh(device.type, (2,))
    shard = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload_policy or OffloadPolicy(),
    )
    shard(model.get_submodule("1"))
    shard(model)
    return model if offload_policy else model.to(device)


def train(wrap: Callable[[torch.nn.Module, torch.device], torch.nn.Module], device: torch.device) -> list[float]:
    torch.manual_seed(0)
    layers = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
    model = wrap(torch.nn.Sequential(*layers), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(0, 32, (4, 17), generator=draw).to(device)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
    return losses


def main(folder: Path) -> None:
    torch_npu.npu.set_device(int(os.environ["LOCAL_RANK"]))
    parts: tuple[tuple[Callable[[], dict[str, Any]], str], ...]
    parts = (collectives, "hccl"), (training, "cpu:gloo,npu:hccl")
    for part, backend in parts:
        # A store for each part: torchrun keeps the keys of the first group, and a rank that reads the old root info of
        # HCCL before rank 0 replaces it waits for a communicator that no longer exists.
        store = dist.FileStore(str(folder / f"{part.__name__}.store"), int(os.environ["WORLD_SIZE"]))
        ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group(backend, store=store, **ranks)
        found = part()
        if dist.get_rank() == 0:
            (folder / f"{part.__name__}.json").write_text(json.dumps(found))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
