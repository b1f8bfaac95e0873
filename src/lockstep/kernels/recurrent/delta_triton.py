"""The gated delta rule over whole sequences in Triton, in chunks, with a backward pass.

With the state S (K x V) of a head, a token does: S = exp(g) S, then S = S + k (beta (v - S^T k))^T, and its output is
S^T q. In a chunk the updates of all tokens are solved at once (the WY form of the Gated DeltaNet paper, arXiv
2412.06464): with the sums G of the decays since the start of the chunk, the triangular system T = (I + tril(beta k k^T
exp(G_i - G_j)))^-1 gives w = T (beta k exp(G)) and u = T (beta v), and the updates of a chunk that starts with the
state S are v' = u - w S. The rest is linear attention (`chunks_triton.py`). The plain-torch reference is
`plain_delta_rule`. Suffixes: N rows, T tokens, H heads, K size of a key, V size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.recurrent import chunks_triton as chunked
from lockstep.kernels.recurrent.chunks_triton import dot, load_tile, pairwise, rows_of_chunk, store_tile


@triton.jit(do_not_specialize=["tokens"])
def _solve(  # type: ignore[no-untyped-def]
    key, value, beta, sums, inverse, w, u, tokens, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Solves the triangular system of one chunk of one head in fp32. Writes T, w and u."""
    chunk, chunks, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    t, inside, row, _ = rows_of_chunk(line, chunk, tokens, HEADS, SHARED, CHUNK)
    g = tl.load(sums + line * (chunks * CHUNK) + t)
    b = tl.load(beta + row, mask=inside, other=0.0).to(tl.float32)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in range(0, KEY, BLOCK):
        k = load_tile(key, row, inside, column + tl.arange(0, BLOCK), KEY)
        system += dot(k, tl.trans(k))
    solved = tl.where(i > j, -system * b[:, None] * pairwise(g, CHUNK), 0.0)
    # Forward substitution, row by row.
    for r in range(1, CHUNK):
        own = tl.sum(tl.where(i == r, solved, 0.0), axis=0)
        own += tl.sum(own[:, None] * solved, axis=0)
        solved = tl.where(i == r, own[None, :], solved)
    solved = (solved + (i == j).to(tl.float32)).to(key.dtype.element_ty)
    tl.store(inverse + (line * chunks + chunk) * (CHUNK * CHUNK) + i * CHUNK + j, solved)
    for column in range(0, KEY, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        k = load_tile(key, row, inside, columns, KEY).to(tl.float32) * (b * tl.exp(g))[:, None]
        store_tile(w, row, inside, columns, dot(solved, k.to(solved.dtype)), KEY)
    for column in range(0, VALUE, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        v = load_tile(value, row, inside, columns, VALUE).to(tl.float32) * b[:, None]
        store_tile(u, row, inside, columns, dot(solved, v.to(solved.dtype)), VALUE)


@triton.jit(do_not_specialize=["tokens"])
def _grad_solved(  # type: ignore[no-untyped-def]
    key, value, beta, sums, inverse, grad_w, grad_u, half_grad_key, grad_key, grad_value, grad_beta, grad_sums, tokens,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Passes the gradients of w and u of one chunk of one head back to keys, values, beta and the sums of decays."""
    chunk, chunks, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    t, inside, row, _ = rows_of_chunk(line, chunk, tokens, HEADS, SHARED, CHUNK)
    g = tl.load(sums + line * (chunks * CHUNK) + t)
    b = tl.load(beta + row, mask=inside, other=0.0).to(tl.float32)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # T is loaded transposed.
    turned = tl.load(inverse + (line * chunks + chunk) * (CHUNK * CHUNK) + j * CHUNK + i)
    d_solved = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_b = tl.zeros([CHUNK], tl.float32)
    for column in range(0, VALUE, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        v = load_tile(value, row, inside, columns, VALUE).to(tl.float32)
        d_u = load_tile(grad_u, row, inside, columns, VALUE)
        d_vb = dot(turned, d_u)
        d_b += tl.sum(d_vb * v, axis=1)
        d_solved += dot(d_u, tl.trans((v * b[:, None]).to(d_u.dtype)))
        store_tile(grad_value, row, inside, columns, d_vb * b[:, None], VALUE)
    d_g = tl.zeros([CHUNK], tl.float32)
    squares = tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in range(0, KEY, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        k = load_tile(key, row, inside, columns, KEY)
        d_w = load_tile(grad_w, row, inside, columns, KEY)
        k_32 = k.to(tl.float32)
        along = tl.sum(dot(turned, d_w) * k_32, axis=1) * tl.exp(g)
        d_b += along
        d_g += along * b
        d_solved += dot(d_w, tl.trans((k_32 * (b * tl.exp(g))[:, None]).to(k.dtype)))
        squares += dot(k, tl.trans(k))
    # The gradient of X^-1 is -X^-T dT X^-T.
    d_system = dot(turned, d_solved.to(turned.dtype))
    d_system = -dot(d_system.to(turned.dtype), turned)
    d_system = tl.where(i > j, d_system * pairwise(g, CHUNK), 0.0)
    weighted = d_system * squares
    d_b += tl.sum(weighted, axis=1)
    weighted *= b[:, None]
    d_g += tl.sum(weighted, axis=1) - tl.sum(weighted, axis=0)
    d_system = (d_system * b[:, None]).to(turned.dtype)
    for column in range(0, KEY, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        k = load_tile(key, row, inside, columns, KEY)
        d_w = load_tile(grad_w, row, inside, columns, KEY)
        d_k = load_tile(half_grad_key, row, inside, columns, KEY)
        d_k += dot(turned, d_w) * (b * tl.exp(g))[:, None]
        d_k += dot(d_system, k)
        d_k += dot(tl.trans(d_system), k)
        store_tile(grad_key, row, inside, columns, d_k, KEY)
    tl.store(grad_sums + line * (chunks * CHUNK) + t, d_g)
    tl.store(grad_beta + row, d_b.to(grad_beta.dtype.element_ty), mask=inside)


def delta_rule(
    query_NTHK: torch.Tensor,
    key_NTHK: torch.Tensor,
    value_NTHV: torch.Tensor,
    decay_NTH: torch.Tensor,
    beta_NTH: torch.Tensor,
    first_NHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs (N, T, H, V) and the last states (N, H, K, V) in fp32. Queries and keys have length 1; the
    outputs are divided by the root of the key size."""
    out: tuple[torch.Tensor, torch.Tensor] = _DeltaRule.apply(
        query_NTHK, key_NTHK, value_NTHV, decay_NTH, beta_NTH, first_NHKV
    )
    return out


def delta_rule_fits(query_NTHK: torch.Tensor, key_NTHK: torch.Tensor, value_NTHV: torch.Tensor) -> bool:
    same = query_NTHK.shape == key_NTHK.shape and key_NTHK.shape[:3] == value_NTHV.shape[:3]
    return same and query_NTHK.dtype == key_NTHK.dtype and chunked.chunks_fit(key_NTHK, value_NTHV)


def plain_delta_rule(
    query_NTHK: torch.Tensor,
    key_NTHK: torch.Tensor,
    value_NTHV: torch.Tensor,
    decay_NTH: torch.Tensor,
    beta_NTH: torch.Tensor,
    first_NHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `delta_rule`, token by token."""
    rows, tokens, heads, size = key_NTHK.shape
    state = key_NTHK.new_zeros(rows, heads, size, value_NTHV.shape[-1], dtype=torch.float32)
    state = state if first_NHKV is None else first_NHKV.float()
    parts = [part.float() for part in (query_NTHK, key_NTHK, value_NTHV, decay_NTH, beta_NTH)]
    outputs = []
    for t in range(tokens):
        q, k, v, g, b = (part[:, t] for part in parts)
        state = state * g.exp()[..., None, None]
        delta = (v - torch.einsum("nhkv,nhk->nhv", state, k)) * b[..., None]
        state = state + k[..., None] * delta[..., None, :]
        outputs.append(torch.einsum("nhkv,nhk->nhv", state, q) * size**-0.5)
    return torch.stack(outputs, 1).to(query_NTHK.dtype), state


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, decay, beta = (part.contiguous() for part in given[:5])
        first = None if given[5] is None else given[5].contiguous()
        sums = chunked.summed(decay)
        lines, chunks, length = sums.shape
        inverse = torch.empty(lines, chunks, length, length, dtype=key.dtype, device=key.device)
        w, u = torch.empty_like(key), torch.empty_like(value)
        _solve[(chunks, lines)](
            key, value, beta, sums, inverse, w, u, key.shape[1], **chunked.sizes_of(key, value), BLOCK=chunked.BLOCK,
            num_warps=chunked.WARPS, num_stages=chunked.STAGES,
        )  # fmt: skip
        starts, updates, last = chunked.scan(key, u, w, sums, first)
        out = chunked.read(query, key, updates, sums, starts, key.shape[-1] ** -0.5)
        ctx.save_for_backward(query, key, value, decay, beta, first, sums, inverse, w, u)
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, decay, beta, first, sums, inverse, w, u = ctx.saved_tensors
        upstream, grad_last = (grad.contiguous() for grad in grads)
        starts, updates, _ = chunked.scan(key, u, w, sums, first)
        grad_query, half, grad_w, grad_u, grad_first, parts = chunked.gradients(
            query, key, w, sums, starts, updates, upstream, grad_last, key.shape[-1] ** -0.5
        )
        grad_key, grad_value, grad_beta = torch.empty_like(key), torch.empty_like(value), torch.empty_like(beta)
        grad_sums = torch.empty_like(sums)
        _grad_solved[(sums.shape[1], sums.shape[0])](
            key, value, beta, sums, inverse, grad_w, grad_u, half, grad_key, grad_value, grad_beta, grad_sums,
            key.shape[1], **chunked.sizes_of(key, value), BLOCK=chunked.BLOCK, num_warps=chunked.WARPS,
            num_stages=chunked.STAGES,
        )  # fmt: skip
        grad_decay = chunked.decay_gradient(torch.cat((parts, grad_sums[None])), decay)
        return grad_query, grad_key, grad_value, grad_decay, grad_beta, None if first is None else grad_first
