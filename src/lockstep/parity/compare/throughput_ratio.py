"""Computes the throughput ratio of two runs: as the Ascend documents define it, and at equal response lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.parity.compare.align_curves import align, common_steps, values_at
from lockstep.parity.compare.comparison import PhaseTimes, Throughput
from lockstep.parity.compare.logs.log_curves import Log, Series

RATE, STEP = "perf/throughput", "timing_s/step"
FIRST_STEPS = 4
MATCHED = 0.02
"""Response lengths (in offline training: tokens per step) that differ by at most this fraction are treated as equal."""
RESPONSE, PROMPT = "response_length/mean", "prompt_length/mean"
ALL_TOKENS, ROW_TOKENS = "perf/total_num_tokens", "train/tokens"
LOG_PROBS = ("timing_s/old_log_prob", "timing_s/ref", "timing_s/values")
UPDATES = ("timing_s/update_actor", "timing_s/update_critic")


class SpeedTable:
    """The metrics of one log at selected steps."""

    def __init__(self, log: Log, steps: np.ndarray, devices: int):
        self._log, self._steps, self.devices = log, steps, devices

    def total(self, name: str) -> float:
        return float(self.at(name).sum())

    def at(self, name: str) -> np.ndarray:
        return values_at(self._log.metrics[name], self._steps)

    def rate(self, tokens: float, seconds: Sequence[str]) -> float:
        """Returns tokens per second per device, or 0 if no time was measured."""
        spent = sum(self.total(name) for name in seconds)
        return tokens / (spent * self.devices) if spent > 0 else 0.0

    def response_tokens(self) -> float:
        """Estimates the number of response tokens. The number of sequences in a step is its number of tokens divided by
        the mean sequence length."""
        sequences = self.at(ALL_TOKENS) / (self.at(RESPONSE) + self.at(PROMPT))
        return float((sequences * self.at(RESPONSE)).sum())


def throughput(a: Log, b: Log) -> Throughput:
    """Computes the throughput of B divided by that of A. If the ratio is above 1, B is faster. Rates are per device,
    like perf/throughput."""
    warnings: list[str] = []
    rates = _first_rates(a, b, warnings)
    devices = (devices_of(a), devices_of(b))
    if devices[0] != devices[1]:
        warnings.append(f"A has {devices[0]} device(s) and B has {devices[1]}: all rates are per device")
    length = RESPONSE if _both(a, b, RESPONSE) else ROW_TOKENS
    tokens = ALL_TOKENS if length == RESPONSE else ROW_TOKENS
    measured = _common_steps(a, b, [length, tokens, STEP])
    if not len(measured):
        needed = ", ".join(dict.fromkeys([length, tokens, STEP]))
        warnings.append(f"no length-matched ratio: A and B have no common step with all of {needed}")
        return Throughput(*rates, None, 0, [], warnings)
    _warn_about_lengths(a, b, length, warnings)
    # The first step is slow: it compiles kernels and allocates caches and buffers.
    warm = measured[1:] if len(measured) > 1 else measured
    matched = warm[_alike(SpeedTable(a, warm, 1).at(length), SpeedTable(b, warm, 1).at(length))]
    if not len(matched):
        warnings.append("no step has equal lengths in A and B: the ratios of the phases use all common steps")
    chosen = matched if len(matched) else warm
    sides = (SpeedTable(a, chosen, devices[0]), SpeedTable(b, chosen, devices[1]))
    speeds = [side.rate(side.total(tokens), [STEP]) for side in sides]
    ratio = speeds[1] / speeds[0] if len(matched) and speeds[0] > 0 else None
    return Throughput(*rates, ratio, len(matched), _phases(a, b, chosen, sides, tokens), warnings)


def devices_of(log: Log) -> int:
    """Returns the number of devices by which perf/throughput was divided. Returns 1 if the metrics do not give a whole
    number of devices."""
    tokens = ALL_TOKENS if ALL_TOKENS in log.metrics else ROW_TOKENS
    steps = _common_steps(log, log, [RATE, tokens, STEP])
    if not len(steps):
        return 1
    table = SpeedTable(log, steps, 1)
    devices = float(np.median(table.at(tokens) / (table.at(RATE) * table.at(STEP))))
    return max(1, round(devices)) if abs(devices - round(devices)) <= MATCHED * devices else 1


def _first_rates(a: Log, b: Log, warnings: list[str]) -> tuple[float | None, float | None, float | None]:
    """Returns the throughput ratio of B to A and the means of perf/throughput of A and of B, over the first 4 common
    steps."""
    steps = _common_steps(a, b, [RATE])[:FIRST_STEPS]
    if not len(steps):
        warnings.append(f"no throughput ratio: A and B have no common step with {RATE}")
        return None, None, None
    if steps.tolist() != list(range(1, FIRST_STEPS + 1)):
        warnings.append(f"{RATE} is missing in steps 1 to {FIRST_STEPS}; used steps: {', '.join(map(str, steps))}")
    mean_a, mean_b = (float(SpeedTable(log, steps, 1).at(RATE).mean()) for log in (a, b))
    return mean_b / mean_a, mean_a, mean_b


def _phases(a: Log, b: Log, steps: np.ndarray, sides: tuple[SpeedTable, SpeedTable], tokens: str) -> list[PhaseTimes]:
    """Returns the throughput of each phase that A and B timed at all of `steps`."""

    def timed(names: Sequence[str]) -> list[str]:
        return [name for name in names if len(_common_steps(a, b, [name], steps)) == len(steps)]

    everything = [side.total(tokens) for side in sides]
    parts: list[tuple[str, Sequence[str], list[float]]]
    if tokens == ROW_TOKENS:
        parts = [("update", [STEP], everything)]
    else:
        parts = [("log-probs", timed(LOG_PROBS), everything), ("update", timed(UPDATES), everything)]
        if timed(["timing_s/gen"]) and timed([PROMPT]):
            parts.insert(0, ("generation", ["timing_s/gen"], [side.response_tokens() for side in sides]))
    phases = [
        PhaseTimes(name, *(side.rate(count, seconds) for side, count in zip(sides, counts, strict=True)))
        for name, seconds, counts in parts
    ]
    return [phase for phase in phases if phase.a > 0 and phase.b > 0]


def _warn_about_lengths(a: Log, b: Log, length: str, warnings: list[str]) -> None:
    pair = align(a.metrics[length], b.metrics[length])
    mean_a, mean_b = float(pair.a[pair.finite].mean()), float(pair.b[pair.finite].mean())
    if not _alike(np.array(mean_a), np.array(mean_b)):
        warnings.append(
            f"{length} is {mean_a:.4g} against {mean_b:.4g} ({mean_b / mean_a - 1:+.1%}): {RATE} compares different "
            "amounts of work, and the length-matched ratio compares equal amounts"
        )


def _alike(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(a - b) <= MATCHED * np.abs(a)


def _both(a: Log, b: Log, name: str) -> bool:
    return name in a.metrics and name in b.metrics


def _common_steps(a: Log, b: Log, names: Sequence[str], among: np.ndarray | None = None) -> np.ndarray:
    """Returns the steps at which both logs have a positive number for all of `names`."""
    if not all(_both(a, b, name) for name in names):
        return np.array([], dtype=np.int64)
    positive = [_positive(log.metrics[name]) for log in (a, b) for name in names]
    return common_steps(positive if among is None else [among, *positive])


def _positive(series: Series) -> np.ndarray:
    return series.steps[np.isfinite(series.values) & (series.values > 0)]
