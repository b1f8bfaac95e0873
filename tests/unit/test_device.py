"""Devices: what each says about itself, and that an absent one is refused with the true reason."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lockstep.device import cuda, npu
from lockstep.device.base import Device
from lockstep.device.cpu import Cpu, Group, groups, host_memory
from lockstep.device.cuda import Cuda
from lockstep.device.npu import Npu
from lockstep.device.select import DEVICES, explain, select
from lockstep.errors import Refusal
from refusals import refuses

MIB = 2**20
RELEASE = ".".join(torch.__version__.split("+")[0].split(".")[:3])


def _present_or_skip(kind: type[Device]) -> Device:
    device = kind()
    reason = device.unavailable()
    if reason is not None:
        pytest.skip(f"no {device.name} here: {reason}")
    return device


@pytest.fixture(params=[Cpu, pytest.param(Cuda, marks=pytest.mark.cuda), Npu], ids=lambda kind: kind.name)
def device(request: pytest.FixtureRequest) -> Device:
    return _present_or_skip(request.param)


@pytest.fixture(autouse=True)
def _switches_restored() -> Iterator[None]:
    before, benchmark = dict(os.environ), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    os.environ.clear()
    os.environ.update(before)


# What every present device must do -------------------------------------------------------------------------------


def test_seed_repeats_the_random_numbers(device: Device) -> None:
    place = device.torch_device()
    device.seed(7)
    first = torch.randn(64, device=place)
    device.seed(7)
    again = torch.randn(64, device=place)
    device.seed(8)
    other = torch.randn(64, device=place)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rng_state_round_trip(device: Device) -> None:
    place = device.torch_device()
    device.seed(7)
    torch.randn(3, device=place)
    state = device.rng_state()
    expected = torch.randn(64, device=place)
    torch.randn(5, device=place)
    device.set_rng_state(state)
    assert torch.equal(torch.randn(64, device=place), expected)
    assert state.device.type == "cpu"  # so that it can be saved with a checkpoint


def hold(device: Device, size: int) -> object:
    """So much memory of the device, given back when the result is. On a CPU from the system itself: torch's allocator
    may keep what was freed, as that of its Arm builds does."""
    if device.torch_device().type != "cpu":
        return torch.ones(size // 4, device=device.torch_device())
    held = mmap.mmap(-1, size)
    held.write(b"1" * size)
    return held


def test_memory_counts_an_allocation_and_its_peak(device: Device) -> None:
    device.use(0)
    before = device.memory()
    held = hold(device, 256 * MIB)
    device.synchronise()
    with_held = device.memory()
    assert with_held.allocated - before.allocated > 192 * MIB
    del held
    after = device.memory()
    assert with_held.allocated - after.allocated > 192 * MIB
    assert after.peak >= with_held.allocated - 8 * MIB
    device.reset_peak()
    assert device.memory().peak < after.peak - 128 * MIB
    for memory in (before, with_held, after):
        assert 0 <= memory.allocated <= memory.peak
        assert 0 < memory.free <= memory.total


def test_facts_are_json_and_complete(device: Device) -> None:
    facts = json.loads(json.dumps(device.facts()))
    assert facts["name"] == device.name
    assert facts["chip"]
    assert facts["count"] == device.count() >= 1
    assert facts["torch"] == torch.__version__
    assert facts["memory"]["total"] > 0


def test_supported_dtypes_train(device: Device) -> None:
    """Forward and backward of a decoder's operators in every promised dtype, against float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (12,), generator=generator)
    weights = [
        torch.randn(shape, generator=generator) * 0.3 for shape in [(50, 32), (32,), (96, 32), (32, 32), (50, 32)]
    ]

    def loss_and_gradients(place: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        embed, norm, qkv, gate, head = (w.to(place, dtype, copy=True).requires_grad_() for w in weights)
        hidden = F.rms_norm(F.embedding(ids.to(place), embed), (32,), norm)
        query, key, value = F.linear(hidden, qkv).view(12, 3, 4, 8).permute(1, 2, 0, 3).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + mixed.squeeze(0).transpose(0, 1).reshape(12, 32)
        hidden = hidden + F.silu(hidden @ gate)
        loss = F.cross_entropy(F.linear(hidden, head).float(), ids.to(place))
        gradients = torch.autograd.grad(loss, [embed, norm, qkv, gate, head])
        return [tensor.detach().float().cpu() for tensor in (loss, *gradients)]

    expected = loss_and_gradients(torch.device("cpu"), torch.float32)
    assert device.supports(torch.float32)
    assert not device.supports(torch.int8)
    for dtype in (torch.float32, *device.autocast_dtypes):
        assert device.supports(dtype)
        tolerance = 2e-5 if dtype == torch.float32 else 0.05
        actual = loss_and_gradients(device.torch_device(), dtype)
        for want, got in zip(expected, actual, strict=True):
            assert (want - got).norm() <= tolerance * want.norm(), dtype


def test_fused_adamw_is_plain_adamw(device: Device) -> None:
    assert device.fused_optimizer
    start = torch.randn(300, generator=torch.Generator().manual_seed(1))
    results = []
    for fused in (True, False):
        weight = torch.nn.Parameter(start.to(device.torch_device(), copy=True))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, fused=fused, foreach=False)
        for step in range(10):
            gradient = torch.randn(300, generator=torch.Generator().manual_seed(step))
            weight.grad = gradient.to(device.torch_device())
            optimizer.step()
        results.append(weight.detach().cpu())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
    assert (results[0] - start).abs().max() > 1e-2


