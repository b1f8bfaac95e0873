"""Attention of modules that derive their own mask from the causal one, for example by the top-k of an indexer.

Such modules select tokens by their index in the row, so a packed row would mix sequences. They run on right-padded rows
instead, one per sequence, with the causal mask of transformers. In the engine they read and write the KV cache through
the cache interface of transformers, because their indexers cache keys too. Attention is dense with the module's mask.

Shapes: N rows, L tokens of a row, K cached tokens of a row, H query heads, G key/value heads, D key size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.kernels.attention.explicit import SCORE_BYTES, masked_attention
from lockstep.kernels.attention.kv_cache import CachedCall, CacheLayout, Plane
from lockstep.kernels.attention.layout import DecodePass, Layout
from lockstep.kernels.attention.masks import PROBE, SELECTIONS, MaskProbe, Seen, attending, register_probe
from lockstep.kernels.attention.paged import PrefillPass

TOKENS, BLOCKS = SELECTIONS


@dataclass(frozen=True)
class RowPass:
    """The layout of a forward pass over right-padded rows, whose modules get a causal mask and build their own masks
    from it."""


def row_mask(seen: Seen, queries_NL: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the causal mask (N, 1, L, keys) of queries at these positions as transformers builds it: 0 where a token
    is seen, else the lowest number."""
    positions = torch.arange(keys, device=queries_NL.device)
    shown = seen.sees(queries_NL[:, :, None], positions[None, None, :])
    mask = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(~shown, torch.finfo(dtype).min)
    return mask[:, None]


