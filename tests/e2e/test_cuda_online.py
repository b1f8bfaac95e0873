"""The built-in engine and the online loop on an NVIDIA device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from lockstep.device.select import select
from lockstep.kernels.invariant import products_by_row
from lockstep.kernels.sampling import sequence_keys
from lockstep.model.check import build_miniature, try_architecture
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.schema import Model
from lockstep.rollout.engine_check import try_engine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.sampler import choose
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.online import train_online
from lockstep.types import Completion, Request, Sampling

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 32), (14, 2, 64), (3, 3, 40), (8, 1, 128)])
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("block", [1, 16])
def test_paged_decode_equals_its_twin(dtype, heads, groups, size, window, block) -> None:
    from lockstep.kernels.attention.paged import gathered_decode
    from lockstep.kernels.attention.paged_triton import paged_decode

    torch.manual_seed(0)
    lengths = torch.tensor([1, 7, 64, 65, 200], device="cuda")
    width = -(-200 // block)
    blocks = 5 * width
    keys, values = (torch.randn(blocks * block, groups, size, device="cuda", dtype=dtype) for _ in range(2))
    table = torch.randperm(blocks, device="cuda").view(5, width)
    query = torch.randn(5, heads, size, device="cuda", dtype=dtype)
    common = (query, keys, values, table, lengths, block, size**-0.5, window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    sinks = torch.linspace(-3, 4, heads, device="cuda")
    for more in ((), (2.0, None), (None, sinks), (2.0, sinks.to(dtype))):
        twin = gathered_decode(*common, *more)
        for splits in (None, 1, 4):
            found = paged_decode(*common, *(more or (None, None)), None, splits)
            torch.testing.assert_close(found, twin, rtol=tolerance, atol=tolerance)
            # The last token's keys and values are not there yet: they are read, and written where they belong.
            last = lengths - 1
            slots = table.gather(1, (last // block)[:, None])[:, 0] * block + last % block
            poor = keys.index_fill(0, slots, 7.0), values.index_fill(0, slots, 7.0)
            new = keys[slots].transpose(0, 1).contiguous().transpose(0, 1), values[slots]
            found = paged_decode(query, *poor, *common[3:], *(more or (None, None)), new, splits)
            torch.testing.assert_close(found, twin, rtol=tolerance, atol=tolerance)
            assert torch.equal(poor[0], keys)
            assert torch.equal(poor[1], values)


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", "deepseek_v32", "gemma4_text", "mimo_v2_flash", "diffllama", "llama4_text", "minimax_m3_vl_text"],
)
def test_the_engine_equals_transformers(name: str) -> None:
    """Latents, indexers, shared planes, several sizes, several calls and chunks with the kernels of the device."""
    device = select("cuda")
    miniature = build_miniature(AutoConfig.for_model(name), device.attention, torch.device("cuda"))
    try_architecture(miniature)
    try_engine(miniature, device)


WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 40},
    {"top_k": 20, "score_truncated": True},
    {"top_p": 0.8},
    {"min_p": 0.05, "score_truncated": True},
    {"temperature": 0.6, "top_k": 200, "top_p": 0.9, "min_p": 0.001, "score_truncated": True},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("batch", "vocabulary"), [(1, 151_936), (7, 50_257), (333, 4096), (1024, 151_936)])
def test_the_fused_sampler_draws_the_tokens_of_its_twin(way: dict[str, Any], batch: int, vocabulary: int) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    # Sorting all rows of the largest case takes more memory than it shows.
    batch = min(batch, 128) if "top_p" in way else batch
    logits = torch.randn(batch, vocabulary, device="cuda", generator=draw) * 3
    keys = torch.tensor([sequence_keys(5, row, row % 8) for row in range(batch)], dtype=torch.int32, device="cuda")
    positions = torch.arange(batch, device="cuda") * 17
    for dtype in (torch.float32, torch.bfloat16):
        rows, sampling = logits.to(dtype), Sampling(1, **way)
        tokens, logprobs = choose(rows, sampling, keys, positions, kernel="triton")
        twins, scores = choose(rows, sampling, keys, positions)
        assert torch.equal(tokens, twins)
        torch.testing.assert_close(logprobs, scores, rtol=0, atol=4e-6)


def test_a_drawn_token_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(300, 151_936, device="cuda", dtype=torch.bfloat16)
    keys = torch.randint(-(2**31), 2**31, (300, 2), device="cuda").to(torch.int32)
    positions = torch.arange(300, device="cuda")
    together = choose(logits, Sampling(1), keys, positions, kernel="triton")
    alone = choose(logits[7:8], Sampling(1), keys[7:8], positions[7:8], kernel="triton")
    assert all(torch.equal(a[7:8], b) for a, b in zip(together, alone, strict=True))


def prompts() -> list[Request]:
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 60, (20,), generator=draw).tolist()
    return [
        Request(torch.randint(0, 256, (length,), generator=draw).tolist(), key, 3) for key, length in enumerate(lengths)
    ]


def generate(folder: Path, device_name: str, dtype: str, **settings: int) -> list[Completion]:
    device = select(device_name)
    policy = load_policy(Model(path=str(folder), dtype=dtype), device.torch_device(), device.attention, seed=0)  # type: ignore[arg-type]
    engine = NativeEngine(policy, device, RolloutSettings(**settings), load_tokenizer(str(folder)).decode)  # type: ignore[arg-type]
    made = engine.generate(prompts(), Sampling(max_tokens=30, stop_ids=(7, 9, 33), seed=5))
    return sorted(made, key=lambda c: (c.request, c.sample))


def test_samples_are_those_of_the_cpu(tiny_folder: Path) -> None:
    """fp32, the same noise: a sample differs only where two tokens are within rounding of each other."""
    cpu, cuda = generate(tiny_folder, "cpu", "fp32"), generate(tiny_folder, "cuda", "fp32")
    equal = [a.ids == b.ids for a, b in zip(cpu, cuda, strict=True)]
    assert sum(equal) >= 0.95 * len(equal)
    for a, b, same in zip(cpu, cuda, equal, strict=True):
        if same:
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


def test_captured_passes_equal_eager_ones(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.device.cuda import Cuda

    captured = generate(tiny_folder, "cuda", "fp32", max_sequences=13)
    monkeypatch.setattr(Cuda, "graph_capture", False)
    eager = generate(tiny_folder, "cuda", "fp32", max_sequences=13)
    equal = [a.ids == b.ids for a, b in zip(captured, eager, strict=True)]
    assert sum(equal) >= 0.98 * len(equal)


def test_fused_layers_generate_what_the_modules_do(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.device.cuda import Cuda

    fused = generate(tiny_folder, "cuda", "fp32", max_sequences=13)
    monkeypatch.setattr(Cuda, "generating_layers", "modules")
    plain = generate(tiny_folder, "cuda", "fp32", max_sequences=13)
    equal = [a.ids == b.ids for a, b in zip(fused, plain, strict=True)]
    assert sum(equal) >= 0.98 * len(equal)
    for a, b, same in zip(fused, plain, equal, strict=True):
        if same:
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


def test_weights_side_by_side_are_those_that_are_trained(tiny_folder: Path) -> None:
    """A change of a parameter shows in what is generated next, through the passes that were recorded before it."""
    device = select("cuda")
    policy = load_policy(Model(path=str(tiny_folder), dtype="fp32"), device.torch_device(), device.attention, seed=0)
    engine = NativeEngine(policy, device, RolloutSettings(free_cache=False), load_tokenizer(str(tiny_folder)).decode)
    sampling = Sampling(max_tokens=8, temperature=0.0)

    def scores() -> list[float]:
        made = sorted(engine.generate(prompts()[:4], sampling), key=lambda c: (c.request, c.sample))
        return [score for one in made for score in one.logprobs]

    names = [name for name, _ in policy.named_parameters()]
    before = scores()
    assert engine._layers is not None
    places = [parameter.data_ptr() for parameter in policy.parameters()]
    with torch.no_grad():
        for layer in policy.layers():
            layer.self_attn.v_proj.weight.mul_(1.5)
            layer.mlp.up_proj.weight.mul_(1.5)
    after = scores()
    assert places == [parameter.data_ptr() for parameter in policy.parameters()]
    assert names == [name for name, _ in policy.named_parameters()]
    assert before != after
    engine.release_memory()
    engine._layers = None
    assert after == pytest.approx(scores(), abs=1e-3)


@pytest.mark.parametrize("method", sorted(ONLINE))
def test_online_fp32_is_in_step_with_the_cpu(online_file: Path, tmp_path: Path, method: str) -> None:
    more = [f"method={method}"]
    if method == "on_policy_distill":
        write_tiny(tmp_path / "teacher", hidden=64, layers=2, seed=1)
        more.append(f"algorithm.kl.reference={tmp_path / 'teacher'}")
    grouped = load_recipe(str(online_file), more).rollout.n > 1
    more.append(f"rollout.n={3 if grouped else 1}")
    for device in ("cpu", "cuda"):
        words = [*more, f"device={device}", f"run.name={device}"]
        train_online(load_recipe(str(online_file), words), Console.silent())
    cpu, cuda = ([m for _, m in read_metrics(tmp_path / "runs" / d / "metrics.jsonl")] for d in ("cpu", "cuda"))
    for name in ("critic/rewards/mean", "actor/entropy", "actor/grad_norm"):
        assert [m[name] for m in cuda] == pytest.approx([m[name] for m in cpu], rel=0.02, abs=1e-3), name


def test_online_bf16_engine_and_trainer_agree(online_file: Path, tmp_path: Path) -> None:
    words = ["device=cuda", "model.dtype=bf16", "run.steps=3"]
    train_online(load_recipe(str(online_file), words), Console.silent())
    for _, metrics in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl"):
        assert metrics["training/rollout_probs_diff_mean"] < 0.01


WORDS: list[list[str]] = [
    [],
    ["rollout.temperature=0.7", "rollout.top_k=20", "rollout.truncated_sampling=mask"],
    ["method=ppo", "rollout.n=1"],
    ["model.lora.rank=4"],
]


@pytest.mark.parametrize("more", WORDS, ids=lambda words: "-".join(words) or "plain")
def test_a_deterministic_run_generates_and_trains_on_the_same_bits(
    online_file: Path, tmp_path: Path, more: list[str]
) -> None:
    words = ["device=cuda", "model.dtype=bf16", "run.steps=3", "run.deterministic=true", *more]
    try:
        train_online(load_recipe(str(online_file), words), Console.silent())
    finally:
        select("cuda").deterministic(False)
        products_by_row(False)
    found = [metrics for _, metrics in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")]
    assert len(found) == 3
    assert [metrics["training/rollout_probs_diff_max"] for metrics in found] == [0.0, 0.0, 0.0]


def test_memory_that_torch_holds_for_nobody_is_free() -> None:
    device = select("cuda")
    torch.cuda.synchronize()
    before = device.memory().free
    used = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    assert before - device.memory().free > 2**29
    del used
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= 2**30
    assert abs(device.memory().free - before) < 2**28


def test_memory_of_the_cache_is_given_back(tiny_folder: Path) -> None:
    generate(tiny_folder, "cuda", "bf16")  # libraries take their workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    generate(tiny_folder, "cuda", "bf16")
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**22
