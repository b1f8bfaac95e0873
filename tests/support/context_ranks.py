"""What each rank of test_context_runs.py does beside whole runs: divided attention and models against whole ones.

Started by torchrun. A rank that finds a difference ends with an error.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
)

from lockstep.data.batching import micro_batch, run_on
from lockstep.device.cpu import Cpu
from lockstep.kernels.attention.interface import ATTENTION, register_attention
from lockstep.model.policy import Policy, Scoring
from lockstep.parallel.context import ContextGroup
from lockstep.parallel.context_split import LAYOUTS, PLACES, Division
from lockstep.parallel.world import World, joined, with_context
from lockstep.types import Example, MicroBatch, Origin
from tiny_sizes import TINY

# How far from the whole, beside its largest number. Of 700 random packings the worst were 1.9e-15 and 1.4e-6 off.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int
    groups: int
    key: int
    value: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def full_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, case: Case
) -> torch.Tensor:
    """By the definition, of all tokens to all: those that are not seen have a score of minus infinity."""
    sequence = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    back = torch.arange(len(query))[:, None] - torch.arange(len(query))
    seen = (sequence[:, None] == sequence) & (back >= 0) & (back < (case.window or len(query)))
    key, value = (tensor.repeat_interleave(case.heads // case.groups, 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~seen, -float("inf"))
    if case.sinks:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khe->qhe", scores.softmax(-1)[..., : len(query)], value)


def cases(draw: random.Random, ranks: int) -> list[Case]:
    """Random packings, and those at the edge: a token, no more than ranks, a boundary in every place.

    Two ranks run every day and draw few; the slow run of four draws more.
    """
    packings = [(1,), (ranks,), (2 * ranks + 1,), (1, 1, 1), (3, 2 * ranks, 1, 5 * ranks - 1)]
    packings += [
        tuple(draw.randrange(1, 25) for _ in range(draw.randrange(1, 6))) for _ in range(2 if ranks == 2 else 7)
    ]
    shapes = [(4, 4, 8, 8), (4, 2, 8, 8), (8, 1, 4, 4), (4, 2, 8, 4), (8, 8, 4, 6)]
    return [Case(lengths, *shapes[number % len(shapes)]) for number, lengths in enumerate(packings)]


def variants(case: Case, layout: str) -> list[Case]:
    """The kinds of attention that a layout has beside the plain one."""
    found = [case, replace(case, sinks=True)]
    if layout != "zigzag":
        found.append(replace(case, window=3, sinks=True))
    if layout == "ulysses":
        found.append(replace(case, softcap=1.5, window=5))
    return found


def check_attention(
    case: Case, group: ContextGroup, dtype: torch.dtype, seed: int, kernel: str = "sdpa", on: str = "cpu"
) -> None:
    """Of the device `on`, whose attention kernel is called `kernel`."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(case.lengths)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    whole = [numbers(total, case.heads, case.key), numbers(total, case.groups, case.key)]
    whole += [numbers(total, case.groups, case.value), numbers(case.heads)]
    upstream = numbers(total, case.heads, case.value)
    exact = [tensor.to(torch.float64, copy=True).requires_grad_() for tensor in whole]
    wanted = full_attention(*exact, case)
    wanted.backward(upstream.double())

    example = Example([1] * total, [1] * total, Origin("rows", 0))
    batch = replace(micro_batch([example], packed=True, pad_id=0), lengths=case.lengths)
    division = Division(batch, group)
    own_T = division.local_T
    filler = sum(division.lengths) - total
    mine = [torch.cat([tensor, tensor.new_zeros(filler, *tensor.shape[1:])])[own_T] for tensor in whole[:3]]
    mine = [tensor.to(on).requires_grad_() for tensor in [*mine, whole[3].clone()]]
    layout = division.layout(torch.device(on), kernel)
    out = layout.attend(
        *mine[:3],
        scale=0.3,
        window=case.window,
        dropout=0.0,
        softcap=case.softcap,
        sinks_H=mine[3] if case.sinks else None,
    )
    out.backward(torch.cat([upstream, upstream.new_zeros(filler, *upstream.shape[1:])])[own_T].to(on))
    real = own_T < total
    where = own_T[real]
    told = f"{group.layout}, rank {group.rank} of {group.size}, {case}, {dtype}"
    close(out.detach().cpu()[real], wanted.detach()[where], dtype, f"output: {told}")
    for name, tensor, other in zip(("query", "key", "value"), mine, exact, strict=False):
        assert tensor.grad is not None
        assert other.grad is not None
        close(tensor.grad.cpu()[real], other.grad[where], dtype, f"gradient of the {name}: {told}")
        assert not tensor.grad.cpu()[~real].any(), f"padding has a gradient: {told}"
    if case.sinks:
        assert mine[3].grad is not None
        summed = group.sum_shares(mine[3].grad.repeat(group.size))
        close(summed.cpu(), exact[3].grad, dtype, f"gradient of the sinks: {told}")


