"""What only a real device settles: its kernels against plain torch, its runs against the CPU's, two ranks against one.

On the emulator these tests are skipped: there the kernels are plain torch themselves. `sh tools/ascend_evidence.sh`
runs them on a machine with a device.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from commands import cold_lockstep
from lockstep.device.npu import Npu
from lockstep.kernels import fused_modules_npu as npu_modules
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.npu_attention import FUSION_PARTS, infer_decode, infer_fits
from lockstep.kernels.attention.paged import gathered_decode
from lockstep.kernels.attention.partial import PLAIN
from lockstep.kernels.attention.partial_attention import PartialKernel, merge, sections
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.kernels.fused_modules import plug_in
from lockstep.kernels.sampling import noise_bits, sequence_keys, wraps
from lockstep.run.metrics import read_metrics
from preference_rows import write_recipe

from .processes import python

pytestmark = pytest.mark.ascend_hardware

# Bars of the Ascend documents for the mean error of losses and of rewards, an absolute one.
LOSS_BAR, REWARD_BAR = 0.02, 0.04
# Of a kernel that computes in float32 and rounds its inputs and outputs, relative to the largest number.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
HALF = [torch.float16, torch.bfloat16]
HEADS, GROUPS, SIZE = 8, 2, 64
Function = Callable[..., torch.Tensor]

every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def real_device() -> None:
    """CANN can be there without a device."""
    reason = Npu().unavailable()
    if reason is not None:
        pytest.skip(f"needs a real Ascend device: {reason}")


# ---- kernels against plain torch ----


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(function: Function, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output and the gradient of every input, for an uneven gradient of the output."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    weight = random(*out.shape, seed=9).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def agree(fused: Function, plain: Function, inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """The device in `dtype` against the CPU in float32 on the same rounded numbers."""
    rounded = [tensor.to(dtype) for tensor in inputs]
    actual = run(fused, [tensor.to("npu") for tensor in rounded])
    expected = run(plain, [tensor.float() for tensor in rounded])
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == dtype
        close(ours, theirs, dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    worst = float((ours.cpu().float() - theirs).abs().max())
    assert worst <= TOLERANCE[dtype] * max(1.0, float(theirs.abs().max()))


@every_dtype
@pytest.mark.parametrize("window", [None, 100])
def test_fusion_attention(dtype: torch.dtype, window: int | None) -> None:
    """Lengths around the kernel's own tiles, and one that the causal mask's corner does not cover."""
    lengths = [1, 127, 128, 129, 2500]

    def attend(kernel: str) -> Function:
        def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            layout = make_layout(lengths, query.device, kernel)
            return varlen_attention(query, key, value, layout, scale=SIZE**-0.5, window=window)

        return function

    shapes = [(sum(lengths), heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    agree(attend("npu_fusion"), attend("sdpa"), inputs, dtype)


@every_dtype
def test_attention_in_parts(dtype: torch.dtype) -> None:
    """Two parts of the keys, merged, and their gradients from the whole's output and log of sums."""
    queries, parts = (1, 127, 700), (((1, 127, 2500), True), ((64, 129, 300), False))
    query, upstream = (random(sum(queries), HEADS, SIZE, seed=seed).to(dtype) for seed in (0, 9))
    seen = [
        [random(sum(keys), GROUPS, SIZE, seed=seed).to(dtype) for seed in (2 * number + 1, 2 * number + 2)]
        for number, (keys, _) in enumerate(parts)
    ]

    def answers(kernel: PartialKernel, device: str, wide: bool) -> list[torch.Tensor]:
        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.float() if wide else tensor.to(device)

        where = [sections(queries, keys, causal, torch.device(device)) for keys, causal in parts]
        q, up, kv = moved(query), moved(upstream), [[moved(tensor) for tensor in pair] for pair in seen]
        first, second = (kernel.forward(q, *pair, at, SIZE**-0.5) for pair, at in zip(kv, where, strict=True))
        out, lse = merge(first[0].float(), first[1], *second)
        gradients = [
            kernel.backward(up, q, *pair, out.to(q.dtype), lse, at, SIZE**-0.5)
            for pair, at in zip(kv, where, strict=True)
        ]
        return [out, lse, *(one for three in gradients for one in three)]

    found, wanted = answers(FUSION_PARTS, "npu", False), answers(PLAIN, "cpu", True)
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs, dtype)


