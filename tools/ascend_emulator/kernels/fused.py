"""All references of fused operators, installed together. A fused operator that has none fails loudly."""

from __future__ import annotations

import torch

from ascend_emulator.kernels import (  # noqa: F401  importing a module is what marks its references
    activation,
    cache,
    fusion_attention,
    infer_attention,
    norms,
    quant,
    reference,
    rotary,
)

# Registrations last as long as the object that made them.
_npu = torch.library.Library("npu", "IMPL")


def install() -> None:
    reference.install(_npu)
