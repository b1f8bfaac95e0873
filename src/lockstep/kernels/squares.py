"""The sum of the squared probabilities of all words at each position, never holding all logits.

Shapes: K positions, R positions of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from lockstep.kernels.logprob import CHUNK_BYTES, Head
from lockstep.kernels.truncate import Truncation, truncate_


@torch.no_grad()
def summed_squares(
    hidden_KH: torch.Tensor,
    head: Head,
    targets_K: torch.Tensor,
    *,
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> torch.Tensor:
    """Of softmax(logits / temperature), in fp32: 1 where one word is certain, 1 / V where all are alike.

    With a truncation the distribution is what it leaves. Nothing of it is differentiated.
    """
    squares_K = torch.empty(len(targets_K), dtype=torch.float32, device=hidden_KH.device)
    each = max(1, chunk_bytes // (4 * head.weight_VH.shape[0]))
    for start in range(0, len(targets_K), each):
        part = slice(start, start + each)
        logits_RV = head.logits(hidden_KH[part]).float() / temperature
        if truncation is not None and truncation.active:
            logits_RV = truncate_(logits_RV, truncation, targets_K[part])
        squares_K[part] = logits_RV.softmax(-1).square().sum(-1)
    return squares_K
