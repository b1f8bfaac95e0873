"""Triton kernels of quantised weights against plain torch: by the interpreter on the host, or on a device."""

from __future__ import annotations

import warnings
from copy import copy
from dataclasses import replace
from unittest.mock import patch

import torch

from lockstep.kernels.quantized import formats
from lockstep.kernels.quantized.formats import FORMATS, Quantized, narrow, quantize
from lockstep.kernels.quantized.token_products import CODES, LARGEST, SMALLEST_SCALE, TokenCodes
from triton_checks import EXPERTS, LATENTS, _small, agree


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
    from lockstep.kernels.quantized.token_products import token_codes

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
            made = token_codes_triton(x.to(device), CODES[format], LARGEST[format], SMALLEST_SCALE)
            codes, found = (part.cpu() for part in made)
            finite = [0, 1, 2, 5]
            assert torch.equal(found[finite], scales[finite])
            assert torch.equal(codes[finite].float(), expected[finite].float())
            assert not found[[3, 4]].isfinite().any()


def _same_codes(made: TokenCodes, rows: torch.Tensor, format: str) -> None:
    """The bytes and the scales of quantising these rows by a kernel of its own."""
    from lockstep.kernels.quantized.token_codes_triton import token_codes_triton

    codes, scales = token_codes_triton(rows, CODES[format], LARGEST[format], SMALLEST_SCALE)
    finite = scales[:, 0].isfinite()
    assert (made.codes_TK.dtype, made.dtype) == (CODES[format], rows.dtype)
    assert torch.equal(made.scales_T1.isfinite(), scales.isfinite())
    assert torch.equal(made.scales_T1[finite], scales[finite])
    assert torch.equal(made.codes_TK.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])


def codes_of_norms(device: str) -> None:
    """The norm that quantises its result: rows of zeros, of very large and very small numbers, and with NaN."""
    from lockstep.kernels.decode.decode_triton import add_norm_, add_norm_codes_
    from lockstep.kernels.norm_triton import RmsNorm

    generator = torch.Generator().manual_seed(0)
    cases = [(False, False, "fp8"), (True, False, "int8"), (False, True, "int8"), (True, True, "fp8")]
    sizes = [(7, torch.float32), (896, torch.bfloat16), (5121, torch.bfloat16)]
    if device != "cpu":  # the interpreter is slow
        sizes += [(width, torch.bfloat16) for width in (3584, 4096, 5120, 8192)]
    for width, dtype in sizes:
        drawn = [torch.randn(rows, width, generator=generator).to(device, dtype) for rows in (7, 7, 1, 1)]
        stream, more, *weights = drawn
        stream[1], more[1], weights[0][0, 3] = 0.0, 0.0, 300.0
        for part in (stream, more):
            part[2:5] *= torch.tensor([[1e15], [1e30], [1e-30]], device=device)
        more[5, 5] = float("nan")
        for offset, inner, format in cases:
            norm, post = (RmsNorm(weight[0], 1e-6, offset) for weight in weights)
            sums, twin = stream.clone(), stream.clone()
            made = add_norm_codes_(sums, more, norm, post if inner else None, format)
            _same_codes(made, add_norm_(twin, more, norm, post if inner else None), format)
            assert made.scales_T1.isfinite().sum() == 6
            assert torch.equal(sums[:5], twin[:5])


def codes_of_gated_rows(device: str) -> None:
    """act(gate) * up that is quantised: rows that one block holds, that two hold, and that fill both."""
    from lockstep.kernels.decode.decode_triton import swiglu_, swiglu_codes

    generator = torch.Generator().manual_seed(0)
    sizes = [(1, torch.float32), (40, torch.float32), (4096, torch.bfloat16), (18944, torch.bfloat16)]
    if device != "cpu":  # the interpreter is slow
        sizes += [(width, torch.bfloat16) for width in (5, 4864, 8960, 11008, 14336, 27648, 32768)]
    for width, dtype in sizes:
        line = torch.randn(7, 2 * width, generator=generator).to(device, dtype) * 5
        line[1] = 0.0
        line[2:5] *= torch.tensor([[1e15], [1e3], [1e-15]], device=device)
        line[5, width], line[6, width - 1], line[6, -1] = float("nan"), 1e3, 1e3
        for gelu, format in ((False, "fp8"), (True, "int8"), (False, "int8"), (True, "fp8")):
            given = line.clone()
            made = swiglu_codes(given, gelu, format)
            assert torch.equal(given[:5], line[:5])
            _same_codes(made, swiglu_(given, gelu), format)
            assert made.scales_T1.isfinite().sum() == 6


def layers_that_quantise(device: str) -> None:
    """Layers quantise in the kernels before their products, except for the first norm and the output of attention. The
    results have the bits of layers that quantise apart."""
    from lockstep.kernels.decode import layer_parts_triton
    from lockstep.kernels.decode.decode_layers_triton import _trial_pass, fused_layers
    from lockstep.kernels.quantized import token_products
    from lockstep.model.decoder import inner_decoder
    from lockstep.model.policy import Policy
    from lockstep.rollout.native.native_engine import quantized_view

    gemma = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    # Two layers: the first norm and both outputs of attention are quantised apart. Modules of experts quantise their
    # inputs by themselves: DeepSeek's shared expert, in the second layer, has three products.
    cases = (("Qwen2", {}, 3, 8), ("Gemma3", gemma, 3, 8), ("Qwen3Moe", EXPERTS, 3, 4), ("DeepseekV3", LATENTS, 6, 9))
    for (name, more, *calls), precision in zip(cases, ("fp8", "int8", "fp8", "int8"), strict=True):
        policy = Policy(_small(name, device, **more), "sdpa")
        layout, decoder = policy.decoder.cache_layout(), inner_decoder(policy.causal_lm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused, view = fused_layers(decoder, layout), quantized_view(policy, precision)
        assert fused is not None
        assert view is not None
        view.refresh()
        apart = copy(fused)
        apart.norms = [replace(norm, readers=()) for norm in fused.norms]
        apart.layers = [replace(layer, middle=replace(layer.middle, readers=())) for layer in fused.layers]
        positions = torch.tensor([0, 5, 17, 30], device=device)
        found, counts = [], []
        for layers, widest in ((fused, layer_parts_triton.WIDEST_CODED), (apart, 0)):
            step = _trial_pass(layout, positions, decoder.embed_tokens.weight)
            with (
                patch.object(layer_parts_triton, "WIDEST_CODED", widest),
                patch.object(token_products, "token_codes", wraps=token_products.token_codes) as quantising,
                torch.inference_mode(),
                view.used(),
            ):
                found.append(layers.decode(positions + 1, positions, step))
            counts.append(quantising.call_count)
        assert torch.equal(*found)
        assert counts == calls


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
    "codes_of_norms": codes_of_norms,
    "codes_of_gated_rows": codes_of_gated_rows,
    "layers_that_quantise": layers_that_quantise,
    "products_of_int8": products_of_int8,
    "dequantizing": dequantizing,
    "products_with_few_rows": products_with_few_rows,
    "rows_of_any_batch": rows_of_any_batch,
}
