"""The device class on the emulated NPU: what it says, switches and counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.device.npu import Npu, has_kernel
from lockstep.device.select import explain, select
from lockstep.errors import Refusal
from lockstep.kernels import sampling as noise
from lockstep.kernels.sampling import sequence_keys
from lockstep.model.load import load_policy
from lockstep.model.tiny import write_tiny
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.schema import Model
from lockstep.train.optim import Optimizer

from .processes import python

pytestmark = pytest.mark.ascend


def test_auto_takes_it_and_says_so() -> None:
    device, sentence = explain("auto")
    assert device.name == "npu"
    assert "npu" in sentence
    assert select("npu").unavailable() is None


def test_what_it_says_of_itself() -> None:
    device = Npu()
    device.use(0)
    facts = device.facts()
    assert (facts["count"], facts["ray_resource"]) == (2, "NPU")
    assert facts["emulated"] is True
    assert facts["chip"].startswith("Ascend910B")
    before = device.memory().allocated
    block = torch.empty(1 << 20, device="npu")
    assert device.memory().allocated - before >= 4 << 20
    assert device.memory().peak >= device.memory().allocated
    del block
    assert device.peak_flops(torch.bfloat16) is not None
    assert device.supports(torch.bfloat16)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(Refusal, match="2 are visible"):
        Npu().use(5)


@pytest.mark.slow
def test_hidden_devices_are_told_by_the_variable_that_torch_npu_reads() -> None:
    assert Npu.visible_variable == "ASCEND_RT_VISIBLE_DEVICES"
    code = "from lockstep.device.npu import Npu; print(Npu().unavailable() or 'available', Npu().count())"
    assert python("-c", code, **{Npu.visible_variable: "1"}).stdout.split()[-2:] == ["available", "1"]


def test_a_rank_uses_the_device_of_its_number() -> None:
    for index in (1, 0):
        Npu().use(index)
        assert torch.npu.current_device() == index
        assert torch.empty(1, device="npu").device.index == index


def test_weights_keep_the_plain_layout() -> None:
    import torch_npu

    torch_npu._C._npu_setOption({"ALLOW_INTERNAL_FORMAT": "enable"})
    Npu().use(0)
    assert torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT") in ("disable", b"disable")


def test_an_operator_without_a_kernel_is_counted_and_may_be_refused() -> None:
    assert has_kernel("aten::mm")
    assert has_kernel("aten::ones_like")
    # By a variant that writes into a given tensor, of the operator in place too; and by one made of others.
    assert has_kernel("aten::index_add_")
    assert has_kernel("aten::select_backward")
    assert not has_kernel("aten::special_bessel_j0")
    device = Npu()
    device.use(0)
    with device.watched(allow_fallback=True) as counts:
        x = torch.ones(2, device="npu")
        torch.special.bessel_j0(x + x)
        torch.special.bessel_j0(x)
        torch.special.bessel_j0(torch.ones(2))  # the CPU's own
    assert dict(counts) == {"aten::special_bessel_j0": 2}
    with pytest.raises(Refusal, match=r"special_bessel_j0 has no kernel"), device.watched(allow_fallback=False):
        torch.special.bessel_j0(x)


def test_operators_of_the_ai_cpu_are_counted_like_fallbacks() -> None:
    device = Npu()
    device.use(0)
    wide, whole = torch.ones(4, 4, dtype=torch.float64, device="npu"), torch.arange(9, device="npu")
    with device.watched(allow_fallback=True) as counts:
        _ = wide + wide
        _ = wide[0].detach().clone().cpu()  # nothing is computed
        _ = torch.sort(whole)
        _ = torch.sort(whole.float())
        _ = whole + whole
        _ = torch.ones(2, dtype=torch.float64) * 2  # the CPU's own
    assert dict(counts) == {"aten::add.Tensor (AI CPU)": 1, "aten::sort (AI CPU)": 1}
    said = r"aten::sort runs on the device's AI CPU for torch.int64"
    with pytest.raises(Refusal, match=said), device.watched(allow_fallback=False):
        torch.sort(whole)


def test_errors_of_the_device_are_explained() -> None:
    with pytest.raises(RuntimeError, match=r"107001") as caught, Npu().explained():
        torch.npu.set_device(9)
    assert "what it means: " in str(caught.value)
    assert "ASCEND_RT_VISIBLE_DEVICES" in str(caught.value)


@pytest.mark.parametrize("masters", [False, True])
def test_the_fused_optimizer_steps_as_the_plain_one(tmp_path: Path, masters: bool) -> None:
    write_tiny(tmp_path / "model", hidden=32, layers=1)
    dtype = "bf16" if masters else "fp32"
    weights = []
    for fused in (True, False):
        policy = load_policy(Model(path=str(tmp_path / "model"), dtype=dtype), torch.device("npu"), "sdpa", seed=0)  # type: ignore[arg-type]
        optimizer = Optimizer(policy.trainable(), Optim(), masters=masters, fused=fused)
        draw = torch.Generator().manual_seed(0)
        for _ in range(3):
            for _, parameter in policy.trainable():
                parameter.grad = torch.randn(parameter.shape, generator=draw).to("npu", parameter.dtype)
            optimizer.collect()
            optimizer.step(1e-3, optimizer.gradient_norm(1.0))
        weights.append([p.detach().float().cpu() for _, p in policy.trainable()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_determinism_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in Npu.determinism:
        monkeypatch.delenv(variable, raising=False)
    switches = Npu().deterministic(True)
    try:
        assert switches["HCCL_DETERMINISTIC"] == "true"
        assert switches["CLOSE_MATMUL_K_SHIFT"] == "1"
        assert switches["ATB_MATMUL_SHUFFLE_K_ENABLE"] == "0"
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        Npu().deterministic(False)


def test_the_figures_of_memory_are_each_their_own() -> None:
    """The emulated device has 64 GiB; of a block that came and went, only the peak remembers."""
    device = Npu()
    device.use(0)
    torch.npu.empty_cache()
    device.reset_peak()
    before = device.memory()
    block = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    held = device.memory()
    del block
    after = device.memory()
    assert before.total == held.total == after.total == 64 << 30
    assert before.free - held.free >= 64 << 20
    assert 64 << 20 <= held.allocated - before.allocated < 65 << 20  # the allocator rounds up
    assert after.allocated == before.allocated
    assert after.peak == held.peak >= held.allocated
    device.reset_peak()
    assert device.memory().peak == before.allocated


def test_synchronise_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator does everything at once, so that a wait shows in nothing but its call."""
    waits: list[str] = []
    monkeypatch.setattr(torch.npu, "synchronize", lambda: waits.append("waited"))
    Npu().synchronise()
    assert waits == ["waited"]


