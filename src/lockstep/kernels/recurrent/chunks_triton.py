"""Linear attention with a decay per head over whole sequences in Triton, in chunks, with a backward pass.

With the state S (K x V) of a head, a token does: S = exp(g) S + k v^T, and its output is S^T q. With the sums G of the
decays g since the start of the chunk, the outputs of a chunk are exp(G_i) S^T q_i + sum_j exp(G_i - G_j) (q_i k_j) v_j,
j <= i. Only the state is passed from chunk to chunk. Mamba-2 is this rule with q = C, k = B, v = dt x and g = dt A. The
gated delta rule (`delta_triton.py`) writes v' = u - w S instead of v. The backward pass computes the states at the
starts of the chunks again.

All programs have two warps, so that Triton does not use the matrix instructions of Hopper (wgmma): with these, Triton
3.4 to 3.7 gives wrong numbers for the transpose of a product as the factor of another product. Each kernel takes
seconds to compile, so Triton must not compile it again for other numbers of tokens. Suffixes: N rows, T tokens, H
heads, G groups of heads that share keys, K size of a key, V size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from lockstep.kernels.triton_math import runs_on

CHUNK = 64
# Columns of keys and values that a program multiplies at once, and columns of the states of one program of a scan.
BLOCK, COLUMNS = 32, 32
WARPS, STAGES = 2, 2
LARGEST_KEY = 256


@triton.jit
def dot(a, b):  # type: ignore[no-untyped-def]
    """Multiplies matrices in their dtype, and sums in fp32. Matrices in fp32 are multiplied as three products in TF32,
    which is as precise as fp32 here: a kernel without matrix instructions takes minutes to compile."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def load_tile(base, row, inside, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads these columns of rows of WIDTH numbers. Rows and columns outside are zeros."""
    places = row[:, None] * WIDTH + columns[None, :]
    return tl.load(base + places, mask=inside[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(base, row, inside, columns, values, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    places = row[:, None] * WIDTH + columns[None, :]
    tl.store(base + places, values.to(base.dtype.element_ty), mask=inside[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def pairwise(g, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns exp(G_i - G_j) for j <= i, otherwise 0."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.exp(tl.where(i >= j, g[:, None] - g[None, :], -float("inf")))


@triton.jit
def rows_of_chunk(line, chunk, tokens, HEADS: tl.constexpr, SHARED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the tokens of a chunk of one head, which of them exist, and their rows in values and in keys."""
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    token = (line // HEADS) * tokens + t
    return t, t < tokens, token * HEADS + line % HEADS, token * (HEADS // SHARED) + (line % HEADS) // SHARED


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _states(  # type: ignore[no-untyped-def]
    key, value, w, sums, first, starts, updates, last, tokens, chunks, HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY: tl.constexpr, PADDED_KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    FIRST: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Passes the state of one head through its chunks, for COLUMNS of its columns. Writes the state at the start of
    each chunk, the last state and, with DELTA, what the tokens add to the state."""
    line = tl.program_id(0).to(tl.int64)
    k_columns = tl.arange(0, PADDED_KEY)
    v_columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k_inside = k_columns < KEY
    state = tl.zeros([PADDED_KEY, COLUMNS], tl.float32)
    if FIRST:
        state += load_tile(first + line * (KEY * VALUE), k_columns, k_inside, v_columns, VALUE).to(tl.float32)
    for chunk in range(0, chunks):
        t, inside, row, k_row = rows_of_chunk(line, chunk, tokens, HEADS, SHARED, CHUNK)
        g = tl.load(sums + line * (chunks * CHUNK) + t)
        total = tl.load(sums + line * (chunks * CHUNK) + chunk * CHUNK + CHUNK - 1)
        store_tile(starts + (line * chunks + chunk) * (KEY * VALUE), k_columns, k_inside, v_columns, state, VALUE)
        new = load_tile(value, row, inside, v_columns, VALUE)
        if DELTA:
            read = dot(load_tile(w, row, inside, k_columns, KEY), state.to(new.dtype))
            new = (new.to(tl.float32) - read).to(new.dtype)
            store_tile(updates, row, inside, v_columns, new, VALUE)
        k = load_tile(key, k_row, inside, k_columns, KEY)
        decayed = (new.to(tl.float32) * tl.exp(total - g)[:, None]).to(k.dtype)
        state = state * tl.exp(total) + dot(tl.trans(k), decayed)
    store_tile(last + line * (KEY * VALUE), k_columns, k_inside, v_columns, state, VALUE)


@triton.jit(do_not_specialize=["tokens"])
def _outputs(  # type: ignore[no-untyped-def]
    query, key, updates, sums, starts, out, tokens, scale, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes COLUMNS columns of the outputs of one chunk of one head."""
    chunk, chunks, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    t, inside, row, k_row = rows_of_chunk(line, chunk, tokens, HEADS, SHARED, CHUNK)
    v_columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    g = tl.load(sums + line * (chunks * CHUNK) + t)
    state = starts + (line * chunks + chunk) * (KEY * VALUE)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    result = tl.zeros([CHUNK, COLUMNS], tl.float32)
    for column in range(0, KEY, BLOCK):
        k_columns = column + tl.arange(0, BLOCK)
        q = load_tile(query, k_row, inside, k_columns, KEY)
        pairs += dot(q, tl.trans(load_tile(key, k_row, inside, k_columns, KEY)))
        result += dot(q, load_tile(state, k_columns, k_columns < KEY, v_columns, VALUE))
    new = load_tile(updates, row, inside, v_columns, VALUE)
    result = result * tl.exp(g)[:, None] + dot((pairs * pairwise(g, CHUNK)).to(new.dtype), new)
    store_tile(out, row, inside, v_columns, result * scale, VALUE)


@triton.jit(do_not_specialize=["tokens"])
def _grad_within(  # type: ignore[no-untyped-def]
    query, key, upstream, sums, grad_updates, tokens, scale, HEADS: tl.constexpr, SHARED: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of the updates that come from the outputs of their own chunk."""
    chunk, chunks, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    t, inside, row, k_row = rows_of_chunk(line, chunk, tokens, HEADS, SHARED, CHUNK)
    v_columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    g = tl.load(sums + line * (chunks * CHUNK) + t)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    for column in range(0, KEY, BLOCK):
        k_columns = column + tl.arange(0, BLOCK)
        q = load_tile(query, k_row, inside, k_columns, KEY)
        pairs += dot(q, tl.trans(load_tile(key, k_row, inside, k_columns, KEY)))
    above = load_tile(upstream, row, inside, v_columns, VALUE)
    pairs = (pairs * pairwise(g, CHUNK)).to(above.dtype)
    store_tile(grad_updates, row, inside, v_columns, dot(tl.trans(pairs), above) * scale, VALUE)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _grad_states(  # type: ignore[no-untyped-def]
    query, key, w, sums, upstream, grad_last, ends, grad_updates, grad_first, tokens, chunks, scale,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, PADDED_KEY: tl.constexpr, VALUE: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Passes the gradient of the state back through the chunks. Writes the gradients of the state at the end of each
    chunk and of the first state, and completes the gradients of the updates."""
    line = tl.program_id(0).to(tl.int64)
    k_columns = tl.arange(0, PADDED_KEY)
    v_columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k_inside = k_columns < KEY
    grad = load_tile(grad_last + line * (KEY * VALUE), k_columns, k_inside, v_columns, VALUE).to(tl.float32)
    for backwards in range(0, chunks):
        chunk = chunks - 1 - backwards
        t, inside, row, k_row = rows_of_chunk(line, chunk, tokens, HEADS, SHARED, CHUNK)
        g = tl.load(sums + line * (chunks * CHUNK) + t)
        total = tl.load(sums + line * (chunks * CHUNK) + chunk * CHUNK + CHUNK - 1)
        store_tile(ends + (line * chunks + chunk) * (KEY * VALUE), k_columns, k_inside, v_columns, grad, VALUE)
        k = load_tile(key, k_row, inside, k_columns, KEY)
        new = load_tile(grad_updates, row, inside, v_columns, VALUE).to(tl.float32)
        new = (new + dot(k, grad.to(k.dtype)) * tl.exp(total - g)[:, None]).to(k.dtype)
        store_tile(grad_updates, row, inside, v_columns, new, VALUE)
        above = load_tile(upstream, row, inside, v_columns, VALUE).to(tl.float32)
        above = (above * (tl.exp(g) * scale)[:, None]).to(k.dtype)
        grad = grad * tl.exp(total) + dot(tl.trans(load_tile(query, k_row, inside, k_columns, KEY)), above)
        if DELTA:
            grad -= dot(tl.trans(load_tile(w, row, inside, k_columns, KEY)), new)
    store_tile(grad_first + line * (KEY * VALUE), k_columns, k_inside, v_columns, grad, VALUE)


@triton.jit(do_not_specialize=["tokens"])
def _grad_inputs(  # type: ignore[no-untyped-def]
    query, key, sums, upstream, starts, updates, ends, grad_updates, grad_query, grad_key, grad_w, grad_sums, tokens,
    scale, HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK columns of the gradients of queries, keys and w of one chunk of one head, and what these columns
    add to the gradients of the sums of decays."""
    chunk, chunks, line = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    t, inside, row, k_row = rows_of_chunk(line, chunk, tokens, HEADS, SHARED, CHUNK)
    k_columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k_inside = k_columns < KEY
    g = tl.load(sums + line * (chunks * CHUNK) + t)
    total = tl.load(sums + line * (chunks * CHUNK) + chunk * CHUNK + CHUNK - 1)
    square = (line * chunks + chunk) * (KEY * VALUE)
    d_q, d_k = tl.zeros([CHUNK, BLOCK], tl.float32), tl.zeros([CHUNK, BLOCK], tl.float32)
    d_w = tl.zeros([CHUNK, BLOCK], tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    d_total = tl.zeros([BLOCK], tl.float32)
    for column in range(0, VALUE, BLOCK):
        v_columns = column + tl.arange(0, BLOCK)
        state = load_tile(starts + square, k_columns, k_inside, v_columns, VALUE)
        grad = load_tile(ends + square, k_columns, k_inside, v_columns, VALUE)
        above = load_tile(upstream, row, inside, v_columns, VALUE)
        new = load_tile(updates, row, inside, v_columns, VALUE)
        d_q += dot(above, tl.trans(state))
        d_k += dot(new, tl.trans(grad))
        pairs += dot(above, tl.trans(new))
        d_total += tl.sum(state.to(tl.float32) * grad.to(tl.float32), axis=1)
        if DELTA:
            d_w -= dot(load_tile(grad_updates, row, inside, v_columns, VALUE), tl.trans(state))
    q = load_tile(query, k_row, inside, k_columns, KEY)
    k = load_tile(key, k_row, inside, k_columns, KEY)
    pairs = (pairs * pairwise(g, CHUNK) * scale).to(q.dtype)
    d_q = d_q * (tl.exp(g) * scale)[:, None] + dot(pairs, k)
    d_k *= tl.exp(total - g)[:, None]
    k_32 = k.to(tl.float32)
    written = tl.sum(tl.sum(d_k * k_32, axis=1), axis=0) + tl.sum(d_total, axis=0) * tl.exp(total)
    d_k += dot(tl.trans(pairs), q)
    d_g = tl.sum(d_q * q.to(tl.float32), axis=1) - tl.sum(d_k * k_32, axis=1)
    d_g += tl.where(tl.arange(0, CHUNK) == CHUNK - 1, written, 0.0)
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + line
    tl.store(grad_sums + part * (chunks * CHUNK) + t, d_g)
    store_tile(grad_query, row, inside, k_columns, d_q, KEY)
    store_tile(grad_key, row, inside, k_columns, d_k, KEY)
    if DELTA:
        store_tile(grad_w, row, inside, k_columns, d_w, KEY)


def summed(decay_NTH: torch.Tensor) -> torch.Tensor:
    """Returns the sums of the decays since the starts of the chunks: (N * H, chunks, CHUNK), in fp32."""
    rows, tokens, heads = decay_NTH.shape
    chunks = triton.cdiv(tokens, CHUNK)
    padded = pad(decay_NTH.float().transpose(1, 2), (0, chunks * CHUNK - tokens))
    return padded.reshape(rows * heads, chunks, CHUNK).cumsum(-1)


def decay_gradient(parts: torch.Tensor, decay_NTH: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the decays from the gradients of their sums (parts, N * H, chunks, CHUNK)."""
    rows, tokens, heads = decay_NTH.shape
    grad = parts.sum(0).flip(-1).cumsum(-1).flip(-1)
    return grad.view(rows, heads, -1)[..., :tokens].transpose(1, 2).to(decay_NTH.dtype)


def scan(
    key: torch.Tensor,
    value: torch.Tensor,
    w: torch.Tensor | None,
    sums: torch.Tensor,
    first: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the states at the starts of the chunks, what the tokens add to the state, and the last state. `w` is that
    of the delta rule."""
    rows, tokens, heads, width = value.shape
    size, (lines, chunks) = key.shape[-1], sums.shape[:2]
    starts = torch.empty(lines, chunks, size, width, dtype=key.dtype, device=key.device)
    last = torch.empty(rows, heads, size, width, dtype=torch.float32, device=key.device)
    updates = value if w is None else torch.empty_like(value)
    _states[(lines, triton.cdiv(width, COLUMNS))](
        key, value, key if w is None else w, sums, last if first is None else first, starts, updates, last, tokens,
        chunks, **sizes_of(key, value), PADDED_KEY=padded(size), COLUMNS=COLUMNS, FIRST=first is not None,
        DELTA=w is not None, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return starts, updates, last


def read(
    query: torch.Tensor, key: torch.Tensor, updates: torch.Tensor, sums: torch.Tensor, starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Returns the outputs of all tokens."""
    out = torch.empty_like(updates)
    (lines, chunks), width = sums.shape[:2], updates.shape[-1]
    _outputs[(chunks, lines, triton.cdiv(width, 2 * BLOCK))](
        query, key, updates, sums, starts, out, updates.shape[1], scale, **sizes_of(key, updates), BLOCK=BLOCK,
        COLUMNS=2 * BLOCK, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def gradients(
    query: torch.Tensor, key: torch.Tensor, w: torch.Tensor | None, sums: torch.Tensor, starts: torch.Tensor,
    updates: torch.Tensor, upstream: torch.Tensor, grad_last: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the gradients of queries and keys per head, of w, of the updates, of the first state, and the parts of
    the gradient of the sums of decays. With `w`, the gradient of the keys is in fp32 and not complete."""
    rows, tokens, heads, width = updates.shape
    (lines, chunks), size, delta = sums.shape[:2], key.shape[-1], w is not None
    sizes, run = sizes_of(key, updates), {"num_warps": WARPS, "num_stages": STAGES}
    grad_updates = torch.empty_like(updates)
    _grad_within[(chunks, lines, triton.cdiv(width, 2 * BLOCK))](
        query, key, upstream, sums, grad_updates, tokens, scale, **sizes, BLOCK=BLOCK, COLUMNS=2 * BLOCK, **run
    )
    ends, grad_first = torch.empty_like(starts), torch.empty_like(grad_last)
    _grad_states[(lines, triton.cdiv(width, COLUMNS))](
        query, key, key if w is None else w, sums, upstream, grad_last, ends, grad_updates, grad_first, tokens, chunks,
        scale, **sizes, PADDED_KEY=padded(size), COLUMNS=COLUMNS, DELTA=delta, **run,
    )  # fmt: skip
    grad_query = torch.empty(rows, tokens, heads, size, dtype=key.dtype, device=key.device)
    grad_key = torch.empty_like(grad_query, dtype=torch.float32 if delta else key.dtype)
    grad_w = torch.empty_like(grad_query) if delta else grad_query
    blocks = triton.cdiv(size, BLOCK)
    grad_sums = torch.empty(blocks, *sums.shape, dtype=torch.float32, device=key.device)
    _grad_inputs[(chunks, lines, blocks)](
        query, key, sums, upstream, starts, updates, ends, grad_updates, grad_query, grad_key, grad_w, grad_sums,
        tokens, scale, **sizes, BLOCK=BLOCK, DELTA=delta, **run,
    )  # fmt: skip
    return grad_query, grad_key, grad_w, grad_updates, grad_first, grad_sums


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def sizes_of(key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
    heads, width = value.shape[2:]
    return {
        "HEADS": heads,
        "SHARED": heads // key.shape[2],
        "KEY": key.shape[-1],
        "VALUE": width,
        "CHUNK": CHUNK,
    }


def linear_attention(
    query_NTGK: torch.Tensor,
    key_NTGK: torch.Tensor,
    value_NTHV: torch.Tensor,
    decay_NTH: torch.Tensor,
    first_NHKV: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs (N, T, H, V) and the last states (N, H, K, V) in fp32. The heads of a group share queries and
    keys."""
    out: tuple[torch.Tensor, torch.Tensor] = _LinearAttention.apply(
        query_NTGK, key_NTGK, value_NTHV, decay_NTH, first_NHKV, scale
    )
    return out


def chunks_fit(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether the kernels of this file support keys and values of this size. In fp32 they would run without
    matrix instructions, and their compilation takes minutes."""
    sized = key.shape[-1] <= LARGEST_KEY and key.dtype == value.dtype and key.numel() > 0 and value.numel() > 0
    fast = key.dtype != torch.float32 or not key.is_cuda
    return runs_on(key) and sized and fast and value.shape[2] % key.shape[2] == 0 and len(key) * value.shape[2] < 2**16


def plain_linear_attention(
    query_NTGK: torch.Tensor,
    key_NTGK: torch.Tensor,
    value_NTHV: torch.Tensor,
    decay_NTH: torch.Tensor,
    first_NHKV: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of `linear_attention`, token by token."""
    rows, tokens, heads, width = value_NTHV.shape
    query, key = (part.float().repeat_interleave(heads // part.shape[2], 2) for part in (query_NTGK, key_NTGK))
    state = key.new_zeros(rows, heads, key.shape[-1], width) if first_NHKV is None else first_NHKV.float()
    outputs = []
    for t in range(tokens):
        added = key[:, t, :, :, None] * value_NTHV[:, t, :, None].float()
        state = state * decay_NTH[:, t].float().exp()[..., None, None] + added
        outputs.append(torch.einsum("nhkv,nhk->nhv", state, query[:, t]) * scale)
    return torch.stack(outputs, 1).to(value_NTHV.dtype), state


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, decay = (part.contiguous() for part in given[:4])
        first, scale = None if given[4] is None else given[4].contiguous(), given[5]
        sums = summed(decay)
        starts, updates, last = scan(key, value, None, sums, first)
        out = read(query, key, updates, sums, starts, scale)
        ctx.save_for_backward(query, key, value, decay, first, sums)
        ctx.scale = scale
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, decay, first, sums = ctx.saved_tensors
        upstream, grad_last = (grad.contiguous() for grad in grads)
        starts, updates, _ = scan(key, value, None, sums, first)
        grad_query, grad_key, _, grad_value, grad_first, parts = gradients(
            query, key, None, sums, starts, updates, upstream, grad_last, ctx.scale
        )
        shape = (*key.shape[:3], -1, key.shape[3])
        grad_query, grad_key = (part.view(shape).sum(3, dtype=torch.float32) for part in (grad_query, grad_key))
        grad_decay = decay_gradient(parts, decay)
        needed = None if first is None else grad_first
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value, grad_decay, needed, None
