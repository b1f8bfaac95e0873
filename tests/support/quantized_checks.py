"""Triton kernels of quantised weights against plain torch: by the interpreter on the host, or on a device."""

from __future__ import annotations

import torch

from lockstep.kernels.quantized import formats
from lockstep.kernels.quantized.formats import FORMATS, Quantized, narrow, quantize
from triton_checks import agree


def weights(device: str) -> list[Quantized]:
    torch.manual_seed(0)
    made: list[Quantized] = []
    for format in FORMATS:
        for double in (True, False) if format == "nf4" else (False,):
            plain = quantize(torch.randn(17, 1280) * 0.05, format, double)
            short = quantize(torch.randn(3, 77), format, double)
            stack = quantize(torch.randn(2, 4, 4160), format, double)
            cut = narrow(narrow(plain, -2, 12, 4), -1, 128, 256)
            made += [plain, short, stack, narrow(stack, -3, 1, 1)]
            made.append(cut.with_tensors({name: one.contiguous() for name, one in cut.tensors().items()}))
    blocks = quantize(torch.randn(5, 256), "fp8")
    made.append(Quantized("fp8", blocks.codes, torch.rand(5, 2), (5, 256), block=128))
    return [one.to(device) for one in made]


def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """The interpreter cuts off digits of bf16 where devices round, and multiplies bf16 as integers."""
    return (torch.float32, torch.float16) if device == "cpu" else (torch.float32, torch.bfloat16, torch.float16)


def dequantizing(device: str) -> None:
    from lockstep.kernels.quantized import product_triton

    for index, q in enumerate(weights(device)):
        for dtype in dtypes(device)[: 1 if index % 5 else None]:
            assert product_triton.dequantize_fits(q)
            found, wanted = product_triton.dequantize(q, dtype), formats.dequantize(q, dtype)
            assert found.shape == wanted.shape
            assert torch.equal(found, wanted)


def products_with_few_rows(device: str) -> None:
    from lockstep.kernels.quantized import product_triton

    for index, q in enumerate(weights(device)):
        if len(q.shape) != 2:
            continue
        for dtype in dtypes(device)[: 1 if index % 5 else None]:
            weight = formats.dequantize(q, dtype)
            for rows in (1, 17):
                x = torch.randn(rows, 2, q.shape[-1]).to(device, dtype)[:, 1]
                assert product_triton.product_fits(x, q)
                found = product_triton.product(x, q)
                wanted = torch.nn.functional.linear(x.float(), weight.float())
                share = 5e-6 if dtype is torch.float32 else 1e-3 if dtype is torch.float16 else 1e-2
                assert found.dtype == dtype
                agree(found.float(), wanted, share)


def rows_of_any_batch(device: str) -> None:
    """A row has the same bits alone and among others."""
    from lockstep.kernels.quantized import product_triton

    torch.manual_seed(1)
    q = quantize(torch.randn(40, 960), "nf4").to(device)
    x = torch.randn(9, 960).to(device)
    assert torch.equal(product_triton.product(x, q)[4:5], product_triton.product(x[4:5], q))


def codes_of_tokens(device: str) -> None:
    """Rows of several lengths, with a row of zeros, an outlier, NaN and infinity."""
    from lockstep.kernels.quantized.token_codes_triton import token_codes_triton
    from lockstep.kernels.quantized.token_products import CODES, LARGEST, token_codes

    generator = torch.Generator().manual_seed(0)
    for columns in (5, 64, 4100):
        x = torch.randn(6, 2 * columns, generator=generator)[:, ::2]
        x[1], x[2, 3] = 0.0, 1e4
        # All magnitudes of e4m3 and the numbers halfway between them, with 448 as the largest.
        numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        halves = -torch.cat([(numbers[1:] + numbers[:-1]) / 2, numbers]).flip(0)[:columns]
        halves[0] = 448.0
        x[5, : len(halves)] = halves
        x[3, 2], x[4, 1] = float("nan"), float("inf")
        for format in ("fp8", "int8"):
            expected, scales = token_codes(x, format)
            made = token_codes_triton(x.to(device), CODES[format], LARGEST[format], 2.0**-126)
            codes, found = (part.cpu() for part in made)
            finite = [0, 1, 2, 5]
            assert torch.equal(found[finite], scales[finite])
            assert torch.equal(codes[finite].float(), expected[finite].float())
            assert not found[[3, 4]].isfinite().any()


