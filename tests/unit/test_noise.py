"""The sampler's noise: its bits against an independent implementation, its shape against the Gumbel distribution."""

from __future__ import annotations

import math

import pytest
import torch

from lockstep.kernels.sampling import gumbel_noise, sequence_keys


def murmur_finaliser(x: int) -> int:
    """The 32-bit finaliser of MurmurHash3 as published (Appleby 2011), in plain integers."""
    x %= 1 << 32
    x ^= x >> 16
    x = x * 0x85EBCA6B % (1 << 32)
    x ^= x >> 13
    x = x * 0xC2B2AE35 % (1 << 32)
    x ^= x >> 16
    return x


def plain_keys(seed: int, prompt: int, sample: int) -> list[int]:
    words = [seed % 2**32, seed // 2**32, prompt % 2**32, prompt // 2**32, sample]
    keys = []
    for start in (0x85EBCA6B, 0xC2B2AE35):
        for word in words:
            start = murmur_finaliser(start + word * 0x9E3779B9)
        keys.append(start)
    return keys


def plain_gumbel(keys: list[int], position: int, entry: int) -> float:
    first = murmur_finaliser(keys[0] + position * 0x9E3779B9)
    second = murmur_finaliser(keys[1] ^ (position * 0x85EBCA6B % 2**32))
    bits = murmur_finaliser(murmur_finaliser(entry + 1) ^ first)
    bits = murmur_finaliser(bits + second) % 2**31
    share = min((bits + 0.5) / 2**31, 1 - 2.0**-24)
    return -math.log(-math.log1p(-share))


def noise(keys: list[tuple[int, int]], positions: list[int], vocabulary: int) -> torch.Tensor:
    return gumbel_noise(torch.tensor(keys, dtype=torch.int32), torch.tensor(positions), vocabulary)


SEQUENCES = [(0, 0, 0), (1, 2, 3), (2**63 - 1, 2**40 + 5, 4095), (7, 2**32, 0), (7, 0, 1)]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_keys_are_those_of_the_plain_hash(sequence: tuple[int, int, int]) -> None:
    keys = sequence_keys(*sequence)
    assert [key % 2**32 for key in keys] == plain_keys(*sequence)
    assert all(-(2**31) <= key < 2**31 for key in keys)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_noise_is_that_of_the_plain_hash(sequence: tuple[int, int, int]) -> None:
    positions = [0, 1, 255, 131071]
    ours = noise([sequence_keys(*sequence)] * 4, positions, 300)
    plain = torch.tensor([[plain_gumbel(plain_keys(*sequence), p, e) for e in range(300)] for p in positions])
    # The most negative noise comes from shares next to 1, which fp32 rounds to 2^-24.
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-4)


def test_golden_numbers() -> None:
    """Stored runs and other devices rely on these: a change of the hash is a change of every sample."""
    assert sequence_keys(0, 0, 0) == (3036086120 - 2**32, 1792429512)
    golden = torch.tensor([3.5743663, 2.4376127, 5.8428195, 0.4798984])
    torch.testing.assert_close(noise([sequence_keys(0, 0, 0)], [0], 4)[0], golden, rtol=0, atol=2e-6)
    assert noise([sequence_keys(42, 7, 1)], [9], 151_936).argmax().item() == 109_407


def test_rows_do_not_depend_on_their_batch_nor_entries_on_the_vocabulary() -> None:
    keys = [sequence_keys(3, prompt, 0) for prompt in range(16)]
    together = noise(keys, list(range(16)), 500)
    for row in (0, 7, 15):
        assert torch.equal(together[row], noise([keys[row]], [row], 500)[0])
    assert torch.equal(together[:, :37], noise(keys, list(range(16)), 37))


def test_every_part_of_the_counter_matters() -> None:
    base = noise([sequence_keys(1, 2, 3)], [4], 64)
    others = [(2, 2, 3, 4), (1 + 2**32, 2, 3, 4), (1, 3, 3, 4), (1, 2 + 2**32, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)]
    for seed, prompt, sample, position in others:
        assert not (noise([sequence_keys(seed, prompt, sample)], [position], 64) == base).any()


def test_mean_and_spread_are_gumbels() -> None:
    drawn = noise([sequence_keys(5, p, 0) for p in range(200)], [0] * 200, 5000).double()
    spread = math.pi / math.sqrt(6)
    assert drawn.mean().item() == pytest.approx(0.5772156649, abs=5 * spread / 1000)
    # The variance of a sample variance is (kurtosis - 1) var^2 / n; a Gumbel's kurtosis is 5.4.
    assert drawn.var().item() == pytest.approx(spread**2, abs=5 * spread**2 * math.sqrt(4.4) / 1000)
    assert drawn.isfinite().all()
    # The largest of 10^6 is near log(10^6), and finite resolution does not cut it off.
    assert 11 < drawn.max().item() < 23


def chi_square_of(samples: torch.Tensor, shares: torch.Tensor) -> float:
    counts = torch.bincount(samples, minlength=len(shares)).double()
    expected = shares * len(samples)
    return ((counts - expected) ** 2 / expected).sum().item()


@pytest.mark.daily("prompts", "positions")
@pytest.mark.parametrize("along", ["prompts", "samples", "positions"])
def test_sampled_frequencies_are_the_softmax(along: str) -> None:
    logits = torch.linspace(-2, 2, 20)
    count = 40_000
    if along == "positions":
        keys, positions = [sequence_keys(1, 1, 1)] * count, list(range(count))
    else:
        keys = [sequence_keys(1, i, 0) if along == "prompts" else sequence_keys(1, 0, i) for i in range(count)]
        positions = [3] * count
    samples = (noise(keys, positions, 20) + logits).argmax(-1)
    # 19 degrees of freedom: over 43.8 with a probability of 0.001, under 4.9 as well.
    assert 4.9 < chi_square_of(samples, logits.double().softmax(-1)) < 43.8


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_neighbours_are_not_correlated(lag: int) -> None:
    seed, count, vocabulary = 11, 400, 500
    grids = {
        "positions": noise([sequence_keys(seed, 0, 0)] * count, list(range(count)), vocabulary),
        "samples": noise([sequence_keys(seed, 0, s) for s in range(count)], [0] * count, vocabulary),
        "prompts": noise([sequence_keys(seed, p, 0) for p in range(count)], [0] * count, vocabulary),
        "seeds": noise([sequence_keys(s, 0, 0) for s in range(count)], [0] * count, vocabulary),
    }
    grids["entries"] = grids["prompts"].T
    for name, rows in grids.items():
        centred = (rows - rows.mean()) / rows.std()
        products = centred[:-lag] * centred[lag:]
        # The mean of n independent products has deviation 1 / sqrt(n).
        assert abs(products.mean().item()) < 4.5 / math.sqrt(products.numel()), name
