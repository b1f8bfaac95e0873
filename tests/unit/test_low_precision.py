"""Low-precision rollouts: products against fp64, the view of the live weights, and what recipes may combine."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import SIZES, Recorder, load, native, prompts, run, slow_sample, write_model
from torch import nn
from transformers import AutoConfig, MixtralConfig, Qwen2Config

from hand_rollouts import recipe_of
from lockstep.device.base import Device
from lockstep.device.cpu import Cpu
from lockstep.device.npu import Npu
from lockstep.kernels.attention.kv_cache import KVCache, uniform_layout
from lockstep.kernels.attention.layout import Chunks, DecodePass, make_layout
from lockstep.kernels.attention.paged import PrefillPass, paged_attention
from lockstep.kernels.quantized.formats import quantize
from lockstep.kernels.quantized.projections import projections
from lockstep.kernels.quantized.token_products import dequantized_product, quantized_product, token_codes
from lockstep.model.miniature import miniature_config
from lockstep.model.policy import Policy
from lockstep.model.text_model import model_on_meta
from lockstep.preflight.batch_plan import logprob_limit
from lockstep.preflight.memory_plan import MemoryPlan, plan_memory
from lockstep.preflight.model_checks import precision_of_device
from lockstep.recipe import Recipe
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.recipe_checks import combination_problems
from lockstep.recipe.schema import Lora
from lockstep.rollout.native.native_engine import NativeEngine, quantized_view
from lockstep.rollout.servers.adapter import ServerAdapter, ServerNeeds
from lockstep.rollout.servers.sglang import Sglang
from lockstep.rollout.servers.vllm import PLUGIN, Vllm
from lockstep.rollout.servers.weight_check import CheckResult, most_of, repeat_noise, why_rejected
from lockstep.types import Completion, Request, Sampling
from refusals import has_problem, refuses

FORMATS = ("fp8", "int8")
SAMPLING = Sampling(max_tokens=12, temperature=0.8, stop_ids=(7,), seed=3)
FULL = Sampling(max_tokens=12, temperature=0.8, stop_ids=(7,), seed=3, full_precision=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2") / "model", Qwen2Config(**SIZES), tiny_folder)


@pytest.fixture
def policy(folder: Path) -> Policy:
    return load(folder)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(ids, 100 + key, 2) for key, ids in enumerate(prompts(4, longest=12))]


# -- products against fp64 ---------------------------------------------------------------------------------------------


def matrices() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    outlier, tiny = drawn(9, 48), drawn(3, 32) * 1e-30
    outlier[2, 5] = 3e4
    zeros = drawn(4, 32)
    zeros[1] = 0.0
    return {
        "normal": (drawn(5, 64), drawn(32, 64)),
        "odd": (drawn(7, 33), drawn(17, 33)),
        "one token": (drawn(1, 16), drawn(16, 16)),
        "an outlier": (outlier, drawn(16, 48) * 1e-3),
        "tiny": (tiny, drawn(16, 32)),
        "a row of zeros": (zeros, torch.cat([torch.zeros(1, 32), drawn(15, 32)])),
    }


def by_hand(x: torch.Tensor, weight: torch.Tensor, precision: str) -> torch.Tensor:
    """Both matrices rounded to the numbers of the format, multiplied in fp64."""

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        largest = {"int8": 127.0, "fp8": 448.0}[precision]
        scale = (rows.float().abs().amax(-1, keepdim=True) / largest).clamp(min=2.0**-126)
        codes = rows.float() / scale
        codes = codes.round() if precision == "int8" else codes.clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.double() * scale.double()

    return rounded(x) @ rounded(weight).t()


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("case", list(matrices()))
def test_a_product_is_that_of_the_rounded_matrices(case: str, precision: str) -> None:
    x, weight = matrices()[case]
    held = quantize(weight, precision)
    expected = by_hand(x, weight, precision)
    # An error is relative to the sum of magnitudes, of which the result is a part. One code in a row may be rounded to
    # its neighbour, where the quotient is halfway between two numbers.
    magnitude = (x.abs().double() @ weight.abs().double().t()).clamp(min=1e-300)
    for made in (
        quantized_product(x, held),
        dequantized_product(x, held.codes, held.scales, precision),  # type: ignore[arg-type]
    ):
        assert ((made.double() - expected).abs() / magnitude).max() < 1e-5
    # Rounding to eight bits itself is far larger than this tolerance, so the test sees whether both sides are rounded.
    if case == "normal":
        exact = x.double() @ weight.double().t()
        assert ((expected - exact).abs() / magnitude).max() > 1e-4


@pytest.mark.parametrize("precision", FORMATS)
def test_tokens_have_the_codes_of_a_weight(precision: str) -> None:
    for rows, _ in matrices().values():
        codes, scales = token_codes(rows, precision)
        held = quantize(rows, precision)
        assert torch.equal(codes.float(), held.codes.float())
        assert torch.equal(scales, held.scales)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", FORMATS)
def test_a_token_that_is_not_finite_stays_visible(precision: str) -> None:
    x, weight = torch.ones(3, 16), torch.ones(16, 16)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    made = quantized_product(x, quantize(weight, precision))
    assert made[0].isfinite().all()
    assert not made[1].isfinite().any()
    assert not made[2].isfinite().any()


def test_int8_products_do_not_depend_on_the_other_tokens() -> None:
    x, weight = matrices()["normal"]
    held = quantize(weight, "int8")
    alone = torch.cat([quantized_product(row[None], held) for row in x])
    assert torch.equal(alone, quantized_product(x, held))


def test_a_bias_is_added() -> None:
    x, weight = matrices()["normal"]
    held, bias = quantize(weight, "int8"), torch.arange(32.0)
    assert torch.equal(quantized_product(x[None], held, bias), quantized_product(x, held)[None] + bias)


# -- the view ----------------------------------------------------------------------------------------------------------


def names(layers: Any) -> set[str]:
    return {name.split(".", 1)[1] for name in projections(layers)}


def test_the_view_has_the_projections_of_attention_and_mlp_only(policy: Policy) -> None:
    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    assert names(policy.decoder.layers) == attention | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


def test_routers_keep_their_precision() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "layer_types"}
    model = model_on_meta(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    found = names(model.model.layers)
    assert found == {f"self_attn.{name}_proj" for name in "qkvo"}


def test_experts_that_keep_their_precision_are_named(tmp_path: Path, folder: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "layer_types"}
    config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    policy = load(write_model(tmp_path / "experts", config, folder))
    layer = policy.decoder.layers[0]
    experts = sum(one.numel() for one in layer.mlp.experts.parameters())
    attention = sum(getattr(layer.self_attn, f"{name}_proj").weight.numel() for name in "qkvo")
    share = f"{attention / (attention + experts):.0%}"
    with pytest.warns(UserWarning, match=f"rollout.precision: .*MixtralForCausalLM.* {share} .*int8"):
        quantized_view(policy, "int8")


def test_adapters_keep_their_precision(folder: Path) -> None:
    policy = load(folder, Lora(rank=2, alpha=4.0))
    found = names(policy.decoder.layers)
    assert "self_attn.q_proj.base_layer" in found
    assert not any("lora_" in name for name in found)


def rounded_forwards(policy: Policy, precision: str) -> None:
    """Replaces the forwards of the projections by plain products in fp64 of numbers that are rounded by hand."""
    for module in projections(policy.decoder.layers).values():

        def forward(x: torch.Tensor, module: nn.Linear = module) -> torch.Tensor:
            made = by_hand(x.flatten(0, -2), module.weight.detach(), precision)
            made = made if module.bias is None else made + module.bias.double()
            return made.to(x.dtype).unflatten(0, x.shape[:-1])

        module.__dict__["forward"] = forward


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapter"])
def test_samples_and_logprobs_are_those_of_the_rounded_weights(
    folder: Path, requests: list[Request], precision: str, adapted: bool
) -> None:
    policy, other = (load(folder, Lora(rank=2, alpha=4.0) if adapted else None) for _ in range(2))
    if adapted:
        for number, (one, two) in enumerate(zip(policy.trainable(), other.trainable(), strict=True)):
            for parameter in (one[1], two[1]):
                filled = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.1
                parameter.data.copy_(filled)
    made = run(native(policy, folder, precision=precision), requests, SAMPLING)
    plain = run(native(policy, folder), requests, SAMPLING)
    rounded_forwards(other, precision)
    errors, low = [], []
    for completion, unrounded in list(zip(made, plain, strict=True))[::3]:
        ids, logprobs = slow_sample(other, requests[completion.request], completion.sample, SAMPLING)
        assert completion.ids == ids
        errors += [abs(a - b) for a, b in zip(completion.logprobs, logprobs, strict=True)]
        low += [abs(a - b) for a, b in zip(completion.logprobs[:1], unrounded.logprobs[:1], strict=True)]
    # Where the quotient of an activation is almost halfway between two codes, the order of a sum decides.
    assert sum(error < 1e-3 for error in errors) >= 0.8 * len(errors)
    assert max(errors) < 0.1
    assert max(low) > 2e-2  # the weights are rounded


def logprobs_of(completions: list[Completion]) -> torch.Tensor:
    return torch.tensor(list(itertools.chain(*(one.logprobs for one in completions))))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_every_update_reaches_the_view(folder: Path, policy: Policy, requests: list[Request], captured: bool) -> None:
    """A captured graph keeps the memory of the view, so that the weights must change in the same place."""
    engine = native(policy, folder, precision="int8", free_cache=False)
    if captured:
        engine.device = Recorder()
    before = run(engine, requests, SAMPLING)
    assert engine.view is not None
    places = engine.view.addresses
    for name, parameter in policy.trainable():
        with torch.no_grad():
            parameter.mul_(1.01 if "norm" in name else 0.97).add_(0.001)
    after = run(engine, requests, SAMPLING)
    assert engine.view.addresses == places
    fresh = native(policy, folder, precision="int8")
    expected = run(fresh, requests, SAMPLING)
    assert [one.ids for one in after] == [one.ids for one in expected]
    torch.testing.assert_close(logprobs_of(after), logprobs_of(expected), rtol=0, atol=1e-5)
    assert logprobs_of(before).shape != logprobs_of(after).shape or not torch.allclose(
        logprobs_of(before), logprobs_of(after), atol=1e-3
    )


def test_the_base_of_an_adapter_is_quantised_once(folder: Path, requests: list[Request]) -> None:
    policy = load(folder, Lora(rank=2, alpha=4.0))
    engine = native(policy, folder, precision="fp8", free_cache=False)
    engine.device = Recorder()
    run(engine, requests, SAMPLING)
    assert engine.view is not None
    held = engine.view.weight("0.self_attn.q_proj.base_layer")
    held.codes.copy_(torch.zeros_like(held.codes))
    engine.view.refresh()
    assert not held.codes.float().any()  # a second quantisation would have restored it


@pytest.mark.parametrize("precision", FORMATS)
def test_validation_and_the_trainer_use_the_trained_weights(
    folder: Path, policy: Policy, requests: list[Request], precision: str
) -> None:
    plain = run(native(policy, folder), requests, SAMPLING)
    engine = native(policy, folder, precision=precision)
    low = run(engine, requests, SAMPLING)
    full = run(engine, requests, FULL)
    assert [(one.ids, one.logprobs) for one in full] == [(one.ids, one.logprobs) for one in plain]
    assert [one.logprobs for one in low] != [one.logprobs for one in plain]
    assert all("forward" not in vars(module) for module in projections(policy.decoder.layers).values())
    assert engine.view is not None
    assert engine.view.nbytes == 0  # freed together with the cache


def test_a_model_without_projections_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=4, vocab_size=SIZES["vocab_size"])
    policy = load(write_model(tmp_path / "gpt2", config, tiny_folder))
    with refuses("rollout.precision", code="unsupported-model"):
        NativeEngine(policy, Cpu(), recipe_of(rollout__precision="int8").rollout, str)


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_a_correction_is_on_by_default() -> None:
    plain, low = recipe_of(), recipe_of(rollout__precision="fp8")
    assert plain.algorithm.rollout_correction.weight == "none"
    assert low.algorithm.rollout_correction.weight == "token"
    assert logprob_limit(plain) is None
    assert logprob_limit(low) == 0.25
    assert logprob_limit(recipe_of(rollout__precision="fp8", rollout__temperature=0.5)) == 0.5


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"algorithm__rollout_correction__weight": "none"}, "algorithm.rollout_correction.weight"),
        ({"rollout__engine": "hf"}, "rollout.precision"),
        ({"parallel__tensor_parallel": 2}, "rollout.precision"),
        ({"model__quantize": "nf4", "model__lora": {"rank": 4}}, "rollout.precision"),
    ],
    ids=["correction off", "hf", "tensor parallelism", "quantised base"],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], where: str) -> None:
    values: dict[str, Any] = {"method": "grpo", "device": "cpu", "model": {"path": "m"}, "data": {"train": "rows"}}
    values["rollout"] = {"precision": "int8"}
    for key, value in keys.items():
        *parents, leaf = key.split("__")
        target = values
        for parent in parents:
            target = target.setdefault(parent, {})
        target[leaf] = value
    assert has_problem(list(combination_problems(Recipe.model_validate(with_method_defaults(values)))), where)


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm__rollout_correction__bypass": True},
        {"algorithm__rollout_correction__weight": "none", "algorithm__rollout_correction__mask": "sequence"},
        {"algorithm__rollout_correction__weight": "sequence"},
    ],
    ids=["bypass", "mask", "sequence"],
)
def test_every_correction_is_accepted(keys: dict[str, Any]) -> None:
    recipe_of(rollout__precision="int8", **keys)


def test_the_plan_counts_the_view(tiny_folder: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_folder, trust_remote_code=False)

    def planned(**keys: Any) -> MemoryPlan:
        return plan_memory(recipe_of(**keys), config, 1, 64, 4)

    def total(plan: MemoryPlan, name: str) -> int:
        return next(phase.total for phase in plan.phases if phase.name == name)

    plain, low = planned(), planned(rollout__precision="fp8")
    kept = planned(rollout__precision="fp8", rollout__free_cache=False)
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, pairs = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    shapes = [(heads * size, hidden), (hidden, heads * size), *[(pairs * size, hidden)] * 2]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    view = config.num_hidden_layers * sum(rows * (columns + 4) for rows, columns in shapes)
    assert total(low, "generation") - total(plain, "generation") == view
    assert total(low, "optimizer step") == total(plain, "optimizer step")
    assert total(kept, "optimizer step") - total(plain, "optimizer step") == view + kept.cache


# -- the KV cache in fp8 -----------------------------------------------------------------------------------------------


def rounded_heads(rows: torch.Tensor) -> torch.Tensor:
    """The numbers of e4m3 that are nearest to the rows of each head, in fp64."""
    scale = rows.double().abs().amax(-1, keepdim=True) / 448
    return (rows.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


def attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of the last token of a sequence, in fp64: (H, D), (L, G, D)."""
    shared = query.shape[0] // keys.shape[1]
    k, v = (part.repeat_interleave(shared, 1) for part in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query.double(), k) * 0.25
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "in chunks"])
def test_attention_reads_rounded_keys_and_values(chunked: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    length, heads, groups, size, block = 11, 4, 2, 16, 4
    query = torch.randn(length, heads, size, generator=generator)
    keys, values = (torch.randn(length, groups, size, generator=generator) * 3 for _ in range(2))
    cache = KVCache(uniform_layout(1, groups, size), 6, block, query, fp8=True)
    table = torch.tensor([[4, 1, 3]])
    slots = (table[0, :, None] * block + torch.arange(block)).flatten()[:length]
    made = []
    prefilled = length - 2
    bounds = [0, 5, prefilled] if chunked else [0, prefilled]
    for start, stop in itertools.pairwise(bounds):
        where = (
            Chunks.of([(start, stop)], [slots[:stop].numpy()], "sdpa", torch.device("cpu"))
            if chunked
            else make_layout([stop], torch.device("cpu"), "sdpa")
        )
        step = PrefillPass(cache, slots[start:stop], where)
        rows = query[start:stop], keys[start:stop], values[start:stop]
        made.append(paged_attention(*rows, step, 0, scale=0.25, window=None))
    for at in range(prefilled, length):
        decode = DecodePass(cache, "gather", slots[at : at + 1], table, torch.tensor([at + 1]))
        rows = query[at : at + 1], keys[at : at + 1], values[at : at + 1]
        made.append(paged_attention(*rows, decode, 0, scale=0.25, window=None))
    low = rounded_heads(keys), rounded_heads(values)
    expected = torch.stack([attended(query[at], *(part[: at + 1] for part in low)) for at in range(length)])
    exact = torch.stack(
        [attended(query[at], keys[: at + 1].double(), values[: at + 1].double()) for at in range(length)]
    )
    torch.testing.assert_close(torch.cat(made).double(), expected, rtol=0, atol=1e-5)
    assert (expected - exact).abs().max() > 1e-2


def test_blocks_are_copied_with_their_scales() -> None:
    like = torch.randn(8, 2, 16)
    cache = KVCache(uniform_layout(1, 2, 16), 4, 4, like, fp8=True)
    keys, _ = cache.fp8_layer(0)
    keys.index_copy_(0, torch.arange(4, 12), like)
    cache.copy_blocks([(1, 3), (2, 0)])
    for source, target in ((1, 3), (2, 0)):
        one, other = (keys.index_select(0, block * 4 + torch.arange(4)) for block in (source, target))
        assert torch.equal(one, other)
        assert one.any()
    assert cache.nbytes == 2 * 5 * 4 * 2 * (16 + 4)


@pytest.mark.slow
def test_samples_of_an_fp8_cache_differ_by_rounding_and_validation_does_not(
    folder: Path, policy: Policy, requests: list[Request]
) -> None:
    plain, engine = run(native(policy, folder), requests, SAMPLING), native(policy, folder, kv_cache="fp8")
    low, full = run(engine, requests, SAMPLING), run(engine, requests, FULL)
    assert [(one.ids, one.logprobs) for one in full] == [(one.ids, one.logprobs) for one in plain]
    first = [abs(one.logprobs[0] - two.logprobs[0]) for one, two in zip(low, plain, strict=True)]
    assert 1e-4 < max(first) < 0.5
    # The same samples with chunked prefill and one row at a time: a token's context is rounded in every way.
    other = run(native(policy, folder, kv_cache="fp8", prefill_tokens=3, max_sequences=1), requests, SAMPLING)
    assert [one.ids for one in other] == [one.ids for one in low]
    torch.testing.assert_close(logprobs_of(other), logprobs_of(low), rtol=0, atol=5e-2)
    assert (logprobs_of(other) - logprobs_of(low)).abs().median() < 1e-4


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_a_cache_of_latents_is_refused(tmp_path: Path, tiny_folder: Path, family: str) -> None:
    config = miniature_config(AutoConfig.for_model(family))
    policy = load(write_model(tmp_path / family, config, tiny_folder))
    with refuses("rollout.kv_cache", code="unsupported-model"):
        NativeEngine(policy, Cpu(), recipe_of(rollout__kv_cache="fp8").rollout, str)


def test_a_cache_in_fp8_is_corrected_and_counted(tiny_folder: Path) -> None:
    recipe = recipe_of(rollout__kv_cache="fp8")
    assert recipe.algorithm.rollout_correction.weight == "token"
    assert logprob_limit(recipe) == 0.25
    config = AutoConfig.from_pretrained(tiny_folder, trust_remote_code=False)
    plain, low = (plan_memory(one, config, 1, 64, 4).cache for one in (recipe_of(), recipe))
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert low / plain == pytest.approx((size + 4) / (4 * size))


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server_adapter", "flags"),
    [
        (Vllm(), ["--quantization", "fp8_per_channel"]),
        (Sglang(), ["--quantization", "fp8", "--load-format", "flash_rl"]),
    ],
    ids=["vllm", "sglang"],
)
def test_a_server_starts_with_the_quantisation_that_every_update_repeats(
    server_adapter: ServerAdapter, flags: list[str]
) -> None:
    low, plain = (server_adapter.flags(ServerNeeds("cuda", precision=one)) for one in ("fp8", None))
    at = low.index(flags[0])
    assert low[at : at + len(flags)] == flags
    assert not set(flags[::2]) & set(plain)


