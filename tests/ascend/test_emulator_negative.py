"""Mistakes that have to be noticed. Where the emulator would let one pass, a test on it would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from ascend_emulator import build
from ascend_emulator.kernels import norms, reference

from .processes import python

pytestmark = pytest.mark.ascend

X = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.ones(4, 4, dtype=torch.bool).triu(1)
GAMMA = torch.ones(8)


def attention(mask: torch.Tensor | None = None, layout: str = "BNSD", heads: int = 2, **more: Any) -> torch.Tensor:
    x = X.to("npu")
    out = torch_npu.npu_fusion_attention(x, x, x, heads, layout, atten_mask=mask, scale=8**-0.5, **more)[0]
    return out.cpu()


def is_causal(out: torch.Tensor) -> None:
    torch.testing.assert_close(out, F.scaled_dot_product_attention(X, X, X, is_causal=True))


def test_the_right_call_passes() -> None:
    is_causal(attention(HIDDEN.to("npu")))


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a hard-coded cuda": (lambda: X.to("npu").to("cuda"), "(?i)cuda"),
    "a hard-coded cuda call": (lambda: torch.cuda.synchronize(), "(?i)cuda"),
    "a tensor left on the host": (lambda: X.to("npu") + X, "same device"),
    "tensors on two devices": (lambda: X.to("npu:0") + X.to("npu:1"), "same device"),
    "a list over two devices": (lambda: torch.cat([X.to("npu:0"), X.to("npu:1")]), "same device"),
    "a mask left on the host": (lambda: attention(HIDDEN), "expected all tensors to be on npu:0"),
    "a fused operator over two devices": (
        lambda: torch_npu.npu_rms_norm(X.to("npu:0"), GAMMA.to("npu:1")),
        "expected all tensors to be on npu:0",
    ),
    "a generator of the host": (
        lambda: torch.randn(2, device="npu", generator=torch.Generator()),
        "Expected a 'npu' device type for generator",
    ),
    "a device that is not there": (lambda: torch_npu.npu.set_device(9), "107001"),
    "a tensor on a device that is not there": (lambda: torch.empty(1, device="npu:5"), "NPU function error"),
    "numpy of a device tensor": (lambda: X.to("npu").numpy(), "can't convert"),
    "a misspelt keyword": (
        lambda: torch_npu.npu_rms_norm(X.to("npu"), GAMMA.to("npu"), eps=1e-6),
        "Unknown keyword argument 'eps'",
    ),
    "pre_tokens for pre_tockens": (lambda: attention(pre_tokens=5), "Unknown keyword argument"),
    "a missing argument": (lambda: torch_npu.npu_fusion_attention(*[X.to("npu")] * 3, head_num=2), "input_layout"),
    "an unknown operator": (lambda: torch_npu.npu_flash_attention_of_tomorrow, "no attribute"),
    "an unknown layout": (lambda: attention(layout="BDNS"), "layout"),
    "a wrong number of heads": (lambda: attention(heads=4), "head_num 4"),
    "a mask of floats": (lambda: attention(HIDDEN.float().to("npu")), "bool or uint8"),
    "a small mask for a compressed mode": (lambda: attention(HIDDEN.to("npu"), sparse_mode=2), "2048"),
    "no mask for a compressed mode": (lambda: attention(sparse_mode=3), "2048"),
    "an inverted compressed mask": (
        lambda: attention(torch.ones(2048, 2048, dtype=torch.bool).tril().to("npu"), sparse_mode=2),
        "above the diagonal",
    ),
    "an inverted mask": (lambda: is_causal(attention((~HIDDEN).to("npu"))), "not close"),
    "a forgotten mask": (lambda: is_causal(attention()), "not close"),
    "dropout in attention": (lambda: attention(keep_prob=0.9), "no dropout"),
    "packed sequences without lengths": (
        lambda: torch_npu.npu_fusion_attention(*[X[0].to("npu")] * 3, 4, "TND"),
        "actual_seq_qlen",
    ),
    "a fused operator without a reference": (
        lambda: torch_npu.npu_gelu(X.to("npu"), approximate="tanh"),
        r"aclnnGeluV2 or .* not in libopapi\.so",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(Exception, match=message):
        make()


def test_a_wrong_gradient_is_noticed() -> None:
    """The comparison that the tests of the fused operators make, with a gradient wrong by one per cent."""

    def difference() -> float:
        x = X.to("npu").requires_grad_()
        torch_npu.npu_rms_norm(x, GAMMA.to("npu"), 1e-6)[0].sum().backward()
        plain = X.clone().requires_grad_()
        F.rms_norm(plain, (8,), GAMMA, 1e-6).sum().backward()
        assert x.grad is not None
        assert plain.grad is not None
        return (x.grad.cpu() - plain.grad).abs().max().item()

    def wrong(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by_x, by_gamma = norms.rms_norm_backward(*arguments)
        return by_x * 1.01, by_gamma

    assert difference() < 1e-6
    library = torch.library.Library("npu", "IMPL")
    kernel = reference.kernel_of("npu_rms_norm_backward", reference.Reference(wrong))
    library.impl("npu_rms_norm_backward", kernel, "PrivateUse1", allow_override=True)
    try:
        assert difference() > 1e-4
    finally:
        library._destroy()
    assert difference() < 1e-6


# ---- the environment: every test that starts torch takes seconds, so one of them runs every day ----


def test_without_cann_torch_does_not_import() -> None:
    done = python("-c", "import torch", LD_LIBRARY_PATH=None, PYTHONPATH=None)
    assert done.returncode != 0
    assert "libhccl.so" in done.stderr


@pytest.mark.slow
def test_without_cann_and_autoload_torch_is_the_plain_one() -> None:
    code = "import torch; print(torch.ones(1).item(), hasattr(torch, 'npu'))"
    done = python("-c", code, LD_LIBRARY_PATH=None, PYTHONPATH=None, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.split() == ["1.0", "False"]


@pytest.mark.slow
def test_without_the_host_kernels_an_operator_fails() -> None:
    done = python("-c", "import torch; print(torch.ones(2).npu() + 1)", PYTHONPATH=None)
    assert done.returncode == 1
    assert "Error" in done.stderr


@pytest.mark.slow
def test_fresh_memory_can_be_made_to_show() -> None:
    code = "import torch; print(torch.empty(64, device='npu').isnan().all().item())"
    assert python("-c", code, ASCEND_EMULATOR_POISON="1").stdout.split() == ["True"]


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("1", 1), ("0,1", 2), ("1,0", 1), ("", 0), ("7", 0), ("x", 0)]
)
def test_hidden_devices_are_hidden(visible: str, count: int) -> None:
    """Asked of the runtime itself: starting torch seven times takes half a minute."""
    code = f"""