def test_a_device_index_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "count", lambda self: 2)
    with pytest.raises(Refusal, match=r"cuda device 2 .* 2 are visible.*\n.*CUDA_VISIBLE_DEVICES"):
        Cuda().use(2)


# Memory of the host ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no /proc here")
def test_host_memory_agrees_with_the_kernel() -> None:
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kernel = {row[0]: int(row[1]) * 1024 for row in rows}
    memory = host_memory()
    assert memory.total <= kernel["MemTotal:"] * 1.01
    assert memory.free <= kernel["MemAvailable:"] * 1.1
    pages = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert memory.allocated == pytest.approx(pages, rel=0.05)


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_memory_limit_of_a_nested_cgroup_v2(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    _write(proc / "self", cgroup="0::/job/step\n")
    _write(cgroups / "job", memory__max="1000\n", memory__current="700\n", memory__stat="anon 1\ninactive_file 100\n")
    _write(cgroups / "job" / "step", memory__max="max\n", memory__current="50\n")
    assert list(groups(proc, cgroups)) == [Group(limit=1000, used=600)]
    memory = host_memory(proc, cgroups)
    assert (memory.total, memory.free) == (1000, 400)


def test_memory_limit_of_a_container_under_cgroup_v1(tmp_path: Path) -> None:
    """The container's own group is mounted as the root, while the path is the host's."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    _write(proc / "self", cgroup="5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    _write(
        cgroups / "memory",
        memory__limit_in_bytes="2000\n",
        memory__usage_in_bytes="2500\n",
        memory__stat="total_inactive_file 0\n",
    )
    assert list(groups(proc, cgroups)) == [Group(limit=2000, used=2500)]
    memory = host_memory(proc, cgroups)
    assert (memory.total, memory.free) == (2000, 0)


def test_no_cgroup_means_the_whole_machine(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = host_memory(tmp_path, tmp_path)
    assert memory.total == physical
    assert 0 < memory.allocated <= memory.peak < physical


# Determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DEVICES.values(), ids=lambda kind: kind.name)
def test_deterministic_sets_reports_and_restores(kind: type[Device], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in kind.determinism:
        monkeypatch.delenv(variable, raising=False)
    switches = kind().deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert switches["torch.use_deterministic_algorithms"] == "True"
    for variable, accepted in kind.determinism.items():
        assert os.environ[variable] == switches[variable] == accepted[0]
    assert kind().deterministic(False) == {"torch.use_deterministic_algorithms": "False"}
    assert not torch.are_deterministic_algorithms_enabled()
    assert not set(kind.determinism) & set(os.environ)


def test_deterministic_keeps_a_users_value_that_is_deterministic_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_DETERMINISTIC", "STRICT")
    monkeypatch.setenv("LCCL_DETERMINISTIC", "0")
    switches = Npu().deterministic(True)
    assert switches["HCCL_DETERMINISTIC"] == os.environ["HCCL_DETERMINISTIC"] == "STRICT"
    assert switches["LCCL_DETERMINISTIC"] == os.environ["LCCL_DETERMINISTIC"] == "1"
    Npu().deterministic(False)
    assert os.environ["HCCL_DETERMINISTIC"] == "STRICT"
    assert os.environ["LCCL_DETERMINISTIC"] == "0"


# Chips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chip", "half"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_promised_flops_of_nvidia_chips(chip: str, half: float | None) -> None:
    peak = cuda.peak_of(chip)
    assert (peak.half if peak else None) == half


@pytest.mark.parametrize(
    ("chip", "half"),
    [("Ascend910B3", 294.9e12), ("Ascend910B2C", 353.9e12), ("Ascend910B", None), ("Ascend910B34", None)],
)
def test_promised_flops_of_ascend_chips(chip: str, half: float | None) -> None:
    assert npu.peak_of(chip) == half


def test_the_cpu_promises_no_flops() -> None:
    assert Cpu().peak_flops(torch.bfloat16) is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n", "535.129.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x)\n", "580.159.04"),
        ("GCC version:  gcc version 12.3.0 (Ubuntu)\n", None),
    ],
)
def test_driver_version_is_read(text: str, version: str | None) -> None:
    assert cuda.driver_version(text) == version


@pytest.mark.cuda
def test_cuda_facts_of_a_real_device() -> None:
    device = _present_or_skip(Cuda)
    facts = device.facts()
    assert facts["cuda"] == torch.version.cuda
    assert facts["nccl"]
    assert device.memory().total == torch.cuda.get_device_properties(0).total_memory
    if "H200" in facts["chip"]:
        assert device.peak_flops(torch.bfloat16) == 989e12


# Reasons ---------------------------------------------------------------------------------------------------------


def test_cuda_reason_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(cuda, "DRIVER", tmp_path / "absent")
    assert Cuda().unavailable() == f"torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(cuda, "DRIVER", tmp_path)
    assert "NVIDIA driver" in (Cuda().unavailable() or "")


@pytest.mark.parametrize("value", ["", "-1"])
def test_cuda_reason_hidden_devices(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert Cuda().unavailable() == f"CUDA_VISIBLE_DEVICES={value!r} hides every device"


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("Found no NVIDIA driver. Please install it", "Found no NVIDIA driver"),
        ("The driver is too old (found 11040). Please update", "The driver is too old (found 11040)"),
        ("No CUDA GPUs are available", "No CUDA GPUs are available"),
    ],
)
def test_cuda_reason_is_what_torch_says(monkeypatch: pytest.MonkeyPatch, message: str, kept: str) -> None:
    def init() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Cuda().unavailable() == f"torch {torch.__version__} (CUDA 13.0) reports: {kept}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert (Cuda().unavailable() or "").endswith(f"{kept} (CUDA_VISIBLE_DEVICES='7')")


def _fake_torch_npu(folder: Path, version: str, code: str | None = None) -> None:
    """An installed torch_npu as importlib sees it: its metadata, its entry point and, where given, its code."""
    _write(
        folder / f"torch_npu-{version}.dist-info",
        METADATA=f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n",
        entry_points__txt="[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
    )
    if code is not None:
        (folder / "torch_npu").mkdir()
        (folder / "torch_npu" / "__init__.py").write_text(code)


@pytest.fixture
def _forgotten_load() -> Iterator[None]:
    npu._load_problem.cache_clear()
    yield
    npu._load_problem.cache_clear()


@pytest.mark.skipif(npu.installed_version() is not None, reason="torch_npu is installed")
def test_npu_reason_package_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(npu, "DRIVER_NODE", tmp_path / "absent")
    assert Npu().unavailable() == "package torch_npu is not installed"
    monkeypatch.setattr(npu, "DRIVER_NODE", tmp_path)
    assert "Ascend driver" in (Npu().unavailable() or "")


@pytest.mark.parametrize("version", ["2.5.1rc1", "2.10.0.post4", "2.99.0"])
def test_npu_reason_version_mismatch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    """Seen from the metadata alone: importing the wrong one could end the process."""
    _fake_torch_npu(tmp_path, version, "raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Refusal, match=rf"device \[device-unavailable\].*torch_npu {version} .*torch {RELEASE}"):
        select("npu")


@pytest.mark.usefixtures("_forgotten_load")
@pytest.mark.parametrize(
    ("message", "ending"),
    [
        ("libhccl.so: cannot open shared object file", "CANN toolkit.*set_env.sh"),
        ("libascend_hal.so: cannot open shared object file", "Ascend driver"),
        ("torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN3c10", "are not compatible"),
        ("Two accelerators: npu and cuda. Install", "npu and cuda$"),
    ],
)
def test_npu_reason_load_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, message: str, ending: str) -> None:
    _fake_torch_npu(tmp_path, f"{RELEASE}.post1", f"raise ImportError({message!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    reason = Npu().unavailable() or ""
    assert reason.startswith(f"torch_npu {RELEASE}.post1 does not load: {message.split('. ')[0]}")
    assert re.search(ending, reason)


@pytest.mark.usefixtures("_forgotten_load")
@pytest.mark.parametrize(
    ("count", "visible", "reason"),
    [
        ("0", None, "sees no device: check that the driver is loaded"),
        ("0", "1,0", "ASCEND_RT_VISIBLE_DEVICES='1,0' leaves no device visible"),
        ("1 / 0", None, None),
        ("stop()", None, "aclInit failed with 507008"),
        ("8", None, ""),
    ],
)
def test_npu_reason_no_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: str, visible: str | None, reason: str | None
) -> None:
    code = f"""
def stop():
    raise RuntimeError("aclInit failed with 507008\\n[ERROR] 2026-01-01 (PID:1) ERR00100 PTA call acl api failed")
class npu:
    device_count = staticmethod(lambda: {count})
"""
    _fake_torch_npu(tmp_path, RELEASE, code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    if visible is None:
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    try:
        if reason is None:  # an error that is nobody's absence is not swallowed
            with pytest.raises(ZeroDivisionError):
                Npu().unavailable()
        elif reason == "":
            assert Npu().unavailable() is None
        else:
            assert reason in (Npu().unavailable() or "")
    finally:
        sys.modules.pop("torch_npu", None)


@pytest.mark.slow
def test_a_broken_torch_npu_does_not_break_the_other_devices(tmp_path: Path) -> None:
    """`import torch` alone fails where torch_npu cannot load; after `import lockstep.device` it does not."""
    _fake_torch_npu(
        tmp_path, RELEASE, "raise ImportError('libhccl.so: cannot open shared object file: No such file')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)

    def python(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )

    plain = python("import torch")
    assert plain.returncode != 0
    assert "Failed to load the backend extension" in plain.stderr
    ours = python("from lockstep.device.select import explain; print(explain('auto')[1])")
    assert ours.returncode == 0, ours.stderr
    assert "no npu, because torch_npu" in ours.stdout
    assert "source its set_env.sh" in ours.stdout


def test_importing_the_package_sets_nothing_where_torch_npu_is_absent() -> None:
    if npu.installed_version() is not None:
        pytest.skip("torch_npu is installed")
    code = (
        "import os, sys, lockstep.device;print(os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'), 'torch' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["None", "False"]


# Choosing --------------------------------------------------------------------------------------------------------


def _availability(monkeypatch: pytest.MonkeyPatch, **reasons: str | None) -> None:
    for name, reason in reasons.items():
        monkeypatch.setattr(DEVICES[name], "unavailable", lambda self, reason=reason: reason)


def test_auto_takes_npu_then_cuda_then_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _availability(monkeypatch, npu=None, cuda=None)
    assert explain("auto")[0].name == "npu"
    _availability(monkeypatch, npu="no CANN", cuda=None)
    device, sentence = explain("auto")
    assert device.name == "cuda"
    assert re.fullmatch(r"device cuda, .* auto: .*npu.*no CANN", sentence)
    _availability(monkeypatch, npu="no CANN", cuda="no driver")
    device, sentence = explain("auto")
    assert device.name == "cpu"
    assert re.fullmatch(r"device cpu, .* auto: .*npu.*no CANN; .*cuda.*no driver", sentence)


def test_a_named_device_is_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _availability(monkeypatch, npu=None, cuda=None)
    for name, kind in DEVICES.items():
        assert type(select(name)) is kind
        assert explain(name)[1] == f"device {name}, as requested"


@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_an_absent_device_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _availability(monkeypatch, npu="gone", cuda="gone")
    with pytest.raises(Refusal) as caught:
        select(name)
    [problem] = caught.value.problems
    assert (problem.where, problem.code) == ("device", "device-unavailable")
    assert name in problem.why
    assert "gone" in problem.why
    assert problem.remedy.endswith("cpu (or auto)")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("gpu", "did you mean cuda?"),
        ("NPU", "did you mean npu?"),
        ("ascend", "did you mean npu?"),
        ("cdua", "did you mean cuda?"),
        ("cuda:1", "CUDA_VISIBLE_DEVICES=1"),
        ("quantum", "valid: auto, npu, cuda, cpu"),
    ],
)
def test_an_unknown_name_gets_the_valid_ones(name: str, remedy: str) -> None:
    with refuses("device", "unknown-device", f"'{name}'") as caught:
        select(name)
    assert remedy in caught.value.problems[0].remedy


def test_the_table_is_complete() -> None:
    assert [kind.name for kind in DEVICES.values()] == list(DEVICES)
    facts = [(kind.collective, kind.visible_variable, kind.attention) for kind in DEVICES.values()]
    assert facts == [
        ("hccl", "ASCEND_RT_VISIBLE_DEVICES", "npu_fusion"),
        ("nccl", "CUDA_VISIBLE_DEVICES", "flash_varlen"),
        ("gloo", None, "sdpa"),
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "5"}, "None")],
)
def test_worker_threads_wait_asleep_unless_told_otherwise(given: dict[str, str], expected: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    script = "import lockstep, os; print(os.environ.get('OMP_WAIT_POLICY'))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("torch_npu", "torch_version", "wrong"), [("2.13.1", "2.13.0+cpu", True), ("2.13.0.post2", "2.13.0", False)]
)
def test_a_patch_release_of_torch_npu_is_another_release(
    monkeypatch: pytest.MonkeyPatch, torch_npu: str, torch_version: str, wrong: bool
) -> None:
    from lockstep.device import npu

    monkeypatch.setattr(npu, "installed_version", lambda: torch_npu)
    monkeypatch.setattr(torch, "__version__", torch_version)
    problem = npu._package_problem()
    assert (problem is not None and "must have the same version" in problem) == wrong