class Asked:
    """A server that answers with its settings."""

    address = "http://server"

    def __init__(self, info: dict[str, Any]):
        self.info = info

    def get(self, path: str, seconds: float | None = None) -> Any:
        return self.info

    def post(self, path: str, body: Any = None, seconds: float | None = None) -> Any:
        return {"results": [self.info]}


VLLM = {
    "version": "0.26.0",
    "vocabulary": 9,
    "longest": 9,
    "dtype": "bfloat16",
    "logprobs_mode": "processed_logprobs",
    "device": "cuda",
    "sleep": False,
    "lora_rank": None,
}
SGLANG = {"version": "0.5.23", "enable_deterministic_inference": True}


@pytest.mark.parametrize(
    ("server_adapter", "info", "precision", "wrong"),
    [
        (Vllm(), {**VLLM, "quantization": None}, None, 0),
        (Vllm(), {**VLLM, "quantization": "fp8_per_channel"}, "fp8", 0),
        (Vllm(), {**VLLM, "quantization": "fp8_per_channel"}, None, 1),
        (Vllm(), {**VLLM, "quantization": None}, "fp8", 1),
        (Vllm(), {**VLLM, "quantization": "fp8"}, "fp8", 1),
        (Sglang(), SGLANG, None, 0),
        (Sglang(), {**SGLANG, "quantization": "fp8", "load_format": "flash_rl"}, "fp8", 0),
        (Sglang(), {**SGLANG, "quantization": "fp8", "load_format": "auto"}, "fp8", 1),
        (Sglang(), {**SGLANG, "quantization": "fp8"}, None, 1),
        (Sglang(), {**SGLANG, "load_format": "flash_rl"}, "fp8", 1),
    ],
)
def test_a_server_with_another_quantisation_is_unfit(
    server_adapter: ServerAdapter, info: dict[str, Any], precision: str | None, wrong: int
) -> None:
    found = server_adapter.metadata(Asked(info), ServerNeeds("cuda", precision=precision))  # type: ignore[arg-type]
    assert len(found.wrong) == wrong, found.wrong


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"rollout": {"engine": "vllm", "precision": "int8"}, "model": {"dtype": "bf16"}}, "rollout.precision"),
        ({"rollout": {"engine": "vllm", "precision": "fp8"}, "model": {"dtype": "fp32"}}, "rollout.precision"),
        (
            {"rollout": {"engine": "sglang", "precision": "fp8"}, "model": {"dtype": "bf16", "lora": {"rank": 4}}},
            "rollout.precision",
        ),
        (
            {
                "rollout": {"engine": "vllm", "precision": "fp8", "server": {"args": ["--quantization", "fp8"]}},
                "model": {"dtype": "bf16"},
            },
            "rollout.server.args",
        ),
    ],
    ids=["int8", "fp32", "adapter", "own flag"],
)
def test_what_a_server_would_serve_wrong_is_refused(keys: dict[str, Any], where: str) -> None:
    values = {"method": "grpo", "device": "cuda", "data": {"train": "rows"}, "rollout": keys["rollout"]}
    values["model"] = {"path": "m", **keys["model"]}
    found = list(combination_problems(Recipe.model_validate(with_method_defaults(values))))
    assert has_problem(found, where), found


