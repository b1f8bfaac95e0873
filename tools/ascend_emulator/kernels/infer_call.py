"""One call of an attention operator of generation: split into sequences, answered one by one, put together again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ascend_emulator.kernels.attention import (
    UNLIMITED,
    Masking,
    for_every_query_head,
    masked_scores,
    packed_slices,
    softmax_statistics,
    softmax_weights,
    to_heads_first,
)
from ascend_emulator.kernels.pages import PROMPT_MULTIPLE, SINGLE_TOKEN_MULTIPLE, Pages
from ascend_emulator.kernels.reference import NotInReference, limit

_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
_DTYPES = (torch.float16, torch.bfloat16)
_MOST_QUERY_HEADS_TO_A_KEY_HEAD = 64


@dataclass(frozen=True)
class Call:
    name: str
    layout: str
    heads: int
    key_heads: int
    scale: float
    query_lengths: list[int] | None
    key_lengths: list[int] | None
    masking: Masking
    block_table: torch.Tensor | None
    block_size: int

    @property
    def packed(self) -> bool:
        return self.layout == "TND"

    @property
    def input_layout(self) -> str:
        return self.layout.split("_")[0]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output in the layout of the call, and the logarithms of the softmax sums."""
    check_arguments(query, key, value, call)
    queries = query_sequences(query, call)
    longest = max((q.shape[1] for q in queries), default=0)
    keys, values = key_value_sequences(key, value, len(queries), longest, call)
    outs, sums = [], []
    for index, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        masking = masking_of(index, q.shape[1], k.shape[1], longest, call)
        scores = masked_scores(q[None], k[None], call.scale, masking)
        largest, total = softmax_statistics(scores)
        weights = softmax_weights(scores, largest, total)
        outs.append((weights @ for_every_query_head(v[None], call.heads))[0].to(query.dtype))
        sums.append((total.log() + largest)[0])
    return assembled(outs, query, call), assembled_sums(sums, query, call)


def check_arguments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> None:
    if call.layout not in _LAYOUTS:
        raise NotInReference(f"the emulated {call.name} has no layout {call.layout!r}")
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) > 1 or query.dtype not in _DTYPES:
        raise RuntimeError(f"{call.name}: query, key and value must be all float16 or all bfloat16, got {dtypes}")
    if call.heads % call.key_heads or call.heads // call.key_heads > _MOST_QUERY_HEADS_TO_A_KEY_HEAD:
        raise RuntimeError(f"{call.name}: {call.heads} query heads cannot share {call.key_heads} key heads")
    heads_at = {"BNSD": 1, "BSND": 2, "TND": 1}.get(call.input_layout)
    if heads_at is not None and query.shape[heads_at] != call.heads:
        raise RuntimeError(f"{call.name}: {call.heads} heads, but query is {tuple(query.shape)}")
    _check_sizes(query, key, call)


def _check_sizes(query: torch.Tensor, key: torch.Tensor, call: Call) -> None:
    limit(call.name, 1 <= call.heads <= 256, f"{call.heads} heads: at most 256")
    size = query.shape[-1] // (call.heads if call.input_layout == "BSH" else 1)
    limit(call.name, size <= 512, f"head size {size}: at most 512")
    limit(call.name, query.shape[0] <= 2**16 or call.packed, f"{query.shape[0]} sequences: at most 65536")
    limit(call.name, max(call.key_lengths or [0]) <= 2**18, f"{max(call.key_lengths or [0])} keys: at most 262144")
    if call.block_table is not None:
        limit(
            call.name, key.dim() == 4 or key.shape[-1] <= 65535, f"keys of a token {key.shape[-1]} wide: at most 65535"
        )
        limit(call.name, key.numel() < 2**31, f"a cache of {key.numel()} elements: an int32 counts them")


