"""Update rules against torch, transformers, torchao, bitsandbytes and written-out formulas; their states and roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

from lockstep.optimizers.adamw8bit import BLOCK, dequantize_blocks, dynamic_map, quantize_blocks
from lockstep.optimizers.muon import orthogonalised
from lockstep.optimizers.roles import roles_of
from lockstep.optimizers.rule_table import RULES, state_bytes_of
from lockstep.optimizers.stochastic_rounding import element_index, round_to_bf16, rounding_key
from lockstep.optimizers.update_rule import Roles, ShardLayout
from lockstep.recipe.keys_optim import Optim
from lockstep.train import optim_rules
from lockstep.train.optim_rules import RuleOptimizer

CPU = torch.device("cpu")
# A matrix, a stack of experts, an embedding, a vector and a matrix whose rows are no multiple of a block.
SHAPES = {"linear": (24, 512), "experts": (3, 16, 256), "embed": (20, 256), "bias": (300,), "odd": (17, 300)}
ROLES = Roles(frozenset({"embed"}), frozenset({"linear", "experts", "odd"}))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Gradients of different sizes in every row, as those of a model."""
    draw = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(shape, generator=draw) * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=draw)
        for name, shape in SHAPES.items()
    }


def optimizer_of(params: Mapping[str, nn.Parameter], masters: bool = False, **settings) -> RuleOptimizer:
    on_host, seed = settings.pop("on_host", False), settings.pop("seed", "0")
    optim = Optim(**{"clip": None, "weight_decay": 0.1, **settings})
    where = {"device": CPU, "state_on_host": on_host, "roles": ROLES, "spared": {"bias"}, "seed": seed}
    return RuleOptimizer(params.items(), optim, masters=masters, **where)


def run(optimizer: RuleOptimizer, steps: range, lr: float = 0.01) -> None:
    for step in steps:
        found = gradients(step)
        for name, parameter in optimizer.parameters.items():
            parameter.grad = found[name].to(parameter.dtype)
        optimizer.collect()
        optimizer.step(lr, optimizer.gradient_norm())


def trained(steps: int, masters: bool = False, **settings) -> dict[str, torch.Tensor]:
    params = parameters()
    run(optimizer_of(params, masters, **settings), range(steps))
    return {name: parameter.detach() for name, parameter in params.items()}


def reference(make: Callable[[dict[str, nn.Parameter]], list[torch.optim.Optimizer]], steps: int) -> dict:
    params = parameters()
    optimizers = make(params)
    for step in range(steps):
        found = gradients(step)
        for name, parameter in params.items():
            parameter.grad = found[name]
        for one in optimizers:
            one.step()
    return {name: parameter.detach() for name, parameter in params.items()}


def decayed(params: Mapping[str, nn.Parameter], names: list[str] | None = None) -> list[dict]:
    chosen = names or list(params)
    return [{"params": [params[name]], "weight_decay": 0.0 if name == "bias" else 0.1} for name in chosen]


