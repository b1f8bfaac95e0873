"""OpenRLHF's correction of rollouts in its three ages: 0.7.5's weights, `is_correction_type`, and 0.11.2's gates."""

from __future__ import annotations

from typing import Any

from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion

GROUP = "algo.advantage.is_correction"
ENABLE, CAP = "enable_vllm_is_correction", "vllm_is_truncated_threshold"
KIND, BOUNDS, LEVEL, MODE, GATE = (f"{GROUP}_{name}" for name in ("type", "threshold", "level", "mode", "gating"))
_GATES = {"ratio": "ratio", "binary_kl": "binary_kl", "tv": "tv"}


def correction_rule(settings: Settings, done: Conversion) -> None:
    dotted = "ds.param_dtype" in settings.defaults
    if dotted and settings[LEVEL] not in (None, "off"):
        _gated(settings, done)
    elif not settings[ENABLE]:
        for key in (BOUNDS, KIND, CAP, MODE, GATE):
            if settings.says(key):
                done.ignore(key, "the correction is off")
    elif not dotted:
        done.write("algorithm.correction.weight", "token", ENABLE)
        done.write("algorithm.correction.cap", settings.number(CAP), CAP)
    else:
        _typed(settings, done)


def _typed(settings: Settings, done: Conversion) -> None:
    """`tis` bounds the ratio of a token, `icepop` drops what is out of bounds, `seq-mask-tis` whole responses."""
    bounds = _bounds(settings, done)
    if bounds is None:
        return
    kinds = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
    if settings[KIND] not in kinds:
        done.refuse(KIND, f"{settings[KIND]} is not here", f"one of {', '.join(kinds)}")
        return
    level, mode = kinds[str(settings[KIND])]
    _write(done, level, mode, "ratio", bounds, (ENABLE, KIND))


def _gated(settings: Settings, done: Conversion) -> None:
    bounds = _bounds(settings, done)
    level, mode, gate = str(settings[LEVEL]), str(settings[MODE]), str(settings[GATE])
    if bounds is None:
        return
    if level not in ("token", "seq") or mode not in ("mask", "clip") or gate not in _GATES:
        done.refuse(LEVEL, f"{level}, {mode}, {gate} are no correction", "token or seq, mask or clip, ratio ...")
    elif mode == "clip" and (level == "seq" or gate != "ratio"):
        done.refuse(MODE, "clip is for the ratios of tokens, there too", "mask")
    elif str(settings["policy_loss_type"]) == "gspo":
        note = "gspo's ratio is from the engine's log-probs there, and nothing is gated"
        done.write("algorithm.correction.bypass", True, LEVEL, note=note)
        for key in (MODE, GATE, BOUNDS):
            if settings.says(key):
                done.ignore(key, note)
    else:
        _write(done, level, mode, gate, bounds, tuple(key for key in (LEVEL, MODE, GATE) if settings.says(key)))


def _write(
    done: Conversion, level: str, mode: str, gate: str, bounds: tuple[float, float], keys: tuple[str, ...]
) -> None:
    """Every survivor weighs its own ratio; what is dropped still counts in the mean."""
    low, high = bounds
    done.write("algorithm.correction.weight", "token", *keys)
    if mode == "clip":
        done.write("algorithm.correction.floor", low, BOUNDS)
        done.write("algorithm.correction.cap", high, BOUNDS)
        return
    done.write("algorithm.correction.cap", None, BOUNDS)
    band: dict[str, Any] = {"over": "token" if level == "token" else "mean", "by": _GATES[gate]}
    band |= {"low": low, "high": high} if low else {"high": high}
    done.write("algorithm.correction.reject", [band], BOUNDS, *keys)
    done.write("algorithm.correction.rejected", "zero", *keys)


def _bounds(settings: Settings, done: Conversion) -> tuple[float, float] | None:
    """LOW HIGH, or HIGH alone."""
    given = [float(bound) for bound in settings[BOUNDS]]
    low, high = [0.0, *given] if len(given) == 1 else given[:2]
    if len(given) not in (1, 2) or not 0 <= low <= high or high <= 0:
        done.refuse(BOUNDS, f"{given} is no band", "LOW HIGH, or HIGH alone")
        return None
    return low, high
