"""nf4, int8 and fp8: the codes, scales and values of bitsandbytes and torchao, and what holds for every weight."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import quantized_reference
from draws import draws
from interpreter import interpreted, needs_interpreter
from lockstep.kernels.quantized import formats, product
from lockstep.kernels.quantized.formats import Quantized, dequantize, narrow, quantize, quantized_bytes

CASES = ("random_bf16", "random_fp16", "random_fp32", "extreme")
WITH_ROWS = ("random_fp32", "extreme")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Compares -0.0 with 0.0 and NaN with NaN too."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def same(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    assert found is not None
    assert found.dtype == wanted.dtype
    return torch.equal(bits(found).flatten(), bits(wanted).flatten())


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, torch.Tensor]]:
    cases: dict[str, dict[str, torch.Tensor]] = {name: {} for name in CASES}
    for name, tensor in load_file(quantized_reference.REFERENCE).items():
        case, part = name.split("/")
        cases[case][part] = tensor
    return cases


def check_nf4(weight: torch.Tensor, wanted: dict[str, torch.Tensor]) -> None:
    plain = quantize(weight, "nf4", double=False)
    assert same(plain.codes, wanted["nf4.codes"])
    assert same(plain.scales, wanted["nf4.scales"])
    assert same(dequantize(plain, weight.dtype), wanted["nf4.values"])
    # The mean of bitsandbytes depends on the device and the threads in its last bit.
    own = quantize(weight, "nf4").scale_offset
    assert own is not None
    torch.testing.assert_close(own, wanted["nf4.scale_offset"], rtol=3e-7, atol=0.0)
    nested = formats.double_quantized(plain, wanted["nf4.scale_offset"])
    assert same(nested.scale_codes, wanted["nf4.scale_codes"])
    assert same(nested.scale_scales, wanted["nf4.scale_scales"])
    assert same(dequantize(nested, weight.dtype), wanted["nf4.double_values"])


def check_rows(weight: torch.Tensor, wanted: dict[str, torch.Tensor], format: str) -> None:
    found = quantize(weight[: len(wanted[f"{format}.codes"])], format)
    assert same(found.codes, wanted[f"{format}.codes"])
    assert same(found.scales, wanted[f"{format}.scales"])
    assert same(dequantize(found, torch.float32), wanted[f"{format}.values"])


@pytest.mark.parametrize("case", CASES)
def test_nf4_is_that_of_bitsandbytes(case: str, stored: dict[str, dict[str, torch.Tensor]]) -> None:
    check_nf4(stored[case]["weight"], stored[case])


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("case", WITH_ROWS)
def test_rows_are_those_of_torchao(case: str, format: str, stored: dict[str, dict[str, torch.Tensor]]) -> None:
    check_rows(stored[case]["weight"], stored[case], format)


def test_live_bitsandbytes() -> None:
    bnb = pytest.importorskip("bitsandbytes.functional")
    assert same(formats.dynamic_table(torch.device("cpu")), bnb.create_dynamic_map())
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = (torch.randn(96, 1024) * 0.05).to(dtype)
        check_nf4(weight, quantized_reference.bitsandbytes_nf4(weight))


def test_live_torchao() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(2)
    weight = torch.randn(96, 300) * 0.05
    wanted = quantized_reference.torchao_rows(weight)
    for format in ("int8", "fp8"):
        check_rows(weight, wanted, format)


def test_int8_by_hand() -> None:
    # scale = 2.54 / 127 = 0.02; 0.03 / 0.02 = 1.5 and 0.05 / 0.02 = 2.5 round to even
    weight = torch.tensor([[2.54, -2.54, 0.03, 0.05, -0.01, 0.0]])
    q = quantize(weight, "int8")
    torch.testing.assert_close(q.scales, torch.tensor([[0.02]]))
    powers = quantize(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), "int8")  # scale 1: exact halves
    assert powers.codes.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_fp8_by_hand() -> None:
    # Codes between 16 and 32 are 2 apart: 17 lies between 16 and 18, and 16 is even. The smallest code is 2^-9.
    q = quantize(torch.tensor([[448.0, -448.0, 17.0, 19.0, 2.0**-9, 2.0**-10, 0.0]]), "fp8")
    assert q.scales is not None
    assert q.scales.item() == 1.0
    assert dequantize(q, torch.float32).tolist() == [[448.0, -448.0, 16.0, 20.0, 2.0**-9, 0.0, 0.0]]


def test_rows_of_any_length() -> None:
    """The last block of a row is shorter; each row has the codes that bitsandbytes gives a weight of this one row."""
    torch.manual_seed(3)
    weight = torch.randn(3, 150)
    q = quantize(weight, "nf4", double=False)
    assert q.codes.shape == (3, 75)
    assert q.scales is not None
    blocks = [weight[:, :64], weight[:, 64:128], weight[:, 128:]]
    assert torch.equal(q.scales, torch.stack([block.abs().amax(-1) for block in blocks], -1))
    alone = quantize(torch.nn.functional.pad(weight[:, 128:], (0, 42)), "nf4", double=False)
    assert torch.equal(q.codes[:, 64:], alone.codes[:, :11])
    odd = quantize(weight[:, :77], "nf4", double=False)
    assert odd.codes.shape == (3, 39)
    assert dequantize(odd, torch.float32).shape == (3, 77)
    assert (odd.codes[:, -1] & 15 == 7).all()  # the code of zero fills the last byte


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("format", formats.FORMATS)
def test_a_stack_of_experts_is_quantised_matrix_by_matrix(format: str, double: bool) -> None:
    torch.manual_seed(4)
    stack = torch.randn(3, 40, 200) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    q = quantize(stack, format, double)
    values = dequantize(q, torch.float32)
    for index, matrix in enumerate(stack):
        assert torch.equal(values[index], dequantize(quantize(matrix, format, double), torch.float32))


@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_are_refused(format: str, value: float) -> None:
    weight = torch.ones(4, 64)
    weight[2, 5] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize(weight, format)


def test_scales_whose_sum_overflows_are_refused() -> None:
    with pytest.raises(ValueError, match="overflow"):
        quantize(torch.full((4, 64), 3e38), "nf4")
    assert dequantize(quantize(torch.full((4, 64), 3e38), "nf4", double=False), torch.float32).isfinite().all()


@pytest.mark.parametrize("format", formats.FORMATS)
def test_zeros_stay_zero(format: str) -> None:
    for weight in (torch.zeros(3, 128), torch.zeros(3, 128).bfloat16()):
        assert dequantize(quantize(weight, format), weight.dtype).eq(0).all()


@pytest.mark.parametrize("format", formats.FORMATS)
def test_pieces_give_the_codes_of_the_whole(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    weight = torch.randn(50, 192)
    whole = quantize(weight, format)
    values = dequantize(whole, torch.bfloat16)
    monkeypatch.setattr(formats, "_CHUNK", 192 * 7)
    pieces = quantize(weight, format)
    for name, tensor in whole.tensors().items():
        assert same(pieces.tensors()[name], tensor)
    assert torch.equal(dequantize(pieces, torch.bfloat16), values)


# The largest distance between neighbouring codes, halved, relative to the largest magnitude of a block.
GAP = {"nf4": 0.152, "int8": 0.5 / 127, "fp8": 16 / 448}


@st.composite
def drawn_weights(draw: st.DrawFn) -> torch.Tensor:
    leading = draw(st.sampled_from([(), (2,), (3,)]))
    rows, columns = draw(st.integers(1, 9)), draw(st.sampled_from([1, 2, 3, 63, 64, 65, 127, 128, 192, 320]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(*leading, rows, columns, generator=generator)
    weight = weight * 10.0 ** draw(st.integers(-20, 20))
    kind = draw(st.sampled_from(["random", "huge", "equal", "sparse"]))
    if kind == "huge":
        weight[..., 0, 0] *= 1e6
    if kind == "equal":
        weight = weight[..., :1].expand_as(weight).contiguous()
    if kind == "sparse":
        weight = torch.where(weight > 0, weight, 0.0)
    return weight


def largest_of_blocks(weight: torch.Tensor, q: Quantized) -> torch.Tensor:
    """The largest magnitude of the block of each value."""
    size = q.block or weight.shape[-1]
    blocks = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % size)).unflatten(-1, (-1, size))
    return blocks.abs().amax(-1, keepdim=True).expand_as(blocks).flatten(-2)[..., : weight.shape[-1]]


@settings(max_examples=draws(40, 400), deadline=None)
@given(weight=drawn_weights(), format=st.sampled_from(formats.FORMATS))
def test_the_error_is_at_most_half_a_step(weight: torch.Tensor, format: str) -> None:
    q = quantize(weight, format, double=False)
    assert q.nbytes == quantized_bytes(tuple(weight.shape), format, double=False)
    error = (dequantize(q, torch.float32) - weight).abs()
    assert (error <= (GAP[format] + 1e-6) * largest_of_blocks(weight, q)).all()


@settings(max_examples=draws(40, 400), deadline=None)
@given(weight=drawn_weights())
def test_double_quantisation_moves_a_scale_by_at_most_half_a_step(weight: torch.Tensor) -> None:
    """The widest steps of the eight-bit codes are 0.9 / 64 (0.1 to 1), and 0 and -0.993 are the ends."""
    q = quantize(weight, "nf4")
    assert q.nbytes == quantized_bytes(tuple(weight.shape), "nf4")
    plain = quantize(weight, "nf4", double=False)
    assert q.scale_scales is not None
    assert plain.scales is not None
    error = (q.block_scales() - plain.scales).abs().flatten(-2)
    limit = q.scale_scales.amax(-1, keepdim=True) * 0.9 / 128 + plain.scales.flatten(-2).amax(-1, keepdim=True) * 1e-6
    assert (error <= limit).all()


@settings(max_examples=draws(40, 400), deadline=None)
@given(weight=drawn_weights(), format=st.sampled_from(formats.FORMATS))
def test_quantising_again_gives_the_same_codes(weight: torch.Tensor, format: str) -> None:
    """In fp32. The largest value of an int8 or fp8 row is 127 or 448 scales, whose rounding can move the scale by one
    bit; nf4 keeps the largest value itself, so its values are equal too."""
    first = dequantize(quantize(weight, format, double=False), torch.float32)
    once, again = quantize(weight, format, double=False), quantize(first, format, double=False)
    assert torch.equal(bits(once.codes) if format == "nf4" else once.codes.float(), _codes(again, format))
    second = dequantize(again, torch.float32)
    if format == "nf4":
        assert torch.equal(second, first)
    else:
        torch.testing.assert_close(second, first, rtol=3e-7, atol=0.0)


def _codes(q: Quantized, format: str) -> torch.Tensor:
    return bits(q.codes) if format == "nf4" else q.codes.float()


@settings(max_examples=draws(60, 600), deadline=None)
@given(weight=drawn_weights(), format=st.sampled_from(formats.FORMATS), double=st.booleans(), data=st.data())
def test_slices_dequantise_to_slices(weight: torch.Tensor, format: str, double: bool, data: st.DataObject) -> None:
    q, taken = quantize(weight, format, double), weight
    values = dequantize(q, torch.float32)
    for _ in range(2):
        dim = data.draw(st.integers(-weight.dim(), -1))
        step = q.block if dim == -1 and q.block else 1
        start = step * data.draw(st.integers(0, (taken.shape[dim] - 1) // step))
        length = taken.shape[dim] - start
        if length > step:
            length = step * data.draw(st.integers(1, length // step))
        q, taken, values = (narrow(q, dim, start, length), *(t.narrow(dim, start, length) for t in (taken, values)))
        assert q.shape == tuple(taken.shape)
        assert torch.equal(dequantize(q, torch.float32), values)


@settings(max_examples=draws(30, 300), deadline=None)
@given(weight=drawn_weights(), format=st.sampled_from(formats.FORMATS), data=st.data())
def test_rows_have_the_codes_of_the_full_weight(weight: torch.Tensor, format: str, data: st.DataObject) -> None:
    """What a rank quantises of its own rows is what it would get of the full weight. With double quantisation the mean
    is that of the full weight, so a rank slices."""
    start = data.draw(st.integers(0, weight.shape[-2] - 1))
    length = data.draw(st.integers(1, weight.shape[-2] - start))
    alone = quantize(weight.narrow(-2, start, length), format, double=False)
    cut = narrow(quantize(weight, format, double=False), -2, start, length)
    assert same(alone.codes, cut.codes)
    assert alone.scales is not None
    assert same(cut.scales, alone.scales)


def test_slices_of_a_matrix_with_several_groups_of_scales() -> None:
    torch.manual_seed(7)
    q = quantize(torch.randn(2, 40, 1280) * torch.logspace(-3, 3, 40)[:, None], "nf4")
    assert q.scale_scales is not None
    assert q.scale_scales.shape == (2, 4)  # 40 * 20 scales
    values = dequantize(q, torch.float32)
    cut = narrow(narrow(narrow(q, -1, 320, 896), -2, 17, 20), -1, 64, 128)
    assert torch.equal(dequantize(cut, torch.float32), values[:, 17:37, 384:512])


def test_columns_are_cut_at_blocks() -> None:
    with pytest.raises(ValueError, match="block of 64"):
        narrow(quantize(torch.ones(2, 128), "nf4"), -1, 32, 64)


def test_the_size_of_nf4() -> None:
    """0.5 bytes, 1 byte per 64 values, 4 bytes per 64 * 256 values: 0.516 bytes per value."""
    assert quantized_bytes((4096, 4096), "nf4") == prod((4096, 4096)) // 2 + 4096 * 64 + 4 * 1024 + 4
    assert quantized_bytes((4096, 4096), "nf4", double=False) == 4096 * 2048 + 4096 * 64 * 4
    assert quantized_bytes((10, 100), "int8") == quantized_bytes((10, 100), "fp8") == 10 * 104


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("format", formats.FORMATS)
def test_a_device_computes_the_same_bits(format: str) -> None:
    torch.manual_seed(6)
    for weight in (torch.randn(300, 1024) * 0.02, quantized_reference.extreme(formats.NF4)):
        here, there = quantize(weight, format), quantize(weight.cuda(), format)
        for name, tensor in here.tensors().items():
            assert same(there.tensors()[name].cpu(), tensor), name
        assert same(dequantize(there, torch.bfloat16).cpu(), dequantize(here, torch.bfloat16))


@pytest.mark.parametrize("format", formats.FORMATS)
def test_products_without_a_kernel(format: str) -> None:
    torch.manual_seed(8)
    q = quantize(torch.randn(40, 128), format)
    x = torch.randn(2, 3, 128, requires_grad=True)
    y = product.matmul(x, q, torch.float32)
    assert torch.equal(y, x @ dequantize(q, torch.float32).T)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0], dequantize(q, torch.float32).sum(0))
    assert product.matmul(x.detach(), q, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(product.dequantize(q, torch.bfloat16), dequantize(q, torch.bfloat16))


TRIED = """
import warnings
import torch
from lockstep.kernels.quantized import product, product_triton
from lockstep.kernels.quantized.formats import quantize, dequantize

