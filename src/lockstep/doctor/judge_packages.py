"""Judgements on packages: what is missing or too old, and what does not go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep.doctor.facts import (
    MINIMUM,
    Diagnosis,
    Examination,
    MachineFacts,
    broken,
    installed_packages,
    unknown,
    warning,
)
from lockstep.doctor.machine import AUTOLOAD, Machine
from lockstep.doctor.stacks import older, release
from lockstep.errors import Problem

# What does not work on an Ascend device, and what does instead.
INSTEAD = {
    "flash_attn": (
        "its kernels are for CUDA",
        "leave model.attention at auto, which takes torch_npu's fused attention; pip uninstall flash_attn",
    ),
    "liger_kernel": (
        "lockstep does not use it, and its kernels need triton-ascend there",
        "nothing to do for lockstep, whose log-probabilities are computed in chunks without it",
    ),
    "bitsandbytes": (
        "lockstep does not use it, and its usual builds are for CUDA",
        "train LoRA on bf16 weights (model.dtype: bf16, model.lora.rank) in place of 4-bit or 8-bit ones",
    ),
    "deepspeed": (
        "lockstep does not use it; AutoTP and the hybrid engine do not work there",
        "several devices: torchrun, which shards with FSDP2; generation: rollout.engine native",
    ),
}

# triton-ascend from this version on depends on a triton of its own choice; before it, the two overwrite each other.
TRITON_BESIDE = "3.2.1"
TRITON_OF_TRITON_ASCEND = ("3.2.0", "3.5.0")


# The packages of an Ascend guide belong together, and with its engine and its CANN: none is upgraded among the others.
NEW_ENVIRONMENT = (
    "leave this environment as it is, it belongs to another program; in a checkout of lockstep: "
    'python3 -m venv .venv && .venv/bin/pip install -c constraints-npu.txt -e ".[npu]"'
)


def core_is_there(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    foreign = belongs_to_another(facts.packages, device)
    for name, least in MINIMUM.items():
        version = facts.packages.get(name)
        if version is None:
            yield broken(
                name,
                "not installed",
                NEW_ENVIRONMENT if foreign else "in a checkout: pip install -c constraints.txt -e .",
            )
        elif older(version, least):
            remedy = NEW_ENVIRONMENT if foreign else f"pip install -c constraints.txt -U '{name}>={least}'"
            yield broken(name, f"lockstep needs {name} >= {least}", remedy)


def belongs_to_another(packages: Mapping[str, str], device: str) -> bool:
    """An environment for Ascend whose packages are too old for lockstep was made by another project's guide."""
    ascend = device == "npu" or "torch_npu" in packages
    return ascend and any(name in packages and older(packages[name], least) for name, least in MINIMUM.items())


