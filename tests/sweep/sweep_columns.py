"""Further checks of a model that the sweep supports: LoRA, context and tensor parallelism, fused kernels.

Each function returns what docs/models.md says in its column, after comparing with the same model undivided or alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sweep_cases import Case
from sweep_judge import CPU, sequences, training_error

from lockstep.data.batching import micro_batch, run_on
from lockstep.errors import Refusal
from lockstep.kernels.attention.masks import ROWS
from lockstep.kernels.fused import fuse, replaced
from lockstep.kernels.mixers import RECURRENT_KINDS, layer_kinds
from lockstep.model.division.tensor_plan import refuse_indivisible
from lockstep.model.division.tensor_trial import try_division
from lockstep.model.load import load_policy
from lockstep.model.policy import Policy
from lockstep.model.text_model import text_config
from lockstep.model.trials import Unfit
from lockstep.parallel.context import ContextGroup
from lockstep.parallel.context_split import LAYOUTS, Division, refuse_undivided
from lockstep.parallel.tensor import TensorGroup
from lockstep.recipe.schema import Lora, Model
from lockstep.types import Example, MicroBatch, Origin
from recurrent_checks import small_chunks
from thread_group import on_every_rank

YES, NO = "yes", "no"
# Names of Triton kernels, and what they replace. A name stands at the end of its entry, or before further words, as in
# "triton_norm of 1 + weight".
FUSED_NAMES = {
    "triton_norm": "norm",
    "triton_gated_norm": "gated norm",
    "triton_swiglu": "MLP",
    "triton_geglu": "MLP",
    "triton_experts": "experts",
    "triton_router": "router",
    "triton_rotary": "rotary",
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "mamba2_chunk_scan": "Mamba-2",
    "causal_conv1d_fn": "convolution",
}
# Layers that some modules read without calling them, so that an adapter on them is refused.
MOST_EXCLUDED = 4


def lora(folder: Path) -> str:
    """Trains adapters on all linear layers: log-probs and gradients, packed and padded, against each sequence alone."""
    exclude: list[str] = []
    for _ in range(MOST_EXCLUDED):
        try:
            policy = load_policy(
                Model(path=str(folder), lora=Lora(rank=2, alpha=4.0, exclude=exclude or None)), CPU, "sdpa", 0
            )
            break
        except Refusal as refusal:
            bypassed = re.match(r"add (\S+) to model\.lora\.exclude", refusal.problems[0].remedy or "")
            if bypassed is None:
                return NO
            exclude.append(bypassed[1])
    else:
        return NO
    generator = torch.Generator().manual_seed(3)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 8
    if wrong := training_error(policy):
        raise AssertionError(f"LoRA: {wrong}")
    return f"without {', '.join(f'`{name}`' for name in exclude)}" if exclude else YES


def context(folder: Path) -> str:
    """Returns the layouts of context parallelism with which two ranks (threads) give the numbers of one."""
    whole, *ranks = (load_policy(Model(path=str(folder)), CPU, "sdpa", 0).eval() for _ in range(3))
    if layer_kinds(text_config(whole.causal_lm.config)) & RECURRENT_KINDS:
        return NO
    rows = [Example(ids, [1] * len(ids), Origin("sweep", row)) for row, ids in enumerate(sequences(whole))]
    batch = micro_batch(rows, packed=True, pad_id=0)
    wanted, gradients = _scored(whole, batch)
    found = [layout for layout in LAYOUTS if _divides(layout, ranks, batch, wanted, gradients)]
    return ", ".join(found) or NO


def _divides(
    layout: str, ranks: Sequence[Policy], batch: MicroBatch, wanted: torch.Tensor, gradients: dict[str, torch.Tensor]
) -> bool:
    with suppress(Refusal):
        refuse_undivided(ranks[0].causal_lm, ContextGroup(0, len(ranks), layout, tuple(range(len(ranks)))), "model")

        def work(group: ContextGroup) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return _scored(ranks[group.rank], replace(batch, context=Division(batch, group)))

        parts = on_every_rank(len(ranks), layout, work)
        off = max(float((logprobs - wanted).abs().max()) for logprobs, _ in parts)
        assert off < 1e-3, f"context parallelism ({layout}): log-probs are off by {off:.3g}"
        largest = max(float(gradient.norm()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            summed = torch.stack([shares[name] for _, shares in parts]).sum(0)
            off = float((summed - gradient).norm()) / max(float(gradient.norm()), 1e-4 * largest)
            assert off < 1e-2, f"context parallelism ({layout}): the gradient of {name} is off by {off:.3g}"
        return True
    return False


def _scored(policy: Policy, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.zero_grad(set_to_none=True)
    logprobs = run_on(policy, batch, CPU).logprobs_K
    (logprobs**2).sum().backward()
    named = policy.named_parameters()
    return logprobs.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def tensor(cases: Sequence[Case]) -> dict[Case, str]:
    """Returns for each case whether two processes give the numbers of one, each with its part of the heads."""
    from torch.multiprocessing import get_context

    queue = get_context("spawn").SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_tensor_rank, (store.port, list(cases), queue), nprocs=2)
    return queue.get()


def _tensor_rank(rank: int, port: int, cases: Sequence[Case], queue: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = TensorGroup(dist.device_mesh.init_device_mesh("cpu", (2,)))
    found = {case: _tensor(case, group) for case in cases}
    if rank == 0:
        queue.put(found)
    dist.destroy_process_group()


def _tensor(case: Case, group: TensorGroup) -> str:
    config = case.config()
    try:
        refuse_indivisible(config, "model", group.size)
        try_division(config, "sdpa", CPU, group)
    except (Refusal, Unfit):
        return NO
    return YES


def kernels(folder: Path) -> str:
    """Returns the attention of a model, and which of its operators Triton kernels replace. Each kernel is compared with
    the operator on the spot, by Triton's interpreter."""
    policy = load_policy(Model(path=str(folder)), CPU, "sdpa", 0)
    with small_chunks("cpu"):
        fuse(policy.causal_lm, "flash_varlen")
    words = {word for entry in replaced(policy.causal_lm) for word in entry.split()}
    labels = dict.fromkeys(label for name, label in FUSED_NAMES.items() if name in words)
    return ", ".join([*_attention(policy), *labels]) or NO


def _attention(policy: Policy) -> list[str]:
    decoder, found = policy.decoder, []
    if decoder.attentions:
        dense = any(getattr(module, ROWS) for module in decoder.attentions)
        found.append("dense attention" if dense else "flash attention")
    with suppress(NotImplementedError):  # the built-in engine cannot run it
        found += ["latent decode"] * any(call.latent is not None for call in decoder.cache_layout().calls)
    return [*found, "recurrence"] if decoder.mixers else found
