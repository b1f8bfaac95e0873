"""Does the engine generate from the distribution that the trainer scores? Tried on the loaded model."""

from __future__ import annotations

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.base import Device
from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Problem, Refusal
from lockstep.kernels.rotary import fixed_length
from lockstep.model.check import CHECK_TOLERANCE, RUN_ERRORS, Unfit
from lockstep.model.kernel_trial import refuse_unless_replayed
from lockstep.model.policy import Policy, Scoring
from lockstep.rollout.engine import Engine
from lockstep.rollout.trial import check_engine_architecture
from lockstep.types import Example, Origin, Request, Sampling

# What the check of a loaded model generates: prompts of one token and of what is left of the longest sequence.
LONGEST_TRIED, NEW_TOKENS_TRIED = 25, 6


@torch.no_grad()
def check_engine(engine: Engine, policy: Policy, device: torch.device, path: str, *, paged_on: Device | None) -> None:
    """Refuse a model whose generation the trainer would score differently.

    Catches layers that keep a state of their own besides keys and values, and attention beyond the usual. `paged_on` is
    the device of an engine whose row says `paged`: the architecture is tried there first.
    """
    name, remedy = type(policy.causal_lm).__name__, engine.instead
    try:
        if paged_on is not None:
            check_engine_architecture(policy.causal_lm.config, policy.kernel, paged_on, device)
        ours, trainers = _two_scores(engine, policy, device)
    except Unfit as unfit:
        # A replay goes on and judges what is generated: where the tape was recorded, this check passed.
        refuse_unless_replayed(Problem(f"model.path {path}", f"{name}: {unfit}", remedy))
        return
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refusal.at(f"model.path {path}", f"{name} cannot be run by the engine: {why}", remedy) from error
    difference = (trainers - ours).abs().max().item()
    if not difference <= CHECK_TOLERANCE[next(policy.parameters()).dtype]:
        why = f"{name}: the engine's log-probabilities differ from the trainer's by {difference:.3g}"
        refuse_unless_replayed(Problem(f"model.path {path}", why, remedy))


def _two_scores(engine: Engine, policy: Policy, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a few sampled tokens: as the engine gave them, and as the policy scores them."""
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    fixed = fixed_length(policy.causal_lm.config.get_text_config(decoder=True)) or LONGEST_TRIED
    lengths = (1, min(LONGEST_TRIED, fixed) - NEW_TOKENS_TRIED)
    prompts = [[(5 * i + 2) % vocabulary for i in range(n)] for n in lengths]
    requests = [Request(ids, key) for key, ids in enumerate(prompts)]
    made = sorted(engine.generate(requests, Sampling(max_tokens=NEW_TOKENS_TRIED, seed=1)), key=lambda c: c.request)
    rows = [
        Example(ids + c.ids, [0] * len(ids) + [1] * len(c.ids), Origin("check", 0))
        for ids, c in zip(prompts, made, strict=True)
    ]
    before = policy.scoring, policy.training
    policy.scoring = Scoring()
    policy.eval()
    try:
        scores = policy(to_device(micro_batch(rows, packed=True, pad_id=0), device)).logprobs_K
    finally:
        policy.scoring = before[0]
        policy.train(before[1])
    return torch.tensor([score for c in made for score in c.logprobs], device=device), scores
