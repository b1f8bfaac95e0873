"""Recursions along sequences: discounted returns and generalised advantages.

Shapes: K tokens, S sequences, T positions. The recursions run over positions, all sequences at once.
"""

from __future__ import annotations

import torch


def return_to_go(rewards_K: torch.Tensor, sequence_K: torch.Tensor, gamma: float) -> torch.Tensor:
    """The discounted sum of a token's own and later rewards: G_t = r_t + gamma G_{t+1}, in float64."""
    return _accumulated(_Layout(sequence_K), rewards_K.double(), gamma)


def gae(
    rewards_K: torch.Tensor, values_K: torch.Tensor, sequence_K: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Generalised advantages (Schulman et al. 2015, arXiv 1506.02438), in float64, not whitened.

    The value after a sequence's last token is 0. Tokens that the model did not produce are not in the vectors, so the
    next value and the running advantage pass over them: an observation costs neither a discount nor a residual.
    """
    layout = _Layout(sequence_K)
    values_K = values_K.double()
    values_TS = layout.padded(values_K)
    next_TS = torch.cat([values_TS[1:], torch.zeros_like(values_TS[:1])])
    residuals_K = rewards_K.double() + gamma * layout.flat(next_TS) - values_K
    return _accumulated(layout, residuals_K, gamma * lam)


def positions(sequence_K: torch.Tensor) -> torch.Tensor:
    """Of each token, how many of its sequence stand before it."""
    return _Layout(sequence_K).position_K


def running_sum(values_K: torch.Tensor, sequence_K: torch.Tensor) -> torch.Tensor:
    """Of each token, the sum of its own and of its sequence's earlier values, in float64."""
    layout = _Layout(sequence_K)
    return layout.flat(layout.padded(values_K.double()).cumsum(0))


class _Layout:
    """Between the flat line of tokens and columns (position by sequence) that end in zeros."""

    def __init__(self, sequence_K: torch.Tensor):
        self.present_S, self.column_K, lengths_S = torch.unique_consecutive(
            sequence_K, return_inverse=True, return_counts=True
        )
        starts_S = lengths_S.cumsum(0) - lengths_S
        self.position_K = torch.arange(len(sequence_K), device=sequence_K.device) - starts_S[self.column_K]
        self.positions = int(lengths_S.max()) if len(lengths_S) else 0

    def padded(self, values_K: torch.Tensor) -> torch.Tensor:
        values_TS = values_K.new_zeros(self.positions, len(self.present_S))
        values_TS[self.position_K, self.column_K] = values_K
        return values_TS

    def flat(self, values_TS: torch.Tensor) -> torch.Tensor:
        return values_TS[self.position_K, self.column_K]


def _accumulated(layout: _Layout, values_K: torch.Tensor, decay: float) -> torch.Tensor:
    """x_t + decay x_{t+1} + decay^2 x_{t+2} + ... within each sequence. The zeros behind a sequence add nothing."""
    sums_TS = layout.padded(values_K)
    for position in range(layout.positions - 2, -1, -1):
        sums_TS[position].add_(sums_TS[position + 1], alpha=decay)
    return layout.flat(sums_TS)
