"""What run folders tell besides their curves: the facts of the support table, and responses to the same prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.parity.compare.comparable import differences
from lockstep.parity.compare.log import Evidence, Log

MOST_SAMPLES = 8
# What a device tells of itself that is no version of anything.
_NO_VERSION = {"name", "chip", "count", "memory", "visible", "threads", "instructions", "kernel", "torch"}
_NO_VERSION |= {"ray_resource", "emulated"}


def facts(a: Log, b: Log) -> dict[str, tuple[Any, Any]]:
    """Method, model, dtype, hardware and versions of both sides; None where a side does not tell."""
    read = {"method": _method, "model": _model, "dtype": _dtype, "hardware": _hardware, "versions": _versions}
    return {
        name: (tell(a.evidence) if a.evidence else None, tell(b.evidence) if b.evidence else None)
        for name, tell in read.items()
    }


def side_by_side(a: Log, b: Log) -> list[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """The first responses of both to the same prompt at the same step; None where one side was not asked it."""
    told_a, told_b = ({_asked(line): line for line in log.evidence.samples} if log.evidence else {} for log in (a, b))
    asked = list(dict.fromkeys([*told_a, *told_b]))
    return [(told_a.get(key), told_b.get(key)) for key in asked[:MOST_SAMPLES]]


def same_setting(one: Log, other: Log) -> bool:
    """Whether two runs are repeats of each other: nothing differs that matters, but for the seed, nor the hardware."""
    if one.evidence is None or other.evidence is None:
        return False
    differing = [each for each in differences(one, other)[0] if each.weight != "harmless" and each.key != "run.seed"]
    return not differing and _hardware(one.evidence) == _hardware(other.evidence)


def seed_of(log: Log) -> Any:
    return log.evidence.recipe.get("run", {}).get("seed") if log.evidence else None


def _asked(line: dict[str, Any]) -> tuple[Any, ...]:
    return line.get("step"), line.get("kind"), line.get("sample"), json.dumps(line.get("prompt"), sort_keys=True)


def _method(evidence: Evidence) -> Any:
    return evidence.recipe.get("method")


def _model(evidence: Evidence) -> str:
    """Its kind, size and folder; a run's export is called by its run. An adapter is a part of what was trained."""
    model = evidence.recipe.get("model", {})
    path = Path(str(model.get("path", "")))
    name = path.parent.name if path.name == "export" and path.parent.name else path.name
    kind = evidence.env.get("model", {})
    if "parameters" in kind:
        name = f"{kind['architecture'].removesuffix('ForCausalLM')} {_millions(kind['parameters'])} ({name})"
    lora = model.get("lora")
    if not lora:
        return name
    return f"{name}, LoRA rank {lora['rank']}" if lora.get("rank") else f"{name}, LoRA from {lora.get('adapter')}"


def _millions(count: int) -> str:
    return f"{count / 1e9:.2g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _dtype(evidence: Evidence) -> Any:
    return evidence.recipe.get("model", {}).get("dtype")


def _hardware(evidence: Evidence) -> str:
    device = evidence.env.get("device", {})
    kind = f"{device.get('name', '?')}, emulated" if device.get("emulated") else device.get("name", "?")
    return f"{evidence.env.get('world_size', 1)} x {device.get('chip', 'unknown chip')} ({kind})"


def _versions(evidence: Evidence) -> str:
    env = evidence.env
    packages = env.get("packages", {})
    named = {"lockstep": env.get("lockstep"), "torch": packages.get("torch")}
    named["transformers"] = packages.get("transformers")
    device = env.get("device", {})
    named |= {key: value for key, value in device.items() if key not in _NO_VERSION and isinstance(value, str)}
    return ", ".join(f"{name} {version}" for name, version in named.items() if version)