def test_no_operator_is_wrong_up_to_32768_keys() -> None:
    """The sweep of `tools/ascend_kernels.py`, with and without a mask."""
    table = Path(__file__).parents[2] / "tools" / "ascend_kernels.py"
    done = subprocess.run([sys.executable, table, "--repeat", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32768 keys, mask" in done.stdout


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("block", [16, 128])
def test_decode_over_pages(dtype: torch.dtype, block: int) -> None:
    lengths = [1, block, block + 1, 3 * block + 5]
    tables = [[7, 0, 0, 0], [3, 0, 0, 0], [1, 9, 0, 0], [5, 2, 8, 4]]
    query = random(len(lengths), HEADS, SIZE, seed=1).to(dtype)
    keys, values = (random(10 * block, GROUPS, SIZE, seed=seed).to(dtype) for seed in (2, 3))
    table, scale = torch.tensor(tables), SIZE**-0.5
    assert infer_fits(query, keys, block, None, 4 * block)
    on_device = (tensor.to("npu") for tensor in (query, keys, values, table))
    found = infer_decode(*on_device, lengths, block, scale)
    in_float = (tensor.float() for tensor in (query, keys, values))
    close(found, gathered_decode(*in_float, table, torch.tensor(lengths), block, scale, None), dtype)


@every_dtype
def test_rms_norm(dtype: torch.dtype) -> None:
    agree(
        lambda x, weight: torch_npu.npu_rms_norm(x, weight, epsilon=1e-6)[0],
        lambda x, weight: F.rms_norm(x, (896,), weight, 1e-6),
        [random(3, 50, 896), random(896, seed=1)],
        dtype,
    )


@every_dtype
def test_swiglu(dtype: torch.dtype) -> None:
    agree(
        lambda x: torch_npu.npu_swiglu(x, dim=-1),
        lambda x: F.silu(x[..., :512]) * x[..., 512:],
        [random(3, 50, 1024)],
        dtype,
    )


@every_dtype
def test_rotary(dtype: torch.dtype) -> None:
    angles = torch.arange(50)[:, None] / 10000 ** (torch.arange(SIZE) % (SIZE // 2) / (SIZE // 2))
    cos, sin = angles.cos().to(dtype)[None], angles.sin().to(dtype)[None]

    def plain(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.cat(apply_rotary_pos_emb(q, k, cos.float(), sin.float()), dim=1)

    def fused(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.cat(npu_modules.rotate(q, k, cos.to("npu"), sin.to("npu")), dim=1)

    agree(fused, plain, [random(2, HEADS, 50, SIZE), random(2, GROUPS, 50, SIZE, seed=1)], dtype)


@every_dtype
def test_modules_are_fused_by_what_they_compute(tiny_folder: Path, dtype: torch.dtype) -> None:
    """A tolerance that the device's rounding misses would leave every module as it is, and say nothing."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=dtype).to("npu")
    found = " ".join(plug_in(model, npu_modules.KERNELS))
    assert "npu_rms_norm" in found
    assert "npu_swiglu" in found
    # A function of the modelling file is replaced once in a process, not once a model.
    assert sys.modules[type(model).__module__].apply_rotary_pos_emb.tried


def test_integers_wrap_around() -> None:
    """The bits of the sampler's noise come from products and sums of int32 that wrap at 32 bits."""
    keys = torch.tensor([sequence_keys(2**63 - 1, 5, 4095), (-(2**31), 2**31 - 1)], dtype=torch.int32)
    positions = torch.tensor([131071, 0])
    found = noise_bits(keys.to("npu"), positions.to("npu"), 5000)
    assert torch.equal(found.cpu(), noise_bits(keys, positions, 5000))
    products = torch.tensor([2**31 - 1, -(2**31), 0x7EDCBA98], dtype=torch.int32, device="npu")
    wanted = [((value * -0x7A143595 + 2**31) % 2**32) - 2**31 for value in (2**31 - 1, -(2**31), 0x7EDCBA98)]
    assert products.mul_(-0x7A143595).tolist() == wanted
    assert wraps(torch.device("npu", 0))


def test_fused_adamw() -> None:
    def steps(on: str) -> torch.Tensor:
        weight = random(300, 70).to(on).requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, fused=on == "npu")
        for seed in range(1, 6):
            weight.grad = random(300, 70, seed=seed).to(on)
            optimizer.step()
        return weight.detach().cpu()

    torch.testing.assert_close(steps("npu"), steps("cpu"), atol=1e-5, rtol=1e-5)


# ---- runs against the CPU's ----


def history(recipe: Path, where: str, metric: str, *words: str) -> list[float]:
    """Train with the real command; without a kernel of the device for an operator, the run ends."""
    done = cold_lockstep(
        "train", recipe, f"device={where}", f"run.name={where}", "run.export=false", "run.allow_fallback=false", *words
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return values(recipe.parent / "runs" / where, metric)


def values(folder: Path, metric: str) -> list[float]:
    return [metrics[metric] for _, metrics in read_metrics(folder / "metrics.jsonl")]


def mean_error(ours: list[float], theirs: list[float]) -> float:
    """The documents' formula, absolute; the relative error is printed next to it."""
    apart = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"mean error {apart / len(ours):.2%}, relative {apart / max(sum(map(abs, theirs)), 1e-8):.2%}")
    return apart / len(ours)


EPS = "optim.eps=1e-4"
WAYS = {
    "fp32": [],
    "bf16": ["model.dtype=bf16"],
    "lora": ["model.lora.rank=4"],
    "checkpointing": ["model.gradient_checkpointing=true"],
    "padded": ["batch.tokens=null", "batch.micro_batch_size=2"],
}


@pytest.mark.parametrize("way", WAYS)
def test_sft_in_step_with_the_cpu(recipe_file: Path, way: str) -> None:
    ours, theirs = (history(recipe_file, where, "train/loss", EPS, *WAYS[way]) for where in ("npu", "cpu"))
    assert mean_error(ours, theirs) <= LOSS_BAR


@pytest.mark.parametrize("method", ["dpo", "kto", "rm", "prm"])
def test_preferences_in_step_with_the_cpu(tiny_folder: Path, tmp_path: Path, method: str) -> None:
    recipe = write_recipe(tmp_path, tiny_folder, method)
    ours, theirs = (history(recipe, where, "train/loss", EPS) for where in ("npu", "cpu"))
    assert mean_error(ours, theirs) <= LOSS_BAR


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["grpo", "ppo", "reinforce_pp"])
def test_rewards_in_step_with_the_cpu(online_file: Path, method: str, dtype: str) -> None:
    """In bf16 the devices round apart and their samples with them; then the bar holds over more samples only."""
    words = [f"method={method}", f"model.dtype={dtype}"]
    words += ["rollout.n=32"] if dtype == "bf16" else []
    ours, theirs = (history(online_file, where, "critic/score/mean", *words) for where in ("npu", "cpu"))
    assert mean_error(ours, theirs) <= REWARD_BAR


# ---- two ranks against one ----


@pytest.mark.torchrun
@pytest.mark.parametrize("lora", [False, True])
def test_two_ranks_over_hccl_train_what_one_does(recipe_file: Path, lora: bool) -> None:
    if Npu().count() < 2:
        pytest.skip("needs two Ascend devices")
    words = [EPS, *(["model.lora.rank=4"] if lora else [])]
    one = history(recipe_file, "npu", "train/loss", *words)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "lockstep"]
    done = python(*launch, "train", recipe_file, "device=npu", "run.name=two", "run.export=false", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    folder = recipe_file.parent / "runs"
    assert values(folder / "two", "train/loss") == pytest.approx(one, rel=1e-3)
    norms = values(folder / "npu", "train/grad_norm")
    assert values(folder / "two", "train/grad_norm") == pytest.approx(norms, rel=1e-2)