def query_sequences(query: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """One [N, S, D] a sequence."""
    if call.packed:
        if call.query_lengths is None or call.key_lengths is None:
            raise RuntimeError(f"{call.name}: layout TND needs the lengths of queries and keys")
        return [query[rows].transpose(0, 1) for rows in packed_slices(call.query_lengths)]
    sequences = list(to_heads_first(query, call.input_layout, call.heads))
    if call.query_lengths is None or sequences[0].shape[1] == 1:  # documented to be ignored for single tokens
        return sequences
    lengths = one_each(call.query_lengths, len(sequences), call.name)
    return [x[:, :length] for x, length in zip(sequences, lengths, strict=True)]


def key_value_sequences(
    key: torch.Tensor, value: torch.Tensor, count: int, longest: int, call: Call
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One [K, T, D] a sequence, of keys and of values."""
    if call.block_table is not None:
        heads_first_allowed = call.input_layout in ("BNSD", "TND")
        multiple = PROMPT_MULTIPLE if longest > 1 else SINGLE_TOKEN_MULTIPLE
        pages = Pages(call.block_table, call.block_size, call.key_heads, heads_first_allowed, multiple)
        if call.key_lengths is None:
            raise RuntimeError(f"{call.name}: pages need the lengths of the keys")
        # Lengths of paged keys are lengths and not running sums, in every layout.
        lengths = one_each(call.key_lengths, count, call.name)
        return pages.sequences(key, lengths), pages.sequences(value, lengths)
    if call.packed:
        if call.key_lengths is None or len(call.key_lengths) != count:
            raise RuntimeError(f"{call.name}: {count} sequences of queries, but key lengths {call.key_lengths}")
        rows = packed_slices(call.key_lengths)
        return [key[part].transpose(0, 1) for part in rows], [value[part].transpose(0, 1) for part in rows]
    keys = to_heads_first(key, call.input_layout, call.key_heads)
    values = to_heads_first(value, call.input_layout, call.key_heads)
    if keys.shape[1] != call.key_heads:
        raise RuntimeError(f"{call.name}: {call.key_heads} key heads, but key is {tuple(key.shape)}")
    lengths = one_each(call.key_lengths or [keys.shape[2]], count, call.name)
    return [k[:, :n] for k, n in zip(keys, lengths, strict=True)], [
        v[:, :n] for v, n in zip(values, lengths, strict=True)
    ]


def one_each(lengths: list[int], count: int, name: str) -> list[int]:
    """One length stands for all sequences, and more than enough are cut."""
    if len(lengths) == 1:
        return list(lengths) * count
    if len(lengths) < count:
        raise RuntimeError(f"{name}: {count} sequences, but lengths {lengths}")
    return list(lengths[:count])


def masking_of(index: int, queries: int, keys: int, longest: int, call: Call) -> Masking:
    """A single token, unless packed, is documented to look at its mask only and at no sparse mode."""
    masking = call.masking
    single = longest == 1 and not call.packed
    mode = 0 if single else masking.sparse_mode
    if masking.mask is None or mode in (2, 3, 4):
        return Masking(None) if single else masking
    mask = masking.mask
    if mask.dim() == 2 and single:
        mask = mask[index][None]
    elif mask.dim() > 2:
        mask = mask[index if mask.shape[0] > 1 else 0].reshape(mask.shape[-2:])
    if mask.shape[0] < queries or mask.shape[1] < keys:
        raise RuntimeError(f"{call.name}: a mask of {tuple(masking.mask.shape)} for {queries} queries and {keys} keys")
    band = (UNLIMITED, UNLIMITED) if single else (masking.before, masking.after)
    return Masking(mask[:queries, :keys], mode, *band)


def assembled(outs: list[torch.Tensor], query: torch.Tensor, call: Call) -> torch.Tensor:
    """[N, S, D] a sequence in the layout of the call; rows past a sequence's length are zero."""
    if call.packed:
        filled = torch.zeros(*query.shape[:2], outs[0].shape[-1], dtype=query.dtype)
        for place, out in zip(packed_slices(call.query_lengths or []), outs, strict=True):
            filled[place] = out.transpose(0, 1)
        return filled
    rows = to_heads_first(query, call.input_layout, call.heads).shape[2]
    stacked = torch.stack([torch.nn.functional.pad(out, (0, 0, 0, rows - out.shape[1])) for out in outs])
    if call.layout == "BNSD":
        return stacked
    return stacked.transpose(1, 2).flatten(2) if call.layout == "BSH" else stacked.transpose(1, 2).contiguous()


def assembled_sums(sums: list[torch.Tensor], query: torch.Tensor, call: Call) -> torch.Tensor:
    """[B, N, S, 1], or [T, N, 1] for packed sequences."""
    if call.packed:
        return torch.cat([x.transpose(0, 1) for x in sums])
    rows = to_heads_first(query, call.input_layout, call.heads).shape[2]
    return torch.stack([torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[1])) for x in sums])