@pytest.mark.parametrize("device", [Cpu(), Npu()], ids=lambda device: device.name)
def test_servers_quantise_on_nvidia_devices_only(device: Device) -> None:
    recipe = recipe_of(rollout__engine="vllm", rollout__precision="fp8", model__dtype="bf16")
    (problem,) = precision_of_device(SimpleNamespace(recipe=recipe, device=device))  # type: ignore[arg-type]
    assert (problem.where, problem.code) == ("rollout.precision", "unsupported-dtype")


def test_the_check_of_a_quantised_server_has_wider_bounds() -> None:
    def result(off: float) -> CheckResult:
        return CheckResult([[1, 2]], torch.tensor([-1.0, -1.0]) + off, torch.tensor([-1.0, -1.0]))

    for precision, passes in ((None, False), ("fp8", True)):
        why = why_rejected(result(0.1), None, most_of(torch.bfloat16, precision), 0.0)
        assert (why is None) == passes
    assert why_rejected(result(0.3), None, most_of(torch.bfloat16, "fp8"), 0.0) is not None
    assert repeat_noise(result(0.0), result(0.0), "fp8") == 0.01
    assert repeat_noise(result(0.0), result(0.0)) == 0.0


def test_scales_that_the_server_computes_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    plugin = importlib.import_module("lockstep_vllm")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.weight_scale = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    plugin._refuse_missing(Layer(), {"weight"})
    with pytest.raises(ValueError, match="weight_scale"):
        plugin._refuse_missing(Layer(), set())