def close(found: torch.Tensor, wanted: torch.Tensor | None, dtype: torch.dtype, told: str) -> None:
    assert wanted is not None
    if not wanted.numel():
        return
    difference = float((found.double() - wanted).abs().max())
    assert difference <= TOLERANCE[dtype] * max(1.0, float(wanted.abs().max())), f"{difference:.3g} off: {told}"


def check_kernels(world: World) -> None:
    for layout in LAYOUTS:
        group = with_context(world, Cpu(), world.size, layout).context
        assert group is not None
        draw, seed = random.Random(world.size), 0
        for case in cases(draw, world.size):
            for variant, dtype in product(variants(case, layout), TOLERANCE):
                seed += 1
                check_attention(variant, group, dtype, seed)


SIZES: dict[str, Any] = {**TINY, "vocab_size": 61, "initializer_range": 0.4}
FIXED = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def models(layout: str) -> dict[str, PreTrainedConfig]:
    found: dict[str, PreTrainedConfig] = {
        "llama": LlamaConfig(**SIZES),
        "dynamic positions": LlamaConfig(**{**SIZES, "max_position_embeddings": 9}, rope_parameters=DYNAMIC),
        "experts": MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    }
    if layout != "zigzag":
        found["window"] = MistralConfig(**SIZES, sliding_window=6)
        found["sinks and window"] = GptOssConfig(**SIZES, num_local_experts=4, sliding_window=6, rope_parameters=FIXED)
    if layout == "ulysses":
        found["soft cap and window"] = Gemma2Config(**SIZES, sliding_window=6, attn_logit_softcapping=2.0)
    return found


def check_model(config: PreTrainedConfig, batch: MicroBatch, group: ContextGroup, told: str) -> None:
    """Log-probs, entropies and the gradient of every parameter, summed over ranks, with a loss of products."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    policy = Policy(model, "sdpa", Scoring(entropy=True))
    weights = torch.cos(torch.arange(len(batch.targets_K)))

    def run(one: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        policy.zero_grad(set_to_none=True)
        scores = run_on(policy, one, torch.device("cpu"))
        # Not a sum over tokens: what a token's log-prob is worth depends on those that other ranks have.
        loss = (weights * scores.logprobs_K).sum().square() + (weights * scores.entropies_K).sum()
        loss.backward()
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in policy.named_parameters()}
        return scores.logprobs_K.detach(), found

    wanted, gradients = run(batch)
    found, shares = run(replace(batch, context=Division(batch, group)))
    assert torch.allclose(found, wanted, rtol=1e-5, atol=2e-5), f"{(found - wanted).abs().max():.3g} off: {told}"
    for name, share in shares.items():
        summed = group.sum_shares(share.flatten().repeat(group.size)).view_as(share)
        size = max(float(gradients[name].norm()), 1e-6)
        off = float((summed - gradients[name]).norm()) / size
        assert off <= 1e-4, f"the gradient of {name} is {off:.3g} of its norm off: {told}"


def example(length: int, seed: int) -> Example:
    draw = random.Random(seed)
    trained = [0, *(int(draw.random() < 0.6) for _ in range(length - 1))]
    return Example([draw.randrange(61) for _ in range(length)], trained, Origin("rows", seed))


def check_models(world: World) -> None:
    register_attention()
    for layout in LAYOUTS:
        group = with_context(world, Cpu(), world.size, layout).context
        assert group is not None
        for name, config in models(layout).items():
            examples = [example(length, length) for length in (13, 1, 22, 5)]
            for packed in (True, False):
                batch = micro_batch(examples, packed=packed, pad_id=0)
                check_model(config, batch, group, f"{name}, {layout}, packed {packed}, rank {group.rank}")
        # Fewer tokens than ranks, and none that is trained.
        for lengths in ((2,), (1,), ()):
            batch = micro_batch([example(length, length) for length in lengths], packed=True, pad_id=0)
            check_model(LlamaConfig(**SIZES), batch, group, f"{lengths}, {layout}, rank {group.rank}")


def groups_of_two(world: World) -> None:
    """Neighbours share a part of the rows; sums go over the parts, and every rank of a group has the whole sum."""
    divided = with_context(world, Cpu(), 2, "zigzag")
    assert divided.context is not None
    assert (divided.dp_rank, divided.dp_size) == (world.rank // 2, world.size // 2)
    assert divided.context.ranks == (world.rank // 2 * 2, world.rank // 2 * 2 + 1)
    assert divided.sum([1.0 + divided.dp_rank]) == [sum(1.0 + share for share in range(divided.dp_size))]
    assert PLACES.keys() == LAYOUTS.keys()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(Cpu()) as here:
        groups_of_two(here)
        check_kernels(here)
        check_models(here)
