"""The gated delta rule over whole sequences in Triton, in chunks, with a backward pass.

With the state S (K x V) of a head, a token does: S = exp(g) S, then S = S + k (beta (v - S^T k))^T, and its output is
S^T q. In a chunk the updates of all tokens are solved at once (the WY form of the Gated DeltaNet paper, arXiv
2412.06464): with the decays G = exp(sum of g), the triangular system T = (I + tril(beta k k^T G))^-1 gives w = T (beta
k G) and u = T (beta v), and the updates of a chunk that starts with S are v' = u - w S. Only the state is passed from
chunk to chunk. The backward pass computes the states of the chunk starts again. The plain-torch reference is
`plain_delta_rule`. Suffixes: N rows, T tokens, H heads, K size of a key, V size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lockstep.kernels.triton_math import runs_on

CHUNK = 64
# Columns of the state of one Triton program.
COLUMNS = 32
LARGEST_KEY = 128


@triton.jit
def _dot(a, b, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiplies matrices in the dtype of the inputs, and sums in fp32."""
    return tl.dot(a.to(KIND), b.to(KIND), input_precision="ieee")


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    key,
    value,
    decay,
    beta,
    inverse,
    w,
    u,
    sums,
    tokens,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Solves the triangular system of one chunk of one head. Writes T, w, u and the sums of the decays."""
    kind: tl.constexpr = key.dtype.element_ty
    line = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    row = ((line // HEADS) * tokens + t) * HEADS + line % HEADS
    place = line * (tl.num_programs(0) * CHUNK) + t
    inside = t < tokens
    k_columns, v_columns = tl.arange(0, PADDED_KEY)[None, :], tl.arange(0, PADDED_VALUE)[None, :]
    g = tl.cumsum(tl.load(decay + row, mask=inside, other=0.0).to(tl.float32), axis=0)
    b = tl.load(beta + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    k_mask, v_mask = inside[:, None] & (k_columns < KEY), inside[:, None] & (v_columns < VALUE)
    k = tl.load(key + row[:, None] * KEY + k_columns, mask=k_mask, other=0.0).to(tl.float32)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    system = _dot(k * b, tl.trans(k), kind)
    solved = tl.where(i > j, -system * tl.exp(g[:, None] - g[None, :]), 0.0)
    # Forward substitution, row by row.
    for r in range(1, CHUNK):
        own = tl.sum(tl.where(i == r, solved, 0.0), axis=0)
        own += tl.sum(own[:, None] * solved, axis=0)
        solved = tl.where(i == r, own[None, :], solved)
    solved += (i == j).to(tl.float32)
    squares = inverse + (line * tl.num_programs(0) + tl.program_id(0)) * (CHUNK * CHUNK)
    tl.store(squares + i * CHUNK + j, solved)
    tl.store(sums + place, g)
    k_w = _dot(solved, k * b * tl.exp(g)[:, None], kind)
    tl.store(w + place[:, None] * KEY + k_columns, k_w.to(w.dtype.element_ty), mask=k_columns < KEY)
    v = tl.load(value + row[:, None] * VALUE + v_columns, mask=v_mask, other=0.0).to(tl.float32)
    v_u = _dot(solved, v * b, kind)
    tl.store(u + place[:, None] * VALUE + v_columns, v_u.to(u.dtype.element_ty), mask=v_columns < VALUE)


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    query,
    key,
    w,
    u,
    sums,
    first,
    out,
    last,
    starts,
    updates,
    tokens,
    chunks,
    scale,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Passes the state of one head through its chunks, for COLUMNS of its columns. With AGAIN, writes the state at the
    start of each chunk and the updates of its tokens; otherwise writes outputs and the last state."""
    kind: tl.constexpr = key.dtype.element_ty
    line = tl.program_id(1).to(tl.int64)
    k_columns = tl.arange(0, PADDED_KEY)
    v_columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k_sized, v_sized = (k_columns < KEY)[None, :], (v_columns < VALUE)[None, :]
    square = k_columns[:, None] * VALUE + v_columns[None, :]
    square_mask = (k_columns < KEY)[:, None] & v_sized
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    state = tl.zeros([PADDED_KEY, COLUMNS], tl.float32)
    if FIRST:
        state += tl.load(first + line * (KEY * VALUE) + square, mask=square_mask, other=0.0).to(tl.float32)
    for chunk in range(0, chunks):
        t = chunk * CHUNK + tl.arange(0, CHUNK)
        row = ((line // HEADS) * tokens + t) * HEADS + line % HEADS
        place = line * (chunks * CHUNK) + t
        inside = (t < tokens)[:, None]
        g = tl.load(sums + place)
        total = tl.load(sums + line * (chunks * CHUNK) + chunk * CHUNK + CHUNK - 1)
        k = tl.load(key + row[:, None] * KEY + k_columns[None, :], mask=inside & k_sized, other=0.0).to(tl.float32)
        k_w = tl.load(w + place[:, None] * KEY + k_columns[None, :], mask=k_sized, other=0.0).to(tl.float32)
        new = tl.load(u + place[:, None] * VALUE + v_columns[None, :], mask=v_sized, other=0.0).to(tl.float32)
        new -= _dot(k_w, state, kind)
        if AGAIN:
            tl.store(starts + (line * chunks + chunk) * (KEY * VALUE) + square, state, mask=square_mask)
            places = updates + place[:, None] * VALUE + v_columns[None, :]
            tl.store(places, new.to(updates.dtype.element_ty), mask=v_sized)
        else:
            q = tl.load(query + row[:, None] * KEY + k_columns[None, :], mask=inside & k_sized, other=0.0)
            q = q.to(tl.float32) * scale
            share = _dot(q, tl.trans(k), kind)
            share = tl.where(i >= j, share * tl.exp(g[:, None] - g[None, :]), 0.0)
            result = _dot(q * tl.exp(g)[:, None], state, kind)
            result += _dot(share, new, kind)
            places = out + row[:, None] * VALUE + v_columns[None, :]
            tl.store(places, result.to(out.dtype.element_ty), mask=inside & v_sized)
        k *= tl.exp(total - g)[:, None]
        state = state * tl.exp(total) + _dot(tl.trans(k), new, kind)
    if not AGAIN:
        tl.store(last + line * (KEY * VALUE) + square, state, mask=square_mask)


@triton.jit
def _scan_back(  # type: ignore[no-untyped-def]
    query,
    key,
    w,
    sums,
    upstream,
    grad_last,
    grad_ends,
    grad_updates,
    grad_first,
    tokens,
    chunks,
    scale,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
):
    """Passes the gradient of the state back through the chunks. Writes the gradients of the state at the end of each
    chunk, of the updates, and of the first state."""
    kind: tl.constexpr = key.dtype.element_ty
    line = tl.program_id(1).to(tl.int64)
    k_columns = tl.arange(0, PADDED_KEY)
    v_columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k_sized, v_sized = (k_columns < KEY)[None, :], (v_columns < VALUE)[None, :]
    square = k_columns[:, None] * VALUE + v_columns[None, :]
    square_mask = (k_columns < KEY)[:, None] & v_sized
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    grad = tl.zeros([PADDED_KEY, COLUMNS], tl.float32)
    if LAST:
        grad += tl.load(grad_last + line * (KEY * VALUE) + square, mask=square_mask, other=0.0).to(tl.float32)
    for backwards in range(0, chunks):
        chunk = chunks - 1 - backwards
        t = chunk * CHUNK + tl.arange(0, CHUNK)
        row = ((line // HEADS) * tokens + t) * HEADS + line % HEADS
        place = line * (chunks * CHUNK) + t
        inside = (t < tokens)[:, None]
        g = tl.load(sums + place)
        total = tl.load(sums + line * (chunks * CHUNK) + chunk * CHUNK + CHUNK - 1)
        tl.store(grad_ends + (line * chunks + chunk) * (KEY * VALUE) + square, grad, mask=square_mask)
        k = tl.load(key + row[:, None] * KEY + k_columns[None, :], mask=inside & k_sized, other=0.0).to(tl.float32)
        q = tl.load(query + row[:, None] * KEY + k_columns[None, :], mask=inside & k_sized, other=0.0)
        q = q.to(tl.float32) * scale
        above = tl.load(upstream + row[:, None] * VALUE + v_columns[None, :], mask=inside & v_sized, other=0.0)
        above = above.to(tl.float32)
        share = _dot(q, tl.trans(k), kind)
        share = tl.where(i >= j, share * tl.exp(g[:, None] - g[None, :]), 0.0)
        new = _dot(tl.trans(share), above, kind)
        new += _dot(k * tl.exp(total - g)[:, None], grad, kind)
        places = grad_updates + place[:, None] * VALUE + v_columns[None, :]
        tl.store(places, new.to(grad_updates.dtype.element_ty), mask=v_sized)
        k_w = tl.load(w + place[:, None] * KEY + k_columns[None, :], mask=k_sized, other=0.0).to(tl.float32)
        grad = grad * tl.exp(total)
        grad += _dot(tl.trans(q * tl.exp(g)[:, None]), above, kind)
        grad -= _dot(tl.trans(k_w), new, kind)
    tl.store(grad_first + line * (KEY * VALUE) + square, grad, mask=square_mask)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    beta,
    inverse,
    sums,
    upstream,
    starts,
    updates,
    grad_ends,
    grad_updates,
    grad_query,
    grad_key,
    grad_value,
    grad_decay,
    grad_beta,
    tokens,
    scale,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUE: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Computes the gradients of the inputs of one chunk of one head."""
    kind: tl.constexpr = key.dtype.element_ty
    line, chunk, chunks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    row = ((line // HEADS) * tokens + t) * HEADS + line % HEADS
    place = line * (chunks * CHUNK) + t
    inside = (t < tokens)[:, None]
    k_columns = tl.arange(0, PADDED_KEY)
    k_sized = (k_columns < KEY)[None, :]
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    g = tl.load(sums + place)
    total = tl.load(sums + line * (chunks * CHUNK) + chunk * CHUNK + CHUNK - 1)
    b = tl.load(beta + row, mask=t < tokens, other=0.0).to(tl.float32)
    solved = tl.load(inverse + (line * chunks + chunk) * (CHUNK * CHUNK) + i * CHUNK + j)
    d_q = tl.zeros([CHUNK, PADDED_KEY], tl.float32)
    d_k = tl.zeros([CHUNK, PADDED_KEY], tl.float32)
    d_w = tl.zeros([CHUNK, PADDED_KEY], tl.float32)
    d_share = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_solved = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_b = tl.zeros([CHUNK], tl.float32)
    d_total = 0.0
    for column in range(0, VALUE, COLUMNS):
        v_columns = column + tl.arange(0, COLUMNS)
        v_sized = (v_columns < VALUE)[None, :]
        square = (line * chunks + chunk) * (KEY * VALUE) + k_columns[:, None] * VALUE + v_columns[None, :]
        square_mask = (k_columns < KEY)[:, None] & v_sized
        state = tl.load(starts + square, mask=square_mask, other=0.0)
        grad = tl.load(grad_ends + square, mask=square_mask, other=0.0)
        rows = row[:, None] * VALUE + v_columns[None, :]
        places = place[:, None] * VALUE + v_columns[None, :]
        above = tl.load(upstream + rows, mask=inside & v_sized, other=0.0).to(tl.float32)
        v = tl.load(value + rows, mask=inside & v_sized, other=0.0).to(tl.float32)
        new = tl.load(updates + places, mask=v_sized, other=0.0).to(tl.float32)
        d_new = tl.load(grad_updates + places, mask=v_sized, other=0.0).to(tl.float32)
        d_q += _dot(above, tl.trans(state), kind)
        d_share += _dot(above, tl.trans(new), kind)
        d_k += _dot(new, tl.trans(grad), kind)
        d_w -= _dot(d_new, tl.trans(state), kind)
        d_total += tl.sum(tl.sum(state * grad, axis=1), axis=0)
        d_vb = _dot(tl.trans(solved), d_new, kind)
        d_b += tl.sum(d_vb * v, axis=1)
        d_solved += _dot(d_new, tl.trans(v * b[:, None]), kind)
        tl.store(grad_value + rows, (d_vb * b[:, None]).to(grad_value.dtype.element_ty), mask=inside & v_sized)
    k = tl.load(key + row[:, None] * KEY + k_columns[None, :], mask=inside & k_sized, other=0.0).to(tl.float32)
    q = tl.load(query + row[:, None] * KEY + k_columns[None, :], mask=inside & k_sized, other=0.0).to(tl.float32)
    pairwise = tl.exp(tl.where(i >= j, g[:, None] - g[None, :], -float("inf")))
    # The outputs: q G S and (q k^T G) v'.
    d_qk = d_share * pairwise * scale
    weighted = d_qk * _dot(q, tl.trans(k), kind)
    d_q *= tl.exp(g)[:, None] * scale
    d_g = tl.sum(d_q * q, axis=1) + tl.sum(weighted, axis=1) - tl.sum(weighted, axis=0)
    d_q += _dot(d_qk, k, kind)
    # The next state: exp(total) S + (k exp(total) / G)^T v'.
    d_k *= tl.exp(total - g)[:, None]
    written = tl.sum(d_k * k, axis=1)
    d_g -= written
    d_total = d_total * tl.exp(total) + tl.sum(written, axis=0)
    d_k += _dot(tl.trans(d_qk), q, kind)
    # w = T (beta k G) and u = T (beta v).
    d_kb = _dot(tl.trans(solved), d_w, kind) * tl.exp(g)[:, None]
    d_solved += _dot(d_w, tl.trans(k * (b * tl.exp(g))[:, None]), kind)
    along = tl.sum(d_kb * k, axis=1)
    d_b += along
    d_g += along * b
    d_k += d_kb * b[:, None]
    # T = (I + tril(beta k k^T G))^-1.
    d_system = _dot(tl.trans(solved), d_solved, kind)
    d_system = -_dot(d_system, tl.trans(solved), kind)
    d_system = tl.where(i > j, d_system * pairwise, 0.0)
    weighted = d_system * _dot(k, tl.trans(k), kind)
    d_b += tl.sum(weighted, axis=1)
    weighted *= b[:, None]
    d_g += tl.sum(weighted, axis=1) - tl.sum(weighted, axis=0)
    d_system *= b[:, None]
    d_k += _dot(d_system, k, kind) + _dot(tl.trans(d_system), k, kind)
    # Decays are summed from the start of the chunk, so a gradient is the sum from its token to the end.
    d_g += tl.where(tl.arange(0, CHUNK) == CHUNK - 1, d_total, 0.0)
    d_g += tl.sum(d_g, axis=0) - tl.cumsum(d_g, axis=0)
    tl.store(grad_query + row[:, None] * KEY + k_columns[None, :], d_q.to(key.dtype.element_ty), mask=inside & k_sized)
    tl.store(grad_key + row[:, None] * KEY + k_columns[None, :], d_k.to(key.dtype.element_ty), mask=inside & k_sized)
    tl.store(grad_decay + row, d_g, mask=t < tokens)
    tl.store(grad_beta + row, d_b, mask=t < tokens)


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


def delta_rule_fits(key_NTHK: torch.Tensor, value_NTHV: torch.Tensor) -> bool:
    small = key_NTHK.shape[-1] <= LARGEST_KEY and value_NTHV.shape[-1] <= LARGEST_KEY
    return runs_on(key_NTHK) and small and key_NTHK.dtype == value_NTHV.dtype and key_NTHK.numel() > 0


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
    def forward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, decay, beta = (part.contiguous() for part in given[:5] if part is not None)
        first = None if given[5] is None else given[5].contiguous()
        rows, tokens, heads, size = key.shape
        width, lines, chunks = value.shape[-1], rows * heads, triton.cdiv(tokens, CHUNK)
        sums = torch.empty(lines, chunks * CHUNK, dtype=torch.float32, device=key.device)
        inverse = torch.empty(lines, chunks, CHUNK, CHUNK, dtype=torch.float32, device=key.device)
        w, u = (key.new_empty(lines, chunks * CHUNK, columns) for columns in (size, width))
        sizes = _sizes(key, value)
        padded = max(16, triton.next_power_of_2(width))
        _prepare[(chunks, lines)](
            key, value, decay, beta, inverse, w, u, sums, tokens, **sizes, PADDED_VALUE=padded, num_warps=4
        )
        out = torch.empty_like(value)
        last = torch.empty(rows, heads, size, width, dtype=torch.float32, device=key.device)
        start = last if first is None else first
        _scan[(triton.cdiv(width, COLUMNS), lines)](
            query, key, w, u, sums, start, out, last, last, last, tokens, chunks, size**-0.5, **sizes, COLUMNS=COLUMNS,
            FIRST=first is not None, AGAIN=False, num_warps=4, num_stages=2,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, beta, first, sums, inverse, w, u)
        ctx.decay_dtype = decay.dtype
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, beta, first, sums, inverse, w, u = ctx.saved_tensors
        upstream, grad_last = (grad.contiguous() for grad in grads)
        _, tokens, _, size = key.shape
        width, (lines, chunks) = value.shape[-1], inverse.shape[:2]
        sizes, grid = _sizes(key, value), (triton.cdiv(width, COLUMNS), lines)
        starts, ends = torch.empty(2, lines, chunks, size, width, dtype=torch.float32, device=key.device)
        updates, grad_updates = torch.empty_like(u), torch.empty_like(u)
        start = starts if first is None else first
        _scan[grid](
            query, key, w, u, sums, start, starts, starts, starts, updates, tokens, chunks, size**-0.5, **sizes,
            COLUMNS=COLUMNS, FIRST=first is not None, AGAIN=True, num_warps=4, num_stages=2,
        )  # fmt: skip
        grad_first = torch.empty_like(grad_last)
        _scan_back[grid](
            query, key, w, sums, upstream, grad_last, ends, grad_updates, grad_first, tokens, chunks, size**-0.5,
            **sizes, COLUMNS=COLUMNS, LAST=True, num_warps=4, num_stages=2,
        )  # fmt: skip
        grad_query, grad_key, grad_value = (torch.empty_like(part) for part in (query, key, value))
        grad_decay, grad_beta = (torch.empty(beta.shape, dtype=torch.float32, device=key.device) for _ in range(2))
        _gradients[(chunks, lines)](
            query, key, value, beta, inverse, sums, upstream, starts, updates, ends, grad_updates, grad_query, grad_key,
            grad_value, grad_decay, grad_beta, tokens, size**-0.5, **sizes, COLUMNS=COLUMNS, num_warps=8, num_stages=1,
        )  # fmt: skip
        needed = ctx.needs_input_grad[5] and first is not None
        grad_decay, grad_beta = grad_decay.to(ctx.decay_dtype), grad_beta.to(beta.dtype)
        return grad_query, grad_key, grad_value, grad_decay, grad_beta, grad_first if needed else None


def _sizes(key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
    heads, size = key.shape[2:]
    return {
        "HEADS": heads,
        "KEY": size,
        "PADDED_KEY": max(16, triton.next_power_of_2(size)),
        "VALUE": value.shape[-1],
        "CHUNK": CHUNK,
    }
