"""Partial attention for context parallelism: selects a kernel, tests it, and contains the plain-torch reference."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache

import torch

from lockstep.kernels.attention.explicit import SCORE_BYTES
from lockstep.kernels.attention.flash import FLASH_PARTS, flash_part_fits
from lockstep.kernels.attention.npu_attention import FUSION_PARTS, TRIAL
from lockstep.kernels.attention.partial_attention import Gradients, PartialKernel, Sections, Tensors, merge, sections
from lockstep.kernels.fused_modules import Answers, KernelTrial, drawn
from lockstep.kernels.npu_limits import part_problem

# Before its first use, a kernel is compared with the reference on three sequences. The trial merges one causal part and
# one full part, and computes the gradients of each part. The trial detects kernels with a different output order, with
# causal alignment at the start of a sequence, or with gradients that ignore the merged output.
QUERIES, SEEN_CAUSALLY, SEEN_FULL = (3, 1, 70), (5, 1, 90), (4, 9, 33)
WINDOW = 7


def same_parts(
    name: str,
    kernel: PartialKernel,
    reference: PartialKernel,
    trial: KernelTrial,
    like: torch.Tensor,
    shape: tuple[int, int, int],
    windowed: bool,
) -> bool:
    """Returns whether the kernel matches `reference` on the device and dtype of `like`. `shape` is (number of query
    heads, number of key/value heads, head size)."""
    heads, groups, size = shape
    causal, full = (
        sections(QUERIES, keys, is_causal, like.device)
        for keys, is_causal in ((SEEN_CAUSALLY, True), (SEEN_FULL, False))
    )
    query, upstream = (drawn(sum(QUERIES), heads, size, like=like, seed=seed) for seed in (0, 1))
    causal_kv, full_kv = (
        [drawn(sum(keys), groups, size, like=like, seed=seed) for seed in seeds]
        for keys, seeds in ((SEEN_CAUSALLY, (2, 3)), (SEEN_FULL, (4, 5)))
    )
    window, scale = WINDOW if windowed else None, size**-0.5

    def outputs(candidate: PartialKernel) -> Answers:
        out, lse_HT = candidate.forward(query, *causal_kv, causal, scale, window)
        more, more_lse_HT = candidate.forward(query, *full_kv, full, scale)
        out, lse_HT = merge(out.float(), lse_HT.float(), more, more_lse_HT.float())
        out = out.to(like.dtype)
        gradients = [
            *candidate.backward(upstream, query, *causal_kv, out, lse_HT, causal, scale, window),
            *candidate.backward(upstream, query, *full_kv, out, lse_HT, full, scale),
        ]
        return [out, lse_HT, *(gradient.to(like.dtype) for gradient in gradients)]

    return trial.alike(
        "attention over parallel.context_parallel", name, lambda: outputs(reference), lambda: outputs(kernel)
    )


# Tensor names end with their dimensions, which are T queries, S keys, H query heads, G key/value heads, D key size, E
# value size.


def partial_kernel(
    name: str, query_THD: torch.Tensor, value_SGE: torch.Tensor, where: Sections, window: int | None = None
) -> PartialKernel:
    """Returns the kernel with the name `name` (`Device.attention`) if it supports these inputs, otherwise plain
    torch."""
    if name in ("flash_varlen", "invariant") and flash_part_fits(query_THD, value_SGE):
        return FLASH_PARTS
    if name == "npu_fusion" and _fusion_serves(query_THD, value_SGE, where, window):
        return FUSION_PARTS
    return PLAIN


def _fusion_serves(query_THD: torch.Tensor, value_SGE: torch.Tensor, where: Sections, window: int | None) -> bool:
    problem = part_problem(query_THD, value_SGE, where.queries, where.keys)
    if problem is not None:
        _warn_once(problem)
        return False
    shape = (query_THD.shape[1], value_SGE.shape[1], query_THD.shape[2])
    return _fusion_passes(query_THD.device, query_THD.dtype, shape, window is not None)


@cache
def _warn_once(problem: str) -> None:
    """Warns once per problem."""
    warnings.warn(
        "attention over parallel.context_parallel uses plain torch: npu_fusion_attention has no support for "
        f"these inputs: {problem}",
        stacklevel=4,
    )


@cache
def _fusion_passes(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], windowed: bool) -> bool:
    """Returns whether the NPU kernel passes the trial. The result is cached per device, dtype and shape."""
    like = torch.empty(0, dtype=dtype, device=device)
    return same_parts("npu_fusion_attention", FUSION_PARTS, PLAIN, TRIAL, like, shape, windowed)


# -- reference implementation


def plain_part(
    query_THD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGE: torch.Tensor,
    where: Sections,
    scale: float,
    window: int | None = None,
) -> Tensors:
    """Computes partial attention in fp32 or a wider dtype. Works on one sequence and one block of queries at a time, so
    that no (heads, T, S) tensor is allocated."""
    heads, wide = query_THD.shape[1], torch.promote_types(query_THD.dtype, torch.float32)
    out_THE = query_THD.new_empty(len(query_THD), heads, value_SGE.shape[-1], dtype=wide)
    lse_HT = query_THD.new_empty(heads, len(query_THD), dtype=wide)
    for rows, keys, key_GSD, hidden in _blocks(query_THD, key_SGD, where, window):
        scores = _scores(query_THD[rows], key_GSD, scale, hidden)
        lse = scores.logsumexp(-1, keepdim=True)
        out_THE[rows] = _to_rows((scores - lse).exp() @ value_SGE[keys].to(wide).transpose(0, 1), heads)
        lse_HT[:, rows] = lse.view(heads, -1)
    return out_THE, lse_HT


def plain_part_backward(
    upstream_THE: torch.Tensor,
    query_THD: torch.Tensor,
    key_SGD: torch.Tensor,
    value_SGE: torch.Tensor,
    out_THE: torch.Tensor,
    lse_HT: torch.Tensor,
    where: Sections,
    scale: float,
    window: int | None = None,
) -> Gradients:
    heads, groups = query_THD.shape[1], key_SGD.shape[1]
    wide = torch.promote_types(query_THD.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(tensor, dtype=wide) for tensor in (query_THD, key_SGD, value_SGE))
    for rows, keys, key_GSD, hidden in _blocks(query_THD, key_SGD, where, window):
        q, do, o = (_to_groups(tensor[rows].to(wide), groups) for tensor in (query_THD, upstream_THE, out_THE))
        lse = lse_HT[:, rows].to(wide).reshape(groups, -1, 1)
        p = (_scores(query_THD[rows], key_GSD, scale, hidden) - lse).exp()
        dv[keys] += (p.transpose(1, 2) @ do).transpose(0, 1)
        dp = do @ value_SGE[keys].to(wide).permute(1, 2, 0)
        ds = p * (dp - (do * o).sum(-1, keepdim=True)) * scale
        dq[rows] = _to_rows(ds @ key_GSD, heads)
        dk[keys] += (ds.transpose(1, 2) @ q).transpose(0, 1)
    return dq, dk, dv


PLAIN = PartialKernel(plain_part, plain_part_backward)


def _blocks(
    query_THD: torch.Tensor, key_SGD: torch.Tensor, where: Sections, window: int | None
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor | None]]:
    """Yields each block of queries with the keys (G, S, D) that the block sees, and with the mask of keys that are
    hidden from each query."""
    heads, wide = query_THD.shape[1], torch.promote_types(query_THD.dtype, torch.float32)
    for queries, keys in where.spans:
        count = keys.stop - keys.start
        # Index of the key at the position of the first query, used only for causal parts.
        first = count - (queries.stop - queries.start)
        step = max(1, SCORE_BYTES // (4 * heads * max(1, count)))
        for start in range(queries.start, queries.stop, step):
            stop = min(start + step, queries.stop)
            if not where.causal:
                yield slice(start, stop), keys, key_SGD[keys].to(wide).transpose(0, 1), None
                continue
            positions = torch.arange(first + start - queries.start, first + stop - queries.start)
            low = max(0, int(positions[0]) + 1 - window) if window else 0
            distance = positions[:, None] - torch.arange(low, int(positions[-1]) + 1)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            seen = slice(keys.start + low, keys.start + int(positions[-1]) + 1)
            yield slice(start, stop), seen, key_SGD[seen].to(wide).transpose(0, 1), hidden.to(query_THD.device)


def _scores(query_THD: torch.Tensor, key_GSD: torch.Tensor, scale: float, hidden: torch.Tensor | None) -> torch.Tensor:
    """Returns the scores as (G, H / G * T, S). The query heads of one key head are stacked as rows."""
    groups = len(key_GSD)
    scores = _to_groups(query_THD.to(key_GSD.dtype), groups) @ key_GSD.transpose(1, 2) * scale
    if hidden is None:
        return scores
    return scores.view(groups, -1, *hidden.shape).masked_fill(hidden, -float("inf")).view_as(scores)


def _to_groups(rows_THD: torch.Tensor, groups: int) -> torch.Tensor:
    return rows_THD.transpose(0, 1).reshape(groups, -1, rows_THD.shape[-1])


def _to_rows(groups_GRD: torch.Tensor, heads: int) -> torch.Tensor:
    return groups_GRD.reshape(heads, -1, groups_GRD.shape[-1]).transpose(0, 1)