x, right, calls = torch.ones(2, 64), product_triton.product, []
for format, factor in (("int8", 1.0), ("fp8", 1.001)):
    q = quantize(torch.ones(8, 64), format)
    product_triton.product = lambda x, q: calls.append(q.format) or right(x, q) * factor
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(product.matmul(x, q, torch.float32), x @ dequantize(q, torch.float32).T)
    print(len(told), *(str(one.message) for one in told))
print(calls)
"""


@pytest.mark.slow
@needs_interpreter
def test_a_kernel_with_other_results_is_not_used() -> None:
    right, wrong, calls = interpreted(TRIED).splitlines()
    assert right == "0"
    assert wrong.startswith("1 the product with fp8 weights stays plain torch")
    assert calls == "['int8', 'int8', 'int8', 'fp8']"  # a trial and two products, and a trial


@pytest.mark.slow
@pytest.mark.parametrize("format", formats.FORMATS)
def test_the_compiled_kernel_rounds_as_plain_torch(format: str) -> None:
    """Compiled for an H100, without a device: no fused multiplication and addition, and subnormal numbers are kept."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lockstep.kernels.quantized import product_triton

    kernel = product_triton._dequantize
    q = quantize(torch.ones(64, 256), format)
    pointers = dict.fromkeys(("scales", "scale_scales", "scale_offset", "table", "dynamic"), "*fp32")
    pointers |= {"codes": "*i8" if format == "int8" else "*u8", "scale_codes": "*u8", "out": "*bf16"}
    constants = {"COLUMNS": 256, "ROWS": 64, "BLOCK_BYTES": 1024, **product_triton._sizes(q)}
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", 90, 32)
    code = triton.compile(source, target=target, options=product_triton._EXACT).asm["ptx"]
    assert "mul.rn.f32" in code
    assert "fma.rn" not in code
    assert ".ftz" not in code
