"""What a step draws besides its responses: the same on every rank, from the run's seed and the place in the run."""

from __future__ import annotations

from hashlib import sha256

import torch


def generator_of(seed: tuple[int, ...]) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(sha256(repr(seed).encode()).digest()[:7], "big"))