def row_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    dropout: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    selected: dict[str, Any],
) -> torch.Tensor:
    """Computes attention with the module's mask. Inputs are (N, H or G, L or K, D), the output is (N, L, H, D).

    `selected` has the selection of the module's indexer, if the module did not add it to the mask itself.
    """
    if (tokens := selected.get(TOKENS)) is not None:
        hidden = torch.ones(*tokens.shape[:2], key.shape[2], dtype=torch.bool, device=mask.device)
        hidden = hidden.scatter(-1, tokens.long(), False)[:, None]
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
    if (blocks := selected.get(BLOCKS)) is not None:
        where = key.shape[2], query.dtype, query.device
        mask = module.indexer.build_block_mask(blocks, mask, *where, selected["position_ids"])
    # The scores of a block of queries are recomputed in the backward pass.
    heads, width = query.shape[1], query.shape[2]
    rows = max(1, SCORE_BYTES // (4 * len(query) * heads * key.shape[2]))
    parts = [
        checkpoint(
            masked_attention,
            query[:, :, start : start + rows],
            key,
            value,
            mask[:, :, start : start + rows],
            sinks_H,
            scale=scale,
            softcap=softcap,
            dropout=dropout,
            use_reentrant=False,
            preserve_rng_state=bool(dropout),
        )
        for start in range(0, width, rows)
    ]
    return torch.cat(parts, 2).transpose(1, 2)


# -- reading the cache layout of a model


@dataclass
class RowProbe(MaskProbe):
    """The result of a probe pass of a model whose modules build their own masks. It stands in for the cache."""

    seen: Seen = field(default_factory=lambda: Seen(None))
    events: dict[tuple[str, int], int] = field(default_factory=dict)
    """The index in the cache layout of each write to the cache, by its kind and layer."""
    repeated: list[tuple[str, int]] = field(default_factory=list)

    @property
    def layout(self) -> CacheLayout:
        if self.repeated:
            kind, layer = self.repeated[0]
            raise NotImplementedError(f"layer {layer} writes its {kind} to the cache more than once in a pass")
        return super().layout

    def add(self, module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> None:
        # What is cached is written before attention.
        self.called.append(module)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any) -> Any:
        self._event("keys", layer, key, value)
        return key, value

    def update_indexer(self, key: torch.Tensor, layer: int, *_: Any) -> torch.Tensor:
        self._event("index", layer, key)
        return key

    @property
    def layers(self) -> _CacheLayers:
        return _CacheLayers(self)

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def _event(self, kind: str, layer: int, *tensors: torch.Tensor) -> None:
        if (kind, layer) in self.events:
            self.repeated.append((kind, layer))
        first = len(self.planes)
        self.planes += [Plane(tensor.shape[1] if tensor.dim() == 4 else 1, tensor.shape[-1]) for tensor in tensors]
        self.events[kind, layer] = len(self.calls)
        self.calls.append(CachedCall(first, len(self.planes) - 1))


@dataclass(frozen=True)
class _CacheLayers:
    """The `layers` of a cache, for indexers that write their keys to the cache of one layer."""

    cache: Any

    def __getitem__(self, layer: int) -> _CacheLayer:
        return _CacheLayer(self.cache, layer)


@dataclass(frozen=True)
class _CacheLayer:
    cache: Any
    layer: int

    def update_index(self, key: torch.Tensor) -> torch.Tensor:
        return self.cache.update_indexer(key, self.layer)


@torch.no_grad()
def read_rows(model: Any, decoder: nn.Module, seen: Seen) -> RowProbe:
    """Runs a probe pass on two tokens, with the mask that the modules get in training."""
    register_probe()
    probe = RowProbe(seen=seen)
    weight = model.get_input_embeddings().weight
    positions = torch.tensor([[0, 1]], device=weight.device)
    training = model.training
    model.eval()
    try:
        with attending(model, PROBE):
            decoder(
                input_ids=positions + 1,
                position_ids=positions,
                attention_mask=row_mask(seen, positions, 2, weight.dtype),
                past_key_values=probe,
                use_cache=False,
                probe=probe,
            )
    finally:
        model.train(training)
    return probe


# -- rows of a training batch


@dataclass(frozen=True)
class PaddedRows:
    """The sequences of a micro-batch as right-padded rows."""

    input_ids_NL: torch.Tensor
    position_ids_NL: torch.Tensor
    tokens_T: torch.Tensor | None
    """Index in the flattened rows of each token of the packed row, or None if the batch was padded already."""

    def back(self, states_NLW: torch.Tensor) -> torch.Tensor:
        """Returns the states of the packed row's tokens, (1, T, W)."""
        return states_NLW if self.tokens_T is None else states_NLW.flatten(0, 1).index_select(0, self.tokens_T)[None]


def padded_rows(
    input_ids_NT: torch.Tensor,
    position_ids_NT: torch.Tensor,
    lengths: tuple[int, ...],
    packed_index_E: torch.Tensor | None,
    packed: bool,
) -> PaddedRows:
    if not packed:
        return PaddedRows(input_ids_NT, position_ids_NT, None)
    device, width = input_ids_NT.device, max(lengths)
    count = int(input_ids_NT.shape[1])
    source_E = torch.arange(count) if packed_index_E is None else packed_index_E.cpu()
    # Slot of each token of the expanded sequences in the flattened rows.
    slots_E = torch.cat([row * width + torch.arange(length) for row, length in enumerate(lengths)])
    tokens_T = torch.zeros(count, dtype=torch.long)
    # A token that several sequences share is taken from the first of them.
    tokens_T[source_E.flip(0)] = slots_E.flip(0)
    source, slots = source_E.to(device), slots_E.to(device)
    ids = torch.zeros(len(lengths) * width, dtype=input_ids_NT.dtype, device=device)
    positions = torch.arange(width, device=device).repeat(len(lengths))
    ids[slots] = input_ids_NT[0, source]
    positions[slots] = position_ids_NT[0, source]
    return PaddedRows(ids.view(-1, width), positions.view(-1, width), tokens_T.to(device))


# -- rows of a pass of the engine


@dataclass(frozen=True)
class RowKVCache:
    """The KV cache of the engine behind the cache interface of transformers. It writes the new tokens of every row, and
    returns all tokens of every row, padded on the right."""

    step: PrefillPass | DecodePass
    events: dict[tuple[str, int], int]
    slots_NL: torch.Tensor
    """Slot of each new token. Padding is written to the spare block."""
    slots_NK: torch.Tensor
    """Slots of all tokens of a row, new ones included."""

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any) -> Any:
        call = self.step.cache.layout.calls[self.events["keys", layer]]
        return self._rows(key, call.keys), self._rows(value, call.values)

    def update_indexer(self, key: torch.Tensor, layer: int, *_: Any) -> torch.Tensor:
        call = self.step.cache.layout.calls[self.events["index", layer]]
        return self._rows(key, call.keys) if key.dim() == 4 else self._rows(key[:, None], call.keys)[:, 0]

    @property
    def layers(self) -> _CacheLayers:
        return _CacheLayers(self)

    def _rows(self, new_NGLD: torch.Tensor, plane: int) -> torch.Tensor:
        slots = self.step.cache.plane(plane)
        slots.index_copy_(0, self.slots_NL.flatten(), new_NGLD.transpose(1, 2).flatten(0, 1).to(slots.dtype))
        cached = slots.index_select(0, self.slots_NK.flatten())
        return cached.unflatten(0, self.slots_NK.shape).transpose(1, 2)


