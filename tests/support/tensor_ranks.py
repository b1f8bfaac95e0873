"""What each rank of test_tensor_runs.py does beside whole runs: divided models against whole ones.

Started by torchrun, with the names of some models or for all. A rank that finds a difference ends with an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from lockstep.device.base import Device, Memory
from lockstep.device.cpu import Cpu
from lockstep.model.check import build_miniature
from lockstep.model.decoder import inner_decoder
from lockstep.model.division import tensor_trial
from lockstep.model.division.tensor_plan import styles_of
from lockstep.model.division.tensor_trial import try_division
from lockstep.model.policy import Policy
from lockstep.model.trials import Unfit
from lockstep.parallel.sharding import by_mesh, shard, sharding_of, total_norm, whole
from lockstep.parallel.tensor import Style, TensorGroup, divide, with_tensor
from lockstep.parallel.world import World, joined
from lockstep.recipe.keys_parallel import Parallel
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Completion, Request, Sampling
from played_turns import Played, Script

CPU = torch.device("cpu")
# Biases before and after attention, norms of heads, soft caps, windows, three feed-forwards, tied heads, recurrences.
MODELS: Mapping[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(tie_word_embeddings=True),
    "llama with biases": LlamaConfig(attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(num_key_value_heads=8),
    "mistral": MistralConfig(sliding_window=64),
    "gemma2": Gemma2Config(),
    "gemma3": Gemma3TextConfig(num_attention_heads=8, num_key_value_heads=4),
    "mixtral": MixtralConfig(),
    "qwen3_next": Qwen3NextConfig(),
    "qwen3_5": Qwen3_5TextConfig(),
    "qwen3_moe": Qwen3MoeConfig(num_attention_heads=8, num_key_value_heads=4, decoder_sparse_step=2),
}


def refusal(config: PreTrainedConfig, group: TensorGroup) -> str:
    try:
        try_division(config, "sdpa", CPU, group)
    except Unfit as unfit:
        return str(unfit)
    raise AssertionError("nothing was refused")


def check_models(group: TensorGroup, names: Sequence[str]) -> None:
    for name in names or MODELS:
        print(name, flush=True)
        try_division(MODELS[name], "sdpa", CPU, group)


def check_that_faults_show(group: TensorGroup) -> None:
    """A plan that forgets something, and sums that are not taken."""

    def without(part: str) -> None:
        def styles(model: nn.Module, size: int) -> dict[str, Style]:
            return {name: style for name, style in styles_of(model, size).items() if part not in name}

        tensor_trial.styles_of = styles

    for part, wanted in (("q_norm", r"the gradient of .*q_norm.weight is off"), ("down_proj", "cannot be run divided")):
        without(part)
        assert re.search(wanted, refusal(MODELS["qwen3"], group)), part
    tensor_trial.styles_of = styles_of
    own = TensorGroup.sum_
    TensorGroup.sum_ = lambda self, tensor: tensor  # type: ignore[method-assign]
    assert "log-probs differ" in refusal(MODELS["llama with biases"], group)
    TensorGroup.sum_ = own  # type: ignore[method-assign]


def check_sharded(world: World, settings: Parallel) -> None:
    """Slices of divided parameters: each number counts once in the norm, and the whole is what it was."""
    sharding = sharding_of(settings, Cpu(), world)
    assert sharding is not None
    assert sharding.tensor is not None
    policy = build_miniature(MODELS["qwen3"], "sdpa", CPU, sharding.tensor.size).policy
    known = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    divide(
        policy.model, inner_decoder(policy.model), styles_of(policy.causal_lm, sharding.tensor.size), sharding.tensor
    )
    shard(policy, policy.layers(), sharding)
    found = dict(policy.named_parameters())
    norm = torch.linalg.vector_norm(torch.stack([one.double().norm() for one in known.values()]))
    torch.testing.assert_close(total_norm(found.values()).double(), norm, rtol=1e-6, atol=0)
    # Divided ones, those of the layers that are not, and what lies outside: an optimizer takes each of them at once.
    assert len(by_mesh(found.values())) == 3
    for name, parameter in found.items():
        torch.testing.assert_close(whole(parameter), known[name], rtol=0, atol=0, msg=name)
    # The same parameter is the same number of bytes on every rank, and the large ones are divided by all.
    embedding = next(parameter for name, parameter in found.items() if "embed_tokens" in name)
    held = sum(parameter.to_local().numel() for parameter in found.values())
    every = torch.tensor([held, embedding.to_local().numel()])
    dist.all_reduce(every)
    shards = world.size // (settings.replicate or 1)
    assert int(every[1]) == known["model.model.embed_tokens.weight"].numel() * (settings.replicate or 1)
    assert held < 1.1 * sum(one.numel() for one in known.values()) / shards


def generated(policy: Policy, device: Device) -> list[Completion]:
    engine = NativeEngine(policy, device, RolloutSettings(), str)
    requests = [Request([3 + number, 7, 11], number, 2) for number in range(5)]
    made = engine.generate(requests, Sampling(max_tokens=12, seed=3))
    return sorted(made, key=lambda one: (one.request, one.sample))


def check_engine(
    config: PreTrainedConfig, device: Device, where: torch.device, group: TensorGroup, whole_on: Device | None = None
) -> None:
    """The same tokens, by its part of the heads each."""
    whole = build_miniature(config, device.attention, where, group.size).policy
    model = build_miniature(config, device.attention, where, group.size).model
    divide(model, inner_decoder(model), styles_of(model, group.size), group)
    parts = Policy(model, device.attention).eval()
    for ours, theirs in zip(generated(parts, device), generated(whole, whole_on or device), strict=True):
        assert ours.ids == theirs.ids
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-3)
    elements = whole.decoder.cache_layout().token_elements
    assert parts.decoder.cache_layout().token_elements == elements // group.size


def check_turns(config: PreTrainedConfig, group: TensorGroup) -> None:
    """Turns of trajectories: only the first rank has tools, and all ranks generate what it asks for."""
    model = build_miniature(config, "sdpa", CPU, group.size).model
    divide(model, inner_decoder(model), styles_of(model, group.size), group)
    engine = NativeEngine(Policy(model, "sdpa").eval(), Cpu(), RolloutSettings(max_sequences=2, block_tokens=4), str)
    scripts = [Script([3 + number, 7, 11], [[5, 9], [number + 1]], [4 * number, 1]) for number in range(3)]
    played, sampling = Played(engine, scripts, 6), Sampling(max_tokens=6, seed=3)
    if group.is_first:
        flat = [one for turns in played.play(sampling) for one in turns]
    else:
        engine.further = played
        flat = list(engine.generate([], sampling))
        assert not played.requests
    reused = engine.prompt_counts().reused
    assert reused > 20
    assert group.object_of_first(reused) == reused
    ids = {one.request: one.ids for one in flat}
    assert group.object_of_first(ids) == ids
    whole = NativeEngine(build_miniature(config, "sdpa", CPU, group.size).policy, Cpu(), RolloutSettings(), str)
    alone = [one for turns in Played(whole, scripts, 6).play(sampling) for one in turns]
    assert sorted(one.ids for one in alone) == sorted(ids.values())


class Uneven(Cpu):
    """Its ranks have room for different numbers of blocks."""

    def __init__(self, rank: int):
        self.room = (8 + 3 * rank) * 2 * 2 * 16 * 16 * 4  # blocks of two layers, a head of 16 numbers each, 16 tokens

    def memory(self) -> Memory:
        return replace(super().memory(), free=2 * self.room)


def check_groups(world: World) -> None:
    divided = with_tensor(world, 2)
    assert (divided.dp_rank, divided.dp_size, divided.engine, divided.engines) == (world.rank // 2, world.size // 2) * 2
    assert divided.is_tp_rank0 == (world.rank % 2 == 0)
    assert divided.sum([1.0 + divided.dp_rank]) == [sum(1.0 + share for share in range(divided.dp_size))]
    group = TensorGroup(sharding_of(Parallel(tensor_parallel=2), Cpu(), world).tensor.mesh)  # type: ignore[union-attr]
    assert group.least(7 + world.rank, CPU) == 7 + world.rank // 2 * 2
    number = torch.tensor([float(world.rank)])
    group.as_first_(number)
    assert number.item() == world.rank // 2 * 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(Cpu()) as here:
        check_groups(here)
        check_sharded(here, Parallel(tensor_parallel=2))
        if here.size > 2:
            check_sharded(here, Parallel(tensor_parallel=2, replicate=here.size // 2))
            check_sharded(here, Parallel(tensor_parallel=here.size))
        every = sharding_of(Parallel(tensor_parallel=here.size), Cpu(), here)
        assert every is not None
        assert every.tensor is not None
        check_models(every.tensor, sys.argv[1:])
        check_that_faults_show(every.tensor)
        # Room for a few blocks of one head is none for blocks of all heads.
        check_engine(MODELS["qwen3"], Uneven(here.rank), CPU, every.tensor, whole_on=Cpu())
        check_engine(MODELS["qwen3_next"], Cpu(), CPU, every.tensor)
        check_turns(MODELS["qwen3"], every.tensor)