def torch_fits_torch_npu(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    finding = torch_mismatch(facts.packages, device)
    if finding is not None:
        yield finding


def torch_mismatch(packages: Mapping[str, str], device: str) -> Diagnosis | None:
    """torch_npu is built for one torch release; candidates and post-releases are of that release."""
    torch, torch_npu = packages.get("torch"), packages.get("torch_npu")
    if torch is None or torch_npu is None or release(torch) == release(torch_npu):
        return None
    return Diagnosis(
        "torch_npu",
        "broken" if device == "npu" else "warning",
        f"torch_npu {torch_npu} is built for torch {release(torch_npu)}, and torch {torch} is installed",
        NEW_ENVIRONMENT if belongs_to_another(packages, device) else _same_torch(release(torch), release(torch_npu)),
    )


def _same_torch(torch: str, torch_npu: str) -> str:
    remedy = f"pip install torch_npu=={torch} (a candidate or post-release of it will do)"
    # Going back to torch_npu's torch is no way out where lockstep could not run on that.
    return remedy if older(torch_npu, MINIMUM["torch"]) else f"{remedy}, or torch=={torch_npu}"


def torch_npu_can_load(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    torch_npu = facts.packages.get("torch_npu")
    if torch_npu is None:
        if device == "npu":
            here = 'in a checkout: pip install -c constraints-npu.txt -e ".[npu]"'
            remedy = NEW_ENVIRONMENT if belongs_to_another(facts.packages, device) else here
            yield broken("torch_npu", "not installed", remedy)
        return
    if facts.cann is not None:
        return
    remedy = "install CANN and source its set_env.sh"
    if device == "npu":
        yield broken("torch_npu", "there is no CANN, which torch_npu loads at its import", remedy)
    elif facts.variables.get(AUTOLOAD) != "0":
        yield warning(
            "torch_npu",
            "there is no CANN, and a plain `import torch` loads torch_npu and fails (lockstep itself puts that off)",
            f"export {AUTOLOAD}=0, or {remedy}",
        )


def one_triton(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    triton, ascend = facts.packages.get("triton"), facts.packages.get("triton-ascend")
    if triton is None or ascend is None:
        return
    again = f"pip uninstall -y triton triton-ascend && pip install triton-ascend=={ascend}"
    if older(ascend, TRITON_BESIDE):
        yield broken(
            "triton-ascend", f"triton {triton} is installed too, and the two overwrite each other's files", again
        )
    elif release(triton) not in TRITON_OF_TRITON_ASCEND:
        yield warning(
            "triton-ascend", f"triton {triton} is not the one it brings, and may have overwritten its files", again
        )


def nothing_for_cuda(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if device != "npu":
        return
    for name, (why, remedy) in INSTEAD.items():
        if name in facts.packages:
            yield warning(name, f"on this device {why}", remedy)
    torchvision = facts.packages.get("torchvision", "")
    if "+cu" in torchvision:
        yield warning(
            "torchvision",
            f"{torchvision} is a CUDA build",
            "pip install torchvision --index-url https://download.pytorch.org/whl/cpu",
        )


# verl's guide for Ascend: of the torch that it pins, this is the tensordict that works on Arm.
TENSORDICT_ON_ARM = {"2.5.1": "0.8.3"}


def tensordict_fits_arm(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    tensordict, torch = facts.packages.get("tensordict"), facts.packages.get("torch", "")
    wanted = TENSORDICT_ON_ARM.get(release(torch))
    if device != "npu" or facts.architecture != "aarch64" or tensordict is None:
        return
    if wanted is None:
        why = f"no guide names a tensordict for torch {torch} on Arm"
        yield unknown("tensordict", why, "lockstep does not use it; ask the guide of the program that does")
    elif release(tensordict) != wanted:
        why = f"on Arm {wanted} goes with torch {release(torch)}, this is {tensordict}"
        yield warning("tensordict", why, f"pip install tensordict=={wanted}")


def torch_is_for_the_device(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    torch = facts.packages.get("torch", "")
    if device == "npu" and facts.architecture == "x86_64" and torch and not torch.endswith("+cpu"):
        yield warning(
            "torch",
            f"{torch} is the plain build, which brings CUDA and triton on x86; TorchNPU needs the CPU build",
            f"pip uninstall -y torch triton && pip install torch=={release(torch)} "
            "--index-url https://download.pytorch.org/whl/cpu",
        )
    if device == "cuda" and torch.endswith("+cpu"):
        yield broken("torch", f"{torch} is a CPU build", "pip uninstall torch, then install the plain one")


def unfit_packages(device: str, machine: Machine) -> list[Problem]:
    """Packages that do not go together on the device of a run: refused before the first step."""
    finding = torch_mismatch(installed_packages(machine), device) if device == "npu" else None
    return [] if finding is None else [Problem(f"package {finding.row}", finding.why, finding.remedy)]


JUDGEMENTS: tuple[Examination, ...] = (
    core_is_there,
    torch_is_for_the_device,
    tensordict_fits_arm,
    torch_fits_torch_npu,
    torch_npu_can_load,
    one_triton,
    nothing_for_cuda,
)
