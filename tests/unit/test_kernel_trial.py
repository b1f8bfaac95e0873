"""A device whose attention kernel is wrong, or that fails: told from a model that we cannot serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import load
from transformers import LlamaConfig, MistralConfig

from lockstep.device.device_errors import trouble
from lockstep.errors import Refusal
from lockstep.kernels.attention import interface as attention
from lockstep.kernels.attention import varlen
from lockstep.kernels.attention.varlen import Fused, varlen_attention
from lockstep.model import trials
from lockstep.model.check import check_architecture, check_policy, wrong_kernel
from lockstep.model.trials import judged_later
from refusals import refuses

CPU, OTHER = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True)
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    trials._verified_here.cache_clear()
    yield
    trials._verified_here.cache_clear()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., torch.Tensor]], None]:
    """A device's own kernel `broken`, around the right one."""

    def bring(change: Callable[..., torch.Tensor]) -> None:
        def run(q: Any, k: Any, v: Any, layout: Any, scale: float, window: int | None) -> torch.Tensor:
            return change(varlen._buckets, q, k, v, layout, scale, window, 0.0, None, None)

        monkeypatch.setitem(varlen.KERNELS, "broken", Fused(run, lambda *_: True))

    return bring


def strong(
    right: Callable[..., torch.Tensor], q: torch.Tensor, k: Any, v: Any, layout: Any, scale: float, *more: Any
) -> Any:
    return right(q, k, v, layout, 1.05 * scale, *more)


def without_window(right: Any, q: Any, k: Any, v: Any, layout: Any, scale: float, window: Any, *more: Any) -> Any:
    return right(q, k, v, layout, scale, None, *more)


def no_gradient(right: Any, q: Any, k: torch.Tensor, *more: Any) -> Any:
    return right(q, k.detach(), *more)


def check(config: Any, kernel: str = "broken") -> None:
    check_architecture(config, "folder", torch.float32, kernel, CPU)


@pytest.mark.daily("window", "gradient")
@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (LlamaConfig(), strong, "packed log-probs differ"),
        (MistralConfig(sliding_window=4096), without_window, "packed log-probs differ"),
        (LlamaConfig(), no_gradient, "k_proj.weight gets no gradient"),
    ],
    ids=["scale", "window", "gradient"],
)
def test_a_wrong_kernel_is_named_with_what_is_right(config: Any, change: Any, says: str, kernel: Any) -> None:
    kernel(change)
    with pytest.raises(Refusal) as refusal:
        check(config)
    (problem,) = refusal.value.problems
    assert problem.where == "device cpu"
    assert "its attention kernel broken is wrong" in problem.why
    assert says in problem.why
    assert "With model.attention=sdpa the same check passes here" in problem.why
    assert problem.remedy.startswith("set model.attention=sdpa")
    check(config, "sdpa")
    assert not trials.is_verified(trials.fingerprint(config, "architecture", "torch.float32", "broken", "cpu"))


def test_a_right_kernel_passes(kernel: Any) -> None:
    kernel(lambda right, *rest: right(*rest))
    check(LlamaConfig())


def test_a_model_that_plain_torch_cannot_serve_either_is_no_fault_of_the_kernel(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(lambda right, *rest: right(*rest))
    monkeypatch.setattr(attention, "varlen_attention", lambda q, *a, **m: 1.05 * varlen_attention(q, *a, **m))
    with pytest.raises(Refusal, match=r"model.path folder \[unsupported-model\]: .*packed log-probs differ") as refusal:
        check(LlamaConfig())
    assert "lockstep help models" in refusal.value.problems[0].remedy


def test_a_kernel_that_shows_with_the_real_weights_alone_is_named_too(tiny_folder: Path, kernel: Any) -> None:
    policy = load(tiny_folder)
    policy.kernel = policy.decoder.kernel = "broken"
    kernel(lambda right, q, *rest: right(3 * q, *rest))
    with refuses("device cpu", "wrong-kernel", "kernel broken", "Qwen2ForCausalLM: packed"):
        check_policy(policy, "folder")
    assert (policy.decoder.kernel, policy.training) == ("broken", True)


def test_who_judges_later_is_told_and_not_stopped(kernel: Any) -> None:
    kernel(strong)
    with judged_later() as problems:
        check(LlamaConfig())
        check(LlamaConfig())
    assert [problem.where for problem in problems] == ["device cpu"]
    with pytest.raises(Refusal):
        check(LlamaConfig())


def test_a_device_that_is_wrong_with_plain_torch_too() -> None:
    """Only the CPU passes: no kernel of the device is right."""
    tried: list[tuple[str, str]] = []

    def trial(kernel: str, device: torch.device) -> str | None:
        tried.append((kernel, device.type))
        return None if device.type == "cpu" else "off by 0.5"

    problem = wrong_kernel("flash", OTHER, "off by 0.4", trial, lambda: 0.25)
    assert tried == [("sdpa", "meta"), ("sdpa", "cpu")]
    assert problem is not None
    assert problem.code == "wrong-kernel"
    assert "flash and with sdpa: off by 0.4" in problem.why
    assert "0.25 nats" in problem.why
    assert "lockstep doctor" in problem.remedy
    assert wrong_kernel("flash", OTHER, "off", lambda *_: "off everywhere", lambda: 0.0) is None


# -- errors of the device


DEVICE_ERRORS = {
    "memory": (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.1 GiB",
        "no memory left",
        "lower batch.tokens",
    ),
    "host memory": (
        "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
        "no memory",
        "lower",
    ),
    "driver": ("CUDA error: no kernel image is available for execution on the device", "driver or the chip", "doctor"),
    "operator": (
        "Could not run 'vendor::norm' with arguments from the 'PrivateUse1' backend.",
        "no kernel for this operator",
        "model.attention=sdpa",
    ),
    "dtype": ("\"flash_forward\" not implemented for 'BFloat16'", "no kernel for this operator", "model.dtype"),
    "call": ("CUDA error: an illegal memory access was encountered", "a call failed", "CUDA_LAUNCH_BLOCKING=1"),
    "cann": ("The Inner error is reported, error code is 507015\nEZ9999: Inner Error!", "kernel stopped", "ASCEND"),
}


@pytest.mark.daily("driver", "operator", "memory")
@pytest.mark.parametrize("name", DEVICE_ERRORS)
def test_an_error_of_the_device_keeps_its_text_and_gets_its_own_advice(name: str, kernel: Any) -> None:
    text, cause, advice = DEVICE_ERRORS[name]

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError(text)

    kernel(fails)
    with pytest.raises(Refusal) as refusal:
        check(LlamaConfig())
    (problem,) = refusal.value.problems
    assert problem.where == "device cpu"
    assert problem.why.startswith(text.splitlines()[0])
    assert cause in problem.why
    assert advice in problem.remedy
    assert "lockstep help models" not in problem.remedy


def test_a_kernel_that_fails_in_its_own_words_is_still_told_from_the_model(kernel: Any) -> None:
    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("head_dim must be a multiple of 8")

    kernel(fails)
    with refuses("device ", "wrong-kernel", "kernel broken", "packed: head_dim must be"):
        check(LlamaConfig())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("size of tensor a (4) must match b (5)"),
        RuntimeError("mat1 and mat2 cannot be multiplied (3x4 and 5x6)"),
        ValueError("out of memory"),
        NotImplementedError("it attends more than once"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_what_is_asked_wrongly_is_no_error_of_the_device(error: Exception) -> None:
    assert trouble(error) is None
    assert trouble(torch.OutOfMemoryError("whatever it says")) is not None
