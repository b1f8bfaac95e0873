"""Makes tests/data/quantized/reference.safetensors: small weights with the codes and scales that bitsandbytes and
torchao give them.

    PYTHONPATH=<folder with bitsandbytes 0.50.2 and torchao 0.18> python tests/support/quantized_reference.py

`nested_quantize` calls bitsandbytes' plain torch code. Its compiled code for CPUs takes the eight-bit codes from a
table of 65,536 steps, which is another code for about one scale in 500. The code for CUDA rounds like the plain torch
code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

REFERENCE = Path(__file__).parents[1] / "data" / "quantized" / "reference.safetensors"


def weights() -> dict[str, torch.Tensor]:
    """Random and extreme weights. Every row length is a multiple of 64, where bitsandbytes has blocks within rows."""
    import bitsandbytes.functional as bnb  # type: ignore[import-not-found]

    torch.manual_seed(34)
    return {
        "random_bf16": (torch.randn(16, 256) * 0.02).bfloat16(),
        "random_fp16": (torch.randn(34, 512) * 0.02).half(),
        "random_fp32": torch.randn(33, 64),
        "extreme": extreme(bnb.get_4bit_type("nf4", device="cpu").tolist()),
    }


def extreme(codes: Sequence[float]) -> torch.Tensor:
    """Rows of 128: one huge value, all equal, large and small blocks, values between two codes, subnormals, zeros."""
    rows = torch.randn(8, 128)
    rows[0, 3] = 3e38
    rows[1] = -0.7
    rows[2, 64:] *= 1e-30
    table = torch.tensor(codes)
    rows[3] = 0.0
    rows[3, :15] = (table[:-1] + table[1:]) / 2
    rows[3, 64:79] = -(table[:-1] + table[1:]) / 2
    rows[3, 63] = 1.0
    rows[3, 127] = -1.0
    rows[4] = (torch.arange(128) - 63.5) * (0.5 / 127)  # between two int8 codes
    rows[4, 0] = 0.5
    rows[5] = torch.where(torch.arange(128) % 2 == 0, -0.0, 1.0)
    rows[6] = torch.randn(128) * 3e-39
    rows[7] = 0.0
    return rows


def nested_quantize(absmax: torch.Tensor, offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import bitsandbytes.functional as bnb

    plain = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    operator: Any = torch.ops.bitsandbytes.quantize_blockwise.default
    codes, scales = operator.redispatch(plain, absmax - offset, bnb.create_dynamic_map(), 256)
    return codes, scales


def bitsandbytes_nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    import bitsandbytes.functional as bnb

    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    values = bnb.dequantize_4bit(codes, state)
    offset = state.absmax.mean()
    state.offset = offset
    nested_codes, nested_scales = nested_quantize(state.absmax, offset)
    state.state2 = bnb.QuantState(
        absmax=nested_scales, code=bnb.create_dynamic_map(), blocksize=256, dtype=torch.float32
    )
    absmax, state.absmax, state.nested = state.absmax, nested_codes, True
    return {
        "nf4.codes": codes.flatten(),
        "nf4.scales": absmax,
        "nf4.values": values,
        "nf4.scale_codes": nested_codes,
        "nf4.scale_scales": nested_scales,
        "nf4.scale_offset": offset,
        "nf4.double_values": bnb.dequantize_4bit(codes, state),
    }


def torchao_rows(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """torchao divides by zero in a row of zeros (fp8) and rounds rows below 2e-5 to zero (int8): those are left out.
    It computes the scale of fp8 in the dtype of the weight, so the weight is given in fp32."""
    from torchao.quantization import quant_primitives as ao  # type: ignore[import-not-found]

    weight = weight.float()
    block = [1, weight.shape[-1]]
    scale, zero = ao.choose_qparams_affine(
        weight, ao.MappingType.SYMMETRIC, block, torch.int8, -127, 127, scale_dtype=torch.float32, keepdim=True
    )
    codes = ao.quantize_affine(weight, block, scale, zero, torch.int8, -127, 127)
    values = ao.dequantize_affine(codes, block, scale, zero, torch.int8, -127, 127, output_dtype=torch.float32)
    wide = ao._choose_scale_float8(weight, block)
    narrow = ao._quantize_affine_float8(weight, wide)
    return {
        "int8.codes": codes,
        "int8.scales": scale,
        "int8.values": values,
        "fp8.codes": narrow,
        "fp8.scales": wide,
        "fp8.values": ao._dequantize_affine_float8(narrow, wide),
    }


def main() -> None:
    from safetensors.torch import save_file

    kept: dict[str, torch.Tensor] = {}
    for name, weight in weights().items():
        parts = {"weight": weight, **bitsandbytes_nf4(weight)}
        if weight.dtype is torch.float32:
            parts |= torchao_rows(weight[:6] if name == "extreme" else weight)
        kept |= {f"{name}/{part}": tensor.contiguous() for part, tensor in parts.items()}
    REFERENCE.parent.mkdir(parents=True, exist_ok=True)
    save_file(kept, REFERENCE)


if __name__ == "__main__":
    main()
