"""What is added to a reward for the shape of a response."""

from __future__ import annotations


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13), scaled by `factor`.

    0 up to `limit - buffer` tokens, then a straight line down to `-factor` at the limit and beyond.
    A buffer of 0 is off.
    """
    over = length - (limit - buffer)
    if buffer <= 0 or over <= 0:
        return 0.0
    return -factor * min(over / buffer, 1.0)
