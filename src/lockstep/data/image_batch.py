"""The images of a micro-batch: its distinct images, places of their features, and positions on three axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lockstep.device.base import sent
from lockstep.types import Example, MicroBatch
from lockstep.vision.positions import three_axes
from lockstep.vision.spans import ImageBlock, ImageInputs, ImageSpan


def image_inputs(examples: Sequence[Example], batch: MicroBatch, shares: Sequence[int]) -> ImageInputs:
    """Returns the images of a micro-batch of `examples`. An image that occurs in several examples is stored once.

    `shares` are the numbers of leading tokens of each example that the packed row already contains.
    """
    rows, width = batch.input_ids_NT.shape
    collected = _Collected(rows, width)
    for example, where, share in zip(examples, token_places(examples, batch), shares, strict=True):
        collected.add(example.images, where, three_axes(len(example), example.images), share)
    return collected.inputs()


# The length of a sequence, its images, and the first and the last (exclusive) of its tokens that are in a forward pass.
PrefillSpan = tuple[int, Sequence[ImageSpan], int, int]


def chunk_images(chunks: Sequence[PrefillSpan]) -> ImageInputs | None:
    """Returns the images of a forward pass of the rollout engine over chunks of sequences. Returns None if no sequence
    has images. An image that is partly in a chunk runs through the tower as a whole."""
    if not any(images for _, images, *_ in chunks):
        return None
    collected, start = _Collected(1, sum(stop - first for *_, first, stop in chunks)), 0
    for length, images, first, stop in chunks:
        axes = three_axes(length, images)[:, first:stop]
        # Only tokens inside the chunk have a place.
        where = np.full(length, -1)
        where[first:stop] = np.arange(start, start + stop - first)
        inside = [image for image in images if image.stop > first and image.start < stop]
        collected.add(inside, where, axes, first, stop)
        start += stop - first
    return collected.inputs()


class _Collected:
    """The images of the sequences of a forward pass over `rows` x `width` tokens."""

    def __init__(self, rows: int, width: int):
        self._shape = (3, rows, width)
        self._axes = np.zeros((3, rows * width), dtype=np.int64)
        self._firsts: dict[tuple[str, str], int] = {}
        self._distinct: list[ImageSpan] = []
        self._places: list[np.ndarray] = []
        self._features: list[np.ndarray] = []
        self._blocks: list[ImageBlock] = []
        self._count = 0

    def add(
        self,
        images: Sequence[ImageSpan],
        where: np.ndarray,
        axes: np.ndarray,
        first: int,
        stop: int | None = None,
    ) -> None:
        """Adds a sequence. `where` has the index of each of its tokens in the forward pass, and `axes` the positions of
        the tokens in it. Features are placed at the tokens from `first` to `stop`."""
        self._axes[:, where[where >= 0]] = axes
        for image in images:
            key = (image.folder, image.ref.digest)
            if key not in self._firsts:
                self._firsts[key] = self._count
                self._count += image.features
                self._distinct.append(image)
            own = image.places()
            inside = (own >= first) & (own < (image.stop if stop is None else stop))
            self._places.append(where[own[inside]])
            self._features.append(self._firsts[key] + np.flatnonzero(inside))
            if image.both_ways and stop is None and inside.all():
                arrays = torch.from_numpy(where[own]), torch.from_numpy(where[: own[-1] + 1])
                self._blocks.append(ImageBlock(*arrays, image.both_ways == "windows"))

    def inputs(self) -> ImageInputs:
        nothing = [np.zeros(0, dtype=np.int64)]
        places, features = (np.concatenate(parts or nothing) for parts in (self._places, self._features))
        order = places.argsort()  # features that are added after the first layers are in the order of the tokens
        return ImageInputs(
            distinct=tuple(self._distinct),
            places_M=torch.from_numpy(places[order]),
            features_M=torch.from_numpy(features[order]),
            axes_3NT=torch.from_numpy(self._axes.reshape(self._shape)),
            blocks=tuple(self._blocks),
        )


def token_places(examples: Sequence[Example], batch: MicroBatch) -> list[np.ndarray]:
    """Returns for each example the index of each of its tokens among the flattened tokens of the micro-batch."""
    lengths = [len(example) for example in examples]
    if not batch.packed:
        width = batch.input_ids_NT.shape[1]
        return [np.arange(row * width, row * width + length) for row, length in enumerate(lengths)]
    index = np.arange(sum(lengths)) if batch.packed_index_E is None else batch.packed_index_E.numpy()
    return np.split(index, np.cumsum(lengths)[:-1])


def images_to(images: ImageInputs, device: torch.device) -> ImageInputs:
    """Returns the images on the device."""
    return replace(
        images,
        places_M=sent(images.places_M, device),
        features_M=sent(images.features_M, device),
        axes_3NT=sent(images.axes_3NT, device),
        blocks=tuple(
            replace(one, rows_Q=sent(one.rows_Q, device), keys_K=sent(one.keys_K, device)) for one in images.blocks
        ),
    )
