"""Paged decoding in Triton against its plain twin: other value sizes, latents and chunks."""

from __future__ import annotations

import torch

BLOCK = 4


def _agree(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    chunk: int | None = None,
) -> None:
    """The kernel with and without splits, in single and on a device in half precision, reading the last token from the
    cache or writing it there."""
    dtypes = (torch.float32, torch.bfloat16) if query.is_cuda else (torch.float32,)
    for dtype in dtypes:
        latent = values.data_ptr() == keys.data_ptr()
        cached = keys.to(dtype)
        own = cached[..., : values.shape[-1]] if latent else values.to(dtype)
        _agree_in(query.to(dtype), cached, own, table, lengths, chunk)


def _agree_in(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    chunk: int | None,
) -> None:
    from lockstep.kernels.attention.paged import gathered_decode
    from lockstep.kernels.attention.paged_triton import paged_decode

    latent = values.data_ptr() == keys.data_ptr()
    close = {"rtol": 1e-4, "atol": 1e-5} if query.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    common = (table, lengths, BLOCK, 0.2, None)
    twin = gathered_decode(query, keys, values, *common, chunk=chunk)
    last = table.gather(1, ((lengths - 1) // BLOCK)[:, None])[:, 0] * BLOCK + (lengths - 1) % BLOCK
    new = keys[last].clone(), values[last].clone()
    for splits in (1, 2):
        found = paged_decode(query, keys, values, *common, splits=splits, chunk=chunk)
        torch.testing.assert_close(found, twin, **close)
        poor_keys, poor_values = keys.clone(), values.clone()
        if latent:
            poor_values = poor_keys[..., : values.shape[-1]]
        poor_keys[last], poor_values[last] = 9.0, 9.0
        found = paged_decode(query, poor_keys, poor_values, *common, new=new, splits=splits, chunk=chunk)
        torch.testing.assert_close(found, twin, **close)
        assert torch.equal(poor_keys, keys)
        assert torch.equal(poor_values, values)


def _paged(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([1, 70, 37], device=device)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:54]
    return order.view(3, 18).to(device), lengths


def value_sizes(device: str) -> None:
    """Values narrower and wider than keys, with several query heads per key head."""
    generator = torch.Generator().manual_seed(0)
    table, lengths = _paged(device)
    for size, value_size in ((24, 16), (16, 40), (72, 16)):
        query = torch.randn(3, 4, size, generator=generator).to(device)
        keys, values = (torch.randn(61 * BLOCK, 2, n, generator=generator).to(device) for n in (size, value_size))
        _agree(query, keys, values, table, lengths)


def latents(device: str) -> None:
    """One latent per token that is both key and value, with more heads than one program takes."""
    generator = torch.Generator().manual_seed(0)
    table, lengths = _paged(device)
    for heads, rank, rope in ((4, 16, 8), (40, 24, 16)):
        query = torch.randn(3, heads, rank + rope, generator=generator).to(device)
        keys = torch.randn(61 * BLOCK, 1, rank + rope, generator=generator).to(device)
        _agree(query, keys, keys[..., :rank], table, lengths)


def chunks(device: str) -> None:
    """A token sees the tokens of its own chunk only, also as the first or last token of a chunk."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 16, generator=generator).to(device)
    keys, values = (torch.randn(61 * BLOCK, 2, 16, generator=generator).to(device) for _ in range(2))
    table, _ = _paged(device)
    for lengths in ([1, 8, 9], [64, 65, 70]):
        _agree(query, keys, values, table, torch.tensor(lengths, device=device), chunk=8)


def fp8_cache(device: str) -> None:
    """Keys and values as codes in fp8 with a scale per token and head, against the dequantised cache."""
    from lockstep.kernels.attention.paged import gathered_decode
    from lockstep.kernels.attention.paged_triton import paged_decode
    from lockstep.kernels.quantized.token_products import token_codes

    generator = torch.Generator().manual_seed(0)
    table, lengths = _paged(device)
    dtypes = (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,)
    for dtype in dtypes:
        query = torch.randn(3, 4, 16, generator=generator).to(device, dtype)
        rows = [torch.randn(61 * BLOCK, 2, n, generator=generator).to(device) * 5 for n in (16, 24)]
        codes, scales = zip(*(token_codes(part, "fp8") for part in rows), strict=True)
        read = [(code.float() * scale).to(dtype) for code, scale in zip(codes, scales, strict=True)]
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
        for window in (None, 20):
            common = (table, lengths, BLOCK, 0.2, window)
            twin = gathered_decode(query, *read, *common)
            for splits in (1, 2):
                given = tuple(scale[..., 0].contiguous() for scale in scales)
                found = paged_decode(query, *codes, *common, splits=splits, scales=given)
                torch.testing.assert_close(found, twin, **close)


CHECKS = {"value_sizes": value_sizes, "latents": latents, "chunks": chunks, "fp8_cache": fp8_cache}