def assert_alike(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_lion_by_hand() -> None:
    found = trained(3, name="lion", betas=[0.9, 0.98])
    for name, start in parameters().items():
        weight, mean = start.detach().double(), torch.zeros(SHAPES[name]).double()
        for step in range(3):
            gradient = gradients(step)[name].double()
            decay = 0.0 if name == "bias" else 0.1
            weight = weight - 0.01 * (torch.sign(0.9 * mean + 0.1 * gradient) + decay * weight)
            mean = 0.98 * mean + 0.02 * gradient
        torch.testing.assert_close(found[name].double(), weight, rtol=1e-6, atol=1e-6)


def test_adamw_in_fp32_is_that_of_torch() -> None:
    found = trained(3, name="adamw", betas=[0.9, 0.95])
    wanted = reference(lambda params: [torch.optim.AdamW(decayed(params), lr=0.01, betas=(0.9, 0.95))], 3)
    assert_alike(found, wanted, 1e-6)


def test_adafactor_is_that_of_torch() -> None:
    found = trained(4, name="adafactor")
    wanted = reference(lambda params: [torch.optim.Adafactor(decayed(params), lr=0.01)], 4)
    assert_alike(found, wanted, 1e-6)
    other = trained(4, name="adafactor", decay_rate=0.5, clip_threshold=2.0)
    wanted = reference(lambda params: [torch.optim.Adafactor(decayed(params), lr=0.01, beta2_decay=-0.5, d=2.0)], 4)
    assert_alike(other, wanted, 1e-6)
    assert not torch.allclose(other["linear"], found["linear"], atol=1e-4)


def test_adafactor_without_scaling_is_that_of_transformers() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    settings = {"scale_parameter": False, "relative_step": False, "warmup_init": False}
    found = trained(4, name="adafactor", scale_parameter=False)
    wanted = reference(lambda params: [optimization.Adafactor(decayed(params), lr=0.01, **settings)], 4)
    assert_alike(found, wanted, 2e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_muon_is_that_of_torch_with_adamw_for_the_rest(nesterov: bool, adjust_lr: str) -> None:
    settings = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4}
    found = trained(3, name="muon", adjust_lr=adjust_lr, **settings)

    def make(params: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        # Muon of torch takes matrices only, so each expert is a parameter of its own.
        stack = params["experts"]
        parts = [nn.Parameter(one) for one in stack.detach()]
        muon = torch.optim.Muon(
            [params["linear"], params["odd"], *parts], lr=0.01, weight_decay=0.1, adjust_lr_fn=adjust_lr, **settings
        )

        class Stacked(torch.optim.Optimizer):
            def step(self) -> None:
                for part, gradient in zip(parts, stack.grad, strict=True):
                    part.grad = gradient
                muon.step()
                stack.data.copy_(torch.stack(list(parts)).detach())

        adamw = torch.optim.AdamW(decayed(params, ["embed", "bias"]), lr=0.01, betas=(0.9, 0.95))
        return [Stacked([stack], {}), adamw]

    wanted = reference(make, 3)
    assert_alike({name: found[name] for name in ("linear", "odd")}, {n: wanted[n] for n in ("linear", "odd")}, 1e-7)
    assert_alike({name: found[name] for name in ("embed", "bias")}, {n: wanted[n] for n in ("embed", "bias")}, 1e-6)
    assert_alike({"experts": found["experts"]}, {"experts": wanted["experts"]}, 1e-7)


def test_orthogonalised_matrices_have_singular_values_about_one() -> None:
    for shape in ((8, 20), (20, 8), (3, 8, 20), (3, 20, 8)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape), 5).float())
        assert float(values.min()) > 0.3
        assert float(values.max()) < 1.4


def test_the_map_of_8_bit_codes_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        wanted = functional.create_dynamic_map(signed)
        assert torch.equal(dynamic_map(signed, CPU), wanted.float())