def products_of_int8(device: str) -> None:
    """The product of codes has the bits of exact sums, for sizes that fill no tile."""
    from lockstep.kernels.quantized.token_codes_triton import int8_product_triton

    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 16, 16), (70, 272, 48), (130, 144, 80), (260, 144, 48)]
    if device != "cpu":  # the interpreter is slow
        sizes += [(40, 272, 8208), (130, 8208, 80), (700, 272, 4608)]
    for rows, inputs, outputs in sizes:
        codes = [torch.randint(-127, 128, (n, inputs), generator=generator, dtype=torch.int8) for n in (rows, outputs)]
        codes[0][0], codes[1][0] = 127, -127
        scales = [torch.rand(n, 1, generator=generator) for n in (rows, outputs)]
        sums = (codes[0].long() @ codes[1].long().t()).float()
        # The interpreter cuts digits of bf16 instead of rounding.
        for dtype in (torch.float32, torch.bfloat16)[: 1 if device == "cpu" else 2]:
            expected = (sums * scales[0] * scales[1].t()).to(dtype)
            parts = (part.to(device) for pair in zip(codes, scales, strict=True) for part in pair)
            assert torch.equal(int8_product_triton(*parts, dtype).cpu(), expected)


def codes_of_training(device: str) -> None:
    """Scales that are powers of two: rows of several lengths, and transposed matrices with one scale."""
    from lockstep.kernels.quantized.fp8_linear import fp8_codes, fp8_columns, power_scale
    from lockstep.kernels.quantized.token_codes_triton import token_codes_triton, transposed_codes_triton

    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((6, 5), (70, 130), (3, 4100)):
        x = torch.randn(rows, 2 * columns, generator=generator)[:, ::2]
        x[0], x[1, 3], x[2, :4] = 0.0, 1e4, torch.tensor([448.0, 447.9, 7.0, -0.001])
        codes, scales = fp8_codes(x)
        found, its_scales = token_codes_triton(x.to(device), torch.float8_e4m3fn, 448.0, 1e-12, power=True)
        assert torch.equal(its_scales.cpu(), scales)
        assert torch.equal(found.cpu().float(), codes.float())
        across, scale = fp8_columns(x, scales)
        assert torch.equal(power_scale(x.abs().max()).reciprocal().expand_as(scale), scale)
        turned = transposed_codes_triton(x.to(device), scale[0, 0].to(device), 448.0)
        assert torch.equal(turned.cpu().float(), across.float())


def eight_bit_steps(device: str) -> None:
    """Five updates of rows that end inside a block, beside the plain rule."""
    from lockstep.kernels import adamw8bit_triton
    from lockstep.optimizers.adamw8bit import BLOCK, dynamic_map, plain_step

    generator = torch.Generator().manual_seed(3)
    sizes = {"exp_avg": (4, 700), "exp_avg_sq": (4, 700), "exp_avg_scales": (4, 3), "exp_avg_sq_scales": (4, 3)}
    for betas in ((0.9, 0.999), (0.4, 0.95)):
        weights, states = [torch.randn(4, 700, generator=generator)] * 2, []
        weights = [weights[0].clone(), weights[1].to(device, copy=True)]
        for place in ("cpu", device):
            kinds = {name: torch.float32 if name.endswith("scales") else torch.uint8 for name in sizes}
            states.append({name: torch.zeros(size, dtype=kinds[name], device=place) for name, size in sizes.items()})
            # Code 127 is zero among signed numbers, code 0 among unsigned ones.
            states[-1]["exp_avg"] += 127
        for count in range(1, 6):
            gradient = torch.randn(4, 700, generator=generator) * 10.0 ** (count - 3)
            gradient[1] = 0.0
            numbers = adamw8bit_triton.Numbers(0.99, 0.01 / (1 - betas[0] ** count), 0.7, 1e-8, betas)
            plain_step(weights[0], gradient.clone(), states[0], numbers)
            adamw8bit_triton.step(weights[1], gradient.to(device), states[1], numbers, dynamic_map, BLOCK)
            for name, wanted in states[0].items():
                found = states[1][name].cpu()
                if wanted.dtype == torch.uint8:
                    assert (found == wanted).float().mean() > 0.999
                else:
                    assert torch.allclose(found, wanted, rtol=1e-5, atol=0)
            # The same codes on both sides: a code at a boundary would differ from here on.
            for name, wanted in states[0].items():
                states[1][name].copy_(wanted)
            assert torch.allclose(weights[1].cpu(), weights[0], rtol=1e-5, atol=1e-6)


CHECKS = {
    "eight_bit_steps": eight_bit_steps,
    "codes_of_training": codes_of_training,
    "codes_of_tokens": codes_of_tokens,
    "products_of_int8": products_of_int8,
    "dequantizing": dequantizing,
    "products_with_few_rows": products_with_few_rows,
    "rows_of_any_batch": rows_of_any_batch,
}