def test_noise_of_a_device_whose_integers_do_not_wrap_is_drawn_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, positions = (
        torch.tensor([sequence_keys(1, 2, 3), sequence_keys(2**40, 5, 6)], dtype=torch.int32),
        torch.tensor([0, 7]),
    )
    wanted = noise.gumbel_noise(keys, positions, 300)
    own = noise.noise_bits
    asked: list[str] = []

    def saturating(keys_B2: torch.Tensor, positions_B: torch.Tensor, vocabulary: int) -> torch.Tensor:
        asked.append(keys_B2.device.type)
        bits = own(keys_B2, positions_B, vocabulary)
        return bits if keys_B2.device.type == "cpu" else bits.clamp(-(2**30), 2**30)

    noise.wraps.cache_clear()
    try:
        assert noise.wraps(torch.device("npu", 0))
        noise.wraps.cache_clear()
        monkeypatch.setattr(noise, "noise_bits", saturating)
        with pytest.warns(UserWarning, match="int32 arithmetic on npu:0 does not wrap around"):
            found = noise.gumbel_noise(keys.to("npu"), positions.to("npu"), 300)
        assert asked == ["cpu", "npu", "cpu"]
        assert found.device.type == "npu"
        torch.testing.assert_close(found.cpu(), wanted, atol=1e-6, rtol=1e-6)
    finally:
        noise.wraps.cache_clear()
