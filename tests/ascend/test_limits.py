"""The operators' documented limits: the emulator refuses what is outside them, and lockstep does not ask for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from transformers import AutoModelForCausalLM, LlamaConfig

from ascend_emulator import report
from lockstep.kernels import fused_modules
from lockstep.kernels.attention.kv_cache import KVCache, uniform_layout
from lockstep.kernels.attention.layout import DecodePass, make_layout
from lockstep.kernels.attention.npu_attention import corner
from lockstep.kernels.attention.paged import decode_attention, gathered_decode
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.kernels.fused_modules import plug_rotary
from lockstep.kernels.fused_modules_npu import KERNELS

pytestmark = pytest.mark.ascend
NPU = torch.device("npu")
FP16, BF16 = torch.float16, torch.bfloat16
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def plug_in(model: torch.nn.Module) -> list[str]:
    return fused_modules.plug_in(model, KERNELS)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ran() -> set[str]:
    return {operator.name for operator in report.operators()}


# ---- the emulator refuses ----


def packed(heads: int = 2, size: int = 16, groups: int | None = None, **change: Any) -> None:
    query, key = (random(4, n, size).to(NPU) for n in (heads, groups or heads))
    call = {"atten_mask": corner(NPU), "sparse_mode": 3, "actual_seq_qlen": [4], "actual_seq_kvlen": [4], **change}
    torch_npu.npu_fusion_attention(query, key, key, heads, "TND", **call)


def decode(
    heads: int = 4, size: int = 16, groups: int = 2, block: int = 16, length: int = 5, turned: bool = False
) -> None:
    query = random(1, 1, heads * size, dtype=FP16).to(NPU)
    if turned:
        query = random(heads * size, 1, 2, dtype=FP16).to(NPU).permute(2, 1, 0)[:1]
        query = query.expand(2, 1, -1)
    cache = torch.zeros(2, block, groups * size, dtype=FP16, device=NPU)
    torch_npu.npu_fused_infer_attention_score(
        query,
        cache,
        cache,
        actual_seq_lengths_kv=[length] * query.shape[0],
        block_table=torch.tensor([[0, 1]] * query.shape[0], dtype=torch.int32, device=NPU),
        num_heads=heads,
        num_key_value_heads=groups,
        input_layout="BSH",
        block_size=block,
    )


def rotary(shape: tuple[int, ...] = (1, 2, 3, 8), angles: tuple[int, ...] = (1, 1, 3, 8), scale: float = 1.0) -> None:
    cos, sin = ((random(*angles, seed=1).cos() * scale).to(NPU), random(*angles, seed=1).sin().to(NPU))
    torch_npu.npu_rotary_mul(random(*shape).to(NPU), cos, sin)


def norm(*shape: int, weight: torch.dtype = torch.float32) -> None:
    torch_npu.npu_rms_norm(random(*shape).to(NPU), torch.ones(shape[-1], device=NPU, dtype=weight))


def swiglu(*shape: int, dtype: torch.dtype = torch.float32) -> None:
    torch_npu.npu_swiglu(random(*shape).to(NPU, dtype))


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "the compressed mask as a whole one": (
        lambda: packed(sparse_mode=0),
        "sparse_mode 0 takes the full mask of 4 x 4",
    ),
    "the compressed mask as all of it": (lambda: packed(sparse_mode=1), "sparse_mode 1 takes the full mask of 4 x 4"),
    "257 heads": (lambda: packed(heads=257), "257 heads"),
    "heads of 769": (lambda: packed(size=769), "head size 769"),
    "query heads that do not divide": (lambda: packed(heads=3, groups=2), "3 query heads to 2 key heads"),
    "1025 sequences": (
        lambda: packed(actual_seq_qlen=[1] * 1021 + [1, 2, 3, 4], actual_seq_kvlen=[1] * 1021 + [1, 2, 3, 4]),
        "1025 sequences",
    ),
    "blocks of 528": (lambda: decode(block=528), "up to 512"),
    "blocks of 24": (lambda: decode(block=24), "multiple of 16"),
    "257 decoding heads": (lambda: decode(heads=260, groups=65), "260 heads"),
    "decoding heads of 513": (lambda: decode(size=513), "head size 513"),
    "too many keys": (lambda: decode(length=2**18 + 1), "262145 keys"),
    "keys too wide": (lambda: decode(heads=128, groups=128, size=512), "65536 wide"),
    "a query that is not contiguous": (lambda: decode(turned=True), "not contiguous"),
    "angles beyond 1": (lambda: rotary(scale=1.2), "within"),
    "an odd head": (lambda: rotary((1, 2, 3, 7), (1, 1, 3, 7)), "head size 7"),
    "a rotary head of 896": (lambda: rotary((1, 2, 3, 896), (1, 1, 3, 896)), "head size 896"),
    "1000 rows": (lambda: rotary((1000, 2, 3, 8)), r"\(1000, 2, 3, 8\)"),
    "angles of another length": (lambda: rotary((2, 2, 3, 8), (1, 1, 1, 8)), r"with \(1, 1, 1, 8\)"),
    "a weight of another type": (lambda: norm(2, 8, weight=BF16), "torch.bfloat16"),
    "a norm of one dimension": (lambda: norm(8), "1 dimensions"),
    "a swiglu of fp64": (lambda: swiglu(2, 8, dtype=torch.float64), "float64"),
    "a swiglu that cannot be halved": (lambda: swiglu(2, 7), "halved"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_documents_refuse_is_refused(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(RuntimeError, match=words):
        call()


def test_the_same_calls_inside_the_limits_pass() -> None:
    packed(heads=256, groups=2)
    packed(atten_mask=torch.ones(4, 4, dtype=torch.bool, device=NPU).triu(1), sparse_mode=0)
    decode(block=512)
    decode(heads=256, groups=4)
    rotary((999, 2, 3, 8))
    norm(2, 8)
    swiglu(2, 8)


# ---- lockstep asks for none of it ----


@pytest.mark.parametrize(("heads", "fused"), [(256, True), (257, False)])
def test_packed_attention_of_many_heads(heads: int, fused: bool) -> None:
    tensors = [random(5, heads, 8, seed=seed) for seed in range(3)]
    report.clear()
    on_device = [tensor.to(NPU) for tensor in tensors]
    found = varlen_attention(*on_device, make_layout([2, 3], NPU, "npu_fusion"), scale=0.3)
    assert ("npu::npu_fusion_attention" in ran()) == fused
    wanted = varlen_attention(*tensors, make_layout([2, 3], torch.device("cpu"), "sdpa"), scale=0.3)
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("block", "heads", "size", "fused"),
    [(512, 4, 16, True), (528, 4, 16, False), (16, 260, 16, False), (16, 4, 520, False), (16, 4, 512, True)],
)
def test_decoding_outside_the_limits(block: int, heads: int, size: int, fused: bool) -> None:
    groups = heads // 4
    cache = KVCache(uniform_layout(1, groups, size), 3, block, torch.empty(0, dtype=BF16, device=NPU))
    cache.tensors[0].copy_(random(*cache.tensors[0].shape, dtype=BF16))
    keys, values = cache.layer(0)
    table, lengths = torch.tensor([[2, 1], [0, 0]], device=NPU), torch.tensor([block + 3, 3], device=NPU)
    query = random(2, heads, size, dtype=BF16, seed=3).to(NPU)
    step = DecodePass(cache, "npu_infer", torch.zeros(2, dtype=torch.long), table, lengths)
    report.clear()
    found = decode_attention(query, keys, values, step, size**-0.5, None)
    assert ("npu::npu_fused_infer_attention_score" in ran()) == fused
    host = [tensor.cpu().float() for tensor in (query, keys, values)]
    wanted = gathered_decode(*host, table.cpu(), lengths.cpu(), block, size**-0.5, None)
    torch.testing.assert_close(found.cpu().float(), wanted, atol=2e-2, rtol=2e-2)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def small(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 256, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return model.to(dtype)


def logits(model: Any, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[3, 1, 4, 1, 5, 9]], device=device)).logits.float().cpu()


def test_scaled_angles_do_not_reach_the_operator() -> None:
    """Also where an unscaled model of the same modelling file came first, and after it again."""
    for rope, fused in ((PLAIN, True), (YARN, False), (PLAIN, True)):
        model = small(rope_parameters=rope)
        assert (model.model.rotary_emb.attention_scaling > 1) == (not fused)
        wanted = logits(model, torch.device("cpu"))
        plug_in(model.to(NPU))
        report.clear()
        torch.testing.assert_close(logits(model, NPU), wanted, atol=1e-4, rtol=1e-4)
        assert ("npu::npu_rotary_mul" in ran()) == fused


def test_a_norm_whose_weight_has_another_type_stays_plain() -> None:
    model = small(BF16)
    plug_in(model.to(NPU))
    model.model.norm.to(torch.float32)
    rows = random(1, 3, 32, dtype=BF16).to(NPU)
    report.clear()
    out = model.model.norm(rows)
    assert "npu::npu_rms_norm" not in ran()
    assert torch.equal(out, type(model.model.norm).forward(model.model.norm, rows))


# ---- probes ----


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
def test_probes_have_the_type_and_the_shapes_of_the_model(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[tuple[Any, ...]]] = {}
    for name in ("npu_rms_norm", "npu_swiglu", "npu_rotary_mul"):
        operator = getattr(torch_npu, name)

        def recorded(x: torch.Tensor, *more: Any, of: str = name, run: Any = operator, **named: Any) -> Any:
            seen.setdefault(of, set()).add((x.dtype, *x.shape[1:]))
            return run(x, *more, **named)

        monkeypatch.setattr(torch_npu, name, recorded)
    # Sizes that no other test has tried in this process.
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 40}
    plug_in(small(dtype, **sizes).to(NPU))
    assert seen["npu_rms_norm"] == {(dtype, 64, 48)}
    assert seen["npu_swiglu"] == {(dtype, 64, 80)}
    assert seen["npu_rotary_mul"] == {(dtype, 6, 64, 8), (dtype, 3, 64, 8)}


def test_an_error_that_comes_up_late_is_the_probe_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's error surfaces at a wait. Here the first wait raises it, as a device would."""

    def wait() -> None:
        raise RuntimeError("the kernel of the last operator stopped, error code is 507015")

    monkeypatch.setattr(torch_npu.npu, "synchronize", wait)
    model = small(hidden_size=24, num_attention_heads=3, num_key_value_heads=3)
    with pytest.warns(UserWarning, match=r"LlamaRMSNorm stays plain torch: npu_rms_norm failed on a trial.*507015"):
        replaced = plug_in(model.to(NPU))
    assert replaced == []
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_an_operator_that_gives_other_numbers_is_left_out_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch_npu.npu_swiglu
    monkeypatch.setattr(torch_npu, "npu_swiglu", lambda x, dim: own(x, dim=dim) * 1.01)
    with pytest.warns(UserWarning, match="LlamaMLP stays plain torch: npu_swiglu gives different results"):
        replaced = plug_in(small().to(NPU))
    assert not any("npu_swiglu" in line for line in replaced)