def written_out_codes(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest of the 256 numbers, found by comparing with all of them, block by block."""
    numbers = dynamic_map(signed, CPU).double()
    codes, scales = torch.zeros(values.shape, dtype=torch.uint8), []
    for row, place in zip(values, codes, strict=True):
        for start in range(0, len(row), BLOCK):
            block = row[start : start + BLOCK].double()
            scale = float(block.abs().max())
            scales.append(scale)
            near = (block[:, None] / max(scale, 1e-12) - numbers).abs().argmin(1)
            place[start : start + BLOCK] = near.to(torch.uint8)
    return codes, torch.tensor(scales).view(len(values), -1)


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_codes_are_the_nearest_and_no_block_crosses_a_row(signed: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    values = torch.randn(5, 600, generator=draw) * 10.0 ** torch.randint(-9, 4, (5, 1), generator=draw)
    values = values if signed else values.square()
    values[3, 256:512] = 0.0
    codes, scales = quantize_blocks(values, signed)
    wanted, sizes = written_out_codes(values, signed)
    assert scales.shape == (5, 3)
    assert torch.equal(codes, wanted)
    torch.testing.assert_close(scales, sizes.clamp(min=1e-12))
    back = dequantize_blocks(codes, scales, signed)
    assert back.shape == values.shape
    assert not back[3, 256:512].any()
    # The map is coarsest between 0.1 and 1, with steps of 0.9 / 64 (signed) or 0.9 / 128.
    steps = 0.9 / (64 if signed else 128)
    largest = scales.repeat_interleave(BLOCK, 1)[:, :600]
    assert bool(((back - values).abs() <= largest * (steps * 0.51) + 1e-30).all())
    # A row alone gives the same codes.
    assert torch.equal(quantize_blocks(values[2:3], signed)[0], codes[2:3])


def test_8_bit_adamw_is_that_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are multiples of 256 elements, the blocks are the same, and so are all codes, scales and weights."""
    torchao = pytest.importorskip("torchao.optim")
    adam = pytest.importorskip("torchao.optim.adam")
    monkeypatch.setattr(adam.torch, "compile", lambda function, **_: function)
    names = ["linear", "experts", "bias"]
    params = parameters()
    theirs = torchao.AdamW8bit(decayed(params, names), lr=0.01, betas=(0.9, 0.95))
    for step in range(4):
        for name in names:
            params[name].grad = gradients(step)[name]
        theirs.step()
    own = parameters()
    mine = optimizer_of(own, name="adamw8bit")
    run(mine, range(4))
    state = mine.full_state()
    for name in ("linear", "experts"):
        torch.testing.assert_close(own[name].detach(), params[name].detach(), rtol=1e-6, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            wanted = theirs.state[params[name]][key]
            assert torch.equal(state[f"{key}/{name}"], wanted.codes), (name, key)
            assert torch.equal(state[f"{key}_scales/{name}"].flatten(), wanted.scale), (name, key)
    torch.testing.assert_close(own["bias"].detach(), params["bias"].detach(), rtol=1e-6, atol=1e-6)


def test_8_bit_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(40, 512, generator=torch.Generator().manual_seed(5))
    for signed, numbers in ((True, values), (False, values.square())):
        table = functional.create_dynamic_map(signed)
        codes, state = functional.quantize_blockwise(numbers, code=table, blocksize=BLOCK)
        mine, scales = quantize_blocks(numbers, signed)
        torch.testing.assert_close(scales.flatten(), state.absmax)
        # On a CPU, bitsandbytes looks codes up in a table with bins of 2^-15, so its number may be farther by a bin.
        scaled = numbers.view(40, -1, BLOCK) / scales[..., None]
        farther, nearest = ((scaled - table[one.view_as(scaled).int()]).abs() for one in (codes, mine))
        assert float((farther - nearest).min()) > -1e-7
        assert float((farther - nearest).max()) < 2.0**-14


def test_8_bit_adamw_stays_near_adamw() -> None:
    params = {"exact": parameters(), "short": parameters()}
    run(optimizer_of(params["exact"], name="adamw"), range(6))
    run(optimizer_of(params["short"], name="adamw8bit"), range(6))
    start = parameters()
    for name, one in params["exact"].items():
        moved = (one - start[name]).detach()
        error = (params["short"][name].detach() - one.detach()).norm() / moved.norm()
        assert float(error) < 0.03, name
        # Embeddings, vectors and small parameters keep exact moments.
        assert (float(error) == 0) == (name in ("embed", "bias"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
def test_8_bit_adamw_on_cuda_is_that_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    place = torch.device("cuda")
    names = ["linear", "experts"]
    theirs = {name: nn.Parameter(parameters()[name].detach().to(place)) for name in names}
    mine = {name: nn.Parameter(parameters()[name].detach().to(place)) for name in names}
    other = bitsandbytes.optim.AdamW8bit(theirs.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    own = RuleOptimizer(mine.items(), Optim(name="adamw8bit", clip=None, weight_decay=0.1), masters=False, device=place)
    for step in range(4):
        for name in names:
            theirs[name].grad = gradients(step)[name].to(place)
            mine[name].grad = gradients(step)[name].to(place)
        other.step()
        own.step(0.01, own.gradient_norm())
    for name in names:
        moved = (theirs[name].detach().cpu() - parameters()[name].detach()).norm()
        assert float((theirs[name] - mine[name]).detach().cpu().norm() / moved) < 0.01


# Stochastic rounding


def test_stochastic_rounding_is_unbiased_and_never_beyond_the_neighbours() -> None:
    values = torch.cat([torch.full((100_000,), 1 + 2.0**-9), torch.full((100_000,), -3 - 2.0**-8), torch.ones(9)])
    rounded = round_to_bf16(values, rounding_key("0", "weight", 1), torch.arange(len(values))).float()
    # bf16 has steps of 2^-7 at 1 and of 2^-6 at 3: both values are a quarter of a step from their lower neighbour.
    for part, size, low in ((rounded[:100_000], 2.0**-7, 1.0), (-rounded[100_000:200_000], 2.0**-6, 3.0)):
        assert set(part.tolist()) == {low, low + size}
        # The standard deviation of the share is 0.0014.
        assert float((part > low).float().mean()) == pytest.approx(0.25, abs=0.007)
    assert bool((rounded[200_000:] == 1).all())
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    assert torch.equal(round_to_bf16(odd, 7, torch.arange(4)).isfinite(), odd.isfinite())


def test_random_numbers_depend_on_the_place_in_the_full_parameter() -> None:
    full = ShardLayout((6, 5, 4), (6, 5, 4), (0, 0, 0))
    index = element_index(full, 0, 6, CPU)
    assert torch.equal(index.flatten(), torch.arange(120))
    part = ShardLayout((6, 5, 4), (2, 5, 3), (3, 0, 1))
    assert torch.equal(element_index(part, 0, 2, CPU), index[3:5, :, 1:4])
    assert torch.equal(element_index(part, 1, 2, CPU), index[4:5, :, 1:4])
    values = torch.rand(6, 5, 4, generator=torch.Generator().manual_seed(0))
    key = rounding_key("seed", "name", 3)
    assert torch.equal(round_to_bf16(values, key, index)[3:5], round_to_bf16(values[3:5], key, index[3:5]))
    big = torch.arange(2**32 - 2, 2**32 + 2)
    assert len(set(round_to_bf16(torch.full((4,), 1.005), 5, big).tolist())) <= 2
    draws = [round_to_bf16(torch.full((1000,), 1.002), rounding_key("s", "n", c), torch.arange(1000)) for c in (1, 2)]
    assert not torch.equal(*draws)


# Without scaling, the first updates of Adafactor are as large as the learning rate.
EXTRA: dict[str, dict] = {"adafactor": {"scale_parameter": False}}


@pytest.mark.parametrize("name", list(RULES))
def test_small_updates_of_bf16_weights_survive_stochastic_rounding(name: str) -> None:
    """An update of 2^-12 per step is a 32nd of a step of bf16 at 1. Nearest rounding loses all of them."""

    def moved(rounding: bool) -> float:
        parameter = nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
        settings = Optim(name=name, weight_decay=0, clip=None, stochastic_rounding=rounding, **EXTRA.get(name, {}))
        optimizer = RuleOptimizer([("weight", parameter)], settings, masters=False, device=CPU)
        for _ in range(20):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step(2.0**-12, optimizer.gradient_norm())
        return 1 - float(parameter.detach().float().mean())

    assert moved(True) == pytest.approx(20 * 2.0**-12, rel=0.1)
    assert moved(False) == 0.0


# States


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masters", [True, False], ids=["masters", "no masters"])
@pytest.mark.parametrize("name", list(RULES))
def test_state_on_the_host_and_restored_state_go_on_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, name: str, masters: bool, dtype: torch.dtype
) -> None:
    rounding = dtype == torch.bfloat16 and not masters
    settings = {"name": name, "stochastic_rounding": rounding, "clip": 0.5}
    whole, parts = parameters(dtype), parameters(dtype)
    once = optimizer_of(whole, masters, **settings)
    run(once, range(4))
    monkeypatch.setattr(optim_rules, "ROWS_TOGETHER", 600)
    first = optimizer_of(parts, masters, on_host=True, **settings)
    run(first, range(2))
    again = {name: nn.Parameter(one.detach().clone()) for name, one in parts.items()}
    restored = optimizer_of(again, masters, **settings)
    run(restored, range(7, 9))  # what the restored state replaces
    for one, start in zip(again.values(), parts.values(), strict=True):
        one.data.copy_(start.data)
    restored.restore(first.full_state())
    run(restored, range(2, 4))
    wanted, found = once.full_state(), restored.full_state()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert all(torch.equal(again[key], value) for key, value in whole.items())
    restored.restore({key: value for key, value in wanted.items() if key.startswith("master/")})
    left = restored.full_state()
    assert not any(value.any() for key, value in left.items() if not key.startswith("master/"))


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("name", list(RULES))
def test_the_counted_bytes_are_those_of_the_state(name: str, masters: bool) -> None:
    dtype = torch.bfloat16
    state = optimizer_of(parameters(dtype), masters, name=name).full_state()
    real = sum(value.nbytes for key, value in state.items() if not key.startswith("step/"))
    assert real == state_bytes_of(Optim(name=name), ROLES, SHAPES, dtype, masters)
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    if not masters:
        # Bytes per parameter without the exceptions: two bf16 moments, two codes, means, one bf16 moment.
        most = {"adamw": 4, "adamw8bit": 3, "adafactor": 0.3, "muon": 3, "lion": 2}
        assert real <= most[name] * numbers


def test_roles_of_the_parameters_of_models() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}

    def found(config) -> tuple[set[str], set[str]]:
        with torch.device("meta"):
            roles = roles_of(AutoModelForCausalLM.from_config(config))
        return set(roles.embeddings), set(roles.matrices)

    embeddings, matrices = found(LlamaConfig(**sizes, **heads))
    assert embeddings == {"model.embed_tokens.weight"}
    layer = "model.layers.0."
    projections = [f"self_attn.{side}_proj" for side in "qkvo"] + [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    assert matrices == {f"{layer}{one}.weight" for one in projections}
    _, matrices = found(Qwen3MoeConfig(**sizes, **heads, **moe))
    assert {name for name in matrices if "experts" in name} == {
        f"{layer}mlp.experts.gate_up_proj",
        f"{layer}mlp.experts.down_proj",
    }
    assert not any("norm" in name or "lm_head" in name or "embed" in name for name in matrices)
    embeddings, matrices = found(
        GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=1)
    )
    assert embeddings == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert len(matrices) == 4
