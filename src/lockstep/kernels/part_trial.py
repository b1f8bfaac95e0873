"""Whether a kernel for parts of the keys (`parts.py`) gives what its twin does, tried before it is used.

Three sequences, whose queries see some keys causally and others all: outputs and logs are merged, and each part's
gradients are asked for with the whole's. A kernel that puts numbers in another order, aligns a causal sequence at its
start or computes its gradients from its own part alone gives others.
"""

from __future__ import annotations

import torch

from lockstep.kernels.parts import PartialKernel, merge, sections
from lockstep.kernels.trial import Answers, KernelTrial, drawn

QUERIES, SEEN_CAUSALLY, SEEN_WHOLE = (3, 1, 70), (5, 1, 90), (4, 9, 33)
WINDOW = 7


def same_parts(
    name: str,
    kernel: PartialKernel,
    twin: PartialKernel,
    trial: KernelTrial,
    like: torch.Tensor,
    shape: tuple[int, int, int],
    windowed: bool,
) -> bool:
    """On the device and in the type of `like`, for a `shape` of query heads, key heads and their size."""
    heads, groups, size = shape
    causal, whole = (
        sections(QUERIES, keys, is_causal, like.device)
        for keys, is_causal in ((SEEN_CAUSALLY, True), (SEEN_WHOLE, False))
    )
    query, upstream = (drawn(sum(QUERIES), heads, size, like=like, seed=seed) for seed in (0, 1))
    some, others = (
        [drawn(sum(keys), groups, size, like=like, seed=seed) for seed in seeds]
        for keys, seeds in ((SEEN_CAUSALLY, (2, 3)), (SEEN_WHOLE, (4, 5)))
    )
    window, scale = WINDOW if windowed else None, size**-0.5

    def answers(one: PartialKernel) -> Answers:
        out, lse_HT = one.forward(query, *some, causal, scale, window)
        more, more_lse_HT = one.forward(query, *others, whole, scale)
        out, lse_HT = merge(out.float(), lse_HT.float(), more, more_lse_HT.float())
        out = out.to(like.dtype)
        gradients = [
            *one.backward(upstream, query, *some, out, lse_HT, causal, scale, window),
            *one.backward(upstream, query, *others, out, lse_HT, whole, scale),
        ]
        return [out, lse_HT, *(gradient.to(like.dtype) for gradient in gradients)]

    return trial.alike("attention over parallel.context", name, lambda: answers(twin), lambda: answers(kernel))
