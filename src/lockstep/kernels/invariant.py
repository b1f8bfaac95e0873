"""Batch-invariant operators, which compute bitwise the same result for a token in generation and in training.

With the usual kernels three results depend on the other rows of the batch: matmuls with a weight, attention, and the
sum over the vocabulary. `invariant_triton.py` has batch-invariant kernels for matmuls and attention. For the sum over
the vocabulary, generation uses the trainer's kernel (`logprob.py`). All operators other than matmuls, attention and the
sum over the vocabulary compute each row separately. Backward passes use the usual kernels, which are not
batch-invariant.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lockstep.kernels.attention.flash import LARGEST_HEAD, flash_fits, flash_line_backward
from lockstep.kernels.attention.layout import Layout
from lockstep.kernels.attention.masks import CHUNK, ROWS, SHAPE, SOFTCAP

if TYPE_CHECKING:
    from lockstep.kernels.attention.layout import Chunk, DecodePass


HALVES = (torch.bfloat16, torch.float16)
# The `torch.library.Library` object that keeps the batch-invariant matmuls registered.
_installed: list[torch.library.Library] = []


def products_by_row(on: bool) -> bool:
    """Switches matmuls with a weight on NVIDIA devices to the batch-invariant kernel, or back to torch's, for the whole
    process. Returns False if the batch-invariant kernel is not available, because Triton is not installed."""
    if not on:
        for library in _installed:
            library._destroy()
        _installed.clear()
        return True
    if importlib.util.find_spec("triton") is None:
        return False
    if not _installed:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            library.impl("mm", _mm, "CUDA", allow_override=True)
            library.impl("addmm", _addmm, "CUDA", allow_override=True)
        _installed.append(library)
    return True


def rows_are_separate() -> bool:
    """Returns whether `products_by_row` switched the matmuls of this process to the batch-invariant kernel."""
    return bool(_installed)


def _mm(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    if not _forward(rows, columns):
        out = rows.new_empty(len(rows), columns.shape[1])
        return torch.ops.aten.mm.out(rows, columns, out=out)
    from lockstep.kernels.invariant_triton import product

    return product(_laid(rows), columns.t(), None)


def _addmm(
    bias: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if bias.dim() != 1 or beta != 1 or alpha != 1 or not bias.is_contiguous() or not _forward(rows, columns):
        out = rows.new_empty(len(rows), columns.shape[1])
        return torch.ops.aten.addmm.out(bias, rows, columns, beta=beta, alpha=alpha, out=out)
    from lockstep.kernels.invariant_triton import product

    return product(_laid(rows), columns.t(), bias)


def _forward(rows: torch.Tensor, columns: torch.Tensor) -> bool:
    """Returns whether a matmul is the forward of a linear layer in bf16 or fp16. In a linear forward the second operand
    is transposed; in the matmuls of gradients it is not."""
    inputs, outputs = columns.shape
    transposed = columns.stride(0) == 1 and columns.stride(1) >= inputs and outputs > 1 and inputs > 1
    return transposed and rows.dtype in HALVES and columns.dtype == rows.dtype


def _laid(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


def invariant_varlen(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Computes batch-invariant causal attention inside each packed sequence."""
    return _Attention.apply(query_THD, key_TGD, value_TGD, layout, scale, window)


def variant_attention(attentions: Iterable[Any]) -> str | None:
    """Returns a property of an attention module that the batch-invariant kernel does not support, or None. Such a
    module uses the other kernels, so its results can depend on the batch."""
    for module in attentions:
        _, key_size, value_size = getattr(module, SHAPE)
        found = {
            "selects tokens by scores": getattr(module, ROWS),
            "attends within chunks": getattr(module, CHUNK) is not None,
            "has a soft cap": getattr(module, SOFTCAP) is not None,
            "has attention sinks": getattr(module, "sinks", None) is not None,
            "has keys and values of different sizes": key_size != value_size,
            f"has heads of size {key_size}": key_size % 8 != 0 or key_size > LARGEST_HEAD,
        }
        if why := next((name for name, holds in found.items() if holds), None):
            return f"{type(module).__name__} {why}"
    return None


invariant_fits: Callable[[torch.Tensor, Layout, float], bool] = flash_fits


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        from lockstep.kernels.invariant_triton import KeyPlaces, Queries, attend

        firsts = layout.bounds[:-1]
        lengths = layout.bounds[1:] - firsts
        queries = Queries(query, firsts, lengths, lengths, layout.longest)
        out, lse_HT = attend(queries, KeyPlaces(key, value, firsts), scale, window)
        ctx.save_for_backward(query, key, value, out, lse_HT)
        ctx.layout, ctx.scale, ctx.window = layout, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse_HT = ctx.saved_tensors
        back = flash_line_backward(
            grads[0].contiguous(), query, key, value, out, lse_HT, ctx.layout, ctx.scale, ctx.window
        )
        return *back, None, None, None


def invariant_decode(
    query_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: DecodePass,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Computes decode attention of one token per sequence, whose key and value are already in the KV cache."""
    from lockstep.kernels.invariant_triton import KeyPlaces, Queries, attend

    batch = len(query_BHD)
    firsts = torch.arange(batch, dtype=torch.int32, device=query_BHD.device)
    queries = Queries(query_BHD, firsts, torch.ones_like(firsts), step.lengths_B, 1)
    where = KeyPlaces(keys, values, table=step.table_BM, block=step.cache.block)
    return attend(queries, where, scale, window)[0]


def invariant_store(
    key_TGD: torch.Tensor, value_TGD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots_T: torch.Tensor
) -> None:
    from lockstep.kernels.invariant_triton import store

    store(key_TGD, value_TGD, keys, values, slots_T)


def invariant_chunk(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk: Chunk,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Computes the attention of a chunk of consecutive tokens of one sequence over the KV cache (chunked prefill)."""
    from lockstep.kernels.invariant_triton import KeyPlaces, Queries, attend

    count = chunk.stop - chunk.start
    query = query_THD[chunk.first : chunk.first + count]
    kv = KeyPlaces(keys.index_select(0, chunk.slots), values.index_select(0, chunk.slots))
    first, counts, lengths = (
        torch.tensor([number], dtype=torch.int32, device=query.device) for number in (0, count, chunk.stop)
    )
    return attend(Queries(query, first, counts, lengths, count), kv._replace(firsts=first), scale, window)[0]
