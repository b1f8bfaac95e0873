"""The device interface of torch_npu on the emulated runtime: what a program may rely on before any model runs."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint

from ascend_emulator import report

pytestmark = pytest.mark.ascend

NUMBERS = torch.arange(24.0).reshape(4, 6) - 11.5


@pytest.fixture
def x() -> torch.Tensor:
    return NUMBERS.to("npu:0")


# ---- devices ----


def test_two_devices_are_there_and_can_be_chosen() -> None:
    assert torch_npu.npu.is_available()
    assert torch_npu.npu.device_count() == 2
    assert torch_npu.npu.get_device_name(0) == "Ascend910B1"
    torch_npu.npu.set_device(1)
    assert torch_npu.npu.current_device() == 1
    assert torch.empty(1, device="npu").device == torch.device("npu:1")
    with torch_npu.npu.device(0):
        assert torch.empty(1, device="npu").device == torch.device("npu:0")
    assert torch_npu.npu.current_device() == 1


def test_torch_accelerator_is_the_npu() -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert accelerator.type == "npu"
    assert torch.accelerator.device_count() == 2
    torch.accelerator.synchronize()


def test_copies_keep_values_and_go_where_they_should(x: torch.Tensor) -> None:
    assert x.device.type == "npu"
    assert str(x.to("npu:1").device) == "npu:1"
    assert torch.equal(x.to("npu:1").to("cpu"), NUMBERS)
    assert torch.equal(x.t().contiguous().cpu(), NUMBERS.t())
    assert torch.equal(x.to("cpu", torch.bfloat16), NUMBERS.bfloat16())
    assert "device='npu:0'" in repr(x)


# ---- views and indices ----


def test_views_share_memory(x: torch.Tensor) -> None:
    x.t()[0].zero_()
    x.chunk(2, 1)[1].fill_(7)
    x.view(-1)[1] = 5
    expected = NUMBERS.clone()
    expected[:, 0], expected[:, 3:], expected[0, 1] = 0, 7, 5
    assert torch.equal(x.cpu(), expected)
    assert x.unfold(1, 2, 1).shape == (4, 5, 2)
    assert torch.view_as_complex(x[:, :2].contiguous()).imag.cpu().tolist() == expected[:, 1].tolist()


def test_indices_may_lie_on_the_host(x: torch.Tensor) -> None:
    rows = torch.tensor([3, 0, 3])
    assert torch.equal(x[rows].cpu(), NUMBERS[rows])
    assert torch.equal(x[rows.to("npu")].cpu(), NUMBERS[rows])
    assert torch.equal(x[x > 0].cpu(), NUMBERS[NUMBERS > 0])
    x[rows] = 0
    assert x.cpu()[[0, 3]].abs().sum() == 0


def test_a_number_on_the_host_is_a_scalar(x: torch.Tensor) -> None:
    assert torch.equal((x + torch.tensor(1.0)).cpu(), NUMBERS + 1)


def test_a_storage_can_be_emptied_and_filled_again(x: torch.Tensor) -> None:
    storage = x.untyped_storage()
    storage.resize_(0)
    assert storage.size() == 0
    storage.resize_(96)
    assert storage.size() == 96


# ---- autograd and autocast ----


@pytest.mark.parametrize(
    "shapes", [((4, 6), (6, 3)), ((6,), (6, 3)), ((4, 6), (6,)), ((6,), (6,)), ((2, 4, 6), (6, 3))]
)
def test_matmul_gradients_equal_those_on_the_host(shapes: tuple[tuple[int, ...], ...]) -> None:
    draw = torch.Generator().manual_seed(3)
    host = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    device = [t.detach().to("npu").requires_grad_() for t in host]
    torch.matmul(*host).square().sum().backward()
    torch.matmul(*device).square().sum().backward()
    for a, b in zip(host, device, strict=True):
        assert b.grad is not None
        assert b.grad.device.type == "npu"
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def test_recomputed_activations_repeat_their_dropout(x: torch.Tensor) -> None:
    weight = torch.ones(6, device="npu", requires_grad=True)
    out = checkpoint(lambda z: F.dropout(z * weight), x, use_reentrant=False)
    out.sum().backward()
    # With the same dropout in both passes, the gradient is the column sum of the output at weight one.
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.cpu(), out.detach().cpu().sum(0))


def test_autocast_keeps_weights_and_widens_softmax(x: torch.Tensor) -> None:
    linear = torch.nn.Linear(6, 3).to("npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        y = linear(x)
        assert y.dtype == torch.bfloat16
        assert F.softmax(y, -1).dtype == torch.float32
    assert linear.weight.dtype == torch.float32


def test_gradient_scaler_scales(x: torch.Tensor) -> None:
    scaled = torch.amp.GradScaler("npu").scale(x.sum() + 1)
    assert scaled.item() == 65536


@pytest.mark.slow
def test_compile_without_a_backend_compiler(x: torch.Tensor) -> None:
    assert torch.equal(torch.compile(lambda a: a * 2 + 1, backend="aot_eager")(x).cpu(), NUMBERS * 2 + 1)


# ---- random numbers ----


def test_seeds_and_states_repeat_and_leave_the_host_alone() -> None:
    torch.manual_seed(5)
    first = torch.randn(8, device="npu")
    second = torch.randn(8, device="npu")
    torch_npu.npu.manual_seed(5)
    assert torch.equal(first.cpu(), torch.randn(8, device="npu").cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    host, state = torch.get_rng_state(), torch_npu.npu.get_rng_state()
    dropped = F.dropout(torch.ones(64, device="npu"))
    torch_npu.npu.set_rng_state(state)
    assert torch.equal(dropped.cpu(), F.dropout(torch.ones(64, device="npu")).cpu())
    assert torch.equal(host, torch.get_rng_state())


def test_generators_of_the_device() -> None:
    draw = torch.Generator("npu").manual_seed(3)
    permutation = torch.randperm(10, generator=draw, device="npu")
    assert sorted(permutation.tolist()) == list(range(10))
    weights = torch.tensor([0.0, 1.0, 0.0], device="npu")
    assert torch.multinomial(weights, 1, generator=draw).tolist() == [1]
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.randn(3, device="npu")


# ---- streams, events, memory ----


def test_streams_and_events(x: torch.Tensor) -> None:
    start, end = torch_npu.npu.Event(enable_timing=True), torch_npu.npu.Event(enable_timing=True)
    start.record()
    stream = torch_npu.npu.Stream()
    with torch_npu.npu.stream(stream):
        assert torch_npu.npu.current_stream() == stream
        doubled = x * 2
    torch_npu.npu.current_stream().wait_stream(stream)
    doubled.record_stream(stream)
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert torch.equal(doubled.cpu(), NUMBERS * 2)


def test_memory_figures_follow_the_tensors() -> None:
    # The allocator puts tensors of 1 to 10 MiB into common segments, which stay while another test's tensor is there.
    torch_npu.npu.empty_cache()
    before = torch_npu.npu.memory_allocated()
    block = torch.empty(4096, 4096, device="npu")
    assert 64 << 20 <= torch_npu.npu.memory_allocated() - before <= 66 << 20
    assert torch_npu.npu.max_memory_allocated() >= torch_npu.npu.memory_allocated()
    free, total = torch_npu.npu.mem_get_info()
    assert total == 64 << 30
    assert free < total
    del block
    assert torch_npu.npu.memory_allocated() == before
    torch_npu.npu.empty_cache()
    assert torch_npu.npu.mem_get_info()[0] > free


def test_memory_has_an_end() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(65 << 30, dtype=torch.uint8, device="npu")


def test_host_memory_can_be_pinned() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    rows = torch.utils.data.TensorDataset(torch.ones(4, 2))
    batch = next(iter(torch.utils.data.DataLoader(rows, batch_size=2, pin_memory=True)))
    assert batch[0].is_pinned()


# ---- files ----


def test_saved_tensors_come_back_to_their_device(x: torch.Tensor) -> None:
    buffer = io.BytesIO()
    torch.save({"first": x, "second": x.to("npu:1")}, buffer)
    for place, expected in ((None, ["npu:0", "npu:1"]), ("cpu", ["cpu", "cpu"]), ("npu:1", ["npu:1", "npu:1"])):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=place)
        assert [str(loaded[name].device) for name in ("first", "second")] == expected
        assert torch.equal(loaded["second"].cpu(), NUMBERS)
    assert pickle.loads(pickle.dumps(x)).device == copy.deepcopy(x).device == x.device


def test_safetensors(x: torch.Tensor, tmp_path: Path) -> None:
    save_file({"x": x}, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors", device="npu")["x"]
    assert loaded.device.type == "npu"
    assert torch.equal(loaded.cpu(), NUMBERS)


# ---- what torch_npu itself decides ----


def test_scaled_dot_product_attention_takes_the_fused_route() -> None:
    draw = torch.Generator().manual_seed(0)
    host = [torch.randn(2, 4, 6, 16, generator=draw).requires_grad_() for _ in range(3)]
    device = [t.detach().to("npu").requires_grad_() for t in host]
    out = F.scaled_dot_product_attention(device[0], device[1], device[2], is_causal=True)
    expected = F.scaled_dot_product_attention(host[0], host[1], host[2], is_causal=True)
    assert out.grad_fn is not None
    assert out.grad_fn.name() == "NpuFusionAttentionV3Backward0"
    torch.testing.assert_close(out.cpu(), expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(host, device, strict=True):
        assert b.grad is not None
        torch.testing.assert_close(b.grad.cpu(), a.grad)


def test_float64_survives_a_copy_and_not_a_cast() -> None:
    assert torch.ones(2).to("npu").to(torch.float64).dtype == torch.float32
    assert torch.ones(2, dtype=torch.float64).to("npu").dtype == torch.float64


def test_an_operator_without_a_kernel_falls_back_aloud_and_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    report.clear()
    x = torch.linspace(0, 3, 4).to("npu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = torch.special.modified_bessel_i1(x)
    said = capfd.readouterr().err + "".join(str(warning.message) for warning in caught)
    assert "aten::special_modified_bessel_i1" in said
    assert "fall back to run on the CPU" in said
    assert y.device.type == "npu"
    assert report.fallbacks() == {"aten::special_modified_bessel_i1.out": 1}


def test_the_report_counts_operators_with_kernels(x: torch.Tensor) -> None:
    report.clear()
    (x + x).mul_(3)
    counted = {operator.name: (operator.calls, operator.kind) for operator in report.operators()}
    assert counted == {"aten::add.Tensor": (1, "npu kernel"), "aten::mul_.Tensor": (1, "npu kernel")}
