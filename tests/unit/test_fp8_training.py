"""Training with fp8 matmuls: the numbers of a linear layer against fp64 and torchao, and what recipes may combine."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from small_models import SIZES, native, prompts, run, write_model
from torch import nn
from transformers import Qwen2Config

from lockstep.data.batching import micro_batch, to_device
from lockstep.kernels.quantized.fp8_linear import Fp8Forward, _LastInput, fp8_codes, fp8_linear, power_scale
from lockstep.model.export_check import probe_of
from lockstep.model.load import load_policy
from lockstep.recipe import Recipe
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.recipe_checks import combination_problems
from lockstep.recipe.schema import Model
from lockstep.types import Example, Origin, Request, Sampling
from refusals import has_problem, refuses

CASES = {"normal": (6, 32, 48), "odd": (5, 33, 17), "one token": (1, 16, 16)}


def drawn(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, inputs, outputs = CASES[case]
    generator = torch.Generator().manual_seed(1)
    shapes = ((tokens, inputs), (outputs, inputs), (outputs,), (tokens, outputs))
    x, weight, bias, upstream = (torch.randn(shape, generator=generator) for shape in shapes)
    x[0, 3] = 200.0  # an outlier
    return x, weight, bias, upstream


def rounded(x: torch.Tensor, *, rowwise: bool) -> torch.Tensor:
    """Numbers of e4m3 times a power of two, found by comparing magnitudes."""
    largest = x.double().abs().amax(-1, keepdim=True) if rowwise else x.double().abs().max()
    exponent = torch.floor(torch.log2(448.0 / largest.clamp(min=1e-12)))
    scale = torch.exp2(exponent)
    return (x.double() * scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() / scale


@pytest.mark.parametrize("case", list(CASES))
def test_output_and_gradients_are_those_of_the_rounded_matrices(case: str) -> None:
    x, weight, bias, upstream = drawn(case)
    inputs = [one.clone().requires_grad_() for one in (x, weight, bias)]
    out = fp8_linear(inputs[0][None], inputs[1], inputs[2])[0]
    grads = torch.autograd.grad(out, inputs, upstream)
    expected = rounded(x, rowwise=True) @ rounded(weight, rowwise=True).t() + bias.double()
    by_hand = (
        rounded(upstream, rowwise=True) @ rounded(weight, rowwise=False),
        upstream.double().t() @ x.double(),
        upstream.double().sum(0),
    )
    for made, wanted in ((out, expected), *zip(grads, by_hand, strict=True)):
        assert ((made.double() - wanted).abs().max() / wanted.abs().max()) < 1e-6
    assert not torch.allclose(out, x @ weight.t() + bias, rtol=1e-4)  # it rounds


@pytest.mark.parametrize("largest", [0.0, 1e-20, 0.3, 1.0, 448.0, 449.0, 3e38])
def test_a_scale_is_the_largest_power_of_two_that_does_not_overflow(largest: float) -> None:
    scale = float(power_scale(torch.tensor([largest])))
    assert scale == 2.0 ** round(torch.log2(torch.tensor(scale)).item())
    if largest >= 1e-12:
        assert scale * largest <= 448.0 < 2 * scale * largest


@pytest.mark.parametrize("case", ["normal", "one token"])
def test_it_is_the_formula_of_torchao(case: str) -> None:
    """With the wheel of torchao on the path."""
    float8 = pytest.importorskip("torchao.float8")
    x, weight, bias, upstream = drawn(case)
    plain = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        plain.weight.copy_(weight)
        plain.bias.copy_(bias)
    config = float8.Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    object.__setattr__(config, "emulate", True)
    theirs = float8.float8_linear.Float8Linear.from_float(plain, config)
    leaf, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = torch.autograd.grad((out := theirs(leaf)), [leaf, theirs.weight], upstream)
    parameter = weight.clone().requires_grad_()
    made = torch.autograd.grad((mine := fp8_linear(ours, parameter, bias)), [ours, parameter], upstream)
    torch.testing.assert_close(mine, out, rtol=1e-6, atol=1e-4)
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-4)


def test_only_the_input_and_the_weight_itself_and_its_scales_are_kept() -> None:
    """A sharded weight is gathered again for the backward pass only if it is saved itself."""
    x, weight, _, _ = drawn("normal")
    parameter = nn.Parameter(weight)
    out = fp8_linear(x.requires_grad_(), parameter, None)
    product = out.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    saved = product.saved_tensors  # type: ignore[union-attr]
    assert [one.data_ptr() for one in saved[:2]] == [x.data_ptr(), parameter.data_ptr()]
    assert [tuple(one.shape) for one in saved[2:]] == [(len(weight), 1)]


def test_layers_with_the_same_input_quantise_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(x))
        return fp8_codes(x)

    monkeypatch.setattr("lockstep.kernels.quantized.fp8_linear.fp8_codes", counted)
    x, weights = torch.randn(7, 32), [torch.randn(16, 32) for _ in range(3)]
    alone = [fp8_linear(x.clone(), weight, None) for weight in weights]
    sizes.clear()
    assert all(map(torch.equal, [fp8_linear(x, weight, None) for weight in weights], alone))
    assert sizes.count(7) == 1
    # The same tensor with other values (scales are powers of two), and another tensor with the same values.
    x.mul_(2.0)
    assert torch.equal(fp8_linear(x, weights[0], None), 2 * alone[0])
    assert torch.equal(fp8_linear(x.clone(), weights[0], None), 2 * alone[0])
    assert sizes.count(7) == 3


def test_threads_do_not_share_the_codes_of_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread quantises its input, another thread computes a layer and so replaces the last input."""
    x, other, weight = torch.randn(7, 32), torch.randn(7, 32), torch.randn(16, 32)
    expected = fp8_linear(x.clone(), weight, None)
    threads = [Thread(target=fp8_linear, args=(other, weight, None))]

    class Replaced(_LastInput):
        """Another thread runs after each assignment."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if value is not None and threads:
                thread = threads.pop()
                thread.start()
                thread.join()

    monkeypatch.setattr("lockstep.kernels.quantized.fp8_linear._LAST_INPUT", Replaced())
    assert torch.equal(fp8_linear(x, weight, None), expected)
    assert not threads


def test_codes_of_a_matrix_of_zeros_are_zeros() -> None:
    codes, scale = fp8_codes(torch.zeros(2, 4))
    assert not codes.float().any()
    assert scale.isfinite().all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("fp8") / "model", Qwen2Config(**SIZES), tiny_folder)


def test_policy_and_engine_compute_in_fp8_and_the_reference_does_not(folder: Path) -> None:
    settings = Model(path=str(folder), matmul="fp8", matmul_exclude_ends=0)
    policy = load_policy(settings, torch.device("cpu"), "sdpa", 0)
    reference = load_policy(settings, torch.device("cpu"), "sdpa", 0, frozen=True)
    replaced = [name for name, one in policy.model.named_modules() if isinstance(vars(one).get("forward"), Fp8Forward)]
    assert len(replaced) == 7 * SIZES["num_hidden_layers"]
    assert not any("lm_head" in name or "embed" in name for name in replaced)
    assert not any(isinstance(vars(one).get("forward"), Fp8Forward) for one in reference.modules())
    ids = prompts(1, longest=12)[0]
    (made,) = run(native(policy, folder), [Request(ids, 0)], Sampling(max_tokens=8, seed=1))
    row = Example([*ids, *made.ids], [0] * len(ids) + [1] * len(made.ids), Origin("test", 0))
    batch = to_device(micro_batch([row], packed=True, pad_id=0), torch.device("cpu"))
    engine = torch.tensor(made.logprobs)
    with torch.no_grad():
        low, full = (one.eval()(batch).logprobs_K for one in (policy, reference))
    # Engine and trainer have the same formula. Where an activation is halfway between two codes, sums decide.
    assert (engine - low).abs().median() < 1e-3
    assert (engine - full).abs().median() > 1e-2


def test_an_export_is_compared_with_the_model_without_fp8(folder: Path) -> None:
    """Plain transformers computes no fp8 matmuls."""
    policies = [
        load_policy(Model(path=str(folder), **keys), torch.device("cpu"), "sdpa", 0)
        for keys in ({"matmul": "fp8", "matmul_exclude_ends": 0}, {})
    ]
    fp8, plain = (probe_of(policy, torch.device("cpu")) for policy in policies)
    assert fp8 == plain
    assert any(isinstance(vars(one).get("forward"), Fp8Forward) for one in policies[0].modules())


def test_layers_at_both_ends_keep_their_matmuls(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> None:
    config = Qwen2Config(**{**SIZES, "num_hidden_layers": 5})
    deep = write_model(tmp_path_factory.mktemp("deep") / "model", config, tiny_folder)
    for ends, inner in ((1, {"1", "2", "3"}), (2, {"2"})):
        settings = Model(path=str(deep), matmul="fp8", matmul_exclude_ends=ends)
        policy = load_policy(settings, torch.device("cpu"), "sdpa", 0)
        names = [name for name, one in policy.model.named_modules() if isinstance(vars(one).get("forward"), Fp8Forward)]
        assert {name.partition("layers.")[2].split(".")[0] for name in names} == inner
        assert len(names) == 7 * len(inner)
    with refuses("model.matmul_exclude_ends", "out-of-range", "all 5 layers", remedy="at most 2"):
        settings = Model(path=str(deep), matmul="fp8", matmul_exclude_ends=3)
        load_policy(settings, torch.device("cpu"), "sdpa", 0)


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"model": {"lora": {"rank": 4}}}, "model.matmul"),
        ({"model": {"dtype": "fp16"}}, "model.matmul"),
        ({"parallel": {"tensor_parallel": 2}}, "model.matmul"),
    ],
    ids=["adapter", "fp16", "tensor parallelism"],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], where: str) -> None:
    model = {"path": "m", "matmul": "fp8", **keys.get("model", {})}
    values = {"method": "sft", "device": "cpu", "data": {"train": "rows"}, **keys, "model": model}
    found = list(combination_problems(Recipe.model_validate(with_method_defaults(values))))
    assert has_problem(found, where)
