"""What each rank of test_optimizer_ranks.py does: sharded optimizers against unsharded ones.

Started by torchrun. A rank that finds a difference ends with an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lockstep.device.cpu import Cpu
from lockstep.optimizers.rule_table import RULES
from lockstep.optimizers.update_rule import Roles
from lockstep.parallel.sharded_files import StoredTensors, writer_of
from lockstep.parallel.sharding import Sharding, as_sharded, shard, sharding_of, whole
from lockstep.parallel.world import joined
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.keys_parallel import Parallel
from lockstep.train.optim_rules import RuleOptimizer

CPU = torch.device("cpu")


class Stack(nn.Module):
    """A matrix whose rows do not divide evenly, a wide matrix, experts, an embedding and a vector with few elements."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = {"uneven": (13, 512), "wide": (8, 600), "experts": (6, 16, 256), "embed": (20, 256), "bias": (3,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw)))


ROLES = Roles(frozenset({"embed"}), frozenset({"uneven", "wide", "experts"}))


def gradients(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(50 + step)
    return {name: torch.randn(p.shape, generator=draw) for name, p in Stack().named_parameters()}


def run(optimizer: RuleOptimizer, steps: range) -> None:
    for step in steps:
        for name, gradient in gradients(step).items():
            parameter = optimizer.parameters[name]
            layout = optimizer.layouts[name]
            part = layout.own_part(gradient).contiguous().to(parameter.dtype)
            parameter.grad = layout.sharded(part, layout.shape)
        optimizer.collect()
        optimizer.step(0.01, optimizer.gradient_norm())


def build(name: str, sharding: Sharding | None, rounding: bool) -> tuple[nn.Module, RuleOptimizer]:
    module = Stack().to(torch.bfloat16 if rounding else torch.float32)
    shard(module, [], sharding)
    settings = Optim(name=name, clip=None, weight_decay=0.1, stochastic_rounding=rounding)
    optimizer = RuleOptimizer(module.named_parameters(), settings, masters=False, device=CPU, roles=ROLES, seed="7")
    return module, optimizer


def check(name: str, sharding: Sharding, folder: Path, rounding: bool) -> None:
    alone, wanted = build(name, None, rounding)
    module, optimizer = build(name, sharding, rounding)
    run(wanted, range(2))
    run(optimizer, range(2))
    save(optimizer, folder)
    run(wanted, range(2, 4))
    # Another sharded optimizer goes on from the files, and so does an unsharded one.
    for place in (sharding, None):
        again, restored = build(name, place, rounding)
        for target, source in zip(again.parameters(), module.parameters(), strict=True):
            full = whole(source.detach())
            held = restored.layouts[next(n for n, p in again.named_parameters() if p is target)].own_part(full)
            (target.to_local() if place else target).data.copy_(held)
        restored.restore(StoredTensors(folder.glob("*.safetensors")))
        run(restored, range(2, 4))
        assert_alike(dict(again.named_parameters()), dict(alone.named_parameters()), name, rounding)
        mine, theirs = restored.full_state(), wanted.full_state()
        assert mine.keys() == theirs.keys()
        assert_alike(mine, theirs, name, rounding)


def assert_alike(
    found: dict[str, torch.Tensor] | dict[str, nn.Parameter],
    wanted: dict[str, torch.Tensor] | dict[str, nn.Parameter],
    name: str,
    rounding: bool,
) -> None:
    """Only Adafactor sums over ranks, and sums in another order round otherwise. All other rules are bit-identical."""
    for key, value in wanted.items():
        one = whole(found[key].detach())
        assert one.dtype == value.dtype
        if name != "adafactor":
            assert torch.equal(one, value.detach()), (name, key)
        elif not rounding:
            torch.testing.assert_close(one, value.detach(), rtol=1e-5, atol=2e-6, msg=key)
        else:
            assert float((one != value).float().mean()) < 0.02 or value.dtype == torch.float32, (name, key)


def save(optimizer: RuleOptimizer, folder: Path) -> None:
    from torch.distributed.checkpoint import save as save_parts

    if dist.get_rank() == 0:
        for file in folder.glob("*"):
            file.unlink()
    dist.barrier()
    state = optimizer.local_state()
    sizes = {name: value.numel() * value.element_size() for name, value in state.items()}
    save_parts(state, storage_writer=writer_of(folder, sizes, dist.get_world_size()))
    dist.barrier()


def check_division(ranks: int, name: str) -> None:
    """Matrices whose rows and columns are divided, as by tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(f"tensor-{name}",))
    for dimension in (0, 1):
        full = torch.randn(16, 256 * ranks, generator=torch.Generator().manual_seed(3))
        results = []
        for divided in (False, True):
            value = distribute_tensor(full.clone(), mesh, [Shard(dimension)]) if divided else full.clone()
            parameter = nn.Parameter(value)
            settings = Optim(name=name, clip=None, weight_decay=0.1)
            roles = Roles(matrices=frozenset({"weight"}))
            optimizer = RuleOptimizer([("weight", parameter)], settings, masters=False, device=CPU, roles=roles)
            for step in range(3):
                gradient = torch.randn(full.shape, generator=torch.Generator().manual_seed(step))
                layout = optimizer.layouts["weight"]
                parameter.grad = layout.sharded(layout.own_part(gradient).contiguous(), layout.shape)
                optimizer.step(0.01, optimizer.gradient_norm())
            state = optimizer.full_state()
            results.append((whole(parameter.detach()), state))
        (weight, state), (own, own_state) = results
        assert_alike({"weight": own, **own_state}, {"weight": weight, **state}, name, rounding=False)


def check_host_state(ranks: int) -> None:
    """Shards on the host stay there, although the ranks compute on another device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("elsewhere",))
    mesh._device_type = "meta"
    local = torch.zeros(2, 3)
    as_sharded(local, mesh, [Shard(0)], (2 * ranks, 3)).to_local().fill_(7.0)
    assert bool((local == 7).all())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    device = Cpu()
    with joined(device) as world:
        sharding = sharding_of(Parallel(), device, world)
        assert sharding is not None
        folder.mkdir(exist_ok=True)
        check_host_state(world.size)
        for name in RULES:
            print(name, flush=True)
            for rounding in (False, True):
                check(name, sharding, folder, rounding)
            check_division(world.size, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
