"""What a run changed: the first and last value of what says whether training worked."""

from __future__ import annotations

from collections.abc import Sequence

# Rewards of single steps are noisy: so many are averaged at each end.
ENDS = 5
AVERAGED = (("reward", "critic/score/mean"), ("divergence", "actor/reward_kl_penalty"))
SINGLE = (
    "train/loss",
    "val/loss",
    "val/pair_accuracy",
    "val/label_accuracy",
    "val/step_accuracy",
    "val/margin",
    "val/divergence",
    "val/accuracy",
)


def before_and_after(history: Sequence[tuple[int, dict[str, float]]]) -> list[tuple[str, str]]:
    """Rows of a table: the name, and `first -> last`."""
    rows = []
    for label, name in AVERAGED:
        values = _values(history, name)
        if len(values) > 1 and any(values):
            count = min(ENDS, len(values) // 2)
            first, last = (sum(part) / count for part in (values[:count], values[-count:]))
            over = f" (mean of {count} steps at either end)" if count > 1 else ""
            rows.append((label, f"{first:.4g} -> {last:.4g}{over}"))
    for name in SINGLE:
        values = _values(history, name)
        if len(values) > 1:
            rows.append((name, f"{values[0]:.4g} -> {values[-1]:.4g}"))
    return rows


def _values(history: Sequence[tuple[int, dict[str, float]]], name: str) -> list[float]:
    return [metrics[name] for _, metrics in history if name in metrics]
