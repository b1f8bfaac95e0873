"""Is the built-in engine what transformers would generate? Tried on a miniature of the architecture, in fp32."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.device.base import Device
from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import first_line
from lockstep.kernels.attention import ATTENTION
from lockstep.kernels.rotary import fixed_length
from lockstep.model.check import (
    LOGPROB_ERROR,
    RUN_ERRORS,
    Miniature,
    Unfit,
    build_miniature,
    tokens,
)
from lockstep.model.miniature import LIMIT, ORIGINAL_LENGTH, VOCABULARY
from lockstep.model.verified import fingerprint, hardware, is_verified, remember
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.engine import NativeEngine
from lockstep.types import Request, Sampling

# One prompt within every limit and one past a window; with their responses both are.
PROMPTS = (3, LIMIT + 3)
LONGEST = ORIGINAL_LENGTH + LIMIT


def check_engine_architecture(config: Any, kernel: str, device: Device, torch_device: torch.device) -> None:
    """`Unfit` where the built-in engine would generate other than transformers; needs no weights, and is remembered."""
    key = fingerprint(config, "engine", kernel, *hardware(torch_device))
    if not is_verified(key):
        try_engine(build_miniature(config, kernel, torch_device), device)
        remember(key)


def try_engine(miniature: Miniature, device: Device) -> None:
    """Hold greedy tokens and their log-probs against transformers' own, with prompts whole and in pieces."""
    policy = miniature.policy
    fixed = fixed_length(policy.causal_lm.config.get_text_config())
    longest = min(LONGEST, fixed or LONGEST)
    prompts = [tokens(length, VOCABULARY) for length in PROMPTS]
    theirs = [_greedy(policy.causal_lm, ids, longest - max(PROMPTS)) for ids in prompts]
    for settings in (
        RolloutSettings(block_tokens=4),
        RolloutSettings(block_tokens=4, prefill_tokens=3, max_sequences=1),
    ):
        engine = NativeEngine(policy, device, settings, lambda ids: "")
        requests = [Request(ids, key) for key, ids in enumerate(prompts)]
        try:
            made = list(engine.generate(requests, Sampling(max_tokens=longest - max(PROMPTS), temperature=0)))
        except RUN_ERRORS as error:
            refuse_trouble(error, next(policy.parameters()).device)
            raise Unfit(f"the engine cannot run it: {first_line(error)}") from error
        for one, (ids, logprobs) in zip(sorted(made, key=lambda c: c.request), theirs, strict=True):
            ours = torch.tensor(one.logprobs)
            difference = float((ours - logprobs).abs().max()) if one.ids == ids else float("inf")
            if not difference <= LOGPROB_ERROR:
                token = next((i for i, pair in enumerate(zip(one.ids, ids, strict=True)) if pair[0] != pair[1]), None)
                what = f"differ by {difference:.2g}" if token is None else f"part at token {token} of a response"
                raise Unfit(f"the engine's greedy tokens or log-probs and transformers' own {what}")


@torch.no_grad()
def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """The plainest way to generate: the whole sequence anew for every token."""
    device = model.get_input_embeddings().weight.device
    ids, logprobs = list(prompt), []
    model.set_attn_implementation("eager")
    try:
        for _ in range(count):
            logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1].float()
            ids.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
    finally:
        model.set_attn_implementation(ATTENTION)
    return ids[len(prompt) :], torch.tensor(logprobs)
