"""Which responses of an update the losses by rank (AOT, arXiv 2406.05882) hold against each other.

Shapes: P pairs of the whole update. Ranks are taken over all of it, from the log-probabilities before the update, so
that the size of micro-batches and the number of devices cannot change them. (TRL sorts within a device's micro-batch.)
"""

from __future__ import annotations

import torch

from lockstep.algorithms.pair_losses import Partners


def paired(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    reference_chosen_P: torch.Tensor,
    reference_rejected_P: torch.Tensor,
) -> Partners:
    """For `aot`: how far the reference's margin of the same rank is from the pair's own, by its two log-probabilities.

    With d the log-probability of the policy and r that of the reference, the loss sees scores d - r; taking off
    r_partner - r leaves d - r_partner.
    """
    partner_P = _of_same_rank(chosen_P - rejected_P, reference_chosen_P - reference_rejected_P)
    return Partners(
        reference_chosen_P[partner_P] - reference_chosen_P, reference_rejected_P[partner_P] - reference_rejected_P
    )


def unpaired(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> Partners:
    """For `aot_unpaired`: of each chosen score the rejected one of the same rank, and the other way round."""
    return Partners(chosen_P[_of_same_rank(rejected_P, chosen_P)], rejected_P[_of_same_rank(chosen_P, rejected_P)])


def _of_same_rank(values_P: torch.Tensor, others_P: torch.Tensor) -> torch.Tensor:
    """Where the other value of each value's rank stands; of equal ones the earlier counts as smaller."""
    order_P, other_order_P = values_P.argsort(stable=True), others_P.argsort(stable=True)
    partner_P = torch.empty_like(order_P)
    partner_P[order_P] = other_order_P
    return partner_P
