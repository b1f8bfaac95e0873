"""Writes of new keys and values to their places."""

from __future__ import annotations

import torch

from ascend_emulator.kernels.reference import NotInReference, reference, refuse


@reference("npu_scatter_nd_update")
def scatter_nd_update(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    return scatter_nd_update_(x.clone(), indices, updates)


@reference("npu_scatter_nd_update_", written=(0,))
def scatter_nd_update_(x: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """The last dimension of the indices addresses the first dimensions of x."""
    x[tuple(indices.long().unbind(-1))] = updates
    return x


@reference("npu_scatter_pa_kv_cache", written=(2, 3))
def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """[tokens, heads, size] to slot = page x page size + place in the page."""
    refuse(
        "npu_scatter_pa_kv_cache",
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
    )
    for new, cache in ((key, key_cache), (value, value_cache)):
        _write_slots(new, cache, slot_mapping.long(), cache_mode)


def _write_slots(new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, mode: str | None) -> None:
    if new.dim() != 3 or mode not in (None, "Norm", "PA_NZ"):
        raise NotInReference(
            f"the emulated npu_scatter_pa_kv_cache has no cache_mode {mode!r} for {new.dim()} dimensions"
        )
    # Tiled caches are [pages, heads x size / tile, page size, tile]; plain ones [pages, page size, heads, size].
    tiled = mode == "PA_NZ"
    page_size = cache.shape[2 if tiled else 1]
    if slots.numel() and not (int(slots.min()) >= 0 and int(slots.max()) < cache.shape[0] * page_size):
        raise RuntimeError(f"slot_mapping lies outside of the {cache.shape[0] * page_size} slots of the cache")
    page, place = slots // page_size, slots % page_size
    if tiled:
        cache[page, :, place] = new.reshape(len(new), cache.shape[1], cache.shape[3])
    else:
        cache[page, place] = new