def engine_rows(
    decoder: Any, ids_T: torch.Tensor, at_T: torch.Tensor, step: PrefillPass | DecodePass, probe: RowProbe
) -> torch.Tensor:
    """Runs a pass of the engine over right-padded rows. Returns the hidden states of its tokens."""
    if isinstance(step, DecodePass):
        block, width = step.cache.block, step.table_BM.shape[1]
        within = torch.arange(width * block, device=ids_T.device)
        slots_NK = step.table_BM[:, within // block] * block + within % block
        rows = PaddedRows(ids_T[:, None], at_T[:, None], torch.arange(len(ids_T), device=ids_T.device))
        slots_NL = step.slots_T[:, None]
    else:
        rows, slots_NL, slots_NK = _prefill_rows(ids_T, at_T, step)
    mask = row_mask(probe.seen, rows.position_ids_NL, slots_NK.shape[1], step.cache.tensors[0].dtype)
    cache = RowKVCache(step, probe.events, slots_NL, slots_NK)
    output = decoder(
        input_ids=rows.input_ids_NL,
        position_ids=rows.position_ids_NL,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=False,
        layout=RowPass(),
    )
    return rows.back(output.last_hidden_state)[0]


def _prefill_rows(
    ids_T: torch.Tensor, at_T: torch.Tensor, step: PrefillPass
) -> tuple[PaddedRows, torch.Tensor, torch.Tensor]:
    if isinstance(step.where, Layout):
        bounds = list(pairwise((0, *step.where.ends)))
        pieces = [(first, 0, last - first, step.slots_T[first:last]) for first, last in bounds]
    else:
        pieces = [(piece.first, piece.start, piece.stop, piece.slots) for piece in step.where.pieces]
    spare = step.cache.spare * step.cache.block
    width, longest = max(stop - start for _, start, stop, _ in pieces), max(stop for *_, stop, _ in pieces)
    shape, device = (len(pieces), width), ids_T.device
    ids, slots_NL = torch.zeros(shape, dtype=ids_T.dtype, device=device), torch.full(shape, spare, device=device)
    positions, tokens = torch.zeros(shape, dtype=at_T.dtype, device=device), []
    slots_NK = torch.full((len(pieces), longest), spare, device=device)
    for row, (first, start, stop, slots) in enumerate(pieces):
        count = stop - start
        ids[row, :count] = ids_T[first : first + count]
        positions[row] = start + torch.arange(width, device=device)
        slots_NL[row, :count] = step.slots_T[first : first + count]
        slots_NK[row, :stop] = slots
        tokens.append(row * width + torch.arange(count, device=device))
    return PaddedRows(ids, positions, torch.cat(tokens)), slots_NL, slots_NK
