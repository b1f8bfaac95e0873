"""What each rank of test_expert_kernels.py does: divided experts with the device's kernels against whole ones in torch.

Started by torchrun, in Triton's interpreter or with several ranks on one NVIDIA device. Each rank has other tokens.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from expert_ranks import MODELS
from lockstep.device.cpu import Cpu
from lockstep.kernels.experts.grouped_experts import grouped_experts
from lockstep.kernels.fused import fuse, replaced
from lockstep.kernels.fused_modules import plug_in
from lockstep.kernels.fused_modules_triton import KERNELS
from lockstep.model.adapters.expert_adapters import adapt_experts, innermost
from lockstep.model.check import build_miniature, enter
from lockstep.model.decoder import inner_decoder
from lockstep.model.division.expert_plan import expert_modules
from lockstep.model.division.tensor_trial import compare, run_packed
from lockstep.parallel.expert import ExpertGroup, divide_experts
from lockstep.parallel.sharding import shard, sharding_of, unit_gathered
from lockstep.parallel.tensor import experts_shown
from lockstep.parallel.world import World, joined
from lockstep.recipe.keys_parallel import Parallel

WIDTH, EXPERTS = 32, 8
CONFIG = Qwen3MoeConfig(
    hidden_size=WIDTH, moe_intermediate_size=24, num_experts=EXPERTS, _experts_implementation="eager"
)
ADAPTER = LoraConfig(r=4, lora_alpha=8, target_modules=["proj"], target_parameters=["gate_up_proj", "down_proj"])
# Largest difference, relative to the largest value.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


class Work(TorchDispatchMode):
    """Counts the operators of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.done = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def layer(device: torch.device, dtype: torch.dtype, *, adapted: bool) -> nn.Module:
    torch.manual_seed(0)
    made = nn.ModuleDict({"experts": Qwen3MoeExperts(CONFIG), "proj": nn.Linear(4, 4)})
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    if adapted:
        inject_adapter_in_model(ADAPTER, made)
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.3)
        adapt_experts(made)
    return made.to(device, dtype)


def results(module: nn.Module, chosen: torch.Tensor, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """The outputs, and the gradients of states and shares."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    states = torch.randn(len(chosen), WIDTH, generator=generator).to(device, dtype).requires_grad_()
    shares = torch.rand(chosen.shape, generator=generator).to(device, dtype).requires_grad_()
    out = module["experts"](states, chosen, shares)  # type: ignore[index]
    (out * torch.randn(out.shape, generator=generator).to(out)).sum().backward()
    assert states.grad is not None
    assert shares.grad is not None
    return [out.detach(), states.grad, shares.grad]


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def assert_close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = float((found - wanted).abs().max()) / float(wanted.abs().max())
    assert error <= TOLERANCE[wanted.dtype], f"{what} is off by {error:.2g}"


def check_layer(group: ExpertGroup, device: torch.device, dtype: torch.dtype, *, adapted: bool, least: int) -> None:
    """Experts below `least` get no tokens. Only one sort per forward pass: the received rows are merged by counts."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = 17 + 5 * dist.get_rank()
    chosen = (torch.rand(tokens, EXPERTS - least, generator=generator).topk(2).indices + least).to(device)
    whole = layer(device, dtype, adapted=adapted)
    divided = copy.deepcopy(whole)
    names = innermost(divided, ["experts"])
    divide_experts(divided, names, group)
    experts = divided.get_submodule(names[0])
    lines = plug_in(divided, KERNELS, experts_shown)
    assert any(line.startswith("Qwen3MoeExperts by triton_experts") for line in lines), lines
    wanted = results(whole, chosen, device, dtype)
    for kernels in (True, False):
        if not kernels:
            experts.forward = lambda *inputs: grouped_experts(experts, *inputs)
        divided.zero_grad()
        with Work() as work:
            found = results(divided, chosen, device, dtype)
        for what, one, other in zip(("the output", "the states", "the shares"), found, wanted, strict=True):
            assert_close(one, other, what)
        assert work.done["sort"] == 1, work.done
        assert work.done["argsort"] == 0, work.done
        # Tokens to pairs, received rows to experts and back. Outputs of a token: one more in plain torch.
        assert kernels or work.done["index"] >= 4, work.done
        ours = gradients(divided)
        for name, theirs in gradients(whole).items():
            one, other = ours[name], theirs.clone()
            dist.all_reduce(other)
            if "lora_" in name:  # the same matrices on all ranks, each with the gradients of its experts
                one = one.clone()
                dist.all_reduce(one)
            else:
                one = one.to_local()  # type: ignore[attr-defined]
                other = other.chunk(dist.get_world_size())[group.slot]
            assert_close(one, other, name) if bool(other.any()) else torch.testing.assert_close(one, other)


def check_sharded_model(world: World) -> None:
    """A model whose experts are divided and sharded gets the kernels, and computes what a whole model does."""
    sharding = sharding_of(Parallel(expert_parallel=world.size), Cpu(), world)
    assert sharding is not None
    assert sharding.expert is not None
    config, device = MODELS["qwen3_moe"], torch.device("cpu")
    wanted = run_packed(build_miniature(config, "sdpa", device, world.size).policy, device)
    policy = build_miniature(config, "sdpa", device, world.size).policy
    names = expert_modules(policy.causal_lm, world.size)
    divide_experts(inner_decoder(policy.causal_lm), names, sharding.expert)
    shard(policy, policy.layers(), sharding)
    enter(policy, device)
    with unit_gathered(policy):
        fuse(policy.causal_lm, "flash_varlen", unit_gathered)
    lines = replaced(policy)
    assert any("Qwen3MoeExperts by triton_experts" in line for line in lines), lines
    logprobs, found = run_packed(policy, device)
    # All ranks have the same tokens, so the sum over ranks is that of one times their number.
    compare(wanted, (logprobs, {name: grad / world.size for name, grad in found.items()}), "with kernels")


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        check_layers(ExpertGroup(mesh, mesh.get_group(), mesh.size(), mesh), torch.device("cuda", 0))
        dist.destroy_process_group()
        return
    torch.set_num_threads(1)
    with joined(Cpu()) as world:
        sharding = sharding_of(Parallel(expert_parallel=world.size), Cpu(), world)
        assert sharding is not None
        assert sharding.expert is not None
        check_layers(sharding.expert, torch.device("cpu"))
        check_sharded_model(world)


def check_layers(group: ExpertGroup, device: torch.device) -> None:
    # The interpreter rounds bf16 in another way than torch.
    for dtype in (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16):
        for adapted in (False, True):
            # The first rank receives no token.
            for least in (0, EXPERTS // group.size):
                check_layer(group, device, dtype, adapted=adapted, least=least)


if __name__ == "__main__":
    main()
