"""Computes divergences of next-token distributions and sums of squared probabilities, in chunks to save memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from lockstep.algorithms.divergence import distribution_divergence as divergence
from lockstep.algorithms.divergence import fold_rest
from lockstep.kernels.logprob import CHUNK_BYTES, Head, Scores
from lockstep.kernels.sampling import Truncation, truncate_

# Tensor names end with dimensions, which are K positions, R positions of one chunk, H hidden size, V vocabulary, k
# top-k.


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
    """Returns the sum of squared probabilities of softmax(logits / temperature), in fp32. The sum is 1 for a one-hot
    distribution and 1 / V for a uniform one.

    With a `truncation` (top-k, top-p), truncated tokens have probability 0. The result is not differentiable.
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


@dataclass(frozen=True)
class Whole:
    """A teacher whose full distributions are computed from its hidden states and its output head."""

    hidden_KH: torch.Tensor
    head: Head


@dataclass(frozen=True)
class Likeliest:
    """A teacher whose top-k tokens of each position were saved to disk. `logprobs_Kk1` has the log-probs of the top-k
    tokens at the temperature of the comparison. The last entry of `logprobs_Kk1` is the total log-prob of all other
    tokens."""

    ids_Kk: torch.Tensor
    logprobs_Kk1: torch.Tensor


@dataclass(frozen=True)
class TeacherDivergence:
    """The kind of divergence between student and teacher, and the temperature of both. `mix` is the weight of the
    teacher in the mixture of kind `jsd`."""

    kind: str
    mix: float = 0.5
    temperature: float = 1.0


def compared_scores(
    hidden_KH: torch.Tensor,
    head: Head,
    targets_K: torch.Tensor,
    taught: Whole | Likeliest,
    comparison: TeacherDivergence,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Scores:
    """Returns log-probs of the targets and divergences from the teacher in fp32, computed in chunks of positions.

    The divergence is multiplied by the squared temperature, so that the size of its gradient does not depend on the
    temperature (Hinton et al. 2015, arXiv 1503.02531). The backward pass recomputes each chunk's logits.
    """
    positions = max(1, chunk_bytes // (4 * head.weight_VH.shape[0]))
    parts = [slice(start, start + positions) for start in range(0, max(1, len(targets_K)), positions)]
    chunks = [
        checkpoint(
            _chunk,
            hidden_KH[part],
            head,
            targets_K[part],
            _part_of(taught, part),
            comparison,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for part in parts
    ]
    logprobs, divergences = (torch.cat(vectors) for vectors in zip(*chunks, strict=True))
    return Scores(logprobs, None, divergences)


def likeliest(teacher: Whole, k: int, temperature: float, *, chunk_bytes: int = CHUNK_BYTES) -> Likeliest:
    """Returns the teacher's top-`k` tokens of each position with their log-probs."""
    positions = max(1, chunk_bytes // (4 * teacher.head.weight_VH.shape[0]))
    ids, logprobs = [], []
    for start in range(0, max(1, len(teacher.hidden_KH)), positions):
        log_p = _teacher(_part(teacher, slice(start, start + positions)), temperature)
        ids.append(log_p.topk(k, dim=-1).indices)
        logprobs.append(fold_rest(log_p, ids[-1]))
    return Likeliest(torch.cat(ids), torch.cat(logprobs))


def _chunk(
    hidden_RH: torch.Tensor,
    head: Head,
    targets_R: torch.Tensor,
    taught: Whole | Likeliest,
    comparison: TeacherDivergence,
) -> tuple[torch.Tensor, torch.Tensor]:
    temperature = comparison.temperature
    logits = head.logits(hidden_RH).float()
    student = logits.log_softmax(-1)
    chosen = student.gather(-1, targets_R[:, None])[:, 0]
    if temperature != 1.0:
        student = (logits / temperature).log_softmax(-1)
    if isinstance(taught, Whole):
        teacher = _teacher(taught, temperature)
    else:
        student, teacher = fold_rest(student, taught.ids_Kk), taught.logprobs_Kk1
    divergences = divergence(student, teacher, kind=comparison.kind, mix=comparison.mix)
    return chosen, divergences * temperature**2


def _teacher(teacher: Whole, temperature: float) -> torch.Tensor:
    return (teacher.head.logits(teacher.hidden_KH).float() / temperature).log_softmax(-1)


def _part_of(taught: Whole | Likeliest, part: slice) -> Whole | Likeliest:
    if isinstance(taught, Whole):
        return _part(taught, part)
    return Likeliest(taught.ids_Kk[part], taught.logprobs_Kk1[part])


def _part(teacher: Whole, part: slice) -> Whole:
    return Whole(teacher.hidden_KH[part], teacher.head)
