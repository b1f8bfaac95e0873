"""Selects the device that the recipe names in `device`. An unavailable device is an error. There is no fallback."""

from __future__ import annotations

from difflib import get_close_matches

from lockstep.device.base import Device
from lockstep.device.cpu import Cpu
from lockstep.device.cuda import Cuda
from lockstep.device.npu import Npu
from lockstep.errors import Refusal

# The devices in the order in which `auto` tries them.
DEVICES: dict[str, type[Device]] = {"npu": Npu, "cuda": Cuda, "cpu": Cpu}

# Other common names of the devices. Spelling would suggest the wrong device, because "gpu" is close to "npu".
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu", "huawei": "npu"}


def select(name: str) -> Device:
    """Returns the device for `auto`, `npu`, `cuda` or `cpu`. Raises `Refusal` if the device cannot be used."""
    return explain(name)[0]


def explain(name: str) -> tuple[Device, str]:
    """Returns the device and a sentence that explains the choice."""
    if name == "auto":
        return _first_available()
    if name not in DEVICES:
        raise _unknown(name)
    device = DEVICES[name]()
    reason = device.unavailable()
    if reason is not None:
        usable = [other for other, kind in DEVICES.items() if other != name and kind().unavailable() is None]
        raise Refusal.at(
            "device",
            f"{name} was requested but is not available: {reason}",
            f"fix the cause, or set device to one that is available here: {', '.join(usable)} (or auto)",
            code="device-unavailable",
        )
    return device, f"device {name}, as requested"


def _first_available() -> tuple[Device, str]:
    passed_over: list[str] = []
    for name, kind in DEVICES.items():
        device = kind()
        reason = device.unavailable()
        if reason is None:
            why = "; ".join(passed_over) or f"the first of {', '.join(DEVICES)}"
            return device, f"device {name}, picked by auto: {why}"
        passed_over.append(f"no {name}, because {reason}")
    raise Refusal.at("device", "; ".join(passed_over), code="device-unavailable")


def _unknown(name: str) -> Refusal:
    valid = ["auto", *DEVICES]
    kind, colon, index = name.lower().partition(":")
    nearest = _MEANT.get(kind) or next(iter(get_close_matches(kind, valid, n=1)), None)
    remedy = f"valid: {', '.join(valid)}" + (f"; did you mean {nearest}?" if nearest else "")
    variable = DEVICES[nearest].visible_variable if nearest in DEVICES else None
    if colon and variable:
        remedy += f" To choose a single device, set the environment variable {variable}={index}"
    return Refusal.at("device", f"unknown device {name!r}", remedy, code="unknown-device")
