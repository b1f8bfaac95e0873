"""The images of a tokenized row and of a micro-batch, as records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ImageRef:
    """An image of a data row: a file, or the bytes of an image file. `digest` is the SHA-256 of these bytes."""

    digest: str
    path: str | None = None
    data: bytes | None = None

    def __str__(self) -> str:
        return self.path if self.path is not None else f"{len(self.data or b''):,} bytes ({self.digest[:8]})"


@dataclass(frozen=True)
class ImageSpan:
    """An image in a token sequence. Its tokens are those from `start` to `stop` (exclusive).

    `grid` describes the size of the image (`Family.grid`). If tokens have positions on three axes, the grid is the
    number of patches in time, height and width, and the vision tower merges `merge` x `merge` patches into one token.
    Else `merge` is 0. `folder` is the model folder whose image processor computes the pixels.
    """

    start: int
    grid: tuple[int, int, int]
    merge: int
    ref: ImageRef
    folder: str
    runs: tuple[int, ...] = ()
    """The numbers of other tokens and of placeholder tokens, in turn. An image in several tiles has other tokens
    between the tiles. Empty: all tokens are placeholder tokens."""

    both_ways: str = ""
    """The layers in which the placeholder tokens attend to each other in both directions (`Family.both_ways`)."""

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        time, height, width = self.grid
        return sum(self.runs) if self.runs else time * (height // self.merge) * (width // self.merge)

    @property
    def features(self) -> int:
        """The number of placeholder tokens, each of which is replaced by a feature."""
        return sum(self.runs[1::2]) if self.runs else self.tokens

    def places(self) -> np.ndarray:
        """Returns the index of each placeholder token in the sequence."""
        runs = self.runs or (0, self.tokens)
        return self.start + np.flatnonzero(np.repeat(np.arange(len(runs)) % 2, runs))

    @property
    def stop(self) -> int:
        return self.start + self.tokens


def cut_images(images: Sequence[ImageSpan], span: slice) -> tuple[ImageSpan, ...]:
    """Returns the images inside the tokens of the slice `span`. Raises ValueError if the slice divides an image."""
    kept = [image for image in images if image.stop > span.start and image.start < span.stop]
    if any(image.start < span.start or image.stop > span.stop for image in kept):
        raise ValueError("a cut of a sequence would divide an image")
    return tuple(replace(image, start=image.start - span.start) for image in kept)


def same_images_up_to(first: Sequence[ImageSpan], second: Sequence[ImageSpan], length: int) -> int:
    """Returns the number of leading tokens, at most `length`, up to which two sequences with equal tokens also have
    equal images."""
    for one, other in zip(first, second, strict=False):
        if (one.start, one.grid, one.ref.digest) != (other.start, other.grid, other.ref.digest):
            return min(length, one.start, other.start)
    rest = [*first[len(second) :], *second[len(first) :]]
    return min([length, *(image.start for image in rest)])


@dataclass(frozen=True)
class ImageBlock:
    """The Q tokens of an image that attend to each other in both directions, and the K tokens of their sequence up to
    the last of them."""

    rows_Q: torch.Tensor
    """The index of each token of the image in the forward pass."""
    keys_K: torch.Tensor
    """The index of each token of the sequence: in the forward pass, or its slot in the KV cache."""
    only_windows: bool = False
    """Whether this holds only in layers with a sliding window."""


@dataclass(frozen=True)
class ImageInputs:
    """The images of a micro-batch. Suffixes: M placeholder tokens of the micro-batch, and N x T its tokens."""

    distinct: tuple[ImageSpan, ...]
    """The images, each once. Their pixels are read when the tower runs."""
    places_M: torch.Tensor
    """The index of each placeholder among the N*T flattened tokens, in ascending order."""
    features_M: torch.Tensor
    """The index of the feature vector that replaces the embedding of each placeholder, among the features of all
    images."""
    axes_3NT: torch.Tensor
    """The position of each token on the three axes time, height and width."""
    blocks: tuple[ImageBlock, ...] = ()
    """The images whose tokens attend to each other in both directions."""
