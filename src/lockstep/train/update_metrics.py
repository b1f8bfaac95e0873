"""The metrics of updates: sums as means, several updates as one, and what stops a run before it learns from them."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import Refusal
from lockstep.train.step import Outcome


def over_updates(done: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of several updates as means over those that have them; of maxima, the largest."""
    names = dict.fromkeys(name for metrics in done for name in metrics)
    return {name: _together(name, [metrics[name] for metrics in done if name in metrics]) for name in names}


def _together(name: str, values: Sequence[float]) -> float:
    return max(values) if name.endswith("_max") else sum(values) / len(values)


def per_kept(sums: dict[str, float], kept: float) -> dict[str, float]:
    """Sums over the kept tokens of an update as their means. An update that keeps none has no such number."""
    return {name: value / kept for name, value in sums.items()} if kept else {}


def policy_metrics(outcome: Outcome, divisor: float, kept: float) -> dict[str, float]:
    """Terms of the loss as the loss averages them, the rest per kept token; engine against trainer per token. What is
    undefined is left out: means over no kept token, the deviation of one token."""
    sums, means = dict(outcome.sums), outcome.means()
    averaged = {name: sums.pop(name) / divisor for name in ("pg_loss", "kl_loss") if name in sums}
    averaged = averaged if kept else {}
    del sums["probs_diff"], sums["probs_diff_squared"]
    variance = means["probs_diff_squared"] - means["probs_diff"] ** 2
    return {
        "actor/loss": outcome.loss,
        **{f"actor/{name}": value for name, value in averaged.items()},
        **{f"actor/{name}": value for name, value in per_kept(sums, kept).items()},
        "training/rollout_probs_diff_mean": means["probs_diff"],
        "training/rollout_probs_diff_max": outcome.maxima["probs_diff"],
        **({"training/rollout_probs_diff_std": max(variance, 0.0) ** 0.5} if outcome.targets > 1 else {}),
    }


def refuse_disagreement(metrics: dict[str, float], most: float | None) -> None:
    """Stop before the update when engine and trainer see different models."""
    mean = metrics["training/rollout_probs_diff_mean"]
    if most is not None and mean > most:
        raise Refusal.at(
            "rollout.max_probs_diff",
            f"engine and trainer differ by {mean:.3g} in the probability of a token on average, over {most:g}",
            "use fp32 or the hf engine to find out which side is off, or correct for it (algorithm.correction); stale "
            "responses differ by themselves (rollout.max_staleness). The last checkpoint is untouched",
        )