def test_answers_of_another_number_are_another_function() -> None:
    one = torch.ones(2, device=NPU)
    assert KERNELS.trial.alike("this", "that", lambda: [one, one], lambda: [one, one])
    with pytest.warns(UserWarning, match="this stays plain torch: that failed on a trial"):
        assert not KERNELS.trial.alike("this", "that", lambda: [one, one], lambda: [one])


def test_a_module_that_does_not_say_its_heads_keeps_its_rotation() -> None:
    assert plug_rotary(torch.nn.Linear(4, 4).to(NPU), KERNELS.rotary, KERNELS.trial) == []


def test_a_probe_without_a_problem_says_nothing() -> None:
    """It draws from a generator of its own, too: a run's random numbers are those of a run without probes."""
    model = small().to(NPU)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replaced = plug_in(model)
    assert any("npu_rotary_mul" in line for line in replaced)
    assert torch.equal(torch.get_rng_state(), state)


# ---- what reaches the operators ----


@pytest.mark.parametrize("epsilon", [1e-2, 1e-5])
def test_the_norm_s_own_epsilon_reaches_the_operator(epsilon: float) -> None:
    """On rows so small that the epsilon decides, where the operator's default of 1e-6 would be far off."""
    model = small(rms_norm_eps=epsilon)
    norm = model.model.norm
    rows = random(1, 5, 32) * 1e-3
    wanted = norm(rows)
    assert any("npu_rms_norm" in line for line in plug_in(model.to(NPU)))
    report.clear()
    torch.testing.assert_close(norm(rows.to(NPU)).cpu(), wanted, atol=1e-6, rtol=1e-5)
    assert "npu::npu_rms_norm" in ran()


@pytest.mark.parametrize(("window", "mode"), [(None, 3), (4, 4)])
def test_the_sparse_mode_of_the_packed_operator(window: int | None, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    operator = torch_npu.npu_fusion_attention
    monkeypatch.setattr(
        torch_npu, "npu_fusion_attention", lambda *a, **named: calls.append(named) or operator(*a, **named)
    )
    tensors = [random(9, 2, 16, seed=seed).to(NPU) for seed in range(3)]
    varlen_attention(*tensors, make_layout([9], NPU, "npu_fusion"), scale=0.25, window=window)
    (call,) = calls
    assert call["sparse_mode"] == mode
    assert (call["pre_tockens"], call["next_tockens"]) == (3 if window else 2**31 - 1, 0)
    assert torch.equal(call["atten_mask"].cpu(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
