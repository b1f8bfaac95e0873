"""verl's `rollout_correction`: weights, rejection and the bypass of old log-probs, as rules."""

from __future__ import annotations

import math
from typing import Any

from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion

GROUP = "algorithm.rollout_correction"
WEIGHT, BOUND, NORMALIZE = (f"{GROUP}.rollout_is{name}" for name in ("", "_threshold", "_batch_normalize"))
REJECT, BOUNDS = f"{GROUP}.rollout_rs", f"{GROUP}.rollout_rs_threshold"
BYPASS, LOSS = f"{GROUP}.bypass_mode", f"{GROUP}.loss_type"

# What they reject by: over what, and which statistic. Theirs of k1 is the ratio the other way round.
_STATISTICS = {"k1": "ratio", "k2": "k2", "k3": "k3"}
_OVER = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
_NONE = "seq_max_k1"
CRITERIA = {
    f"{over}_{name}": (ours, statistic)
    for over, ours in _OVER.items()
    for name, statistic in _STATISTICS.items()
    if f"{over}_{name}" != _NONE
}
ONCE = "judged once a step, before its first update; theirs at every update by the policy of then"


def bypass_loss(settings: Settings) -> str | None:
    """The loss that rules in bypass mode, whatever loss_mode says."""
    return str(settings[LOSS]) if settings[BYPASS] else None


def correction_rule(settings: Settings, done: Conversion) -> None:
    kind = settings[WEIGHT]
    if kind not in (None, "token", "sequence"):
        done.refuse(WEIGHT, f"{kind} is not here", "token, sequence or null")
        return
    try:
        floor, cap = _bounds(settings[BOUND])
        bands = _bands(settings)
    except ValueError as bad:
        done.refuse(BOUNDS if settings[REJECT] else BOUND, str(bad), "numbers, or lower_upper")
        return
    if settings[BYPASS]:
        _bypass(settings, done, kind, floor, cap)
    elif kind is not None:
        done.write("algorithm.correction.weight", kind, WEIGHT)
        done.write("algorithm.correction.cap", cap, BOUND)
        done.write("algorithm.correction.normalize", bool(settings[NORMALIZE]), NORMALIZE)
        if floor is not None:
            if bands:
                done.refuse(BOUND, "weights set to zero out of a band, and rejection besides", "one of the two")
                return
            over = "token" if kind == "token" else "sum"
            bands = [{"over": over, "by": "ratio", "low": floor, "high": cap}]
            done.write("algorithm.correction.reject", bands, BOUND)
            done.write("algorithm.correction.rejected", "zero", BOUND)
            return
    elif settings.says(BOUND) or settings.says(NORMALIZE):
        for key in (BOUND, NORMALIZE):
            done.ignore(key, "read with rollout_is only")
    if bands:
        note = ONCE if settings[BYPASS] else ""
        done.write("algorithm.correction.reject", bands, REJECT, BOUNDS, note=note)


def _bypass(settings: Settings, done: Conversion, kind: Any, floor: float | None, cap: float) -> None:
    done.write("algorithm.correction.bypass", True, BYPASS)
    if settings[LOSS] == "ppo_clip":
        for key in (WEIGHT, BOUND, NORMALIZE):
            if settings.says(key):
                done.ignore(key, "the clipped ratio is from the engine already; theirs is then for metrics only")
        return
    if settings[LOSS] != "reinforce":
        done.refuse(LOSS, f"{settings[LOSS]} is not here", "ppo_clip or reinforce")
        return
    if settings[NORMALIZE]:
        done.refuse(NORMALIZE, "the mean weight of a micro-batch, which changes with its size", "false")
    if floor is not None:
        done.refuse(BOUND, "weights set to zero out of a band, in bypass mode", "one number, the largest weight")
    if kind is None:
        done.write("algorithm.correction.bypass", False, BYPASS)
        done.fates[BYPASS] = ("taken", "without weights nothing reads old log-probs: the plain policy gradient")
    else:
        done.write("algorithm.ratio_of", kind, WEIGHT)
        done.write("algorithm.ratio_cap", cap, BOUND)


def _bounds(spec: Any) -> tuple[float | None, float]:
    """Lower and upper bound of the weights; one number is the upper one."""
    low, found, high = str(spec).partition("_")
    pair = (_number(low), _number(high)) if found else (None, _number(low))
    if pair[0] is not None and pair[0] > pair[1]:
        raise ValueError(f"{spec}: the lower bound is over the upper one")
    return pair


def _bands(settings: Settings) -> list[dict[str, Any]]:
    if settings[REJECT] is None:
        return []
    named = settings[REJECT]
    names = list(dict.fromkeys(named if isinstance(named, list) else str(named).replace(" ", "").split(",")))
    given = settings[BOUNDS]
    specs = [str(spec) for spec in given] if isinstance(given, list) else str(given).replace(" ", "").split(",")
    if given is None or len(specs) not in (1, len(names)):
        raise ValueError(f"{given} is not one bound for all, nor one for each of {', '.join(map(str, names))}")
    specs = specs * len(names) if len(specs) == 1 else specs
    return [_band(str(name), spec) for name, spec in zip(names, specs, strict=True)]


def _band(name: str, spec: str) -> dict[str, Any]:
    if name not in CRITERIA:
        raise ValueError(f"{name} is not here; one of {', '.join(CRITERIA)}")
    over, statistic = CRITERIA[name]
    if statistic != "ratio":
        return {"over": over, "by": statistic, "high": _number(spec)}
    low, found, high = spec.partition("_")
    lower, upper = (_number(low), _number(high)) if found else (1 / _number(low), _number(low))
    # They bound -log r: the engine's probability over the trainer's.
    return {"over": over, "by": "ratio", "low": _short(1 / upper), "high": _short(1 / lower)}


def _number(text: str) -> float:
    # Python reads 0.5_2 as 0.52.
    value = math.nan if "_" in text else float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{text} is no bound: one number over 0")
    return value


def _short(value: float) -> float:
    """Without the digits that a division leaves."""
    return float(f"{value:.12g}")
