"""The positions of tokens on three axes (time, height, width) in a sequence with images (multimodal rotary embedding).

A text token has the same position on all axes. The tokens of an image have one position in time, and the positions of
their row and column in height and width. The text after an image continues after the largest position of the image. So
positions depend only on the tokens before them, and sequences that share a prefix also share its positions. In families
without three axes, the position of each token is its index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.vision.spans import ImageSpan


def three_axes(length: int, images: Sequence[ImageSpan]) -> np.ndarray:
    """Returns the positions of the tokens of one sequence, as an array of 3 x `length`. `images` are in the order of
    their tokens."""
    parts, token, position = [], 0, 0
    for image in _with_axes(images):
        parts.append(_text(position, image.start - token))
        position += image.start - token
        parts.append(position + _grid(image))
        position += max(image.grid[1], image.grid[2]) // image.merge
        token = image.stop
    parts.append(_text(position, length - token))
    return np.concatenate(parts, axis=1)


def position_offset(images: Sequence[ImageSpan]) -> int:
    """Returns position minus index of the tokens after the last image. Generated tokens continue with this offset."""
    return sum(max(image.grid[1], image.grid[2]) // image.merge - image.tokens for image in _with_axes(images))


def _with_axes(images: Sequence[ImageSpan]) -> list[ImageSpan]:
    return [image for image in images if image.merge]


def _text(first: int, count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(first, first + count, dtype=np.int64), (3, count))


def _grid(image: ImageSpan) -> np.ndarray:
    """Returns the positions of the tokens of an image, relative to its first position. Tokens are in row order."""
    time, height, width = image.grid
    sizes = (time, height // image.merge, width // image.merge)
    return np.indices(sizes, dtype=np.int64).reshape(3, -1)
