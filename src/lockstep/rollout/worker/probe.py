"""Has the worker the weights that it claims? Both sides score the same few tokens after each hand-over."""

from __future__ import annotations

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.errors import Refusal
from lockstep.kernels.rotary import fixed_length
from lockstep.model.policy import Policy, Scoring, evaluating
from lockstep.types import Example, Origin

ROWS, LENGTH = 3, 16
# Both sides run the same kernels on the same shapes.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}


@torch.no_grad()
def probe(policy: Policy, device: torch.device) -> torch.Tensor:
    """Log-probs of fixed token ids, which go through every layer."""
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    length = min(LENGTH, fixed_length(policy.causal_lm.config.get_text_config(decoder=True)) or LENGTH)
    rows = [[(7 * row + 5 * i + 2) % vocabulary for i in range(length)] for row in range(ROWS)]
    examples = [Example(ids, [1] * length, Origin("probe", number)) for number, ids in enumerate(rows)]
    scoring, policy.scoring = policy.scoring, Scoring()
    try:
        with evaluating(policy):
            return policy(to_device(micro_batch(examples, packed=True, pad_id=0), device)).logprobs_K.float().cpu()
    finally:
        policy.scoring = scoring


def refuse_other_weights(
    version: int, worker_K: torch.Tensor, trainer_K: torch.Tensor, before_K: torch.Tensor | None, dtype: torch.dtype
) -> None:
    """`before_K` is what the trainer said at the hand-over before: an update may move log-probs by less than the bound,
    so the worker must also not be nearer to that than to what the trainer says now."""
    off_K = (worker_K - trainer_K).abs()
    bound = TOLERANCE[dtype]
    if not bool((off_K <= bound).all()):
        at = int(off_K.nan_to_num(nan=torch.inf).argmax())
        why = (
            f"differs by up to {off_K[at].item():.3g} (the bound is {bound:g}): log-prob {worker_K[at].item():.6g} in "
            f"the worker, {trainer_K[at].item():.6g} in the trainer"
        )
    elif before_K is not None and off_K.sum() > (worker_K - before_K).abs().sum():
        why = "is that of the weights before the last update"
    else:
        return
    raise Refusal.at(
        "rollout.max_staleness",
        f"the rollout worker does not have the weights after {version} updates that it was handed: its answer to the "
        f"probe {why}",
        "the last checkpoint is untouched; without the key generation and training share one model",
    )