import ctypes
count = ctypes.c_uint()
ctypes.CDLL({str(build.LIBRARIES / "libascendcl.so")!r}).aclrtGetDeviceCount(ctypes.byref(count))
print(count.value)
"""
    assert python("-c", code, ASCEND_RT_VISIBLE_DEVICES=visible).stdout.split() == [str(count)]


@pytest.mark.slow
def test_torch_sees_what_the_runtime_shows() -> None:
    done = python("-c", "import torch; print(torch.npu.device_count())", ASCEND_RT_VISIBLE_DEVICES="1")
    assert done.stdout.split() == ["1"]


@pytest.mark.slow
def test_other_devices_can_be_asked_for() -> None:
    code = "import torch; print(torch.npu.device_count(), torch.npu.get_device_name(3))"
    done = python("-c", code, ASCEND_EMULATOR_DEVICES="4", ASCEND_EMULATOR_SOC="Ascend910B3")
    assert done.stdout.split() == ["4", "Ascend910B3"]


# ---- what passes, although a device might not let it ----


def test_missing_synchronisation_is_not_noticed() -> None:
    """Everything runs at once and in order, so a race cannot show. Nobody should rely on the emulator for this."""
    with torch_npu.npu.stream(torch_npu.npu.Stream()):
        doubled = X.to("npu") * 2
    assert torch.equal(doubled.cpu(), X * 2)
