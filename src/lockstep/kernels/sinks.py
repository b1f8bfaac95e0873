"""Attention sinks added to attention without them: from its output and the log of its sum of exponentials.

With L that log over the keys, sinks leave the share sigmoid(L - sink) to the keys. A sink's value is 0, so its own
gradient is minus its probability times (upstream . output). T tokens, H heads.
"""

from __future__ import annotations

import torch


def with_sinks(out_THD: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log of the sum of exponentials, the sinks among them."""
    sinks_H1 = sinks_H.to(lse_HT.dtype)[:, None]
    return out_THD * (lse_HT - sinks_H1).sigmoid().t()[:, :, None], torch.logaddexp(lse_HT, sinks_H1)


def sink_gradient(
    upstream_THD: torch.Tensor, out_THD: torch.Tensor, lse_HT: torch.Tensor, sinks_H: torch.Tensor
) -> torch.Tensor:
    """From the output and the log that include the sinks."""
    taken_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp()
    along_HT = (upstream_THD.to(lse_HT.dtype) * out_THD.to(lse_HT.dtype)).sum(-1).t()
    return -(taken_HT * along_HT).sum(1).to(sinks_H.dtype)
